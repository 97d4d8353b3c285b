"""The Ascend kernels under the emulation: built once with g++, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[2]
ASCEND = ROOT / "ascend"

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-DPAGED_KV_EMULATION"]

Array = npt.NDArray[Any]


def structure(name: str, fields: str) -> type[ctypes.Structure]:
    """Make a ctypes structure of `type name` pairs."""
    types = {"u32": ctypes.c_uint32, "i32": ctypes.c_int32, "u64": ctypes.c_uint64, "f32": ctypes.c_float}
    pairs = [field.split() for field in fields.split(",")]
    return type(name, (ctypes.Structure,), {"_fields_": [(label, types[kind]) for kind, label in pairs]})


Shape = structure(
    "Shape",
    "u32 batch, u32 num_heads, u32 num_kv_heads, u32 head_dim, u32 page_size, u32 table_width, u32 dtype,"
    "u32 layout, u32 max_len, u32 num_splits, u32 num_cores, i32 window_left, f32 scale, f32 soft_cap",
)


class DecodeTiling(ctypes.Structure):
    """`DecodeTiling` of ascend/kernel/tiling.h."""

    _fields_ = (
        ("shape", Shape),
        *((name, ctypes.c_uint32) for name in ["group", "lanes_group", "tile_tokens", "score_width", "rows"]),
        *(
            (name, ctypes.c_uint32)
            for name in ["num_splits", "split_tokens", "table_chunk", "ub_bytes", "padding"]
        ),
        *((name, ctypes.c_uint64) for name in ["page_stride", "head_stride", "token_stride"]),
    )


WriteTiling = structure(
    "WriteTiling",
    "u32 num_tokens, u32 num_kv_heads, u32 head_dim, u32 page_size, u32 tile_tokens, u32 ub_bytes,"
    "u64 page_stride, u64 head_stride, u64 token_stride",
)
Counters = structure(
    "Counters",
    "u64 vector_instructions, u64 vector_repeats, u64 barriers, u64 copies_in, u64 bytes_in, u64 copies_out,"
    "u64 bytes_out, u64 scalar_reads, u64 ub_bytes",
)
assert [ctypes.sizeof(s) for s in (Shape, DecodeTiling, WriteTiling)] == [56, 120, 48]  # as tiling.h asserts


class RefusedError(Exception):
    """The host's tiling says that a shape does not fit, or a kernel broke a rule."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


@functools.cache
def build(source: str, *flags: str, root: Path = ASCEND) -> ctypes.CDLL:
    """Compile a file of ascend/ into a shared library and load it; a missing compiler is an error."""
    compiler = os.environ.get("CXX", "g++")
    assert shutil.which(compiler), f"{compiler}: a C++ compiler is needed to test the Ascend kernels; set CXX"
    folder = Path(tempfile.mkdtemp(prefix="paged-kv-ascend-"))
    try:
        target = folder / "kernels.so"
        includes = [f"-I{root / name}" for name in ("emu", "kernel")]
        extra = os.environ.get("ASCEND_CXXFLAGS", "").split()
        command = [
            compiler,
            *(flags or ["-O2"]),
            *FLAGS,
            *extra,
            *includes,
            str(root / source),
            "-o",
            str(target),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        library = ctypes.CDLL(str(target))
    finally:
        shutil.rmtree(folder)  # what is loaded stays mapped
    for name in ("emu_rule", "emu_message"):
        getattr(library, name).restype = ctypes.c_char_p
    library.emu_counters.restype = ctypes.POINTER(Counters)
    library.emu_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    return library


def kernels() -> ctypes.CDLL:
    """Build and load the kernels."""
    return build("kernel/entry.cpp")


def address(array: Array) -> ctypes.c_void_p:
    """Return where an array begins; the kernels take contiguous ones only."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def call(name: str, reads: list[Array], writes: list[Array], *arguments: Any) -> dict[str, int]:
    """Launch a kernel that may read and write these arrays; return what it cost."""
    library = kernels()
    library.emu_clear_memory()
    library.emu_reset_counters()
    for arrays, writable in ((reads, 0), (writes, 1)):
        for array in arrays:
            library.emu_add_memory(address(array), array.nbytes, writable)
    if getattr(library, name)(*arguments):
        raise RefusedError(library.emu_message().decode(), library.emu_rule().decode())
    counters = library.emu_counters().contents
    return {field: getattr(counters, field) for field, _ in Counters._fields_}


def planned(name: str, *arguments: Any) -> None:
    """Ask the host for a tiling."""
    text = ctypes.create_string_buffer(512)
    if getattr(kernels(), name)(*arguments, text, ctypes.c_size_t(len(text))):
        raise RefusedError(text.value.decode())


DTYPES = {"float16": 0, "bfloat16": 1}


def plan_decode(**fields: Any) -> DecodeTiling:
    """Return the tiling of a decode step, of which what isn't named is small and plain."""
    plain = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 16, "table_width": 8}
    plain |= {"dtype": 0, "layout": 0, "max_len": 128, "num_splits": 1, "num_cores": 4, "window_left": -1}
    tiling = DecodeTiling()
    planned("plan_decode", ctypes.byref(Shape(**(plain | {"scale": 1.0} | fields))), ctypes.byref(tiling))
    return tiling


@dataclass
class Decoded:
    """Output [batch, num_heads, head_dim], lse [batch, num_heads], the tiling, and the cost."""

    out: Array
    lse: Array
    tiling: DecodeTiling
    counters: dict[str, int]


def decode(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    seq_lens: Array,
    *,
    layout: str = "HND",
    scale: float | None = None,
    num_splits: int = 1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    num_blocks: int = 3,
) -> Decoded:
    """Run `decode`, and `combine` where there are splits; what they leave unwritten is NaN."""
    batch, num_heads, head_dim = query.shape
    _, first, second, _ = key_pages.shape
    num_kv_heads, page_size = (first, second) if layout == "HND" else (second, first)
    tiling = plan_decode(
        batch=batch,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        table_width=block_table.shape[1],
        dtype=DTYPES[query.dtype.name],
        layout=["HND", "NHD"].index(layout),
        max_len=int(seq_lens.max(initial=0)),
        num_splits=num_splits,
        num_cores=40,
        window_left=window_left,
        scale=head_dim**-0.5 if scale is None else scale,
        soft_cap=logits_soft_cap,
    )
    out = np.full_like(query, np.nan)
    lse = np.full((batch, num_heads), np.nan, np.float32)
    parts = batch * num_kv_heads * tiling.num_splits
    partial_out = np.full((parts, tiling.group, head_dim), np.nan, np.float32)
    partial_lse = np.full((parts, tiling.lanes_group), np.nan, np.float32)
    reads = [query, key_pages, value_pages, block_table, seq_lens]
    writes = [out, lse, partial_out, partial_lse]
    arrays = (ctypes.c_void_p * 9)(*[array.ctypes.data for array in reads + writes])
    counters = call(
        "call_decode", reads, writes, ctypes.c_uint32(num_blocks), None, arrays, ctypes.byref(tiling)
    )
    return Decoded(out, lse, tiling, counters)
