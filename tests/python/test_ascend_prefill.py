"""The Ascend prefill kernel, emulated, against attention in float64, the CPU's kernel and decode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paged_kv
from ascend_case import DTYPES, TOLERANCE, Case
from ascend_support import RefusedError, attend, plan_prefill

GROUPS = [1, 2, 3, 4, 8, 16]
PAGE_SIZES = [16, 32, 128]

# Every dtype with every other head_dim and with every group; every page size and layout.
GRID = [
    pytest.param(
        dtype, head_dim, group, page_size, layout, id=f"{dtype}-{head_dim}-{group}-{page_size}-{layout}"
    )
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate([16, 32, 64, 80, 128, 256])
    for group, page_size, layout in [
        (GROUPS[(i + j) % 6], PAGE_SIZES[(j + j // 3) % 3], ["HND", "NHD"][(i + j // 2) % 2])
    ]
]


@pytest.mark.parametrize(("dtype", "head_dim", "group", "page_size", "layout"), GRID)
def test_ragged_chunks_over_the_grid(dtype, head_dim, group, page_size, layout) -> None:
    shape = {"head_dim": head_dim, "group": group, "page_size": page_size, "layout": layout}
    lens, queries = [0, 1, 16, 35, 130], [0, 1, 5, 35, 3]
    Case(lens, queries, dtype=dtype, num_kv_heads=2, **shape, seed=head_dim).check()


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_grid(dtype, head_dim, group, page_size, layout) -> None:
    shape = {"head_dim": head_dim, "group": group, "page_size": page_size, "layout": layout}
    lens, queries = [0, 1, 15, 17, 129, 513, 64], [0, 1, 15, 3, 40, 2, 64]
    case = Case(lens, queries, dtype=dtype, num_kv_heads=2, **shape, seed=head_dim)
    case.check()
    case.check(window_left=20, logits_soft_cap=9.0)
    case.check(causal=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_at_every_border_of_tile_and_task(dtype) -> None:
    tiling = plan_prefill(dtype=["float16", "bfloat16"].index(dtype), head_dim=16)
    tile, queries = tiling.tile_tokens, tiling.queries
    assert (tile, queries) == (128, 32)
    ends = [tile - 1, tile, tile + 1, 2 * tile, 2 * tile + 1, 70, 70, 70, 64]
    counts = [1, 2, 3, queries, queries + 1, queries - 1, 2 * queries, 2 * queries + 1, 64]
    Case(ends, counts, dtype=dtype, head_dim=16).check()


@pytest.mark.parametrize(("dtype", "layout"), [("float16", "NHD"), ("bfloat16", "HND")])
def test_window_soft_cap_scale_and_all_keys(dtype, layout) -> None:
    lens, queries = [1, 20, 77, 150, 0], [1, 20, 9, 17, 0]
    case = Case(lens, queries, dtype=dtype, layout=layout, group=2, num_kv_heads=2, head_dim=16)
    for window_left in (0, 1, 15, 50, 1000):
        case.check(window_left=window_left)
    case.check(logits_soft_cap=2.0)
    case.check(logits_soft_cap=30.0, window_left=33)
    case.check(scale=-0.3)
    case.check(causal=False)
    case.check(causal=False, window_left=20)


def test_a_window_narrower_than_the_way_to_a_later_query() -> None:
    """Rows of a task whose first tiles show them nothing forget what those tiles held."""
    case = Case([600], [200], head_dim=16)
    for window_left in (0, 3):
        case.check(window_left=window_left)


def test_queries_before_the_first_token_see_nothing() -> None:
    case = Case([3, 0, 1, 20], [5, 4, 40, 20], group=2, num_kv_heads=2, head_dim=16)
    got = case.check()
    assert np.isneginf(got.lse[:2]).all()
    assert np.isfinite(got.lse[2:5]).all()
    case.check(window_left=1)
    case.check(causal=False)


def test_what_a_later_token_holds_does_not_reach_an_earlier_query() -> None:
    case = Case([64], [64], head_dim=16)
    before = case.check()
    page, offset = case.block_table[0, 2], 5
    case.key_pages[page, :, offset] = case.value_pages[page, :, offset] = np.nan  # token 37
    after = case.run()
    assert np.array_equal(before.out[:37], after.out[:37])
    assert np.isnan(after.out[37:]).all()
    windowed = case.run(window_left=10)
    assert np.isfinite(windowed.out[:37]).all()
    assert np.isfinite(windowed.out[48:]).all()


def test_pages_that_left_the_window_are_never_looked_up() -> None:
    case = Case([300, 64], [4, 1], head_dim=16)
    case.block_table[0, : (296 - 40) // 16] = -1
    case.check(window_left=40)
    with pytest.raises(RefusedError, match=r"tiles.h:\d+: gm-bounds"):
        case.run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_query_a_sequence_is_a_decode_step(dtype) -> None:
    lens = [1, 33, 150]
    step = {"dtype": dtype, "group": 4, "num_kv_heads": 2, "head_dim": 80, "page_size": 32}
    decoded = Case(lens, **step).check()
    chunk = Case(lens, [1, 1, 1], **step).check()
    np.testing.assert_allclose(decoded.lse, chunk.lse, rtol=1e-5, atol=2e-5)
    error = np.abs(decoded.out.astype(np.float64) - chunk.out.astype(np.float64)).max()
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_and_the_kernel_agree(dtype) -> None:
    case = Case([33, 150], [33, 20], dtype=dtype, group=4, num_kv_heads=2, page_size=32)
    options: dict[str, Any] = {"logits_soft_cap": 20.0, "window_left": 99}
    got = case.run(**options)
    arrays = (case.query, case.key_pages, case.value_pages, case.block_table, case.seq_lens)
    out, lse = paged_kv.paged_attention(*arrays, case.cu_seqlens_q, return_lse=True, **options)
    np.testing.assert_allclose(
        got.out.astype(np.float32), out.astype(np.float32), rtol=0, atol=2 * TOLERANCE[dtype]
    )
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=2e-5)


def test_neither_the_blocks_nor_the_rest_of_the_batch_change_a_bit() -> None:
    case = Case([40, 100, 31], [40, 35, 2], group=2, num_kv_heads=2, head_dim=16)
    first = case.run(num_blocks=1)
    for num_blocks in (2, 40):
        other = case.run(num_blocks=num_blocks)
        assert np.array_equal(first.out, other.out)
        assert np.array_equal(first.lse, other.lse)
    alone = attend(
        case.query[75:],
        case.key_pages,
        case.value_pages,
        case.block_table[2:],
        case.seq_lens[2:],
        np.array([0, 2], np.int32),
    )
    assert np.array_equal(alone.out, first.out[75:])


def test_no_query_launches_and_writes_nothing() -> None:
    case = Case([3, 0], [0, 0])
    got = case.run()
    assert got.out.shape == (0, 1, 64)
    assert got.counters["bytes_in"] == got.counters["bytes_out"] == 0


# ---- the host's tiling ----


@pytest.mark.parametrize("dtype", [0, 1])
def test_every_shape_of_the_grid_fits(dtype) -> None:
    for head_dim in range(16, 257, 16):
        for group in GROUPS:
            tiling = plan_prefill(dtype=dtype, head_dim=head_dim, num_heads=group)
            assert 0 < tiling.ub_bytes <= 188160
            assert tiling.rows == tiling.queries * group <= 32
            assert tiling.rows >= (16 if dtype == 0 and head_dim <= 128 else 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_the_budget_is_what_the_kernel_takes(dtype, head_dim, group) -> None:
    got = Case([20], [2], dtype=dtype, head_dim=head_dim, group=group).run()
    assert got.counters["ub_bytes"] == got.tiling.ub_bytes


def test_chunks_cover_the_longest_sequence() -> None:
    assert [plan_prefill(n).chunks for n in (0, 1, 32, 33, 4096)] == [0, 1, 1, 2, 128]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 24}, "head_dim 24: a multiple of 16"),
        ({"num_heads": 3, "num_kv_heads": 2}, "3 query heads over 2 KV heads"),
        ({"window_left": -2}, "window_left -2"),
        ({"max_len": 129}, "129 tokens in a table of 8 pages of 16"),
        ({"num_heads": 256}, "256 query heads a KV head: at most 255"),
        ({"num_heads": 64, "head_dim": 256}, r"take \d+ bytes of UB at the smallest tile; there are 188160"),
        (
            {"batch": 2**16, "num_heads": 2**14, "num_kv_heads": 2**14, "head_dim": 16},
            "65536 sequences of 16384 KV heads with up to 1000 queries: more than 2.32 tasks",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(fields, message) -> None:
    with pytest.raises(RefusedError, match=message):
        plan_prefill(1000, **fields)
