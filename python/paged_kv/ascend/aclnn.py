"""CANN's own attention in the place of the kernels here.

``aclnnIncreFlashAttentionV4`` where each sequence has one query, ``aclnnFusedInferAttentionScoreV3``
where some have several. They compute on the matrix unit, which these kernels leave alone. They need
CANN's operator package (libopapi), and are used only where the environment variable
``PAGED_KV_ASCEND_ATTENTION`` is ``aclnn``. What they take is what CANN 8.5 documents.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from ctypes import POINTER, c_bool, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.ascend.errors import device_error, unavailable
from paged_kv.ascend.tiling import LAYOUTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from paged_kv.ascend.lane import Lane
    from paged_kv.ascend.memory import DeviceMemory
    from paged_kv.ascend.step import Step
    from paged_kv.ascend.tiling import Shape

__all__ = ["MASK", "VARIABLE", "Operators", "chosen"]

VARIABLE = "PAGED_KV_ASCEND_ATTENTION"
LIBRARY = "libopapi.so"
DECODE, PREFILL = "aclnnIncreFlashAttentionV4", "aclnnFusedInferAttentionScoreV3"

MASK = 2048
"""Rows and columns of the mask that says "causal", 1 above the diagonal, whatever the lengths are."""

_DTYPES = {0: 1, 1: 27}  # of the kernels' tiling: ACL_FLOAT16, ACL_BF16
_INT8, _INT32, _ND = 2, 3, 2
_NO_LIMIT = 2**31 - 1
_LONGS = POINTER(c_int64)

_CREATE: dict[str, list[type]] = {
    "aclCreateTensor": [_LONGS, c_uint64, c_int32, _LONGS, c_int64, c_int32, _LONGS, c_uint64, c_void_p],
    "aclCreateTensorList": [POINTER(c_void_p), c_uint64],
    "aclCreateIntArray": [_LONGS, c_uint64],
}
_DESTROY = ("aclDestroyTensor", "aclDestroyTensorList", "aclDestroyIntArray")
_BACK = [POINTER(c_uint64), POINTER(c_void_p)]  # workspace's size, executor
_PHASES: dict[str, list[type]] = {
    # query, keys, values, 2 unused, lengths, 7 unused, table, 1 unused; heads, scale, layout, KV heads,
    # block size, precision; output.
    f"{DECODE}GetWorkspaceSize": [
        *[c_void_p] * 15,
        *(c_int64, c_double, c_char_p, c_int64, c_int64, c_int64),
        c_void_p,
        *_BACK,
    ],
    # query, keys, values, 1 unused, mask, ends of the queries, lengths, 7 unused, table, 12 unused; heads,
    # scale, tokens before and after, layout, KV heads, sparse mode, precision, block size, mode; whether
    # there is a log-sum-exp, two modes; output, log-sum-exp.
    f"{PREFILL}GetWorkspaceSize": [
        *[c_void_p] * 27,
        *(c_int64, c_double, c_int64, c_int64, c_char_p, c_int64, c_int64, c_int64, c_int64, c_int64),
        *(c_bool, c_int64, c_int64),
        *[c_void_p] * 2,
        *_BACK,
    ],
    DECODE: [c_void_p, c_uint64, c_void_p, c_void_p],
    PREFILL: [c_void_p, c_uint64, c_void_p, c_void_p],
}


class Operators:
    """The operators, loaded.

    Parameters
    ----------
    path : str
        The library, as ``dlopen`` takes it.

    Raises
    ------
    UnavailableError
        It can't be loaded, or lacks an operator.
    """

    def __init__(self, path: str) -> None:
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise unavailable(f"no operator library: {error}", "install CANN's operator package") from error
        names = (*_CREATE, *_DESTROY, *_PHASES)
        missing = [name for name in names if not hasattr(library, name)]
        if missing:
            raise unavailable(f"{path} lacks {', '.join(missing)}", "CANN 8.5 or newer is needed")
        for name in names:
            function = getattr(library, name)
            function.restype = c_void_p if name in _CREATE else c_int32
            function.argtypes = _CREATE.get(name) or _PHASES.get(name) or [c_void_p]
        self._library = library

    def takes(self, asked: Shape, step: Step) -> bool:
        """Say whether a decode step is one: no window, no soft cap, HND, no sequence without tokens."""
        return _is_plain(asked, step) and asked.layout == LAYOUTS["HND"] and asked.page_size <= 512

    def takes_prefill(self, asked: Shape, step: Step) -> bool:
        """Say whether a step of several queries is one: NHD, pages of 128, queries of each sequence."""
        row = asked.num_kv_heads * asked.head_dim
        fits = asked.page_size == 128 and row <= 65535 and asked.batch <= 4096
        placed = bool((step.queries > 0).all() and (step.queries <= step.lens).all())
        return _is_plain(asked, step) and asked.layout == LAYOUTS["NHD"] and fits and placed

    def decode(
        self, lane: Lane, arrays: dict[str, DeviceMemory], asked: Shape, num_pages: int, step: Step
    ) -> None:
        """Attend of one query a sequence.

        Parameters
        ----------
        lane : Lane
            The stream, whose lock is held.
        arrays : dict of str to DeviceMemory
            As for :meth:`paged_kv.ascend.KernelLibrary.decode`; without a log-sum-exp.
        asked : Shape
            What is asked for; :meth:`takes` it.
        num_pages : int
            Pages of the cache.
        step : Step
            Its lengths, which the operator wants from the host.

        Raises
        ------
        DeviceError
            The operator refuses.
        """
        rows = (asked.batch, asked.num_heads, 1, asked.head_dim)
        pages = (num_pages, asked.num_kv_heads, asked.page_size, asked.head_dim)
        with _Given(self._library, arrays, asked, rows, pages) as given:
            lengths = given.longs(step.lens.tolist())
            tensors = (
                given.query,
                given.keys,
                given.values,
                None,
                None,
                lengths,
                *[None] * 7,
                given.table,
                None,
            )
            numbers = (asked.num_heads, asked.scale, b"BNSD", asked.num_kv_heads, asked.page_size, 1)
            self._run(lane, DECODE, (*tensors, *numbers, given.out), arrays)

    def prefill(
        self,
        lane: Lane,
        arrays: dict[str, DeviceMemory],
        asked: Shape,
        num_pages: int,
        step: Step,
        mask: DeviceMemory | None,
    ) -> None:
        """Attend of the last queries of each sequence.

        Parameters
        ----------
        lane : Lane
            The stream, whose lock is held.
        arrays : dict of str to DeviceMemory
            As for :meth:`paged_kv.ascend.KernelLibrary.prefill`; without a log-sum-exp.
        asked : Shape
            What is asked for; :meth:`takes_prefill` it.
        num_pages : int
            Pages of the cache.
        step : Step
            Its lengths, which the operator wants from the host.
        mask : int8 [MASK, MASK] or None
            1 above the diagonal; None where every query sees all keys.

        Raises
        ------
        DeviceError
            The operator refuses.
        """
        rows = (int(step.rows[-1]), asked.num_heads, asked.head_dim)
        pages = (num_pages, asked.page_size, asked.num_kv_heads * asked.head_dim)
        causal = 3 if mask else 0  # a sequence's last query is its last token
        with _Given(self._library, arrays, asked, rows, pages) as given:
            hidden = given.tensor(mask, (MASK, MASK), _INT8) if mask else None
            # Where each sequence's queries end, but how long each is: pages have their own lengths.
            ends, lengths = given.longs(step.rows[1:].tolist()), given.longs(step.lens.tolist())
            first = (given.query, given.keys, given.values, None, hidden, ends, lengths)
            tensors = (*first, *[None] * 7, given.table, *[None] * 12)
            numbers = (asked.num_heads, asked.scale, _NO_LIMIT, _NO_LIMIT, b"TND", asked.num_kv_heads)
            modes = (causal, 0, asked.page_size, 0, False, 0, 0)
            keep = arrays | ({"mask": mask} if mask else {})
            self._run(lane, PREFILL, (*tensors, *numbers, *modes, given.out, None), keep)

    def _run(
        self, lane: Lane, name: str, arguments: tuple[object, ...], arrays: dict[str, DeviceMemory]
    ) -> None:
        """Go through an operator's two phases."""
        size, executor = c_uint64(), c_void_p()
        first = f"{name}GetWorkspaceSize"
        with lane.stream.device.current():
            code = getattr(self._library, first)(*arguments, ctypes.byref(size), ctypes.byref(executor))
        if code:
            raise device_error(first, code)
        workspace = lane.scratch("workspace", size.value)
        keep = (self._library, *arrays.values(), workspace)
        code = lane.stream.launch(
            lambda stream: getattr(self._library, name)(
                workspace.address if size.value else None, size.value, executor, stream
            ),
            keep,
        )
        if code:
            raise device_error(name, code)


class _Given:
    """What an operator is given, described as it wants; the descriptions go at the block's end."""

    def __init__(
        self,
        library: ctypes.CDLL,
        arrays: dict[str, DeviceMemory],
        asked: Shape,
        rows: tuple[int, ...],
        pages: tuple[int, ...],
    ) -> None:
        self._library = library
        self._arrays = arrays
        self._asked, self._rows, self._pages = asked, rows, pages
        self._made: list[tuple[str, int]] = []

    def __enter__(self) -> Self:
        arrays, dtype, asked = self._arrays, _DTYPES[self._asked.dtype], self._asked
        try:
            self.query, self.out = (self.tensor(arrays[name], self._rows, dtype) for name in ("query", "out"))
            self.table = self.tensor(arrays["block_table"], (asked.batch, asked.table_width), _INT32)
            self.keys, self.values = (
                self._list(arrays[name], self._pages, dtype) for name in ("key_pages", "value_pages")
            )
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._destroy()

    def _destroy(self) -> None:
        while self._made:
            destroy, handle = self._made.pop()
            getattr(self._library, destroy)(handle)

    def longs(self, numbers: Sequence[int]) -> int:
        """Make an array of the host's numbers."""
        array: int = self._library.aclCreateIntArray((c_int64 * len(numbers))(*numbers), len(numbers))
        self._made.append(("aclDestroyIntArray", array))
        return array

    def tensor(self, memory: DeviceMemory, shape: Sequence[int], dtype: int) -> int:
        """Make a tensor of contiguous memory."""
        handle = self._describe(memory, shape, dtype)
        self._made.append(("aclDestroyTensor", handle))
        return handle

    def _list(self, memory: DeviceMemory, shape: Sequence[int], dtype: int) -> int:
        """Make a list of one tensor, which goes with it."""
        tensor = (c_void_p * 1)(self._describe(memory, shape, dtype))
        handle: int = self._library.aclCreateTensorList(tensor, 1)
        self._made.append(("aclDestroyTensorList", handle))
        return handle

    def _describe(self, memory: DeviceMemory, shape: Sequence[int], dtype: int) -> int:
        count = len(shape)
        dims = (c_int64 * count)(*shape)
        strides = (c_int64 * count)(*(math.prod(shape[axis + 1 :]) for axis in range(count)))
        handle: int = self._library.aclCreateTensor(
            dims, count, dtype, strides, 0, _ND, dims, count, memory.address
        )
        return handle


def _is_plain(asked: Shape, step: Step) -> bool:
    return asked.window_left < 0 and asked.soft_cap == 0 and bool((step.lens > 0).all())


@functools.cache
def _loaded(path: str) -> Operators:
    return Operators(path)


def chosen() -> Operators | None:
    """Return the operators where the environment asks for them.

    Raises
    ------
    UnavailableError
        They are asked for and not there.
    ValueError
        The variable has another value than ``aclnn`` or ``kernels``.
    """
    value = os.environ.get(VARIABLE) or "kernels"
    if value == "kernels":
        return None
    if value != "aclnn":
        raise ValueError(f"{VARIABLE}={value}: kernels or aclnn")
    home = os.environ.get("ASCEND_HOME_PATH")
    inside = Path(home) / "lib64" / LIBRARY if home else None
    return _loaded(str(inside) if inside and inside.exists() else LIBRARY)
