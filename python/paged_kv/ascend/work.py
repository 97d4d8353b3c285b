"""What a batch has done on a device: copies, writes and attention, in order on one stream."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.ascend.attention import attend
from paged_kv.ascend.errors import DeviceError
from paged_kv.ascend.runtime import is_forked
from paged_kv.ascend.step import Step
from paged_kv.ascend.tensor import device_tensor, host_array, to_bits
from paged_kv.ascend.tiling import WriteTiling
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from paged_kv._core import Batch, BatchView
    from paged_kv.ascend.backend import Backend
    from paged_kv.ascend.flight import Flight
    from paged_kv.ascend.lane import Lane
    from paged_kv.ascend.memory import DeviceMemory

__all__ = ["Work"]

logger = logging.getLogger("paged_kv.ascend")


class Work:
    """One batch's work; made by :class:`~paged_kv.ascend.backend.Backend`, from any thread.

    Parameters
    ----------
    backend : Backend
        The pages.
    lane : Lane
        The stream it goes to.
    flight : Flight
        What orders it among the work of other streams, and holds the batch's lease.
    """

    def __init__(self, backend: Backend, lane: Lane, flight: Flight) -> None:
        self.backend = backend
        self.lane = lane
        self._flight = flight
        self._step: Step | None = None
        self._ordered: list[tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]] = []
        self._begun = False
        self._ended = False

    # ---- what is launched ----

    def copy(self, copies: npt.NDArray[np.int64]) -> None:
        """Copy pages in all layers, int64 [n, 2] of source and destination; no destination is used twice."""
        backend = self.backend
        sources, destinations = copies[:, 0], copies[:, 1]
        with self.lane.lock:
            pairs = self.lane.upload("copies", np.array(copies, np.int64))
            for layer in range(backend.num_layers):
                keys, values = backend.layer(layer)
                with self._launching(sources, destinations):
                    backend.kernels.copy_pages(
                        self.lane.stream,
                        keys.memory,
                        values.memory,
                        pairs,
                        len(copies),
                        backend.page_bytes,
                        min(backend.num_cores, 2 * len(copies)),
                    )

    def write(self, layer: int, key: Any, value: Any, batch: Batch | BatchView) -> None:
        """Put the new tokens' keys and values of one layer into their slots.

        Parameters
        ----------
        layer : int
            Which layer.
        key, value : array
            [tokens, num_kv_heads, head_dim]: of the device, in the cache's dtype and contiguous, or of
            the host, which are converted and copied there.
        batch : Batch or BatchView
            Says where the tokens lie.

        Raises
        ------
        LayoutError
            For shapes, dtypes or devices that don't fit. Nothing is written then.
        ValueError
            For a layer that is not there, or a batch that has ended.
        DeviceError
            The device refuses.
        """
        backend = self.backend
        keys, values = backend.layer(layer)
        with self.lane.lock:
            step = self._prepared(batch)
            tokens = len(step.slots)
            expected = (tokens, backend.num_kv_heads, backend.head_dim)
            rows = [self._rows(name, array, expected) for name, array in (("key", key), ("value", value))]
            if tokens == 0:
                return
            tiling = WriteTiling.from_buffer_copy(backend.write_tiling)
            tiling.num_tokens = tokens
            with self._launching(step.none, step.written):
                key_memory, value_memory = (
                    self.lane.upload(name, row) if isinstance(row, np.ndarray) else row
                    for name, row in zip(("key", "value"), rows, strict=True)
                )
                backend.kernels.write_pages(
                    self.lane.stream,
                    key_memory,
                    value_memory,
                    keys.memory,
                    values.memory,
                    step.on_device(self.lane)["slots"],
                    tiling,
                    min(backend.num_cores, -(-tokens // tiling.tile_tokens)),
                )

    def attend(self, layer: int, query: Any, batch: Batch | BatchView, **options: Any) -> Any:
        """Attend over one layer; see :func:`paged_kv.ascend.attention.attend`."""
        return attend(self, layer, query, batch, **options)

    def _rows(
        self, name: str, array: Any, expected: tuple[int, ...]
    ) -> DeviceMemory | npt.NDArray[np.uint16]:
        """Return what is written: memory of the device, or bits in the cache's dtype."""
        backend = self.backend
        tensor = device_tensor(name, array, backend.device)
        rows = tensor or host_array(name, array)[0]
        if rows.shape != expected:
            raise LayoutError(f"{name} has shape {list(rows.shape)} instead of {list(expected)}")
        if tensor is None:
            assert isinstance(rows, np.ndarray)
            return to_bits(rows, backend.dtype)
        if tensor.dtype != backend.dtype:
            raise LayoutError(f"{name} is {tensor.dtype} on the device, the cache {backend.dtype}")
        return tensor.memory

    # ---- its course ----

    def _prepared(self, batch: Batch | BatchView) -> Step:
        """Return the batch's arrays, checked; the lock is held."""
        if self._ended:
            raise ValueError("the batch was committed or closed")
        if self._step is None:
            self._step = Step(batch, self.backend.num_pages, self.backend.page_size)
        return self._step

    @contextlib.contextmanager
    def _launching(self, reads: npt.NDArray[np.integer], writes: npt.NDArray[np.integer]) -> Iterator[None]:
        """Launch one kernel in the block, after what other streams do with these pages."""
        flights, flight = self.backend.flights, self._flight
        with self.lane.lock:
            ordered = any(read is reads and written is writes for read, written in self._ordered)
            if not ordered:
                flight.touch(reads, writes)
            begun, self._begun = self._begun, True
            flight.event = None  # whatever was marked, this comes after it
            flights.put_last(flight)
            try:
                if not ordered:
                    flights.order(flight, reads, writes)
                    self._ordered.append((reads, writes))
                yield
            except DeviceError:
                if not begun:
                    # Nothing is under way, so nothing is to be waited for: a stream that takes no
                    # kernel may take no event either, and would keep the pages for ever.
                    self._begun = False
                    flights.remove(flight)
                raise

    def finish(self) -> None:
        """Mark the work so far, before the batch ends; ``DeviceError`` where that fails."""
        with self.lane.lock:
            if self._begun and not self._ended:
                self._flight.mark()

    def park(self) -> None:
        """Note that the batch has ended: its lease ends when the work has passed. Never fails."""
        if is_forked():  # no lock can be had, and no other thread is there
            self._end()
            return
        with self.lane.lock:
            with contextlib.suppress(DeviceError):  # the next poll tries again
                self.finish()
            self._end()

    def _end(self) -> None:
        if self._ended:
            return
        self._ended = True
        if self._step is not None:
            self._step.give_back(self.lane)
        if self._begun:
            self._flight.ended = True  # from now on whoever polls looks for its end
        else:
            self._flight.release()

    def __del__(self) -> None:
        # Nobody else knows it any more. Without a lock: a garbage collection may run this in a thread
        # that holds any of them.
        try:
            self._end()
        except Exception:
            logger.debug("a batch's work did not end", exc_info=True)
