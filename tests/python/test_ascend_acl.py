"""Devices, streams, memory and launches through ctypes, on the fake runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ascend_fake import Fake, decode_arrays
from ascend_support import DTYPES, decode
from paged_kv import ascend
from paged_kv.ascend.tiling import LAYOUTS, Shape, WriteTiling


def decode_case(dtype: type, *, num_splits: int = 2) -> tuple[dict[str, np.ndarray], Shape, np.ndarray]:
    """Return the arrays of a decode step, what is asked for, and the result without a device."""
    rng = np.random.default_rng(0)
    batch, heads, kv_heads, dim, page_size = 3, 4, 2, 32, 16
    seq_lens = np.array([70, 0, 33], np.int32)
    shape = (16, kv_heads, page_size, dim)
    key_pages, value_pages = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    query = rng.standard_normal((batch, heads, dim), np.float32).astype(dtype)
    table = rng.permutation(16)[:15].astype(np.int32).reshape(3, 5)
    inputs = [query, key_pages, value_pages, table, seq_lens]
    want = decode(*inputs, num_splits=num_splits)
    asked = Shape(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        table_width=5,
        dtype=DTYPES[np.dtype(dtype).name],
        layout=LAYOUTS["HND"],
        max_len=70,
        num_splits=num_splits,
        num_cores=8,
        window_left=-1,
        scale=dim**-0.5,
    )
    names = ["query", "key_pages", "value_pages", "block_table", "seq_lens"]
    return dict(zip(names, inputs, strict=True)), asked, want.out


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_decode_on_a_stream_computes_what_the_kernel_computes(fake: Fake, dtype) -> None:
    host, asked, want = decode_case(dtype)
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    kernels = ascend.load_kernels()
    tiling = kernels.plan_decode(asked)
    arrays = decode_arrays(stream, host)
    parts = asked.batch * asked.num_kv_heads * tiling.num_splits
    assert tiling.num_splits == 2
    for name, nbytes in {
        "out": want.nbytes,
        "lse": asked.batch * asked.num_heads * 4,
        "partial_out": parts * tiling.group * asked.head_dim * 4,
        "partial_lse": parts * tiling.lanes_group * 4,
    }.items():
        arrays[name] = ascend.allocate(device, nbytes)
    out = np.zeros_like(want)
    with fake.held(stream):
        kernels.decode(stream, arrays, tiling, device.num_vector_cores)
        tiling.group = 99  # arguments were copied at the launch
        arrays["out"].copy_to(out, stream)
        used = fake.memory_used()
        memory = arrays["out"]
        arrays.clear()  # the stream keeps what its work reads
        assert fake.memory_used() == used
        assert not out.any()
    stream.synchronize()
    np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))
    device.collect()
    assert fake.memory_used() == (memory.nbytes + 31) // 32 * 32 + 32


def test_writes_and_copies_of_pages_take_their_turn(fake: Fake) -> None:
    rng = np.random.default_rng(0)
    device = ascend.open_device(1)
    stream = ascend.Stream(device)
    kernels = ascend.load_kernels()
    key, value = (rng.standard_normal((20, 2, 16), np.float32).astype(np.float16) for _ in range(2))
    pages = np.zeros((6, 2, 16, 16), np.float16)
    slots = np.arange(20, dtype=np.int64)
    copies = np.array([[0, 4], [1, 3]], np.int64)
    memory = decode_arrays(
        stream,
        {
            "key": key,
            "value": value,
            "key_pages": pages,
            "value_pages": pages,
            "slots": slots,
            "copies": copies,
        },
    )
    tiling = kernels.plan_write_pages(
        WriteTiling(num_tokens=20, num_kv_heads=2, head_dim=16, page_size=16), "HND"
    )
    with fake.held(stream):
        names = ["key", "value", "key_pages", "value_pages", "slots"]
        kernels.write_pages(stream, *(memory[name] for name in names), tiling, 2)
        kernels.copy_pages(
            stream, memory["key_pages"], memory["value_pages"], memory["copies"], 2, pages[0].nbytes, 2
        )
        got = np.empty_like(pages)
        memory["key_pages"].copy_to(got, stream)
    stream.synchronize()
    want = pages.copy()
    want[0], want[1, :, :4] = key[:16].swapaxes(0, 1), key[16:].swapaxes(0, 1)
    want[4], want[3] = want[0], want[1]
    np.testing.assert_array_equal(got, want)
