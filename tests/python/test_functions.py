"""The free functions give what their definitions say, over anyone's arrays."""

import os
import subprocess
import sys
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import oracle
import paged_kv

PAGE_SIZE, KV_HEADS, HEADS, DIM, V_DIM = 4, 2, 6, 8, 5


class Case:
    """Three sequences of lengths 9, 0 and 6 with 3, 0 and 1 queries, scattered over 12 pages."""

    lengths = (9, 0, 6)
    queries = (3, 0, 1)

    def __init__(self, layout: str = "HND", seed: int = 7) -> None:
        self.rng = np.random.default_rng(seed)
        self.layout = layout
        self.key = [self.rng.standard_normal((n, KV_HEADS, DIM)) for n in self.lengths]
        self.value = [self.rng.standard_normal((n, KV_HEADS, V_DIM)) for n in self.lengths]
        self.query = self.rng.standard_normal((sum(self.queries), HEADS, DIM)).astype(np.float32)
        self.seq_lens = np.array(self.lengths, np.int32)
        self.cu_seqlens_q = np.cumsum([0, *self.queries]).astype(np.int32)
        self.block_table = np.full((3, 4), -1, np.int32)
        self.block_table[0, :3] = [7, 2, 11]
        self.block_table[2, :2] = [0, 5]
        # Whatever nobody wrote must not be seen.
        self.key_pages, self.value_pages = (
            np.full((12, KV_HEADS, PAGE_SIZE, dim), np.nan, np.float32) for dim in (DIM, V_DIM)
        )
        if layout == "NHD":
            self.key_pages = self.key_pages.swapaxes(1, 2).copy()
            self.value_pages = self.value_pages.swapaxes(1, 2).copy()
        self.slots = np.concatenate(
            [
                self.block_table[b, np.arange(n) // PAGE_SIZE].astype(np.int64) * PAGE_SIZE
                + np.arange(n) % PAGE_SIZE
                for b, n in enumerate(self.lengths)
            ]
        )
        paged_kv.write_pages(
            np.concatenate(self.key).astype(np.float32),
            np.concatenate(self.value).astype(np.float32),
            self.key_pages,
            self.value_pages,
            self.slots,
            layout=layout,  # type: ignore[arg-type]
        )

    def attend(self, **options: Any) -> Any:
        arguments = {
            name: options.pop(name, getattr(self, name))
            for name in ("query", "key_pages", "value_pages", "block_table", "seq_lens", "cu_seqlens_q")
        }
        return paged_kv.paged_attention(**arguments, layout=self.layout, **options)

    def expected(self, **options: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        parts = [
            oracle.attention(self.query[start:end].astype(np.float64), key, value, **options)
            for (start, end), key, value in zip(
                pairwise(self.cu_seqlens_q), self.key, self.value, strict=True
            )
        ]
        out, lse = (np.concatenate(part) for part in zip(*parts, strict=True))
        return out, lse


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3},
    {"causal": False},
    {"window_left": 0},
    {"window_left": 4},
    {"logits_soft_cap": 1.5},
    {"alibi_slopes": np.linspace(0.1, 0.6, HEADS)},
    {"sinks": np.linspace(-1, 1, HEADS)},
    {"window_left": 2, "logits_soft_cap": 2.0, "sinks": np.zeros(HEADS)},
]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_attention_is_what_the_definition_says(layout: str, options: dict[str, Any]) -> None:
    case = Case(layout)
    out, lse = case.attend(return_lse=True, **options)
    want, want_lse = case.expected(**options)
    np.testing.assert_allclose(out, want, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, atol=2e-6)
    assert out.dtype == np.float32
    assert lse.dtype == np.float32


def test_out_is_written_and_returned() -> None:
    case = Case()
    out = np.zeros((4, HEADS, V_DIM), np.float32)
    assert case.attend(out=out) is out
    np.testing.assert_array_equal(out, case.attend())


def test_rows_behind_the_last_sequence_see_no_key() -> None:
    case = Case()
    query = np.concatenate([case.query, case.query])
    out, lse = case.attend(query=query, return_lse=True)
    np.testing.assert_array_equal(out[:4], case.attend())
    assert not out[4:].any()
    assert np.isneginf(lse[4:]).all()


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(num_threads: int) -> None:
    case = Case()
    np.testing.assert_array_equal(case.attend(num_threads=num_threads), case.attend())


def test_field_c75_every_thread_may_call_at_once() -> None:
    case = Case()
    want = case.attend()
    wrong: list[int] = []

    def hammer() -> None:
        wrong.extend(i for i in range(50) if not np.array_equal(case.attend(), want))

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("page_dtype", [np.float16, np.float32])
def test_write_pages_converts_to_the_dtype_of_the_pages(page_dtype: type) -> None:
    rng = np.random.default_rng(1)
    key, value = (rng.standard_normal((3, KV_HEADS, DIM)).astype(np.float32) for _ in range(2))
    pages = np.zeros((2, 2, KV_HEADS, PAGE_SIZE, DIM), page_dtype)
    # Keys and values interleave in one array, as most engines keep them.
    paged_kv.write_pages(key, value, pages[:, 0], pages[:, 1], np.array([1, -1, 6]))
    for which, rows in enumerate([key, value]):
        np.testing.assert_array_equal(pages[0, which, :, 1], rows[0].astype(page_dtype))
        np.testing.assert_array_equal(pages[1, which, :, 2], rows[2].astype(page_dtype))
    assert np.count_nonzero(pages) == 2 * 2 * KV_HEADS * DIM


def test_merge_states_joins_as_if_computed_at_once() -> None:
    case = Case()
    halves = []
    for part in (slice(0, 4), slice(4, 9)):
        out, lse = oracle.attention(
            case.query[:3].astype(np.float64), case.key[0][part], case.value[0][part], causal=False
        )
        halves += [out.astype(np.float32), lse.astype(np.float32)]
    out, lse = paged_kv.merge_states(*halves)
    want, want_lse = oracle.attention(
        case.query[:3].astype(np.float64), case.key[0], case.value[0], causal=False
    )
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-6)


def test_merge_states_ignores_a_side_without_keys() -> None:
    out, lse = np.ones((1, 2, 3), np.float16), np.zeros((1, 2), np.float32)
    nothing = np.full((1, 2), -np.inf, np.float32)
    merged, sums = paged_kv.merge_states(np.full_like(out, np.nan), nothing, out, lse)
    np.testing.assert_array_equal(merged, out)
    np.testing.assert_array_equal(sums, lse)
    assert merged.dtype == np.float16


def test_alibi_slopes_for_heads_that_are_no_power_of_two() -> None:
    np.testing.assert_allclose(paged_kv.alibi_slopes(4), [2**-2, 2**-4, 2**-6, 2**-8])
    np.testing.assert_allclose(paged_kv.alibi_slopes(6)[4:], [2**-1, 2**-3])
    with pytest.raises(ValueError, match="-1 is not an integer from 0 to 65535"):
        paged_kv.alibi_slopes(-1)


def test_kv_bytes_per_token() -> None:
    assert paged_kv.kv_bytes_per_token(num_layers=80, num_kv_heads=8, head_dim=128) == 320 * 1024
    assert (
        paged_kv.kv_bytes_per_token(num_layers=1, num_kv_heads=2, head_dim=8, v_head_dim=4, dtype=np.float32)
        == 96
    )
    assert paged_kv.kv_bytes_per_token(num_layers=1, num_kv_heads=1, head_dim=1, dtype="torch.float16") == 4
    with pytest.raises(paged_kv.LayoutError, match="int4"):
        paged_kv.kv_bytes_per_token(num_layers=1, num_kv_heads=1, head_dim=1, dtype="int4")
    with pytest.raises(paged_kv.LayoutError):
        paged_kv.kv_bytes_per_token(num_layers=2**60, num_kv_heads=2**60, head_dim=1)


def test_the_instruction_set_can_be_named_and_only_one_that_is_there() -> None:
    chosen = paged_kv.isa()
    try:
        paged_kv.set_isa("scalar")
        assert paged_kv.isa() == "scalar"
        with pytest.raises(ValueError, match="sse9"):
            paged_kv.set_isa("sse9")
        assert paged_kv.isa() == "scalar"
    finally:
        paged_kv.set_isa(chosen)


def test_an_environment_variable_names_the_instruction_set() -> None:
    def start(name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "import paged_kv; print(paged_kv.isa())"],
            env={**os.environ, "PAGED_KV_ISA": name},
            capture_output=True,
            text=True,
            check=False,
        )

    assert start("scalar").stdout == "scalar\n"
    wrong = start("sse9")
    assert wrong.returncode == 1
    assert "ValueError" in wrong.stderr


FORKED = """
import os, sys
import numpy as np, paged_kv

tokens = np.ones((4096, 1, 64), np.float32)
cache = paged_kv.KvCache(
    num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32", num_pages=256, num_threads=2
)
seqs = [cache.sequence()]
batch = cache.batch(seqs, 4096)
cache.write(0, tokens, tokens, batch)
pages = cache.key_pages(0), cache.value_pages(0)
tables = batch.block_table, batch.seq_lens, np.array([0, 256])

def attend():
    function = paged_kv.paged_attention(tokens[:256], *pages, *tables, num_threads=2)
    with cache.batch(seqs, 0, num_queries=256) as reading:
        method = cache.attend(0, tokens[:256], reading)
    return np.array([function, method])

batch.commit()
want = attend()
child = os.fork()
if child == 0:
    grandchild = os.fork()
    fine = np.array_equal(attend(), want)
    if grandchild == 0:
        os._exit(0 if fine else 1)
    fine &= os.waitpid(grandchild, 0)[1] == 0
    del batch, cache, seqs, pages
    os._exit(0 if fine else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_child_of_a_fork_starts_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "page beyond the pool": ({"block_table": np.full((3, 4), 12)}, paged_kv.InvalidPageError, "12"),
    "negative page": ({"block_table": np.full((3, 4), -2)}, paged_kv.InvalidPageError, "-2"),
    "huge page": ({"block_table": np.full((3, 4), 2**40)}, ValueError, str(2**40)),
    "length beyond the table": ({"seq_lens": np.array([17, 0, 6])}, paged_kv.LayoutError, "17"),
    "negative length": ({"seq_lens": np.array([9, -1, 6])}, ValueError, "-1"),
    "more queries than tokens": ({"seq_lens": np.array([2, 0, 6])}, ValueError, "3 queries"),
    "falling offsets": ({"cu_seqlens_q": np.array([0, 3, 2, 4])}, ValueError, "must not fall"),
    "offsets beyond the query": ({"cu_seqlens_q": np.array([0, 3, 3, 5])}, ValueError, "4 rows"),
    "table of floats": ({"block_table": np.zeros((3, 4))}, paged_kv.LayoutError, "integers"),
    "table of one axis": ({"block_table": np.zeros(3, int)}, paged_kv.LayoutError, "2 axes"),
    "lengths of two axes": ({"seq_lens": np.zeros((3, 1), int)}, paged_kv.LayoutError, "1 axis"),
    "lengths of another batch": ({"seq_lens": np.array([9])}, paged_kv.LayoutError, "cu_seqlens_q"),
    "heads that don't divide": ({"query": np.zeros((4, 3, DIM), np.float32)}, paged_kv.LayoutError, "3"),
    "another head_dim": ({"query": np.zeros((4, HEADS, 9), np.float32)}, paged_kv.LayoutError, "9"),
    "query of two axes": ({"query": np.zeros((4, 8), np.float32)}, paged_kv.LayoutError, "3 axes"),
    "NaN scale": ({"scale": float("nan")}, ValueError, "NaN"),
    "negative cap": ({"logits_soft_cap": -1.0}, ValueError, "-1"),
    "window of -2": ({"window_left": -2}, ValueError, "-2"),
    "slopes of other heads": ({"alibi_slopes": np.zeros(5)}, paged_kv.LayoutError, "5"),
    "NaN sink": ({"sinks": np.full(HEADS, np.nan)}, ValueError, "NaN"),
    "no threads": ({"num_threads": 0}, ValueError, "0"),
    "out of another shape": ({"out": np.zeros((1, 2, 3), np.float32)}, paged_kv.LayoutError, r"\[4, 6, 5\]"),
    "out of another dtype": ({"out": np.zeros((4, 6, 5), np.float16)}, paged_kv.LayoutError, "float32"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused_and_nothing_is_written(name: str) -> None:
    arguments, error, message = BAD[name]
    case = Case()
    out = arguments.get("out", np.full((4, HEADS, V_DIM), 3.0, np.float32))
    before = [out.copy(), case.key_pages.copy(), case.value_pages.copy()]
    with pytest.raises(error, match=message):
        case.attend(**{"out": out, **arguments})
    for array, copy in zip([out, case.key_pages, case.value_pages], before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    ("slot", "error"), [(2 * PAGE_SIZE, paged_kv.InvalidPageError), (-2, ValueError), (2**62, Exception)]
)
def test_write_pages_refuses_a_bad_slot_before_it_writes(slot: int, error: type[Exception]) -> None:
    rows = np.ones((2, KV_HEADS, DIM), np.float32)
    pages = np.zeros((2, KV_HEADS, PAGE_SIZE, DIM), np.float32)
    with pytest.raises(error):
        paged_kv.write_pages(rows, rows, pages, pages.copy(), np.array([0, slot]))
    assert not pages.any()


def test_an_unknown_layout_is_named() -> None:
    case = Case()
    case.layout = "DHN"
    with pytest.raises(paged_kv.LayoutError, match="DHN"):
        case.attend()
