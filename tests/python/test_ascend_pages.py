"""The Ascend kernels that move keys, values and pages, emulated, against numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import paged_kv
from ascend_support import RefusedError, address, call, planned
from paged_kv.ascend.tiling import WriteTiling

Array = npt.NDArray[Any]
LAYOUTS = ["HND", "NHD"]


def plan_write(layout: str = "HND", **fields: int) -> WriteTiling:
    tiling = WriteTiling(**({"num_tokens": 1, "num_kv_heads": 2, "head_dim": 64, "page_size": 16} | fields))
    planned("plan_write_pages", ctypes.c_uint32(LAYOUTS.index(layout)), ctypes.byref(tiling))
    return tiling


def write_pages(
    key: Array, value: Array, pages: list[Array], slots: Array, *, layout: str, num_blocks: int = 3
) -> dict[str, int]:
    tokens, num_kv_heads, head_dim = key.shape
    page_size = pages[0].shape[2 if layout == "HND" else 1]
    tiling = plan_write(
        layout, num_tokens=tokens, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size
    )
    arrays = [key, value, *pages, slots]
    blocks = ctypes.c_uint32(num_blocks)
    counters = call(
        "call_write_pages",
        [key, value, slots],
        pages,
        blocks,
        None,
        *map(address, arrays),
        ctypes.byref(tiling),
    )
    if tokens:
        assert counters["ub_bytes"] == tiling.ub_bytes
    return counters


def random_pages(rng: np.random.Generator, shape: tuple[int, ...], kind: Any) -> list[Array]:
    return [rng.standard_normal(shape, dtype=np.float32).astype(kind) for _ in range(2)]


def copy_pages(pages: list[Array], copies: Array, *, num_blocks: int = 3) -> dict[str, int]:
    arguments = [*map(address, [*pages, copies]), ctypes.c_uint32(len(copies))]
    page_bytes = ctypes.c_uint64(pages[0].nbytes // len(pages[0]))
    return call("call_copy_pages", [copies], pages, ctypes.c_uint32(num_blocks), None, *arguments, page_bytes)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("tokens", "num_kv_heads", "head_dim", "page_size"),
    [
        (1, 1, 16, 16),
        (63, 2, 80, 16),
        (64, 1, 128, 32),
        (65, 3, 48, 16),
        (200, 8, 128, 128),
        (20, 32, 256, 16),
    ],
)
def test_tokens_arrive_in_their_slots(dtype, layout, tokens, num_kv_heads, head_dim, page_size) -> None:
    rng = np.random.default_rng(tokens)
    num_pages = -(-tokens // page_size) + 3
    key, value = random_pages(rng, (tokens, num_kv_heads, head_dim), dtype)
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    slots = rng.permutation(num_pages * page_size)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] = -1
    expected = random_pages(rng, shape, dtype)
    pages = [page.copy() for page in expected]
    on_cpu = [page.copy() for page in expected]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // page_size, slot % page_size] = key[token]
            expected[1][slot // page_size, slot % page_size] = value[token]
    if layout == "HND":
        pages, on_cpu = ([np.ascontiguousarray(p.swapaxes(1, 2)) for p in both] for both in (pages, on_cpu))
    paged_kv.write_pages(key, value, *on_cpu, slots, layout=layout)
    counters = write_pages(key, value, pages, slots, layout=layout)
    for got, cpu, want in zip(pages, on_cpu, expected, strict=True):
        want = want.swapaxes(1, 2) if layout == "HND" else want
        assert np.array_equal(got.view(np.uint16), np.ascontiguousarray(want).view(np.uint16))
        assert np.array_equal(got.view(np.uint16), cpu.view(np.uint16))
    assert counters["vector_instructions"] == 0
    assert counters["bytes_out"] == 2 * (slots >= 0).sum() * num_kv_heads * head_dim * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_token_and_no_slot_write_nothing(layout) -> None:
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (2, 16, 16, 16), np.float16)
    before = [page.copy() for page in pages]
    for tokens in (0, 5):
        key, value = random_pages(rng, (tokens, 16, 16), np.float16)
        counters = write_pages(key, value, pages, np.full(tokens, -1, np.int64), layout=layout)
        assert counters["copies_out"] == 0
    assert all(map(np.array_equal, pages, before))


def test_a_slot_beyond_the_pages_is_caught() -> None:
    rng = np.random.default_rng(0)
    key, value = random_pages(rng, (1, 2, 16), np.float16)
    pages = random_pages(rng, (2, 2, 16, 16), np.float16)
    with pytest.raises(RefusedError, match=r"pages.h:\d+: gm-bounds"):
        write_pages(key, value, pages, np.array([32]), layout="HND")


def test_two_blocks_at_one_slot_are_caught() -> None:
    rng = np.random.default_rng(0)
    key, value = random_pages(rng, (65, 1, 16), np.float16)
    pages = random_pages(rng, (8, 1, 16, 16), np.float16)
    slots = np.arange(65)
    slots[64] = 0
    with pytest.raises(RefusedError, match="gm-race"):
        write_pages(key, value, pages, slots, layout="HND")


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (5, 112), (8, 128)])
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_pages_are_copied_whole(page_size, num_kv_heads, head_dim, num_blocks) -> None:
    rng = np.random.default_rng(page_size)
    pages = random_pages(rng, (9, num_kv_heads, page_size, head_dim), np.float16)
    copies = np.array([[3, 0], [3, 8], [7, 2], [1, 6]])  # one source may have several copies
    expected = [page.copy() for page in pages]
    for page in expected:
        page[copies[:, 1]] = page[copies[:, 0]]
    counters = copy_pages(pages, copies, num_blocks=num_blocks)
    assert all(map(np.array_equal, pages, expected))
    assert counters["bytes_in"] == counters["bytes_out"] == 4 * 2 * pages[0][0].nbytes


def test_no_copies() -> None:
    pages = random_pages(np.random.default_rng(0), (2, 1, 16, 16), np.float16)
    assert copy_pages(pages, np.empty((0, 2), np.int64))["copies_in"] == 0


def test_a_chain_of_copies_is_caught() -> None:
    pages = random_pages(np.random.default_rng(0), (4, 1, 16, 16), np.float16)
    with pytest.raises(RefusedError, match="gm-race"):
        copy_pages(pages, np.array([[0, 1], [1, 2]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 20}, "head_dim 20"),
        ({"page_size": 0}, "page_size 0"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_kv_heads": 4096}, "4096 KV heads: one copy moves at most 4095"),
        ({"num_kv_heads": 200, "head_dim": 256}, "819200 bytes of UB for 4 tokens; there are 188160"),
    ],
)
def test_what_cannot_be_written_is_refused_with_the_numbers(fields, message) -> None:
    with pytest.raises(RefusedError, match=message):
        plan_write(**fields)
