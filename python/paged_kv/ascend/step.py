"""A batch's arrays on their way to the kernels: checked once, uploaded once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.errors import InvalidPageError, LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv._core import Batch, BatchView
    from paged_kv.ascend.lane import Lane
    from paged_kv.ascend.memory import DeviceMemory

__all__ = ["Step"]

ALIGNMENT = 64


class Step:
    """Copies of a batch's arrays, so that it may end while they are in use.

    Kernels trust them: an entry out of range would be a read or write anywhere, after which the
    device can't be used any more (error 507015).

    Parameters
    ----------
    batch : Batch or BatchView
        Where they come from.
    num_pages, page_size : int
        Of the cache.

    Attributes
    ----------
    table : int32 [B, max_pages]
        Pages; below 0 beyond a sequence's last page.
    lens : int32 [B]
        Tokens.
    rows : int32 [B + 1]
        Where each sequence's queries begin.
    slots : int64 [tokens]
        Where new tokens go; below 0 they go nowhere.
    written : int64 [tokens]
        Their pages.
    pages : int32 [B * max_pages]
        The table's entries; with the same object every time, as with the next two.
    none : int64 [0]
        No pages.

    Raises
    ------
    InvalidPageError
        A slot is out of range.
    LayoutError
        Lengths or rows make no sense.
    ValueError
        Two tokens go into one slot: which of them stayed would be chance.
    """

    def __init__(self, batch: Batch | BatchView, num_pages: int, page_size: int) -> None:
        self.table = np.array(batch.block_table, np.int32)
        self.lens = np.array(batch.seq_lens, np.int32)
        self.rows = np.array(batch.cu_seqlens_q, np.int32)
        self.slots = np.array(batch.slot_mapping, np.int64)
        self.pages = self.table.reshape(-1)
        self.none = np.empty(0, np.int64)
        self._num_pages, self._page_size = num_pages, page_size
        self._memory: DeviceMemory | None = None
        self._parts: dict[str, DeviceMemory] = {}
        self._checked: set[int] = set()
        self.max_len = int(self.lens.max(initial=0))
        self.queries = np.diff(self.rows)
        self.max_queries = int(self.queries.max(initial=0))
        room = self.table.shape[1] * page_size
        if self.lens.min(initial=0) < 0 or self.max_len > room:
            raise LayoutError(
                f"lengths from {self.lens.min(initial=0)} to {self.max_len} in tables of {room} tokens"
            )
        if self.rows[0] != 0 or self.queries.min(initial=0) < 0:
            raise LayoutError(f"cu_seqlens_q {self.rows.tolist()[:8]}: it begins with 0 and never falls")
        self.written = self.slots // page_size
        if self.written.max(initial=0) >= num_pages:
            page = int(self.written.max())
            raise InvalidPageError(
                f"slot {int(self.slots.max())} is in page {page}, not below {num_pages} pages",
                page=page,
                num_pages=num_pages,
            )
        slots = np.sort(self.slots[self.slots >= 0])
        again = slots[1:][slots[1:] == slots[:-1]]
        if len(again):
            raise ValueError(f"slot {again[0]} is there twice")

    def check_table(self, window_left: int, *, causal: bool) -> None:
        """Check every entry that attention will look up; with a window those before it may be missing.

        Raises
        ------
        InvalidPageError
            An entry is none of the cache's pages.
        ValueError
            A sequence has more queries than tokens, and their positions count.
        """
        # Queries of a sequence without tokens see nothing, wherever they are.
        unplaced = (self.queries > self.lens) & (self.lens > 0)
        if (causal or window_left >= 0) and unplaced.any():
            i = int(unplaced.argmax())
            raise ValueError(
                f"{self.queries[i]} queries of {self.lens[i]} tokens have no positions "
                f"(sequence at index {i})"
            )
        if window_left in self._checked:
            return
        first = np.zeros_like(self.lens)
        if window_left >= 0:
            first = np.maximum(self.lens.astype(np.int64) - self.queries - window_left, 0) // self._page_size
        column = np.arange(self.table.shape[1])
        used = (column >= first[:, None]) & (column < -(-self.lens // self._page_size)[:, None])
        wrong = used & ((self.table < 0) | (self.table >= self._num_pages))
        if wrong.any():
            i, j = (int(axis[0]) for axis in wrong.nonzero())
            page = int(self.table[i, j])
            raise InvalidPageError(
                f"block_table[{i}, {j}] is {page}, none of the {self._num_pages} pages",
                page=page,
                num_pages=self._num_pages,
            )
        self._checked.add(window_left)

    def on_device(self, lane: Lane) -> dict[str, DeviceMemory]:
        """Return the arrays on the device, the lane being locked; one copy brings them all there."""
        if self._memory is None:
            arrays: dict[str, npt.NDArray[Any]] = {
                "block_table": self.table,
                "seq_lens": self.lens,
                "cu_seqlens_q": self.rows,
                "slots": self.slots,
            }
            starts, end = {}, 0
            for name, array in arrays.items():
                starts[name] = end
                end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            staging = np.zeros(end, np.uint8)
            for name, array in arrays.items():
                part = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
                staging[starts[name] : starts[name] + array.nbytes] = part
            memory = lane.take(end)
            try:
                memory.copy_from(staging, lane.stream)
            except BaseException:
                lane.give(memory)
                raise
            self._memory = memory
            self._parts = {name: memory[starts[name] : starts[name] + a.nbytes] for name, a in arrays.items()}
        return self._parts

    def give_back(self, lane: Lane) -> None:
        """Let the next steps of the stream have the memory."""
        memory, self._memory = self._memory, None
        if memory is not None:
            lane.give(memory)
