"""Caches: sizes, memory of one's own or of others, zero-copy views, reordering, statistics."""

import gc
import pickle
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import paged_kv
from model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    V_DIM,
    check,
    rows,
    small_cache,
    step,
    write,
)

PAGE_BYTES = LAYERS * PAGE_SIZE * KV_HEADS * (DIM + V_DIM) * 4


def test_a_cache_says_what_it_was_made_of() -> None:
    cache = small_cache(window_left=7, layout="NHD", null_page=True, num_threads=2)
    assert (cache.num_layers, cache.num_kv_heads, cache.head_dim, cache.v_head_dim) == (2, 2, 8, 6)
    assert (cache.page_size, cache.num_pages, cache.dtype, cache.layout) == (4, 16, "float32", "NHD")
    assert (cache.window_left, cache.null_page, cache.num_threads, cache.device) == (7, True, 2, "cpu")
    assert repr(cache) == (
        "paged_kv.KvCache(num_layers=2, num_kv_heads=2, head_dim=8, page_size=4, num_pages=16, "
        "dtype=float32, layout=NHD)"
    )


def test_defaults_are_bfloat16_pages_of_16() -> None:
    cache = paged_kv.KvCache(num_layers=1, num_kv_heads=1, head_dim=4, num_pages=2)
    assert (cache.dtype, cache.page_size, cache.v_head_dim, cache.layout) == ("bfloat16", 16, 4, "HND")


def test_memory_sizes_the_pool() -> None:
    assert small_cache(num_pages=None, memory=10 * PAGE_BYTES + 1).num_pages == 10
    assert small_cache(num_pages=None, memory="1MiB").num_pages == (1 << 20) // PAGE_BYTES
    assert small_cache(num_pages=None, memory=10 * PAGE_BYTES, null_page=True).num_pages == 9


def test_page_bytes_sizes_a_page() -> None:
    token = KV_HEADS * (DIM + V_DIM) * 4
    assert small_cache(page_size=None, page_bytes=16384).page_size == 16384 // token


@pytest.mark.parametrize("dtype", ["float16", np.float16, np.dtype("float16"), "torch.float16"])
def test_dtype_objects_are_taken_by_their_name(dtype: object) -> None:
    assert small_cache(dtype=dtype).dtype == "float16"


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "page size 0": ({"page_size": 0}, paged_kv.LayoutError, "page_size must be at least 1"),
    "page size 2^40": ({"page_size": 2**40}, paged_kv.LayoutError, str(2**40)),
    "no pages": ({"num_pages": 0}, paged_kv.LayoutError, "num_pages must be at least 1"),
    "pages beyond 32 bits": ({"num_pages": 2**33, "num_layers": 0}, paged_kv.LayoutError, str(2**33)),
    "negative pages": ({"num_pages": -1}, ValueError, "-1 is not an integer from 0 to"),
    "pages beyond 64 bits": ({"num_pages": 2**70}, ValueError, f"{2**70} is not an integer"),
    "memory beyond 64 bits": ({"num_pages": None, "memory": 2**70}, ValueError, str(2**70)),
    "window beyond 64 bits": ({"window_left": -(2**70)}, ValueError, str(-(2**70))),
    "a number too long to print": ({"num_pages": 10**5000}, ValueError, "the number is not an integer"),
    "no heads": ({"num_kv_heads": 0}, paged_kv.LayoutError, "num_kv_heads"),
    "heads missing": ({"num_kv_heads": None}, ValueError, "num_kv_heads is needed"),
    "dim missing": ({"head_dim": None}, ValueError, "head_dim is needed"),
    "bytes beyond 64 bits without storage": (
        {"num_layers": 0, "num_kv_heads": 2**40, "head_dim": 2**40},
        paged_kv.LayoutError,
        "overflow",
    ),
    "bytes beyond 64 bits": ({"head_dim": 2**60}, paged_kv.LayoutError, "overflow"),
    "memory of the machine": ({"num_pages": 2**27, "head_dim": 2**12}, paged_kv.CacheMemoryError, "bytes"),
    "neither size": ({"num_pages": None}, ValueError, "num_pages= or memory="),
    "both sizes": ({"memory": "1MiB"}, ValueError, "num_pages= or memory="),
    "memory for no page": ({"num_pages": None, "memory": 5}, paged_kv.LayoutError, "5 bytes hold no page"),
    "memory for the null page": (
        {"num_pages": None, "memory": PAGE_BYTES, "null_page": True},
        paged_kv.LayoutError,
        "null page",
    ),
    "memory of nonsense": ({"num_pages": None, "memory": "much"}, ValueError, "much"),
    "page_bytes for no token": ({"page_size": None, "page_bytes": 8}, paged_kv.LayoutError, "page_bytes=8"),
    "two page sizes": ({"page_bytes": 16384}, ValueError, "not both"),
    "dtype": ({"dtype": "int4"}, paged_kv.LayoutError, "int4"),
    "layout": ({"layout": "DNH"}, paged_kv.LayoutError, "DNH"),
    "device": ({"device": "cuda:0"}, ValueError, "cuda:0"),
    "window": ({"window_left": -2}, ValueError, "-2"),
    "no threads": ({"num_threads": 0}, ValueError, "0"),
    "huge pages": ({"huge_pages": "maybe"}, ValueError, "maybe"),
}


@pytest.mark.parametrize("name", BAD)
def test_sizes_that_make_no_sense_are_refused(name: str) -> None:
    arguments, error, message = BAD[name]
    with pytest.raises(error, match=message):
        small_cache(**arguments)


def test_a_cache_larger_than_the_machine_may_be_asked_for() -> None:
    cache = small_cache(num_pages=2**22, head_dim=2**10, overcommit=True, huge_pages="off")
    assert cache.stats()["total_bytes"] > 64 << 30
    assert cache.num_pages == 2**22


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_views_are_the_memory_itself(layout: str) -> None:
    cache = small_cache(layout=layout)
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    page = int(seq.block_table[1])
    for pages, dim in ((cache.key_pages(1), DIM), (cache.value_pages(1), V_DIM)):
        inner = (KV_HEADS, PAGE_SIZE) if layout == "HND" else (PAGE_SIZE, KV_HEADS)
        assert pages.shape == (16, *inner, dim)
        assert pages.readonly
        array = np.asarray(pages)
        assert array.ctypes.data == pages.data_ptr
        assert not array.flags.writeable
        slot = array[page, :, 0] if layout == "HND" else array[page, 0]
        np.testing.assert_array_equal(slot, rows(1, [5], dim)[0])
        assert not np.from_dlpack(pages).flags.writeable
        with pytest.raises(BufferError, match="read-only"):
            pages.__dlpack__()
        copy = np.from_dlpack(pages, copy=True)
        np.testing.assert_array_equal(copy, array)
        assert copy.flags.c_contiguous
    writable = np.asarray(cache.key_pages(1, writable=True))
    writable[page] = 3
    assert (np.asarray(cache.key_pages(1))[page] == 3).all()
    for layer in (2, 2**40):
        with pytest.raises(ValueError, match=f"layer {layer}"):
            cache.key_pages(layer)


def test_views_keep_the_memory_alive_after_the_cache_is_gone() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3]])
    page = int(seq.block_table[0])
    views = [np.asarray(cache.key_pages(0)), np.from_dlpack(cache.key_pages(0))]
    tensor = cache.key_pages(0)
    gone = weakref.ref(cache)
    del cache, seq
    gc.collect()
    assert gone() is None
    others = [small_cache(num_pages=64) for _ in range(4)]
    for view in [*views, np.asarray(tensor)]:
        np.testing.assert_array_equal(view[page, :, :3].swapaxes(0, 1), rows(0, [1, 2, 3], DIM))
    assert len(others) == 4


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_and_layout_gives_attention_over_what_was_written(dtype: str, layout: str) -> None:
    cache = small_cache(dtype=dtype, layout=layout)
    seq = cache.sequence()
    step(cache, [seq], [list(range(9))])
    with cache.batch([seq], 0, num_queries=1) as batch:
        query = rows(99, [8], DIM, HEADS)
        out = cache.attend(0, query, batch)
    stored = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    exact = small_cache()
    other = exact.sequence()
    key, value = (rows(0, range(9), dim).astype(stored).astype(np.float32) for dim in (DIM, V_DIM))
    with exact.batch([other], 9, num_queries=1) as batch:
        exact.write(0, key, value, batch)
        np.testing.assert_allclose(out, exact.attend(0, query, batch), atol=2e-6)


def test_window_left_of_the_cache_is_the_default() -> None:
    cache, plain = small_cache(window_left=2), small_cache()
    outs = []
    for c, options in ((cache, {}), (plain, {"window_left": 2}), (cache, {"window_left": -1}), (plain, {})):
        seq = c.sequence()
        step(c, [seq], [list(range(9))])
        with c.batch([seq], 0, num_queries=1) as batch:
            outs.append(c.attend(0, rows(99, [8], DIM, HEADS), batch, **options))  # type: ignore[arg-type]
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[2], outs[3])
    assert not np.array_equal(outs[0], outs[2])


def test_tables_only_caches_leave_the_copies_to_the_caller() -> None:
    cache = paged_kv.KvCache(num_layers=0, num_pages=8, page_size=4)
    seq = cache.sequence()
    with cache.batch([seq], 6):
        pass
    child = seq.fork()
    with cache.batch([child], 1) as batch:
        assert batch.copies.tolist() == [[1, 2]]
        with pytest.raises(paged_kv.LayoutError, match="no storage"):
            cache.write(0, np.zeros((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32), batch)
    for use in (lambda: cache.key_pages(0), lambda: cache.copy_pages([[0, 1]])):  # type: ignore[list-item]
        with pytest.raises(paged_kv.LayoutError, match="no storage"):
            use()
    with pytest.raises(paged_kv.LayoutError):
        seq.physical_address(0, 0, "key")


def test_copy_pages_copies_whole_pages_in_every_layer() -> None:
    cache = small_cache()
    keys = [np.asarray(cache.key_pages(layer, writable=True)) for layer in range(LAYERS)]
    for layer, key in enumerate(keys):
        key[3] = layer + 1
    cache.copy_pages(np.array([[3, 5], [5, 6]]))
    cache.copy_pages([(3, 7)])
    for layer, key in enumerate(keys):
        assert (key[[5, 6, 7]] == layer + 1).all()
    for bad, page in (([[3, 16]], 16), ([[-1, 3]], -1), ([[3, 4], [2, 2]], 2)):
        with pytest.raises(paged_kv.InvalidPageError) as caught:
            cache.copy_pages(bad)  # type: ignore[arg-type]
        assert caught.value.page == page
    assert not keys[0][4].any()
    with pytest.raises(paged_kv.LayoutError, match="2 axes"):
        cache.copy_pages(np.zeros((2, 3), int))


def test_a_null_page_stays_zero() -> None:
    cache = small_cache(null_page=True)
    seq = cache.sequence()
    step(cache, [seq], [list(range(16 * PAGE_SIZE))])
    assert not np.asarray(cache.key_pages(0))[0].any()
    with pytest.raises(paged_kv.InvalidPageError, match="null page"):
        cache.copy_pages([(1, 0)])
    # A scheduler with as many pages, but without a null page, hands page 0 out.
    scheduler = small_cache(num_pages=17)
    with scheduler.batch([scheduler.sequence()], 2) as batch:
        view = pickle.loads(pickle.dumps(batch))
        with pytest.raises(paged_kv.InvalidPageError, match="null page") as caught:
            write(cache, view, [1, 2])
        assert (caught.value.page, caught.value.num_pages) == (0, 17)
    assert not np.asarray(cache.key_pages(0))[0].any()
    other = cache.sequence()
    with cache.batch([seq, other], 0) as batch:
        assert (batch.block_table[1] == 0).all()


def test_reorder_moves_forks_and_frees() -> None:
    cache = small_cache()
    seqs = [cache.sequence() for _ in range(3)]
    step(cache, seqs, [[1], [2, 2, 2, 2, 2], [3]])
    pages = cache.stats()["free_pages"]
    picked = cache.reorder(seqs, np.array([1, 0, 1]))
    assert picked[0] is seqs[1]
    assert picked[1] is seqs[0]
    assert picked[2] not in seqs
    assert seqs[2].is_freed
    assert cache.stats()["free_pages"] == pages + 1
    check(cache, picked, [[2] * 5, [1], [2] * 5])
    step(cache, picked, [[4], [5], [6]])
    check(cache, picked, [[2, 2, 2, 2, 2, 4], [1, 5], [2, 2, 2, 2, 2, 6]])
    assert cache.reorder(picked, []) == []
    assert all(seq.is_freed for seq in picked)
    cache.validate()


def test_reorder_refuses_as_a_whole() -> None:
    cache, other = small_cache(), small_cache()
    a, b, freed = cache.sequence(), cache.sequence(), cache.sequence()
    step(cache, [a, b], [[1], [2]])
    freed.free()
    before = cache.stats(detail=True)
    for seqs, indices, message in (
        ([a, b], [2], "2"),
        ([a, b], [-1], "indices: element 0: -1 is not an integer"),
        ([a, a], [0], "index 1"),
        ([a, other.sequence()], [0], "another cache"),
    ):
        with pytest.raises(ValueError, match=message):
            cache.reorder(seqs, indices)
    with pytest.raises(paged_kv.SequenceFreedError):
        cache.reorder([a, freed], [0])
    with cache.batch([b], 1), pytest.raises(paged_kv.SequenceBusyError):
        cache.reorder([a, b], [0])
    b.truncate(1)
    assert cache.stats(detail=True) == before
    cache.validate()


def test_statistics_always_sum() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5, 6]])
    child = seq.fork()
    stats = cache.stats(detail=True)
    parts = ("free_pages", "live_pages", "cached_pages", "deferred_pages")
    assert sum(stats[part] for part in parts) == stats["total_pages"] == 16  # type: ignore[literal-required]
    assert (stats["live_pages"], stats["shared_pages"], stats["sequences"]) == (2, 2, 2)
    assert (stats["tokens"], stats["stored_tokens"], stats["waste"]) == (12, 6, 0.25)
    assert (stats["total_bytes"], stats["used_bytes"]) == (16 * PAGE_BYTES, 2 * PAGE_BYTES)
    detail = {entry["id"]: entry for entry in stats["detail"]}
    assert detail.keys() == {seq.id, child.id}
    assert detail[seq.id] == {"id": seq.id, "len": 6, "num_computed_tokens": 6, "num_pages": 2}
    assert "detail" not in cache.stats()


class TestStorage:
    """The cache works on arrays of someone else."""

    def arrays(self, kind: str) -> list[tuple[Any, Any]]:
        shape = (16, KV_HEADS, PAGE_SIZE)
        if kind == "apart":
            return [tuple(np.zeros((*shape, dim), np.float32) for dim in (DIM, V_DIM)) for _ in range(LAYERS)]  # type: ignore[misc]
        if kind == "layer by layer":
            both = np.zeros((LAYERS, 2, *shape, DIM), np.float32)
            return [(layer[0], layer[1]) for layer in both]
        if kind == "page by page":
            both = np.zeros((16, LAYERS, 2, KV_HEADS, PAGE_SIZE, DIM), np.float32)
            return [(both[:, layer, 0], both[:, layer, 1]) for layer in range(LAYERS)]
        both = np.zeros((LAYERS, *shape, DIM + V_DIM), np.float32)
        return [(layer[..., :DIM], layer[..., DIM:]) for layer in both]

    @pytest.mark.parametrize("kind", ["apart", "layer by layer", "page by page", "token by token"])
    def test_it_is_used_without_a_copy(self, kind: str) -> None:
        storage = self.arrays(kind)
        sizes = {"num_pages": None, "num_kv_heads": None, "head_dim": None, "v_head_dim": None, "dtype": None}
        cache = small_cache(storage=storage, page_size=None, **sizes)
        assert (cache.num_pages, cache.page_size, cache.dtype, cache.head_dim) == (16, 4, "float32", 8)
        assert cache.key_pages(1).data_ptr == storage[1][0].ctypes.data
        seq = cache.sequence()
        v_dim = storage[0][1].shape[-1]
        with cache.batch([seq], 5) as batch:
            for layer in range(LAYERS):
                cache.write(layer, rows(layer, range(5), DIM), rows(layer, range(5), v_dim), batch)
        page = int(seq.block_table[1])
        np.testing.assert_array_equal(storage[1][0][page, :, 0], rows(1, [4], DIM)[0])
        np.testing.assert_array_equal(storage[0][1][page, :, 0], rows(0, [4], v_dim)[0])

    def test_it_stays_alive_with_the_cache_and_goes_with_it(self) -> None:
        class Owned(np.ndarray):  # type: ignore[type-arg]
            pass

        storage = [tuple(array.view(Owned) for array in pair) for pair in self.arrays("apart")]
        gone = [weakref.ref(array) for pair in storage for array in pair]
        cache = small_cache(storage=storage)
        view = np.asarray(cache.key_pages(0))
        del storage
        gc.collect()
        assert all(ref() is not None for ref in gone)
        del cache
        gc.collect()
        assert view.shape == (16, KV_HEADS, PAGE_SIZE, DIM)
        del view
        gc.collect()
        assert all(ref() is None for ref in gone)

    def test_a_null_page_is_one_of_its_pages_and_becomes_zero(self) -> None:
        storage = self.arrays("page by page")
        for pair in storage:
            for array in pair:
                array[:] = np.nan
        cache = small_cache(storage=storage, num_pages=None, v_head_dim=None, null_page=True)
        assert cache.num_pages == 15
        for pair in storage:
            for array in pair:
                assert not array[0].any()
                assert np.isnan(array[1:]).all()

    @pytest.mark.parametrize("kind", [tuple, list, np.stack, iter])
    def test_a_layer_is_any_pair(self, kind: Any) -> None:
        storage = [kind(layer) for layer in self.arrays("layer by layer")]
        cache = small_cache(storage=storage, v_head_dim=None)
        if kind is np.stack:
            assert cache.value_pages(1).data_ptr == storage[1][1].ctypes.data

    def test_prefetch_goes_where_keys_and_values_lie(self) -> None:
        cache = small_cache(storage=self.arrays("apart"))
        seq = cache.sequence()
        step(cache, [seq], [[1, 2, 3, 4, 5]])
        assert seq.prefetch() == 2 * PAGE_BYTES

    def test_what_does_not_fit_is_refused(self) -> None:
        good = self.arrays("apart")
        overlapping = [good[0], (good[0][0], good[1][1])]
        buffer = np.zeros(100_000, np.float32)
        size = good[0][0].size
        shifted = buffer[4 : 4 + size].reshape(good[0][0].shape), good[0][1]
        for storage, options, error, message in (
            (good[:1], {}, paged_kv.LayoutError, "1 layers"),
            ([], {}, ValueError, "per layer"),
            (good, {"num_pages": 17}, paged_kv.LayoutError, "16 pages instead of 17"),
            (good, {"dtype": "float16"}, paged_kv.LayoutError, "float32 instead of float16"),
            (good, {"memory": "1MiB"}, ValueError, "leave memory="),
            (overlapping, {}, paged_kv.LayoutError, "overlap|given before"),
            (
                [(buffer[:size].reshape(good[0][0].shape), good[1][1]), shifted],
                {},
                paged_kv.LayoutError,
                "overlap",
            ),
            ([good[0], 3], {}, TypeError, "not iterable"),
            (3, {}, TypeError, "not iterable"),
            ([good[0], (*good[1], good[1][0])], {}, paged_kv.LayoutError, "layer 1 in storage is no pair"),
            ([good[0], good[1][:1]], {}, paged_kv.LayoutError, "layer 1 in storage is no pair"),
            (
                [good[0], np.broadcast_to(np.float32(0), (2**40, 1))],
                {},
                paged_kv.LayoutError,
                "layer 1 in storage is no pair",
            ),
        ):
            with pytest.raises(error, match=message):
                small_cache(storage=storage, **options)  # type: ignore[arg-type]
        good[1][0].flags.writeable = False
        with pytest.raises(paged_kv.LayoutError, match="key_pages in storage is read-only"):
            small_cache(storage=good)
