"""Sequences: lengths, forks, copy-on-write, truncation, freeing; from any thread."""

import gc
import threading

import numpy as np
import pytest

import paged_kv
from model import DIM, KV_HEADS, PAGE_SIZE, check, small_cache, step


def free_pages(cache: paged_kv.KvCache) -> int:
    return cache.stats()["free_pages"]


def test_a_new_sequence_reserves_nothing() -> None:
    cache = small_cache()
    seq = cache.sequence([5, 6, 7])
    assert (len(seq), seq.num_computed_tokens, seq.block_table.size) == (0, 0, 0)
    assert seq.pending_token_ids.tolist() == [5, 6, 7]
    assert free_pages(cache) == 16
    assert repr(seq) == f"paged_kv.Sequence(id={seq.id}, len=0, num_computed_tokens=0)"


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.uint8), range(1, 3)])
def test_token_ids_may_be_any_sequence_or_array(ids: object) -> None:
    seq = small_cache().sequence()
    seq.extend(ids)  # type: ignore[arg-type]
    assert len(seq) == 2
    assert seq.pending_token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("ids", [[-1], [2**32], np.array([-1]), np.array([2**40])])
def test_token_ids_outside_uint32_are_refused(ids: object) -> None:
    seq = small_cache().sequence()
    with pytest.raises(ValueError, match=r"token_ids: element 0.* from 0 to 4294967295"):
        seq.extend(ids)  # type: ignore[arg-type]
    assert len(seq) == 0


def test_append_reserves_and_commit_counts() -> None:
    cache = small_cache()
    seq = cache.sequence()
    seq.append(PAGE_SIZE + 1)
    assert (len(seq), seq.num_computed_tokens, len(seq.block_table)) == (5, 0, 2)
    assert seq.block_table.dtype == np.int32
    seq.commit(2)
    assert seq.num_computed_tokens == 2
    seq.commit()
    assert seq.num_computed_tokens == 5
    with pytest.raises(ValueError, match="5 are computed"):
        seq.commit(4)


def test_append_beyond_the_pool_changes_nothing() -> None:
    cache = small_cache()
    seq, other = cache.sequence(), cache.sequence()
    seq.append(10 * PAGE_SIZE)
    before = cache.stats()
    with pytest.raises(paged_kv.OutOfPagesError) as caught:
        other.append(7 * PAGE_SIZE)
    assert (caught.value.requested, caught.value.free, caught.value.index) == (7, 6, None)
    with pytest.raises(paged_kv.NeverFitsError) as never:
        other.append(17 * PAGE_SIZE)
    assert (never.value.requested, never.value.total) == (17, 16)
    assert cache.stats() == before
    assert len(other) == 0
    cache.validate()


@pytest.mark.parametrize("n", [-1, 2**32, 2**70])
def test_counts_outside_uint32_are_refused(n: int) -> None:
    seq = small_cache().sequence()
    for method in (seq.append, seq.truncate, seq.commit):
        with pytest.raises(ValueError, match=f"{n} is not an integer from 0 to 4294967295"):
            method(n)
    assert len(seq) == 0


def test_fork_shares_pages_and_the_first_to_write_copies() -> None:
    cache = small_cache()
    parent = cache.sequence()
    text = [1, 2, 3, 4, 5, 6]
    step(cache, [parent], [text])
    child = parent.fork()
    assert child.block_table.tolist() == parent.block_table.tolist()
    assert cache.stats()["shared_pages"] == 2
    step(cache, [child], [[7]])
    assert cache.stats()["copied_pages"] == 1
    assert child.block_table[0] == parent.block_table[0]
    assert child.block_table[1] != parent.block_table[1]
    step(cache, [parent], [[8, 9]])
    assert cache.stats()["copied_pages"] == 1, "the parent is alone on its page again"
    check(cache, [parent, child], [[*text, 8, 9], [*text, 7]])
    cache.validate()


def test_truncate_and_grow_again() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5, 6, 7]])
    seq.truncate(5)
    assert (len(seq), seq.num_computed_tokens) == (5, 5)
    with pytest.raises(ValueError, match="5 tokens to 6"):
        seq.truncate(6)
    step(cache, [seq], [[8, 9]])
    check(cache, [seq], [[1, 2, 3, 4, 5, 8, 9]])


def test_free_gives_pages_back_once_and_never_fails() -> None:
    cache = small_cache()
    seq = cache.sequence()
    seq.append(9)
    child = seq.fork()
    seq.free()
    seq.free()
    assert seq.is_freed
    assert repr(seq) == f"paged_kv.Sequence(id={seq.id}, freed)"
    for use in (
        lambda: len(seq),
        lambda: seq.append(1),
        seq.fork,
        lambda: seq.truncate(0),
        lambda: seq.block_table,
        lambda: seq.num_computed_tokens,
        lambda: seq.prefetch(),
    ):
        with pytest.raises(paged_kv.SequenceFreedError) as caught:
            use()
        assert caught.value.indices == []
    child.free()
    assert free_pages(cache) == 16
    cache.validate()


def test_a_sequence_that_is_collected_is_freed() -> None:
    cache = small_cache()
    seq = cache.sequence()
    seq.append(9)
    del seq
    gc.collect()
    assert free_pages(cache) == 16
    assert cache.stats()["sequences"] == 0


def test_field_c75_many_threads_use_one_sequence() -> None:
    cache = small_cache(num_pages=64)
    seq = cache.sequence()
    busy, wrong = [], []

    def hammer() -> None:
        for _ in range(200):
            try:
                seq.append(1)
                seq.truncate(0)
                seq.fork().free()
            except paged_kv.SequenceBusyError as error:
                busy.append(error.sequence)
            except ValueError:
                pass  # another thread truncated first
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=hammer) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert set(busy) <= {seq.id}
    seq.free()
    cache.validate()
    assert free_pages(cache) == 64


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_addresses_are_those_of_the_views(layout: str) -> None:
    cache = small_cache(layout=layout)
    seq = cache.sequence()
    seq.append(6)
    page, offset = int(seq.block_table[1]), 1
    for which, pages in (("key", cache.key_pages(1)), ("value", cache.value_pages(1))):
        array = np.asarray(pages)
        for head in range(KV_HEADS):
            row = array[page, head, offset] if layout == "HND" else array[page, offset, head]
            assert seq.physical_address(1, 5, which, head=head) == row.ctypes.data  # type: ignore[arg-type]
    for layer, position, which, head, message in (
        (2, 0, "key", 0, "layer 2"),
        (0, 6, "key", 0, "position 6"),
        (0, 0, "query", 0, "query"),
        (0, 0, "key", KV_HEADS, "head 2"),
    ):
        with pytest.raises(ValueError, match=message):
            seq.physical_address(layer, position, which, head=head)  # type: ignore[arg-type]


def test_byte_offsets_are_translated_page_by_page() -> None:
    cache = small_cache()
    seq = cache.sequence()
    seq.append(2 * PAGE_SIZE)
    page_bytes = PAGE_SIZE * KV_HEADS * (DIM + 6) * 4
    for offset in (0, page_bytes - 1, page_bytes, 2 * page_bytes - 1):
        page = int(seq.block_table[offset // page_bytes])
        assert seq.physical_offset(offset) == page * page_bytes + offset % page_bytes
    with pytest.raises(ValueError, match="beyond the sequence's 2 pages"):
        seq.physical_offset(2 * page_bytes)


def test_prefetch_is_bounded_by_what_it_is_given_and_what_there_is() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    everything = 2 * 2 * PAGE_SIZE * KV_HEADS * (DIM + 6) * 4
    assert seq.prefetch() == everything
    assert seq.prefetch(max_bytes=130) == 128
    assert seq.prefetch(max_bytes=0) == 0
