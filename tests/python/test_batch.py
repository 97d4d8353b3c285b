"""A batch is a transaction and a lease: all or nothing, restored or committed, seen whole."""

import gc
import pickle
import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import oracle
import paged_kv
from model import DIM, HEADS, KV_HEADS, PAGE_SIZE, V_DIM, check, check_batch, rows, small_cache, step, write

ARRAYS = [
    "block_table",
    "seq_lens",
    "cu_seqlens_q",
    "slot_mapping",
    "positions",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "copies",
]


def observable(cache: paged_kv.KvCache, *seqs: paged_kv.Sequence) -> object:
    return cache.stats(), [(len(s), s.num_computed_tokens, s.block_table.tolist()) for s in seqs]


def test_the_arrays_say_where_everything_lies() -> None:
    cache = small_cache()
    a, b, c = cache.sequence(), cache.sequence(), cache.sequence()
    step(cache, [a, b], [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    with cache.batch([a, b, c], [3, 1, 0]) as batch:
        assert len(batch) == 3
        assert repr(batch) == "paged_kv.Batch(3 sequences, open)"
        table = batch.block_table
        assert table.shape == (3, 3)
        assert table[0].tolist() == a.block_table.tolist()
        assert table[1].tolist() == [*b.block_table.tolist(), -1, -1]
        assert table[2].tolist() == [-1, -1, -1]
        assert batch.seq_lens.tolist() == [9, 4, 0]
        assert batch.cu_seqlens_q.tolist() == [0, 3, 4, 4]
        assert batch.positions.tolist() == [6, 7, 8, 3]
        want = [int(table[0, p // 4]) * 4 + p % 4 for p in (6, 7, 8)] + [int(table[1, 0]) * 4 + 3]
        assert batch.slot_mapping.tolist() == want
        assert batch.kv_indptr.tolist() == [0, 3, 4, 4]
        assert batch.kv_indices.tolist() == [*a.block_table.tolist(), *b.block_table.tolist()]
        assert batch.kv_last_page_len.tolist() == [1, 4, 0]
        assert batch.copies.shape == (0, 2)
        for name in ARRAYS:
            array = getattr(batch, name)
            wide = name in ("slot_mapping", "positions", "copies")
            assert array.dtype == (np.int64 if wide else np.int32)
            if name != "copies":
                assert not array.flags.writeable
                assert array.ctypes.data == getattr(batch, name).ctypes.data, (
                    "built once, lent without a copy"
                )
        write(cache, batch, [10, 11, 12, 13])
    check(cache, [a, b, c], [[1, 2, 3, 4, 5, 6, 10, 11, 12], [7, 8, 9, 13], []])


def test_an_array_keeps_its_batch_alive() -> None:
    cache = small_cache()
    seq = cache.sequence()
    batch = cache.batch([seq], 5)
    slots = batch.slot_mapping
    del batch
    gc.collect()
    with pytest.raises(paged_kv.SequenceBusyError):
        seq.append(1)
    assert slots.tolist() == [0, 1, 2, 3, 4]
    del slots
    gc.collect()
    assert len(seq) == 0, "a batch that is collected closes"


@pytest.mark.parametrize("how", [3, [3, 3], (3, 3), np.array([3, 3]), np.array([3, 3], np.uint8)])
def test_new_tokens_may_be_one_number_or_one_each(how: Any) -> None:
    cache = small_cache()
    seqs = [cache.sequence(), cache.sequence()]
    with cache.batch(seqs, how) as batch:
        assert batch.seq_lens.tolist() == [3, 3]


def test_new_tokens_default_to_what_is_reserved() -> None:
    cache = small_cache()
    seq = cache.sequence()
    seq.append(3)
    with cache.batch([seq]) as batch:
        assert batch.positions.tolist() == [0, 1, 2]
    assert seq.num_computed_tokens == 3


def test_an_exception_inside_restores_lengths_and_pages() -> None:
    cache = small_cache()
    a, b = cache.sequence(), cache.sequence()
    step(cache, [a], [[1, 2, 3, 4, 5]])
    child = a.fork()
    b.append(2)
    before = observable(cache, a, b, child)
    copied = cache.stats()["copied_pages"]
    with pytest.raises(RuntimeError, match="body"), cache.batch([child, b], [3, 9]) as batch:
        assert len(batch.copies) == 1
        write(cache, batch, list(range(12)))
        raise RuntimeError("body")
    assert batch.is_ended
    assert cache.stats()["copied_pages"] == copied + 1
    stats, seqs = observable(cache, a, b, child)  # type: ignore[misc]
    stats["copied_pages"] = copied
    assert (stats, seqs) == before
    check(cache, [a, child], [[1, 2, 3, 4, 5]] * 2)
    cache.validate()


def test_commit_keeps_the_tokens_that_were_accepted() -> None:
    cache = small_cache()
    a, b = cache.sequence(), cache.sequence()
    a.append(9)
    with cache.batch([a, b], [5, 2]) as batch:
        write(cache, batch, [1, 2, 3, 4, 5, 6, 7])
        with pytest.raises(ValueError, match="6"):
            batch.commit([6, 0])
        with pytest.raises(ValueError, match="1"):
            batch.commit([1])
        assert not batch.is_ended
        batch.commit(np.array([2, 2]))
        assert batch.is_ended
    assert [(len(s), s.num_computed_tokens) for s in (a, b)] == [(2, 2), (2, 2)]
    check(cache, [a, b], [[1, 2], [6, 7]])


def test_an_ended_batch_refuses_everything_but_close() -> None:
    cache = small_cache()
    seq = cache.sequence()
    batch = cache.batch([seq], 2)
    batch.close()
    batch.close()
    assert len(seq) == 0
    key = rows(0, [1, 2], DIM)
    for use in (
        batch.commit,
        lambda: cache.write(0, key, rows(0, [1, 2], V_DIM), batch),
        lambda: cache.attend(0, key, batch),
        lambda: batch.block_table,
        batch.__enter__,
        lambda: pickle.dumps(batch),
    ):
        with pytest.raises(ValueError, match="committed or closed"):
            use()
    assert repr(batch) == "paged_kv.Batch(1 sequences, ended)"


def test_a_batch_that_does_not_fit_names_the_first_sequence_and_changes_nothing() -> None:
    cache = small_cache()
    seqs = [cache.sequence() for _ in range(3)]
    cache.pool.alloc(4)
    before = observable(cache, *seqs)
    with pytest.raises(paged_kv.OutOfPagesError) as caught:
        cache.batch(seqs, [6 * PAGE_SIZE, 7 * PAGE_SIZE, 3 * PAGE_SIZE])
    assert (caught.value.requested, caught.value.free, caught.value.index) == (16, 12, 1)
    with pytest.raises(paged_kv.NeverFitsError) as never:
        cache.batch(seqs, [1, 17 * PAGE_SIZE, 1])
    assert (never.value.requested, never.value.total, never.value.index) == (17, 16, 1)
    assert observable(cache, *seqs) == before
    cache.validate()


def test_bad_batches_are_refused_and_change_nothing() -> None:
    cache, other = small_cache(), small_cache()
    a, b, freed, foreign = cache.sequence([1, 2, 3]), cache.sequence(), cache.sequence(), other.sequence()
    freed.free()
    before = observable(cache, a, b)
    for counts in (0, 1, None, [0, 1], [1, 0]):
        with pytest.raises(ValueError, match=r"the same sequence as at index 0 \(sequence at index 2\)"):
            cache.batch([a, b, a], counts if isinstance(counts, int | None) else [counts[0], 0, counts[1]])
    with pytest.raises(ValueError, match="another cache"):
        cache.batch([a, foreign], 1)
    with pytest.raises(paged_kv.SequenceFreedError) as caught:
        cache.batch([freed, a, freed], 1)
    assert caught.value.indices == [0, 2]
    with pytest.raises(ValueError, match=r"3 counts .* 2 sequences"):
        cache.batch([a, b], [1, 2, 3])
    with pytest.raises(ValueError, match="-1"):
        cache.batch([a, b], -1)
    with pytest.raises(ValueError, match=str(2**40)):
        cache.batch([a, b], 2**40)
    with pytest.raises(
        ValueError, match="num_new_tokens: element 1: -1 is not an integer from 0 to 4294967295"
    ):
        cache.batch([a, b], [1, -1])
    with pytest.raises(ValueError, match="9"):
        cache.batch([a], 2, token_ids=[1, 9])
    with pytest.raises(ValueError, match="1"):
        cache.batch([b], 2, token_ids=[1])
    with pytest.raises(ValueError, match="stream"):
        cache.batch([a], 1, stream=7)  # type: ignore[arg-type]
    for name, use in (
        ("num_new_tokens", lambda: cache.batch([a], 1.0)),  # type: ignore[arg-type]
        ("num_queries", lambda: cache.batch([a], 1, num_queries="1")),  # type: ignore[arg-type]
        ("token_ids", lambda: cache.batch([a], 1, token_ids=[1.0])),  # type: ignore[list-item]
    ):
        with pytest.raises(TypeError, match=f"{name} must be an array or a sequence of integers"):
            use()
    for what in (a, [a, "b"], 3):
        with pytest.raises(TypeError):
            cache.batch(what, 1)  # type: ignore[arg-type]
    assert observable(cache, a, b) == before
    cache.validate()


def test_pending_ids_are_taken_in_order() -> None:
    cache = small_cache()
    seq = cache.sequence([1, 2, 3, 4])
    with cache.batch([seq], 3):
        pass
    assert seq.pending_token_ids.tolist() == [4]
    with cache.batch([seq], 2, token_ids=[4, 5]):
        pass
    assert seq.pending_token_ids.size == 0


def test_more_queries_than_tokens_are_cross_attention() -> None:
    cache = small_cache()
    source, empty = cache.sequence(), cache.sequence()
    step(cache, [source], [[1, 2, 3]])
    query = rows(99, range(7), DIM, HEADS)
    with cache.batch([source, empty], 0, num_queries=[5, 2]) as batch:
        assert batch.cu_seqlens_q.tolist() == [0, 5, 7]
        out, lse = cache.attend(0, query, batch, causal=False, return_lse=True)
        with pytest.raises(ValueError, match="sequence 0 has 5 queries but only 3 tokens"):
            cache.attend(0, query, batch)
    key, value = rows(0, [1, 2, 3], DIM).astype(np.float64), rows(0, [1, 2, 3], V_DIM).astype(np.float64)
    want, want_lse = oracle.attention(query[:5].astype(np.float64), key, value, causal=False)
    np.testing.assert_allclose(out[:5], want, atol=3e-6)
    np.testing.assert_allclose(lse[:5], want_lse, atol=3e-6)
    assert not out[5:].any()
    assert np.isneginf(lse[5:]).all()


def test_while_a_batch_is_open_others_read_and_fork_but_do_not_change() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3]])
    with cache.batch([seq], 2) as batch:
        for change in (lambda: seq.append(1), lambda: seq.truncate(0), lambda: cache.batch([seq], 1)):
            with pytest.raises(paged_kv.SequenceBusyError) as caught:
                change()
            assert caught.value.sequence == seq.id
        child = seq.fork()
        assert len(child) == 3
        write(cache, batch, [4, 5])
    check(cache, [seq, child], [[1, 2, 3, 4, 5], [1, 2, 3]])


def test_free_from_another_thread_during_an_open_batch() -> None:
    cache = small_cache()
    a, b = cache.sequence(), cache.sequence()
    step(cache, [a, b], [[1, 2, 3, 4, 5], [6]])
    with cache.batch([a, b], 1) as batch:
        thread = threading.Thread(target=a.free)
        thread.start()
        thread.join()
        assert a.is_freed
        write(cache, batch, [7, 8])
        check_batch(cache, batch, [[1, 2, 3, 4, 5, 7], [6, 8]])
    check(cache, [b], [[6, 8]])
    assert cache.stats()["free_pages"] == 15
    cache.validate()


def test_truncate_then_append_under_a_lease_does_not_overwrite_what_the_lease_sees() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5, 6]])
    with cache.batch([seq], 0, num_queries=1) as lease:
        seq.truncate(5)
        step(cache, [seq], [[7, 8]])
        check_batch(cache, lease, [[1, 2, 3, 4, 5, 6]])
        check(cache, [seq], [[1, 2, 3, 4, 5, 7, 8]])
        assert cache.stats()["deferred_pages"] == 1
    assert cache.stats()["deferred_pages"] == 0
    cache.validate()


def test_fork_then_abort_the_parent_in_mid_batch_then_append_to_the_child() -> None:
    cache = small_cache()
    parent = cache.sequence()
    step(cache, [parent], [[1, 2, 3, 4, 5]])
    batch = cache.batch([parent], 2)
    write(cache, batch, [6, 7])
    child = parent.fork()
    batch.close()
    step(cache, [child], [[8, 9]])
    check(cache, [parent, child], [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 8, 9]])
    cache.validate()


@pytest.mark.parametrize("fails", ["open", "body"])
def test_two_caches_in_one_with_are_both_restored(fails: str) -> None:
    first, second = small_cache(), small_cache(num_pages=2)
    a, b = first.sequence(), second.sequence()
    step(first, [a], [[1]])
    step(second, [b], [[1]])
    before = observable(first, a), observable(second, b)
    n = 9 if fails == "open" else 3
    with (
        pytest.raises(paged_kv.NeverFitsError if fails == "open" else KeyError),
        first.batch([a], n) as one,
        second.batch([b], n) as two,
    ):
        write(first, one, [2, 3, 4])
        write(second, two, [2, 3, 4])
        raise KeyError
    assert (observable(first, a), observable(second, b)) == before
    first.validate()
    second.validate()


def test_num_queries_counts_query_rows_alone() -> None:
    cache = small_cache()
    seq = cache.sequence()
    with cache.batch([seq], 5, num_queries=[1]) as batch:
        assert batch.cu_seqlens_q.tolist() == [0, 1]
        assert batch.slot_mapping.size == 5
        write(cache, batch, [1, 2, 3, 4, 5])
        check_batch(cache, batch, [[1, 2, 3, 4, 5]])


def test_a_pickled_batch_drives_the_ranks() -> None:
    scheduler, rank = small_cache(num_layers=0), small_cache()
    parent = scheduler.sequence()

    def run(seqs: list[paged_kv.Sequence], new: list[list[int]]) -> paged_kv.BatchView:
        with scheduler.batch(seqs, [len(tokens) for tokens in new]) as batch:
            view: paged_kv.BatchView = pickle.loads(pickle.dumps(batch))
            assert isinstance(view, paged_kv.BatchView)
            for name in ARRAYS:
                np.testing.assert_array_equal(getattr(view, name), getattr(batch, name))
                assert getattr(view, name).dtype == getattr(batch, name).dtype
            assert (len(view), view.page_size, view.num_pages) == (len(batch), 4, 16)
            rank.copy_pages(view.copies)
            write(rank, view, [token for tokens in new for token in tokens])
        return view

    run([parent], [[1, 2, 3, 4, 5, 6]])
    child = parent.fork()
    view = run([parent, child], [[7], [8]])
    assert len(view.copies) == 2, "each of two sharers that write at once copies"
    check_batch(rank, view, [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 8]])
    assert repr(view) == "paged_kv.BatchView(2 sequences)"
    again = pickle.loads(pickle.dumps(view))
    np.testing.assert_array_equal(again.block_table, view.block_table)


def test_a_view_of_another_shape_or_a_broken_one_is_refused() -> None:
    cache = small_cache()
    seq = cache.sequence()
    with cache.batch([seq], 2) as batch:
        view = pickle.loads(pickle.dumps(batch))
    key, value = rows(0, [1, 2], DIM), rows(0, [1, 2], V_DIM)
    for other in (small_cache(num_pages=17), small_cache(page_size=8)):
        with pytest.raises(paged_kv.LayoutError, match="the view is of a cache with 16 pages of 4"):
            other.write(0, key, value, view)
    make, arguments = view.__reduce__()
    broken = list(arguments)
    broken[4] = [2, 2]
    with pytest.raises(paged_kv.LayoutError, match="1 sequences"):
        make(*broken)
    broken = list(arguments)
    broken[6] = [0, 64]
    with pytest.raises(paged_kv.InvalidPageError):
        cache.write(0, key, value, make(*broken))
    with pytest.raises(TypeError, match="batch must be a Batch or a BatchView, not int"):
        cache.write(0, key, value, 3)  # type: ignore[arg-type]


BUFFERS: dict[str, tuple[tuple[int, ...], int | None]] = {
    "block_table": ((4, 5), -1),
    "seq_lens": ((4,), 0),
    "cu_seqlens_q": ((6,), 4),
    "slot_mapping": ((9,), -1),
    "positions": ((9,), 0),
    "kv_indptr": ((6,), 4),
    "kv_indices": ((9,), -1),
    "kv_last_page_len": ((4,), 0),
}


def filled(array: npt.NDArray[Any], shape: tuple[int, ...], pad: int | None) -> npt.NDArray[Any]:
    want = np.full(shape, pad, np.int64)
    want[tuple(slice(n) for n in array.shape)] = array
    return want


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
@pytest.mark.parametrize("of_view", [False, True])
@pytest.mark.parametrize("null_page", [False, True])
def test_fill_writes_and_pads_larger_buffers(dtype: type, of_view: bool, null_page: bool) -> None:
    cache = small_cache(null_page=null_page)
    seqs = [cache.sequence(), cache.sequence()]
    step(cache, seqs, [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    with cache.batch(seqs, [3, 1]) as batch:
        source = pickle.loads(pickle.dumps(batch)) if of_view else batch
        # Every other element of a larger array: strides are followed.
        buffers = {
            name: np.full([2 * n for n in shape], 77, dtype)[tuple(slice(None, None, 2) for _ in shape)]
            for name, (shape, _) in BUFFERS.items()
        }
        source.fill(**buffers)
        for name, (shape, pad) in BUFFERS.items():
            pad = 0 if null_page and pad == -1 and name != "slot_mapping" else pad
            np.testing.assert_array_equal(buffers[name], filled(getattr(batch, name), shape, pad), name)
            base = buffers[name].base
            assert base is not None
            assert (base[tuple(slice(1, None, 2) for _ in shape)] == 77).all(), "between the strides"


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("columns", [131, 140])
@pytest.mark.parametrize("built", [False, True])
def test_fill_writes_long_rows_whether_the_table_is_built_or_not(
    dtype: type, columns: int, built: bool
) -> None:
    cache = small_cache(num_pages=400, page_size=1, null_page=True)
    seqs = [cache.sequence() for _ in range(4)]
    with cache.batch(seqs, [131, 0, 64, 7]) as batch:
        if built:
            assert batch.block_table.shape == (4, 131)
        buffer = np.full((5, columns), 77, dtype)
        batch.fill(block_table=buffer)
        np.testing.assert_array_equal(buffer, filled(batch.block_table, (5, columns), 0))


@pytest.mark.parametrize("built", [False, True])
def test_fill_refuses_pages_and_padding_that_do_not_fit(built: bool) -> None:
    cache = small_cache(num_pages=400, page_size=1)
    first, second = cache.sequence(), cache.sequence()
    with cache.batch([first, second], [300, 70]) as batch:
        if built:
            assert batch.block_table.shape == (2, 300)
        for dtype, low, high in ((np.uint8, -1, 369), (np.int8, -1, 369), (np.uint32, -1, 369)):
            buffer = np.full((2, 300), 77, dtype)
            with pytest.raises(ValueError, match=f"values from {low} to {high} do not fit into"):
                batch.fill(block_table=buffer)
            assert (buffer == 77).all()
    with cache.batch([second], 0) as batch:
        pages = batch.block_table.max() if built else 369
        buffer = np.full((1, 70), 77, np.uint32)
        batch.fill(block_table=buffer)
        assert buffer.max() == pages, "no padding is needed"


@pytest.mark.parametrize("built", [False, True])
def test_fill_of_sequences_without_a_page_is_padding(built: bool) -> None:
    cache = small_cache()
    with cache.batch([cache.sequence(), cache.sequence()], 0) as batch:
        if built:
            assert batch.block_table.shape == (2, 0)
        for source in (batch, pickle.loads(pickle.dumps(batch))):
            buffer, indices = np.full((3, 2), 77, np.int32), np.full(2, 77, np.int32)
            source.fill(block_table=buffer, kv_indices=indices)
            assert (buffer == -1).all()
            assert (indices == -1).all()


def test_fill_after_the_end_writes_only_what_was_built() -> None:
    cache = small_cache()
    seq = cache.sequence()
    buffer = np.full((1, 2), 77, np.int32)
    batch = cache.batch([seq], 6)
    batch.commit()
    with pytest.raises(ValueError, match="committed or closed"):
        batch.fill(block_table=buffer)
    assert (buffer == 77).all()
    batch = cache.batch([seq], 0)
    table = batch.block_table
    batch.close()
    batch.fill(block_table=buffer)
    np.testing.assert_array_equal(buffer, table)


def test_a_table_keeps_its_memory_while_others_are_built() -> None:
    cache = small_cache(num_pages=64, page_size=1)
    seqs = [cache.sequence() for _ in range(4)]
    cache.batch(seqs, [3, 5, 7, 9]).commit()
    kept = []
    for _ in range(8):
        for i in range(len(seqs)):
            with cache.batch(seqs[: i + 1], 0) as batch:
                kept.append((batch.block_table, batch.kv_indices, batch.block_table.copy()))
        kept = kept[-6:]
        for table, indices, want in kept:
            np.testing.assert_array_equal(table, want)
            np.testing.assert_array_equal(indices, want[want >= 0])


def test_fill_refuses_before_it_writes() -> None:
    cache = small_cache()
    seq = cache.sequence()
    with cache.batch([seq], 6) as batch:
        lens = np.full(3, 77, np.int32)
        readonly = np.zeros(9, np.int64)
        readonly.flags.writeable = False
        bad: dict[str, tuple[Any, type[Exception], str]] = {
            "small": (np.zeros(5, np.int64), paged_kv.LayoutError, r"slot_mapping must have room for \[6\]"),
            "two axes": (np.zeros((9, 1), np.int64), paged_kv.LayoutError, "room"),
            "floats": (np.zeros(9), paged_kv.LayoutError, "integers"),
            "unsigned": (np.zeros(9, np.uint32), ValueError, "from -1 to 5 do not fit into uint32"),
            "read-only": (readonly, paged_kv.LayoutError, "read-only"),
        }
        for array, error, message in bad.values():
            with pytest.raises(error, match=message):
                batch.fill(seq_lens=lens, slot_mapping=array)
            assert (lens == 77).all()
        exact = np.zeros(6, np.uint8)
        batch.fill(slot_mapping=exact)
        assert exact.tolist() == [0, 1, 2, 3, 4, 5]
        with pytest.raises(paged_kv.LayoutError, match=r"block_table must have room for \[1, 2\]"):
            batch.fill(block_table=np.zeros((3, 1), np.int32))


def test_threads_step_their_own_sequences_through_one_cache() -> None:
    cache = small_cache(num_pages=256, page_size=2)
    wrong: list[BaseException] = []

    def run(seed: int) -> None:
        try:
            rng = np.random.default_rng(seed)
            seqs: list[paged_kv.Sequence] = [cache.sequence()]
            texts: list[list[int]] = [[]]
            for _ in range(30):
                new = [rng.integers(1000, size=rng.integers(0, 4)).tolist() for _ in seqs]
                step(cache, seqs, new)
                texts = [[*text, *tokens] for text, tokens in zip(texts, new, strict=True)]
                check(cache, seqs, texts)
                pick = rng.integers(len(seqs), size=rng.integers(1, 4)).tolist()
                seqs = cache.reorder(seqs, pick)
                texts = [texts[i] for i in pick]
                cut = [int(rng.integers(len(text) + 1)) for text in texts]
                if rng.random() < 0.3:
                    for seq, n in zip(seqs, cut, strict=True):
                        seq.truncate(n)
                    texts = [text[:n] for text, n in zip(texts, cut, strict=True)]
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert cache.stats()["free_pages"] == 256
    cache.validate()


def test_write_and_attend_check_their_arrays() -> None:
    cache = small_cache()
    seq = cache.sequence()
    key, value = rows(0, [1, 2], DIM), rows(0, [1, 2], V_DIM)
    query = rows(0, [1, 2], DIM, 4)
    with cache.batch([seq], 2) as batch:
        before = np.asarray(cache.key_pages(0)).copy()
        for layer, k, v, error in (
            (2, key, value, ValueError),
            (0, key[:1], value, paged_kv.LayoutError),
            (0, key, key, paged_kv.LayoutError),
            (0, key.astype(np.float64), value, paged_kv.LayoutError),
            (0, key, None, paged_kv.LayoutError),
        ):
            with pytest.raises(error):
                cache.write(layer, k, v, batch)  # type: ignore[arg-type]
        pages = np.asarray(cache.key_pages(0, writable=True))
        with pytest.raises(paged_kv.LayoutError, match="overlaps the cache's own pages"):
            cache.write(0, pages[0, :, :2].swapaxes(0, 1), value, batch)
        np.testing.assert_array_equal(np.asarray(cache.key_pages(0)), before)
        cache.write(0, key, value, batch)
        with pytest.raises(paged_kv.LayoutError, match="query"):
            cache.attend(0, query[:, :3], batch)
        with pytest.raises(paged_kv.LayoutError, match="overlaps query"):
            cache.attend(0, query, batch, out=query[..., :V_DIM])
        with pytest.raises(ValueError, match="NaN"):
            cache.attend(0, query, batch, scale=float("nan"))
        with pytest.raises(ValueError, match="layer 2"):
            cache.attend(2, query, batch)
        out = np.zeros((2, 4, V_DIM), np.float32)
        assert cache.attend(0, query, batch, out=out) is out
        again, lse = cache.attend(0, query, batch, return_lse=True)
        np.testing.assert_array_equal(again, out)
        assert lse.shape == (2, 4)
    assert cache.num_kv_heads == KV_HEADS
