"""Who holds the pages: page maps, explanations, and leases with their age and call site."""

import gc
import logging
import threading
import time
from typing import Any

import numpy as np
import pytest

import paged_kv
from model import small_cache, step
from paged_kv import PageState


def held(cache: paged_kv.KvCache, sequence: paged_kv.Sequence) -> tuple[int, int]:
    (holder,) = (one for one in cache.explain().sequences if one.id == sequence.id)
    return holder.num_pages, holder.exclusive_pages


def test_a_page_map_says_of_every_page_what_it_is_and_whose() -> None:
    cache = small_cache(null_page=True)
    parent = cache.sequence()
    step(cache, [parent], [range(6)])
    child = parent.fork()
    step(cache, [child], [[7]])
    handles = cache.pool.alloc(2)
    page_map = cache.page_map()
    dtypes = {name: array.dtype.name for name, array in page_map.items()}  # type: ignore[attr-defined]
    assert dtypes == {
        "state": "uint8", "ref_count": "uint32", "owner": "int64", "generation": "uint32", "copied": "bool",
    }  # fmt: skip
    shared, tail = parent.block_table
    copy = child.block_table[1]
    want = np.full(17, PageState.FREE)
    want[0], want[shared], want[[tail, copy]] = PageState.NULL, PageState.SHARED, PageState.PRIVATE
    want[cache.pool.page_ids(handles)] = PageState.PRIVATE
    np.testing.assert_array_equal(page_map["state"], want)
    assert page_map["owner"][[shared, tail, copy, 0]].tolist() == [parent.id, parent.id, child.id, -1]
    assert page_map["ref_count"][[shared, tail, copy]].tolist() == [2, 1, 1]
    assert np.flatnonzero(page_map["copied"]).tolist() == [copy]
    generations = page_map["generation"][cache.pool.page_ids(handles)].astype(np.uint64)
    np.testing.assert_array_equal(
        generations << np.uint64(32) | cache.pool.page_ids(handles).astype(np.uint64), handles
    )
    child.free()
    assert not cache.page_map()["copied"].any()


def test_an_explanation_lists_holders_in_sums_that_add_up_to_stats() -> None:
    cache = small_cache()
    parent = cache.sequence()
    step(cache, [parent], [range(11)])
    child = parent.fork()
    handles = cache.pool.alloc(3)
    reader = cache.batch([parent], 0)
    parent.truncate(2)
    writer = cache.batch([child], 1)  # its tail is the reader's too: copied
    why = cache.explain()
    assert why.stats == cache.stats()
    stats = why.stats
    assert why.sequence_pages + why.batch_pages + why.handle_pages == stats["live_pages"]
    assert (why.sequence_pages, why.batch_pages, why.handle_pages) == (3, 1, 3)
    parts = ("free_pages", "live_pages", "cached_pages", "deferred_pages")
    assert sum(stats[part] for part in parts) == stats["total_pages"]  # type: ignore[literal-required]
    assert [one.id for one in why.sequences] == [child.id, parent.id], "most pages first"
    assert (held(cache, child), held(cache, parent)) == ((3, 2), (1, 0))
    assert why.leases is None
    for word in ("2 sequences", "3 held by handles", "1 copied by open batches", "not tracked"):
        assert word in str(why)
    writer.close()
    child.free()
    assert cache.explain().stats["deferred_pages"] == 2, "the reader's"
    reader.close()
    cache.pool.release(handles)
    parent.free()
    assert (cache.explain().stats["free_pages"], cache.explain().freed_pages) == (16, 7)


def test_cells_sum_up_adjacent_pages() -> None:
    cache = small_cache(num_layers=0, num_pages=100, page_size=1)
    first, second = cache.sequence(), cache.sequence()
    first.append(30)
    second.append(25)
    assert cache.explain().cells is None
    cells = cache.explain(max_cells=7).cells
    assert cells is not None
    assert (cells["pages_per_cell"], cells["counts"].shape) == (15, (7, len(PageState) - 1))
    assert cells["counts"].sum(0).tolist() == [45, 55, 0, 0, 0]
    assert cells["owner"].tolist() == [first.id, first.id, second.id, second.id, -1, -1, -1]
    for wrong in (-1, 2**70):
        with pytest.raises(ValueError, match="integer from 0"):
            cache.explain(max_cells=wrong)
    with pytest.raises(TypeError):
        cache.explain(max_cells="x")  # type: ignore[arg-type]


def test_a_tracked_lease_has_its_age_and_call_site() -> None:
    cache = small_cache()
    seqs = [cache.sequence() for _ in range(3)]
    step(cache, seqs, [range(5), range(9), range(1)])
    untracked = cache.batch(seqs[:1], 0)
    cache.track_leases()
    assert cache.explain().leases == ()

    def forgets() -> paged_kv.Batch:
        return cache.batch(seqs[:2], [0, 1])

    batch = forgets()
    seqs[1].free()
    seqs[0].truncate(0)
    with cache.batch([seqs[2]], 0):
        leases = cache.explain().leases
        assert leases is not None
        assert [lease.num_sequences for lease in leases] == [2, 1]
    (lease,) = cache.explain().leases or ()
    # Until the batch ends the freed sequence's pages are its claim's; the truncated one's only a pin's.
    assert (lease.num_pages, lease.deferred_pages) == (5, 5)
    assert lease.age >= 0
    assert lease.site.startswith(f"{__file__}:")
    assert lease.site.endswith("forgets")
    assert "forgets" in str(cache.explain())
    del batch
    gc.collect()
    assert cache.explain().leases == ()
    untracked.close()


def test_a_lease_older_than_the_limit_is_named_once(caplog: Any) -> None:
    cache = small_cache()
    seq, other = cache.sequence(), cache.sequence()
    step(cache, [seq, other], [range(3), range(3)])
    cache.track_leases(warn_after=1e-6)
    with caplog.at_level(logging.WARNING, logger="paged_kv.leases"):
        stuck = cache.batch([seq], 1)
        while not caplog.records:  # noticed when another batch is opened, at most every quarter limit
            cache.batch([other], 0).close()
        cache.explain()
        named = [record.getMessage() for record in caplog.records]
    mine = [message for message in named if "test_a_lease_older_than_the_limit" in message]
    assert len(mine) >= 1
    assert mine[0].startswith("a batch of 1 sequences is open for 0.0 s: opened at ")
    assert sum(f":{line_of(mine[0])} in" in message for message in named) == 1, "once"
    stuck.close()
    caplog.clear()
    cache.track_leases()
    with cache.batch([seq], 0):
        cache.explain()
    assert not caplog.records, "no limit, no warning"


def line_of(message: str) -> str:
    return message.rpartition(":")[2].partition(" ")[0]


@pytest.mark.parametrize("limit", [0, -1, float("nan"), float("inf"), -0.0])
def test_a_limit_is_a_positive_number_of_seconds(limit: float) -> None:
    cache = small_cache()
    with pytest.raises(ValueError, match="warn_after"):
        cache.track_leases(warn_after=limit)
    assert cache.explain().leases is None, "still off"
    with pytest.raises(TypeError):
        cache.track_leases(warn_after="soon")  # type: ignore[arg-type]


def test_ended_batches_are_forgotten() -> None:
    cache = small_cache()
    seq = cache.sequence()
    cache.track_leases()
    stuck = cache.batch([seq], 0)
    for _ in range(1000):
        cache.batch([seq], 0).close()
    tracker = next(one for one in gc.get_objects() if type(one).__name__ == "LeaseTracker")
    assert len(tracker._openings) <= 65
    assert len(cache.explain().leases or ()) == 1
    stuck.close()


def test_looking_disturbs_nobody_and_sums_hold_while_threads_run() -> None:
    cache = small_cache(num_pages=64)
    cache.track_leases(warn_after=60)
    done = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            mother = cache.sequence()
            step(cache, [mother], [range(9)])
            while not done.is_set():
                child = mother.fork()
                step(cache, [child], [[1, 2, 3]])
                child.free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    looks = 0
    while time.monotonic() < end:
        looks += 1
        why = cache.explain(max_cells=5)
        stats = why.stats
        live = why.sequence_pages + why.batch_pages + why.handle_pages
        assert live == stats["live_pages"]
        assert stats["free_pages"] + live + stats["deferred_pages"] == 64
        assert why.cells is not None
        assert why.cells["counts"].sum() == 64
        assert cache.page_map()["state"].max() < PageState.NULL
    done.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert looks > 3
    gc.collect()
    cache.validate()
