"""CANN's own attention for decoding, ``aclnnIncreFlashAttentionV4``, in the place of the kernel here.

It computes on the matrix unit, which these kernels leave alone. It needs CANN's operator package
(libopapi), and is used only where the environment variable ``PAGED_KV_ASCEND_ATTENTION`` is ``aclnn``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.ascend.errors import device_error, unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from paged_kv.ascend.lane import Lane
    from paged_kv.ascend.memory import DeviceMemory
    from paged_kv.ascend.tiling import Shape

__all__ = ["VARIABLE", "IncreFlashAttention", "chosen"]

VARIABLE = "PAGED_KV_ASCEND_ATTENTION"
LIBRARY = "libopapi.so"
NAME = "aclnnIncreFlashAttentionV4"

_DTYPES = {0: 1, 1: 27}  # of the kernels' tiling: ACL_FLOAT16, ACL_BF16
_INT32, _ND = 3, 2
_LONGS = POINTER(c_int64)

_CREATE: dict[str, list[type]] = {
    "aclCreateTensor": [_LONGS, c_uint64, c_int32, _LONGS, c_int64, c_int32, _LONGS, c_uint64, c_void_p],
    "aclCreateTensorList": [POINTER(c_void_p), c_uint64],
    "aclCreateIntArray": [_LONGS, c_uint64],
}
_DESTROY = ("aclDestroyTensor", "aclDestroyTensorList", "aclDestroyIntArray")
_PHASES: dict[str, list[type]] = {
    # query, keys, values, 2 unused, lengths, 7 unused, table, 1 unused; heads, scale, layout, KV heads,
    # block size, precision; output; then what comes back.
    f"{NAME}GetWorkspaceSize": [
        *[c_void_p] * 15,
        c_int64,
        c_double,
        c_char_p,
        *[c_int64] * 3,
        c_void_p,
        POINTER(c_uint64),
        POINTER(c_void_p),
    ],
    NAME: [c_void_p, c_uint64, c_void_p, c_void_p],
}


class IncreFlashAttention:
    """The operator, loaded.

    Parameters
    ----------
    path : str
        The library, as ``dlopen`` takes it.

    Raises
    ------
    UnavailableError
        It can't be loaded, or lacks the operator.
    """

    MAX_BLOCK = 512
    """Tokens of a page that it takes at most."""

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

    def takes(self, asked: Shape, lens: npt.NDArray[np.int32]) -> bool:
        """Say whether a step is one for it: no window, no soft cap, HND, no sequence without tokens."""
        plain = asked.window_left < 0 and asked.soft_cap == 0 and asked.layout == 0
        return plain and asked.page_size <= self.MAX_BLOCK and bool((lens > 0).all())

    def decode(
        self,
        lane: Lane,
        arrays: dict[str, DeviceMemory],
        asked: Shape,
        num_pages: int,
        lens: npt.NDArray[np.int32],
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
        lens : int32 [batch]
            Tokens of each sequence, which the operator wants from the host.

        Raises
        ------
        DeviceError
            The operator refuses.
        """
        dtype = _DTYPES[asked.dtype]
        rows = (asked.batch, asked.num_heads, 1, asked.head_dim)
        pages = (num_pages, asked.num_kv_heads, asked.page_size, asked.head_dim)
        made: list[tuple[str, int]] = []
        tensors = {
            "query": (rows, dtype),
            "out": (rows, dtype),
            "block_table": ((asked.batch, asked.table_width), _INT32),
        }
        try:
            given = {name: self._tensor(made, arrays[name], *kind) for name, kind in tensors.items()}
            keys, values = (
                self._list(made, arrays[name], pages, dtype) for name in ("key_pages", "value_pages")
            )
            longs = (c_int64 * len(lens))(*lens.tolist())
            lengths = self._library.aclCreateIntArray(longs, len(lens))
            made.append(("aclDestroyIntArray", lengths))
            size, executor = c_uint64(), c_void_p()
            with lane.stream.device.current():
                self._check(
                    f"{NAME}GetWorkspaceSize",
                    *(
                        given["query"],
                        keys,
                        values,
                        None,
                        None,
                        lengths,
                        *[None] * 7,
                        given["block_table"],
                        None,
                    ),
                    *(asked.num_heads, asked.scale, b"BNSD", asked.num_kv_heads, asked.page_size, 1),
                    *(given["out"], ctypes.byref(size), ctypes.byref(executor)),
                )
            workspace = lane.scratch("workspace", size.value)
            keep = (self._library, *arrays.values(), workspace)
            code = lane.stream.launch(
                lambda stream: getattr(self._library, NAME)(
                    workspace.address if size.value else None, size.value, executor, stream
                ),
                keep,
            )
            if code:
                raise device_error(NAME, code)
        finally:
            for destroy, handle in reversed(made):
                getattr(self._library, destroy)(handle)

    def _check(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise device_error(name, code)

    def _describe(self, memory: DeviceMemory, shape: Sequence[int], dtype: int) -> int:
        """Make a tensor of contiguous memory."""
        dims = (c_int64 * len(shape))(*shape)
        strides: list[int] = []
        step = 1
        for length in reversed(shape):
            strides.insert(0, step)
            step *= length
        count = len(shape)
        handle: int = self._library.aclCreateTensor(
            dims, count, dtype, (c_int64 * count)(*strides), 0, _ND, dims, count, memory.address
        )
        return handle

    def _tensor(
        self, made: list[tuple[str, int]], memory: DeviceMemory, shape: Sequence[int], dtype: int
    ) -> int:
        handle = self._describe(memory, shape, dtype)
        made.append(("aclDestroyTensor", handle))
        return handle

    def _list(
        self, made: list[tuple[str, int]], memory: DeviceMemory, shape: Sequence[int], dtype: int
    ) -> int:
        """Make a list of one tensor, which goes with it."""
        tensor = (c_void_p * 1)(self._describe(memory, shape, dtype))
        handle: int = self._library.aclCreateTensorList(tensor, 1)
        made.append(("aclDestroyTensorList", handle))
        return handle


@functools.cache
def _loaded(path: str) -> IncreFlashAttention:
    return IncreFlashAttention(path)


def chosen() -> IncreFlashAttention | None:
    """Return the operator where the environment asks for it.

    Raises
    ------
    UnavailableError
        It is asked for and not there.
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
