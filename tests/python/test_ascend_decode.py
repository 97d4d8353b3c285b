"""The Ascend decode and combine kernels, emulated, against attention in float64 and the CPU's kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paged_kv
from ascend_case import DTYPES, TOLERANCE, Case
from ascend_support import RefusedError, attend, plan_decode

HEAD_DIMS = [16, 32, 48, 64, 80, 96, 112, 128, 144, 192, 240, 256]
GROUPS = [1, 2, 3, 4, 8, 16]
PAGE_SIZES = [16, 32, 128]

# Every dtype with every head_dim and with every group; every page size and layout.
GRID = [
    pytest.param(
        dtype, head_dim, group, page_size, layout, id=f"{dtype}-{head_dim}-{group}-{page_size}-{layout}"
    )
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate(HEAD_DIMS)
    for group, page_size, layout in [
        (GROUPS[(i + j) % 6], PAGE_SIZES[(j + j // 3) % 3], ["HND", "NHD"][(i + j // 2) % 2])
    ]
]


@pytest.mark.parametrize(("dtype", "head_dim", "group", "page_size", "layout"), GRID)
def test_ragged_lengths_over_the_grid(dtype, head_dim, group, page_size, layout) -> None:
    shape = {"head_dim": head_dim, "group": group, "page_size": page_size, "layout": layout}
    Case([0, 1, 15, 16, 17, 130, 257], dtype=dtype, num_kv_heads=2, **shape, seed=head_dim).check()


@pytest.mark.stress
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_grid(dtype, head_dim, group, page_size, layout) -> None:
    shape = {"head_dim": head_dim, "group": group, "page_size": page_size, "layout": layout}
    case = Case([0, 1, 15, 17, 128, 129, 513, 900], dtype=dtype, num_kv_heads=2, **shape, seed=head_dim)
    for num_splits in (1, 2, 5):
        case.check(num_splits=num_splits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_at_every_border_of_tile_page_split_and_table_chunk(dtype) -> None:
    shape = {"head_dim": 16, "page_size": 16}
    tiling = plan_decode(dtype=["float16", "bfloat16"].index(dtype), **shape, table_width=300)
    tile, chunk = tiling.tile_tokens, tiling.table_chunk * 16
    assert chunk == 256 * 16
    borders = [n + d for n in (16, 64, tile, 2 * tile, chunk) for d in (-1, 0, 1)]
    Case([0, 1, 2, 7, 8, 9, *borders], dtype=dtype, **shape).check()


@pytest.mark.parametrize("num_splits", range(1, 12))
def test_splits_merge_to_the_same_answer(num_splits) -> None:
    lens = [0, 1, 16, 63, 64, 65, 170, 350]
    got = Case(lens, group=3, num_kv_heads=2, head_dim=32).check(num_splits=num_splits, num_blocks=5)
    assert got.tiling.num_splits == min(num_splits, -(-350 // got.tiling.split_tokens))
    assert got.tiling.num_splits > 1 or num_splits == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_soft_cap_window_and_scale(dtype, layout) -> None:
    case = Case([0, 1, 16, 40, 77, 300], dtype=dtype, layout=layout, group=4, num_kv_heads=2)
    for window_left in (0, 1, 15, 16, 50, 1000):
        for num_splits in (1, 3):
            case.check(window_left=window_left, num_splits=num_splits)
    case.check(logits_soft_cap=2.0)
    case.check(logits_soft_cap=30.0, window_left=33, num_splits=2)
    for scale in (0.0, -0.3, 1.0):  # logits of both signs, of up to ±30
        case.check(scale=scale)


def test_pages_that_left_the_window_are_never_looked_up() -> None:
    case = Case([300, 64])
    case.block_table[0, : (300 - 1 - 40) // 16] = -1  # as a cache with a window leaves its tables
    case.check(window_left=40)
    case.check(window_left=40, num_splits=2)
    with pytest.raises(RefusedError, match=r"tiles.h:\d+: gm-bounds") as error:
        case.run()
    assert error.value.rule == "gm-bounds"


def test_a_soft_cap_holds_where_its_exponential_overflows() -> None:
    case = Case([40])
    case.query *= 60
    case.check(logits_soft_cap=1.5, scale=1.0)


def test_large_and_small_logits_in_one_row() -> None:
    case = Case([200, 3], group=2)
    for i, n in enumerate((200, 3)):
        case.keys[i][n // 2] *= 8
        page, offset = case.block_table[i, n // 2 // 16], n // 2 % 16
        case.key_pages[page, :, offset] *= 8
    case.check(scale=1.0)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_scores_of_any_size_are_weighed_against_each_other(num_splits) -> None:
    case = Case([200, 3, 0], dtype="bfloat16", group=2)
    case.query = np.abs(case.query) * 2.0**54
    case.key_pages = -np.abs(case.key_pages) * 2.0**54  # all scores below -1e33, no two of them near
    case.keys = [-np.abs(keys) * 2.0**54 for keys in case.keys]
    case.query, case.key_pages = (array.astype(DTYPES["bfloat16"]) for array in (case.query, case.key_pages))
    got = case.check(num_splits=num_splits)
    assert (got.lse[:2] < -1e32).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_and_the_kernel_agree(dtype) -> None:
    case = Case([1, 33, 150], dtype=dtype, group=4, num_kv_heads=2, head_dim=128, page_size=32)
    options: dict[str, Any] = {"logits_soft_cap": 20.0, "window_left": 99}
    got = case.run(num_splits=2, **options)
    arrays = (case.query, case.key_pages, case.value_pages, case.block_table, case.seq_lens)
    rows = np.arange(4, dtype=np.int32)
    out, lse = paged_kv.paged_attention(*arrays, rows, return_lse=True, **options)
    np.testing.assert_allclose(
        got.out.astype(np.float32), out.astype(np.float32), rtol=0, atol=2 * TOLERANCE[dtype]
    )
    np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=2e-5)


def test_how_tasks_fall_on_blocks_changes_no_bit() -> None:
    case = Case([5, 100, 64, 31], group=2, num_kv_heads=3)
    first = case.check(num_splits=2, num_blocks=1)
    for num_blocks in (2, 7, 40):
        other = case.run(num_splits=2, num_blocks=num_blocks)
        assert np.array_equal(first.out, other.out)
        assert np.array_equal(first.lse, other.lse)


def test_sequences_without_any_token() -> None:
    Case([0, 0], group=2).check()
    Case([0], group=16, dtype="bfloat16").check(num_splits=4)


def test_a_batch_of_nothing_launches_and_writes_nothing() -> None:
    case = Case([3])
    empty = attend(case.query[:0], case.key_pages, case.value_pages, case.block_table[:0], case.seq_lens[:0])
    assert empty.out.shape == (0, 1, 64)
    assert empty.counters["bytes_in"] == 0


# ---- the host's tiling ----


@pytest.mark.parametrize("dtype", [0, 1])
def test_every_shape_of_the_grid_fits(dtype) -> None:
    for head_dim in range(16, 257, 16):
        for group in GROUPS:
            tiling = plan_decode(dtype=dtype, head_dim=head_dim, num_heads=group)
            assert 0 < tiling.ub_bytes <= 188160
            assert tiling.accumulators * head_dim % 64 == 0
            assert tiling.tile_tokens % 16 == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80, 256])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_the_budget_is_what_the_kernel_takes(dtype, head_dim, group) -> None:
    got = Case([20], dtype=dtype, head_dim=head_dim, group=group).run()
    assert got.counters["ub_bytes"] == got.tiling.ub_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 24}, "head_dim 24: a multiple of 16"),
        ({"head_dim": 272}, "head_dim 272: a multiple of 16 up to 256"),
        ({"page_size": 8}, "page_size 8: a multiple of 16"),
        ({"num_heads": 3, "num_kv_heads": 2}, "3 query heads over 2 KV heads"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"dtype": 2}, "dtype 2"),
        ({"layout": 2}, "layout 2"),
        ({"num_cores": 0}, "num_cores is 0"),
        ({"window_left": -2}, "window_left -2"),
        ({"soft_cap": -1.0}, "soft_cap -1"),
        ({"soft_cap": float("nan")}, "soft_cap"),
        ({"max_len": 129}, "129 tokens in a table of 8 pages of 16"),
        ({"num_heads": 256}, "256 query heads a KV head: at most 255"),
        ({"num_heads": 64, "head_dim": 256}, r"take \d+ bytes of UB at the smallest tile; there are 188160"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(fields, message) -> None:
    with pytest.raises(RefusedError, match=message):
        plan_decode(**fields)


@pytest.mark.parametrize(
    ("batch", "max_len", "window_left", "splits"),
    [
        (1, 512, -1, 1),  # not below 512 tokens each
        (1, 513, -1, 2),
        (1, 65536, -1, 40),  # one for each core
        (10, 65536, -1, 4),
        (19, 65536, -1, 3),
        (20, 65536, -1, 1),  # sequences alone occupy half of the cores
        (1, 65536, 1023, 2),  # only what the window shows is split
    ],
)
def test_splits_follow_the_cores(batch, max_len, window_left, splits) -> None:
    fields = {"batch": batch, "max_len": max_len, "window_left": window_left, "table_width": 4096}
    tiling = plan_decode(**fields, num_splits=0, num_cores=40)
    assert tiling.num_splits == splits
    assert tiling.split_tokens % 16 == 0


# ---- what it costs ----


def repeats(dtype: str, group: int) -> float:
    """Vector repeats for a token and query head, having checked that a group moves each byte once."""
    case = Case([1024], dtype=dtype, head_dim=128, group=group, page_size=128)
    counters = case.check(num_blocks=1).counters
    assert counters["bytes_in"] + counters["bytes_out"] <= 1.05 * 1024 * 128 * 2 * 2
    return counters["vector_repeats"] / (1024 * group)


def test_cost_of_a_token_and_head() -> None:
    per_head = [repeats("float16", group) for group in (1, 2, 4, 8, 16)]
    assert per_head[0] <= 5.2
    assert per_head == sorted(per_head, reverse=True)
    assert repeats("bfloat16", 1) <= 9
    assert repeats("bfloat16", 8) <= 5.2
