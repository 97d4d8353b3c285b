"""What host and kernels tell each other: the structures of ``ascend/kernel/tiling.h``."""

from __future__ import annotations

import ctypes

__all__ = [
    "DTYPES",
    "LAYOUTS",
    "AttendTiling",
    "CopyTiling",
    "DecodeArrays",
    "DecodeTiling",
    "PrefillArrays",
    "PrefillTiling",
    "Shape",
    "WriteTiling",
]

DTYPES = {"float16": 0, "bfloat16": 1}
LAYOUTS = {"HND": 0, "NHD": 1}

_TYPES = {
    "u32": ctypes.c_uint32,
    "i32": ctypes.c_int32,
    "u64": ctypes.c_uint64,
    "f32": ctypes.c_float,
    "ptr": ctypes.c_void_p,
}


def fields(*lines: str) -> list[tuple[str, type]]:
    """Read lines of a type and the names that have it."""
    split = [line.split() for line in lines]
    return [(name, _TYPES[kind]) for kind, *names in split for name in names]


class Shape(ctypes.Structure):
    """One step as it is asked for."""

    _fields_ = fields(
        "u32 batch num_heads num_kv_heads head_dim page_size table_width",
        "u32 dtype layout max_len num_splits num_cores",
        "i32 window_left",
        "f32 scale soft_cap",
    )


class AttendTiling(ctypes.Structure):
    """What decode and prefill share of how a step will be done."""

    _fields_ = (
        ("shape", Shape),
        *fields(
            "u32 group rows lanes tile_tokens score_width accumulators table_chunk ub_bytes",
            "u64 page_stride head_stride token_stride",
        ),
    )


class DecodeTiling(ctypes.Structure):
    """One decode step as it will be done."""

    _anonymous_ = ("common",)
    _fields_ = (("common", AttendTiling), *fields("u32 num_splits split_tokens"))


class PrefillTiling(ctypes.Structure):
    """One step of several queries a sequence as it will be done."""

    _anonymous_ = ("common",)
    _fields_ = (("common", AttendTiling), *fields("u32 queries chunks causal padding"))


class DecodeArrays(ctypes.Structure):
    """Addresses of one decode step's arrays."""

    _fields_ = fields("ptr query key_pages value_pages block_table seq_lens out lse partial_out partial_lse")


class PrefillArrays(ctypes.Structure):
    """Addresses of the arrays of a step with several queries a sequence."""

    _fields_ = fields("ptr query key_pages value_pages block_table seq_lens cu_seqlens_q out lse")


class WriteTiling(ctypes.Structure):
    """Tokens into their slots."""

    _fields_ = fields(
        "u32 num_tokens num_kv_heads head_dim page_size tile_tokens ub_bytes",
        "u64 page_stride head_stride token_stride",
    )


class CopyTiling(ctypes.Structure):
    """Pages into pages."""

    _fields_ = fields("u32 num_copies chunk_bytes", "u64 page_bytes")


SIZES = {Shape: 56, DecodeTiling: 120, PrefillTiling: 128, WriteTiling: 48, CopyTiling: 16}
"""Bytes, as tiling.h asserts them too."""

if any(ctypes.sizeof(structure) != size for structure, size in SIZES.items()):
    raise ImportError(f"sizes differ from {SIZES}")
