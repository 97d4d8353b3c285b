"""The Ascend kernels under the emulation: built once with g++, called through ctypes."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from paged_kv.ascend.tiling import (
    DTYPES,
    LAYOUTS,
    DecodeArrays,
    DecodeTiling,
    PrefillArrays,
    PrefillTiling,
    Shape,
    fields,
)

ROOT = Path(__file__).parents[2]
ASCEND = ROOT / "ascend"

FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-DPAGED_KV_EMULATION"]

Array = npt.NDArray[Any]


class Counters(ctypes.Structure):
    """What the emulation counts."""

    _fields_ = fields(
        "u64 vector_instructions vector_repeats barriers copies_in bytes_in copies_out bytes_out",
        "u64 scalar_reads ub_bytes",
    )


class RefusedError(Exception):
    """The host's tiling says that a shape does not fit, or a kernel broke a rule."""

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


@functools.cache
def compiled(source: str, *options: str, root: Path = ASCEND, name: str = "kernels.so") -> Path:
    """Compile a file of ascend/ into a shared library, unless that was done before with the same text.

    A missing compiler is an error.
    """
    compiler = os.environ.get("CXX", "g++")
    assert shutil.which(compiler), f"{compiler}: a C++ compiler is needed to test the Ascend kernels; set CXX"
    extra = os.environ.get("ASCEND_CXXFLAGS", "").split()
    includes = [f"-I{root / folder}" for folder in ("emu", "kernel")]
    first, last = (
        tuple(o for o in options if o.startswith(("-l", "-L", "-Wl")) is late) for late in (False, True)
    )
    command = [compiler, *(first or ["-O2"]), *FLAGS, *extra, *includes, str(root / source), *last]
    digest = hashlib.sha256(repr((command, subprocess.check_output([compiler, "--version"]))).encode())
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        digest.update(file.read_bytes())
    target = (ROOT / "target" / "ascend" if root == ASCEND else root) / digest.hexdigest()[:16] / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        fresh = Path(folder) / target.name
        done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        fresh.replace(target)  # in one step: another process may be building it too
    return target


def loaded(path: Path) -> ctypes.CDLL:
    """Load a library with the emulation in it."""
    library = ctypes.CDLL(str(path))
    for name in ("emu_rule", "emu_message"):
        getattr(library, name).restype = ctypes.c_char_p
    library.emu_counters.restype = ctypes.POINTER(Counters)
    library.emu_add_memory.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    return library


def build(source: str, *options: str, root: Path = ASCEND) -> ctypes.CDLL:
    """Compile and load a file with kernels."""
    return loaded(compiled(source, *options, root=root))


def fake_runtime() -> Path:
    """Build the fake libascendcl; return the folder that stands for ``$ASCEND_HOME_PATH/lib64``."""
    options = ("-O1", "-pthread", "-Wl,-soname,libascendcl.so", "-ldl")
    return compiled("fake_acl/libascendcl.cpp", *options, name="lib64/libascendcl.so").parent


def kernel_library() -> Path:
    """Build the kernels, linked with the fake runtime for launches onto streams."""
    folder = fake_runtime()
    options = (f"-L{folder}", f"-Wl,--no-as-needed,-rpath,{folder}", "-lascendcl")
    return compiled("kernel/entry.cpp", *options)


@functools.cache
def kernels() -> ctypes.CDLL:
    """Build and load the kernels."""
    return loaded(kernel_library())


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


def shape_of(fields: dict[str, Any]) -> Any:
    """Return a reference to a `Shape`, of which what isn't named is small and plain."""
    plain = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 16, "table_width": 8}
    plain |= {"dtype": 0, "layout": 0, "max_len": 128, "num_splits": 1, "num_cores": 4, "window_left": -1}
    return ctypes.byref(Shape(**(plain | {"scale": 1.0} | fields)))


def plan_decode(**fields: Any) -> Any:
    """Return the tiling of a decode step."""
    tiling = DecodeTiling()
    planned("plan_decode", shape_of(fields), ctypes.byref(tiling))
    return tiling


def plan_prefill(max_queries: int = 1, causal: bool = True, **fields: Any) -> Any:
    """Return the tiling of a step with several queries a sequence."""
    tiling = PrefillTiling()
    counts = ctypes.c_uint32(max_queries), ctypes.c_uint32(causal)
    planned("plan_prefill", shape_of(fields), *counts, ctypes.byref(tiling))
    return tiling


@dataclass
class Attended:
    """Output [tokens, num_heads, head_dim], lse [tokens, num_heads], the tiling, and the cost."""

    out: Array
    lse: Array
    tiling: Any
    counters: dict[str, int]


def attend(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    block_table: Array,
    seq_lens: Array,
    cu_seqlens_q: Array | None = None,
    *,
    layout: str = "HND",
    scale: float | None = None,
    causal: bool = True,
    num_splits: int = 1,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    num_blocks: int = 3,
) -> Attended:
    """Run `prefill`; without `cu_seqlens_q`, `decode`, and `combine` where there are splits.

    What they leave unwritten is NaN.
    """
    tokens, num_heads, head_dim = query.shape
    _, first, second, _ = key_pages.shape
    num_kv_heads, page_size = (first, second) if layout == "HND" else (second, first)
    fields = {
        "batch": len(seq_lens),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "page_size": page_size,
        "table_width": block_table.shape[1],
        "dtype": DTYPES[query.dtype.name],
        "layout": LAYOUTS[layout],
        "max_len": int(seq_lens.max(initial=0)),
        "num_splits": num_splits,
        "num_cores": 40,
        "window_left": window_left,
        "scale": head_dim**-0.5 if scale is None else scale,
        "soft_cap": logits_soft_cap,
    }
    out = np.full_like(query, np.nan)
    lse = np.full((tokens, num_heads), np.nan, np.float32)
    reads, writes = [query, key_pages, value_pages, block_table, seq_lens], [out, lse]
    if cu_seqlens_q is None:
        name, tiling = "call_decode", plan_decode(**fields)
        parts = tokens * num_kv_heads * tiling.num_splits
        writes += [
            np.full((parts, width), np.nan, np.float32) for width in (tiling.group * head_dim, tiling.lanes)
        ]
    else:
        most = int(np.diff(cu_seqlens_q).max(initial=0))
        name, tiling = "call_prefill", plan_prefill(most, causal, **fields)
        reads.append(cu_seqlens_q)
    kind = DecodeArrays if cu_seqlens_q is None else PrefillArrays
    arrays = kind(*[array.ctypes.data for array in reads + writes])
    counters = call(
        name, reads, writes, ctypes.c_uint32(num_blocks), None, ctypes.byref(arrays), ctypes.byref(tiling)
    )
    return Attended(out, lse, tiling, counters)
