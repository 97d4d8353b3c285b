"""The kernel library: one plain C function per kernel, which puts it on a stream."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.ascend import build
from paged_kv.ascend.errors import device_error, unavailable
from paged_kv.ascend.tiling import (
    LAYOUTS,
    DecodeArrays,
    DecodeTiling,
    PrefillArrays,
    PrefillTiling,
    Shape,
    WriteTiling,
)
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paged_kv.ascend.memory import DeviceMemory
    from paged_kv.ascend.stream import Stream

__all__ = ["KernelLibrary", "load_kernels"]

_u32, _u64, _ptr = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p

# The host's side of a kernel: refuses with a text. Arguments before the text and its size.
PLANNERS: dict[str, list[type]] = {
    "plan_decode": [_ptr, _ptr],
    "plan_prefill": [_ptr, _u32, _u32, _ptr],
    "plan_write_pages": [_u32, _ptr],
}

# The launchers: blocks, stream, then these.
LAUNCHERS: dict[str, list[type]] = {
    "call_decode": [_ptr, _ptr],
    "call_prefill": [_ptr, _ptr],
    "call_write_pages": [_ptr] * 6,
    "call_copy_pages": [_ptr, _ptr, _ptr, _u32, _u64],
}


class KernelLibrary:
    """The kernels, as built by ``python -m paged_kv.ascend build``.

    Parameters
    ----------
    path : path-like
        The shared library.

    Raises
    ------
    UnavailableError
        It can't be loaded, or lacks a kernel.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        again = "run python -m paged_kv.ascend build"
        try:
            self.library = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise unavailable(f"the kernel library can't be loaded: {error}", again) from error
        missing = [name for name in (*PLANNERS, *LAUNCHERS) if not hasattr(self.library, name)]
        if missing:
            raise unavailable(f"{self.path} lacks {', '.join(missing)}", again)
        for name, arguments in PLANNERS.items():
            getattr(self.library, name).argtypes = [*arguments, ctypes.c_char_p, ctypes.c_size_t]
        for name, arguments in LAUNCHERS.items():
            getattr(self.library, name).argtypes = [_u32, _ptr, *arguments]

    def plan_decode(self, shape: Shape) -> DecodeTiling:
        """Return how a decode step will be done.

        Parameters
        ----------
        shape : Shape
            What is asked for.

        Returns
        -------
        DecodeTiling
            With ``num_splits``, from which the sizes of the partial results follow.

        Raises
        ------
        LayoutError
            The kernels can't; the message has the numbers.
        """
        tiling = DecodeTiling()
        self._plan("plan_decode", ctypes.byref(shape), ctypes.byref(tiling))
        return tiling

    def plan_prefill(self, shape: Shape, max_queries: int, *, causal: bool) -> PrefillTiling:
        """Return how a step will be done in which no sequence has more than `max_queries` queries.

        Raises
        ------
        LayoutError
            The kernels can't; the message has the numbers.
        """
        tiling = PrefillTiling()
        self._plan("plan_prefill", ctypes.byref(shape), max_queries, causal, ctypes.byref(tiling))
        return tiling

    def plan_write_pages(self, tiling: WriteTiling, layout: str) -> WriteTiling:
        """Complete a tiling whose first four fields are set; ``LayoutError`` where it can't be done."""
        self._plan("plan_write_pages", LAYOUTS[layout], ctypes.byref(tiling))
        return tiling

    def _plan(self, name: str, *arguments: object) -> None:
        text = ctypes.create_string_buffer(512)
        if getattr(self.library, name)(*arguments, text, len(text)):
            raise LayoutError(text.value.decode(errors="replace"))

    def decode(
        self,
        stream: Stream,
        arrays: dict[str, DeviceMemory],
        tiling: DecodeTiling,
        num_blocks: int,
    ) -> None:
        """Attend of one query a sequence; the combination of splits follows on the stream.

        Parameters
        ----------
        stream : Stream
            Where it takes its turn; it keeps the memory alive until then.
        arrays : dict of str to DeviceMemory
            By the names of :class:`DecodeArrays`: query and out [batch,
            num_heads, head_dim], block_table int32 [batch, table_width], seq_lens int32 [batch], lse
            float32 [batch, num_heads], partial_out float32 [parts, group, head_dim] and partial_lse
            float32 [parts, lanes] with parts = batch · num_kv_heads · num_splits.
        tiling : DecodeTiling
            From :meth:`plan_decode`.
        num_blocks : int
            Vector cores to use.
        """
        pointers = DecodeArrays(**{name: memory.address for name, memory in arrays.items()})
        self._launch(
            "call_decode",
            stream,
            num_blocks,
            tuple(arrays.values()),
            ctypes.byref(pointers),
            ctypes.byref(tiling),
        )

    def prefill(
        self,
        stream: Stream,
        arrays: dict[str, DeviceMemory],
        tiling: PrefillTiling,
        num_blocks: int,
    ) -> None:
        """Attend of the last queries of each sequence.

        Parameters
        ----------
        stream : Stream
            Where it takes its turn; it keeps the memory alive until then.
        arrays : dict of str to DeviceMemory
            By the names of :class:`~paged_kv.ascend.tiling.PrefillArrays`: query and out [tokens,
            num_heads, head_dim], block_table int32 [batch, table_width], seq_lens int32 [batch],
            cu_seqlens_q int32 [batch + 1] and lse float32 [tokens, num_heads].
        tiling : PrefillTiling
            From :meth:`plan_prefill`.
        num_blocks : int
            Vector cores to use.
        """
        pointers = PrefillArrays(**{name: memory.address for name, memory in arrays.items()})
        self._launch(
            "call_prefill",
            stream,
            num_blocks,
            tuple(arrays.values()),
            ctypes.byref(pointers),
            ctypes.byref(tiling),
        )

    def write_pages(
        self,
        stream: Stream,
        key: DeviceMemory,
        value: DeviceMemory,
        key_pages: DeviceMemory,
        value_pages: DeviceMemory,
        slots: DeviceMemory,
        tiling: WriteTiling,
        num_blocks: int,
    ) -> None:
        """Put tokens into slots, int64 [num_tokens]; those with -1 are left out.

        Key and value are [num_tokens, num_kv_heads, head_dim].
        """
        memory = (key, value, key_pages, value_pages, slots)
        addresses = [one.address for one in memory]
        self._launch("call_write_pages", stream, num_blocks, memory, *addresses, ctypes.byref(tiling))

    def copy_pages(
        self,
        stream: Stream,
        key_pages: DeviceMemory,
        value_pages: DeviceMemory,
        copies: DeviceMemory,
        num_copies: int,
        page_bytes: int,
        num_blocks: int,
    ) -> None:
        """Copy pages as copies, int64 [num_copies, 2] of source and destination, says.

        Each page has `page_bytes` bytes in either array.
        """
        memory = (key_pages, value_pages, copies)
        addresses = [one.address for one in memory]
        self._launch("call_copy_pages", stream, num_blocks, memory, *addresses, num_copies, page_bytes)

    def _launch(
        self, name: str, stream: Stream, num_blocks: int, memory: tuple[DeviceMemory, ...], *arguments: object
    ) -> None:
        function: Callable[..., int] = getattr(self.library, name)
        keep = (self.library, *(one._owner for one in memory))
        status = stream.launch(lambda handle: function(num_blocks, handle, *arguments), keep)
        if status:
            raise device_error(name, status)


@functools.cache
def load_kernels(path: str | None = None) -> KernelLibrary:
    """Load the kernel library, once.

    Parameters
    ----------
    path : str, optional
        The library. Without it ``$PAGED_KV_ASCEND_KERNELS``, or the place to which
        ``python -m paged_kv.ascend build`` builds the sources of this version.

    Returns
    -------
    KernelLibrary
        The kernels.

    Raises
    ------
    UnavailableError
        There is none.
    """
    chosen = Path(path or os.environ.get("PAGED_KV_ASCEND_KERNELS") or build.library_path())
    try:
        found = chosen.exists()
    except OSError:  # a name that no file can have
        found = False
    if not found:
        raise unavailable(f"there is no kernel library at {chosen}", "run python -m paged_kv.ascend build")
    return KernelLibrary(chosen)
