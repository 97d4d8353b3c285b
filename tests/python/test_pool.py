"""Pages by handles: all or nothing, counted, and refused once they are stale."""

import threading

import numpy as np
import pytest

import paged_kv
from model import PAGE_SIZE, small_cache, step


def test_alloc_gives_the_lowest_run_with_a_count_of_one() -> None:
    cache = small_cache()
    pool = cache.pool
    handles = pool.alloc(3)
    assert handles.dtype == np.uint64
    assert pool.page_ids(handles).tolist() == [0, 1, 2]
    assert pool.page_ids(handles).dtype == np.int32
    assert pool.ref_count(handles).tolist() == [1, 1, 1]
    assert (pool.num_free, pool.num_pages) == (13, 16)
    assert repr(pool) == "paged_kv.PagePool(num_pages=16, num_free=13)"
    pool.release(handles)
    assert pool.num_free == 16


def test_alloc_is_all_or_nothing() -> None:
    pool = small_cache().pool
    handles = pool.alloc(10)
    with pytest.raises(paged_kv.OutOfPagesError) as short:
        pool.alloc(7)
    assert (short.value.requested, short.value.free) == (7, 6)
    with pytest.raises(paged_kv.NeverFitsError) as never:
        pool.alloc(17)
    assert (never.value.requested, never.value.total) == (17, 16)
    assert pool.num_free == 6
    assert pool.alloc(0).size == 0
    with pytest.raises(ValueError, match="-1 is not an integer from 0 to"):
        pool.alloc(-1)
    pool.release(handles)


def test_a_failing_alloc_tells_how_many_pages_leases_hold() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [list(range(8 * PAGE_SIZE))])
    with cache.batch([seq], 0):
        seq.truncate(0)
        with pytest.raises(paged_kv.OutOfPagesError) as caught:
            cache.pool.alloc(10)
    error = caught.value
    assert (error.requested, error.free, error.evictable, error.deferred) == (10, 8, 0, 8)
    assert cache.pool.alloc(10).size == 10


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    pool = small_cache().pool
    handles = pool.alloc(2)
    pool.retain(handles)
    pool.release(handles)
    pool.release(handles[:1])
    for stale in (handles, handles[:1]):
        with pytest.raises(paged_kv.RefCountError) as caught:
            pool.release(stale)
        assert (caught.value.page, caught.value.ref_count) == (0, 0)
    assert pool.ref_count(handles[1:]).tolist() == [1]
    with pytest.raises(paged_kv.RefCountError):
        pool.release(np.array([handles[1], handles[1]]))
    assert pool.ref_count(handles[1:]).tolist() == [1]
    assert pool.num_free == 15


def test_stale_and_foreign_handles_are_refused_by_every_method() -> None:
    pool, other = small_cache().pool, small_cache().pool
    mine, theirs = pool.alloc(1), other.alloc(1)
    pool.release(mine)
    again = pool.alloc(1)
    assert pool.page_ids(again) == [0]
    for handle in (mine, theirs):
        for method in (pool.retain, pool.release, pool.ref_count, pool.page_ids, pool.owners):
            with pytest.raises(paged_kv.RefCountError, match="stale"):
                method(handle)  # type: ignore[operator]
    assert pool.ref_count(again).tolist() == [1]


@pytest.mark.parametrize("handle", [16, 2**32 - 1, 2**64 - 1])
def test_pages_outside_the_pool_are_invalid(handle: int) -> None:
    pool = small_cache().pool
    with pytest.raises(paged_kv.InvalidPageError) as caught:
        pool.retain([handle])
    assert (caught.value.page, caught.value.num_pages) == (handle & (2**32 - 1), 16)


@pytest.mark.parametrize("handles", [[-1], [2**64], np.array([-1]), np.array([[1]]), np.array([0.5]), "x", 3])
def test_what_are_no_handles_is_refused(handles: object) -> None:
    pool = small_cache().pool
    with pytest.raises((ValueError, TypeError)):
        pool.retain(handles)  # type: ignore[arg-type]
    assert pool.num_free == 16


def test_owners_are_the_sequences_that_share_a_page() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    child = seq.fork()
    own = cache.pool.alloc(1)
    assert cache.pool.owners(own) == [[]]
    # A handle of a page that sequences hold: the generation of a first life is that of its pool.
    generation = int(own[0]) >> 32
    shared = [generation << 32 | int(page) for page in seq.block_table]
    assert [sorted(ids) for ids in cache.pool.owners(shared)] == [sorted([seq.id, child.id])] * 2
    assert cache.pool.ref_count(shared[1:]).tolist() == [2]
    cache.pool.retain(shared)
    seq.free()
    child.free()
    assert cache.pool.num_free == 13, "the handles keep the pages"
    cache.pool.release(shared)
    assert cache.pool.num_free == 15


def test_threads_never_receive_the_same_page() -> None:
    pool = small_cache(num_pages=200).pool
    taken: list[list[int]] = [[] for _ in range(4)]

    def take(mine: list[int]) -> None:
        for n in (1, 3, 7, 2, 5, 4, 6, 1, 8, 13):
            mine.extend(pool.page_ids(pool.alloc(n)).tolist())

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(page for mine in taken for page in mine) == list(range(200))


def test_a_null_page_is_never_handed_out() -> None:
    cache = small_cache(null_page=True)
    pool = cache.pool
    assert pool.num_pages == 16
    handles = pool.alloc(16)
    assert pool.page_ids(handles).tolist() == list(range(1, 17))
    with pytest.raises(paged_kv.InvalidPageError):
        pool.retain([0])
