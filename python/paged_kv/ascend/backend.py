"""The pages of a cache on a device, and what is done with them, for ``KvCache(device="ascend:0")``.

The cache keeps tables, counts and leases on the host and decides; this holds the memory and launches.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np

from paged_kv.ascend import aclnn
from paged_kv.ascend.acl import ATTR_L2
from paged_kv.ascend.device import open_device
from paged_kv.ascend.flight import Flight, Flights
from paged_kv.ascend.kernels import load_kernels
from paged_kv.ascend.lane import Lane
from paged_kv.ascend.memory import allocate, allocated_bytes
from paged_kv.ascend.stream import Stream, check_handle
from paged_kv.ascend.tensor import DeviceTensor, described, device_tensor, empty, span
from paged_kv.ascend.tiling import DTYPES, WriteTiling
from paged_kv.ascend.work import Work
from paged_kv.errors import CacheMemoryError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from paged_kv._core import PageLease
    from paged_kv.ascend.memory import DeviceMemory

__all__ = ["Backend", "Measured", "measure"]

L2_BYTES = 96 << 20
"""Bytes of the smallest second-level cache among Atlas A2 and A3, where the runtime doesn't tell."""

IDLE_LANES = 8
"""Streams whose memory is kept although no batch uses them: allocating anew in every step would take long."""


class Backend:
    """Keys and values of all layers on one device.

    Parameters
    ----------
    index : int
        The device's number.
    num_layers, num_pages, page_size, num_kv_heads, head_dim, v_head_dim : int
        Sizes; `num_pages` with the null page.
    dtype : str
        ``"float16"`` or ``"bfloat16"``.
    layout : str
        ``"HND"`` or ``"NHD"``.
    null_page : bool
        Page 0 is kept at zero.
    storage : iterable of pairs of device arrays, optional
        ``(key_pages, value_pages)`` of each layer, to be used instead of memory of one's own.

    Raises
    ------
    LayoutError
        The kernels can't do it, by name and number.
    CacheMemoryError
        The device has less free memory.
    DeviceError
        It can't be opened, or there is no kernel library.
    """

    def __init__(
        self,
        *,
        index: int,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        dtype: str,
        layout: str,
        null_page: bool,
        storage: Iterable[Any] | None = None,
    ) -> None:
        where = f"ascend:{index}"
        if dtype not in DTYPES:
            quantised = "" if dtype.startswith("float32") else ", not quantised keys and values"
            raise LayoutError(f"{where}: dtype {dtype}; the kernels take {' and '.join(DTYPES)}{quantised}")
        if v_head_dim != head_dim:
            raise LayoutError(f"{where}: v_head_dim {v_head_dim} and head_dim {head_dim} have to be equal")
        self.device = open_device(index)
        self.kernels = load_kernels()
        self.aclnn = aclnn.chosen()
        self.write_tiling = self.kernels.plan_write_pages(
            WriteTiling(num_tokens=1, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size),
            layout,
        )
        self.num_cores = self.device.num_vector_cores
        self.num_pages, self.page_size = num_pages, page_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.dtype, self.layout = dtype, layout
        inner = [num_kv_heads, page_size] if layout == "HND" else [page_size, num_kv_heads]
        self._shape = (num_pages, *inner, head_dim)
        self.page_bytes = num_kv_heads * page_size * head_dim * 2
        self._l2_bytes: int | None = None
        self._mask: DeviceMemory | None = None
        self._spans: list[tuple[int, int]] = []  # begin and end of every array, in order
        if storage is None:
            self._layers = self._allocate(num_layers)
        else:
            self._layers = self._adopt(num_layers, storage)
        if null_page:
            for pair in self._layers:
                for tensor in pair:
                    tensor.memory[: self.page_bytes].fill(0)
        self.flights = Flights()
        self._lock = threading.RLock()  # a garbage collection inside may come back here
        self._lanes: WeakValueDictionary[int, Lane] = WeakValueDictionary()
        self._recent: OrderedDict[int, Lane] = OrderedDict()  # of the streams used last
        self._own = Lane(self.device, Stream(self.device))

    def _allocate(self, num_layers: int) -> list[tuple[DeviceTensor, DeviceTensor]]:
        needed = 2 * num_layers * allocated_bytes(self.num_pages * self.page_bytes)
        free, total = self.device.memory_info()
        if needed > free:
            raise CacheMemoryError(
                f"{self.num_pages} pages take {needed} bytes; {free} of ascend:{self.device.index}'s "
                f"{total} bytes are free",
                bytes=needed,
            )
        layers = [
            (empty(self.device, self._shape, self.dtype), empty(self.device, self._shape, self.dtype))
            for _ in range(num_layers)
        ]
        for pair in layers:
            for tensor in pair:
                bisect.insort(self._spans, span(tensor))
        return layers

    def _adopt(self, num_layers: int, storage: Iterable[Any]) -> list[tuple[DeviceTensor, DeviceTensor]]:
        layers = []
        for layer, arrays in enumerate(storage):
            pair = []
            for which, array in zip(("key_pages", "value_pages"), _pair(layer, arrays), strict=True):
                name = f"{which} of layer {layer} in storage"
                tensor = device_tensor(name, array, self.device, writable=True)
                if tensor is None:
                    raise LayoutError(f"{name} is in host memory, the cache on ascend:{self.device.index}")
                if (tensor.shape, tensor.dtype) != (self._shape, self.dtype):
                    raise LayoutError(
                        f"{name} is {tensor.dtype} {list(tensor.shape)} instead of "
                        f"{self.dtype} {list(self._shape)}"
                    )
                if tensor.data_ptr % 32:
                    raise LayoutError(f"{name} begins at {tensor.data_ptr:#x}, no multiple of 32 bytes")
                begin, end = span(tensor)
                other = self.overlapped(tensor)
                if other is not None:
                    raise LayoutError(
                        f"{name}, {begin:#x} to {end:#x}, overlaps the array given before at {other:#x}"
                    )
                bisect.insort(self._spans, (begin, end))
                pair.append(tensor)
            layers.append((pair[0], pair[1]))
        if len(layers) != num_layers:
            raise LayoutError(f"storage has {len(layers)} layers, the cache {num_layers}")
        return layers

    # ---- streams and batches ----

    def lane(self, stream: Any) -> Lane:
        """Return what belongs to a stream.

        Parameters
        ----------
        stream : Stream, int, object with ``npu_stream``, or None
            None is the cache's own one; a number is a raw handle.
        """
        if stream is None:
            return self._own
        if isinstance(stream, Stream):
            handle = stream.handle
            if stream.device is not self.device:
                raise ValueError(
                    f"the stream is of ascend:{stream.device.index}, the cache on ascend:{self.device.index}"
                )
        else:
            handle = check_handle(getattr(stream, "npu_stream", stream))
        with self._lock:
            lane = self._lanes.get(handle)
            # A stream that goes with its object is kept, though its handle may be one that was used before.
            if lane is None or (isinstance(stream, Stream) and stream.is_owner and lane.stream is not stream):
                found = stream if isinstance(stream, Stream) else Stream(self.device, handle)
                lane = self._lanes[handle] = Lane(self.device, found)
            self._recent[handle] = lane
            self._recent.move_to_end(handle)
            idle = self._recent.popitem(last=False) if len(self._recent) > IDLE_LANES else None
        del idle  # without the lock: freeing memory may take its time
        return lane

    def poll(self) -> bool:
        """End the leases of work that has passed; return whether there was any. Never waits."""
        return self.flights.poll()

    def begin(self, lease: PageLease, copies: npt.NDArray[np.int64], stream: Any) -> Work:
        """Begin a batch's work: its copies on write take their turn at once.

        Parameters
        ----------
        lease : PageLease
            Of the batch; ended here when the work has passed, or never began.
        copies : int64 [n, 2]
            Source and destination of each page to copy.
        stream
            As in :meth:`lane`.

        Raises
        ------
        DeviceError
            The device can't be used. The lease lasts as long as what was launched before.
        """
        self.device.check()
        self.poll()
        lane = self.lane(stream)
        work = Work(self, lane, Flight(lane.stream, lease, self.num_pages))
        if len(copies):
            try:
                work.copy(copies)
            except BaseException:
                work.park()
                raise
        return work

    def follow(self) -> Work:
        """Return work on the cache's own stream whose pages are held elsewhere."""
        self.device.check()
        self.poll()
        return Work(self, self._own, Flight(self._own.stream, None, self.num_pages))

    def copy_pages(self, copies: npt.NDArray[np.int64]) -> None:
        """Copy whole pages in all layers, in order, on the cache's own stream."""
        work = self.follow()
        # One launch copies its pages in any order: what depends on an earlier copy goes into another.
        start, read, written = 0, set[int](), set[int]()
        for end, (source, destination) in enumerate(copies.tolist()):
            if {source, destination} & written or destination in read:
                work.copy(copies[start:end])
                start, read, written = end, set(), set()
            read.add(source)
            written.add(destination)
        if start < len(copies):
            work.copy(copies[start:])
        work.park()

    # ---- memory ----

    def causal_mask(self) -> DeviceMemory:
        """Return what says "causal" to CANN's operator: int8, 1 above the diagonal; made once."""
        with self._lock:
            if self._mask is None:
                mask = allocate(self.device, aclnn.MASK**2)
                mask.copy_from(np.triu(np.ones((aclnn.MASK, aclnn.MASK), np.int8), 1))
                self._mask = mask
            return self._mask

    def layer(self, layer: int) -> tuple[DeviceTensor, DeviceTensor]:
        """Return keys and values of one layer; ``ValueError`` where there is none."""
        if layer >= len(self._layers):
            raise ValueError(f"layer {layer} is not below {len(self._layers)} layers")
        return self._layers[layer]

    def overlapped(self, tensor: DeviceTensor) -> int | None:
        """Return where the cache's array begins that shares bytes with a tensor, if one does."""
        begin, end = span(tensor)
        # They don't overlap each other: only the last that begins before the tensor's end can reach into it.
        before = bisect.bisect_left(self._spans, (end,)) - 1
        return self._spans[before][0] if before >= 0 and self._spans[before][1] > begin else None

    def pages(self, layer: int, which: int) -> DeviceTensor:
        """Return the keys (0) or values (1) of one layer."""
        return self.layer(layer)[which]

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    def address(self, layer: int, which: int, page: int, offset: int, head: int) -> int:
        """Return the address of one head's key or value of the token at `offset` in a page."""
        if head >= self.num_kv_heads:
            raise ValueError(f"head {head} is not below {self.num_kv_heads} KV heads")
        place = (page, head, offset) if self.layout == "HND" else (page, offset, head)
        tensor = self.pages(layer, which)
        return tensor.data_ptr + 2 * sum(i * step for i, step in zip(place, tensor.strides, strict=False))

    def prefetch(self, pages: list[int], max_bytes: int) -> int:
        """Ask the device to bring pages into its L2 cache, first layer first.

        Returns
        -------
        int
            Bytes asked for: at most `max_bytes`, and at most what the L2 cache holds; 0 where the
            runtime can't.
        """
        if self._l2_bytes is None:
            self._l2_bytes = self.device.attribute(ATTR_L2) or L2_BYTES
        left = limit = min(max_bytes, self._l2_bytes)
        for pair in self._layers:
            for page in pages:
                for tensor in pair:
                    start = page * self.page_bytes
                    part = tensor.memory[start : start + min(left, self.page_bytes)]
                    if part.nbytes == 0 or not part.prefetch(self._own.stream):
                        return limit - left
                    left -= part.nbytes
        return limit - left


class Measured:
    """Sizes of device arrays that a cache is to adopt.

    Attributes
    ----------
    num_pages, page_size, num_kv_heads, head_dim : int
        As the first array has them.
    dtype : str
        Its dtype.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, layout: str) -> None:
        if len(shape) != 4:
            raise LayoutError(f"key_pages in storage has {len(shape)} axes instead of 4")
        self.num_pages, first, second, self.head_dim = shape
        self.num_kv_heads, self.page_size = (first, second) if layout == "HND" else (second, first)
        self.dtype = dtype


def measure(storage: Iterable[Any], layout: str) -> Measured:
    """Read the sizes of ``storage=``; the device itself isn't touched.

    Raises
    ------
    LayoutError
        There is no layer, or its keys have not 4 axes.
    """
    for arrays in storage:
        return Measured(*described("key_pages of layer 0 in storage", _pair(0, arrays)[0]), layout)
    raise LayoutError("storage= must hold one (key_pages, value_pages) per layer")


def _pair(layer: int, arrays: Any) -> tuple[Any, Any]:
    """Return a layer's keys and values; ``LayoutError`` where there are more arrays, or fewer."""
    found = tuple(arrays)
    if len(found) != 2:
        raise LayoutError(
            f"layer {layer} in storage has {len(found)} arrays: (key_pages, value_pages) is needed; "
            "scales are not taken, for the kernels have no quantised keys and values"
        )
    return found
