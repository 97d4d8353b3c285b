"""Keys and values of eight bits and their scales: written, shared, copied, adopted, attended to."""

import pickle
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import oracle
import paged_kv
from model import DIM, HEADS, KV_HEADS, LAYERS, PAGE_SIZE, V_DIM, rows, small_cache, step

Floats = npt.NDArray[np.float64]
QUANTISED = {"int8": (np.int8, 127), "float8_e4m3fn": (ml_dtypes.float8_e4m3fn, 448)}
#: The largest error of a number, in parts of its row's largest.
ERROR = {"int8": 0.51 / 127, "float8_e4m3fn": 1.01 / 16}


def decoded(cache: paged_kv.KvCache, layer: int, seq: paged_kv.Sequence) -> tuple[Floats, Floats]:
    """What a sequence's keys and values stand for, [tokens, heads, dim], from the cache's own views."""
    element, _ = QUANTISED[cache.dtype]
    both = []
    for pages, scales in (
        (cache.key_pages(layer), cache.key_scales(layer)),
        (cache.value_pages(layer), cache.value_scales(layer)),
    ):
        numbers = np.asarray(pages).view(element).astype(np.float64) * np.asarray(scales)[..., None]
        numbers = numbers[seq.block_table]
        if cache.layout == "HND":
            numbers = numbers.swapaxes(1, 2)
        both.append(numbers.reshape(-1, KV_HEADS, numbers.shape[-1])[: seq.num_computed_tokens])
    return both[0], both[1]


def check(cache: paged_kv.KvCache, seq: paged_kv.Sequence, text: list[int]) -> None:
    """The sequence holds the text as nearly as its dtype can, and attention is over just that."""
    query = rows(99, text[-1:], DIM, HEADS)
    with cache.batch([seq], 0, num_queries=1) as batch:
        for layer in range(LAYERS):
            key, value = decoded(cache, layer, seq)
            for found, dim in ((key, DIM), (value, V_DIM)):
                want = rows(layer, text, dim)
                largest = np.abs(want).max(axis=-1, keepdims=True)
                assert (np.abs(found - want) <= ERROR[cache.dtype] * largest).all()
            out = cache.attend(layer, query, batch)
            np.testing.assert_allclose(
                out, oracle.attention(query.astype(np.float64), key, value)[0], atol=3e-6
            )


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_scales_live_with_the_page(dtype: str, layout: str) -> None:
    cache = small_cache(dtype=dtype, layout=layout, null_page=True)
    seq = cache.sequence()
    text = [1, 2, 3, 4, 5, 6]
    step(cache, [seq], [text])
    check(cache, seq, text)
    assert cache.key_scales(0).shape == cache.key_pages(0).shape[:3]
    # A fork's first token copies the shared page, its scales included; the parent's stay.
    child = seq.fork()
    step(cache, [child], [[7]])
    step(cache, [seq], [[8, 9]])
    assert cache.stats()["copied_pages"] == 1
    check(cache, child, [*text, 7])
    check(cache, seq, [*text, 8, 9])
    seq.truncate(5)
    step(cache, [seq], [[10]])
    check(cache, seq, [1, 2, 3, 4, 5, 10])
    cache.copy_pages([(int(seq.block_table[0]), 9)])
    for pages in (cache.key_scales(1), cache.value_scales(1), cache.key_pages(1), cache.value_pages(1)):
        array = np.asarray(pages)
        np.testing.assert_array_equal(array[9], array[seq.block_table[0]])
        assert not array[0].any(), "the null page is zero, as are its scales"
        assert pages.readonly
    cache.validate()


@pytest.mark.parametrize("dtype", QUANTISED)
def test_a_view_of_a_batch_carries_copies_to_another_rank(dtype: str) -> None:
    cache, rank = small_cache(dtype=dtype), small_cache(dtype=dtype)
    seq = cache.sequence()
    outs = []
    for n, fork in ((6, False), (1, True)):
        seq = seq.fork() if fork else seq
        with cache.batch([seq], n) as batch:
            view = pickle.loads(pickle.dumps(batch))
            rank.copy_pages(view.copies)
            for c, b in ((cache, batch), (rank, view)):
                c.write(0, rows(0, range(n), DIM), rows(0, range(n), V_DIM), b)
                outs.append(c.attend(0, rows(99, range(n), DIM, HEADS), b))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[2], outs[3])


def test_bytes_count_scales() -> None:
    token = KV_HEADS * (DIM + V_DIM + 2 * 4)
    for dtype in QUANTISED:
        cache = small_cache(dtype=dtype)
        assert cache.stats()["total_bytes"] == 16 * LAYERS * PAGE_SIZE * token
        sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "v_head_dim": V_DIM}
        assert paged_kv.kv_bytes_per_token(dtype=dtype, **sizes) == LAYERS * token
    cache = small_cache(dtype="float8_e4m3fn", k_scale=0.1, v_scale=0.1)
    assert cache.stats()["total_bytes"] == 16 * LAYERS * PAGE_SIZE * KV_HEADS * (DIM + V_DIM)


@pytest.mark.parametrize(
    "scale", [0.01, np.float32(0.01), np.full(KV_HEADS, 0.01), np.full((LAYERS, KV_HEADS), 0.01, np.float32)]
)
def test_a_head_may_have_one_scale(scale: Any) -> None:
    cache = small_cache(dtype="float8_e4m3fn", k_scale=scale, v_scale=0.02, null_page=True)
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    key, value = decoded(cache, 1, seq)
    for found, dim, unit in ((key, DIM, 0.01), (value, V_DIM, 0.02)):
        want = rows(1, [1, 2, 3, 4, 5], dim) / np.float32(unit)
        want = want.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * np.float32(unit)
        np.testing.assert_allclose(found, want, rtol=1e-6)
    scales = cache.key_scales(1, writable=True)
    assert scales.readonly
    assert scales.shape == cache.key_pages(1).shape[:3]
    assert (np.asarray(scales) == np.float32(0.01)).all()
    with cache.batch([seq], 0, num_queries=1) as batch:
        query = rows(99, [5], DIM, HEADS)
        want = oracle.attention(query.astype(np.float64), key, value)[0]
        np.testing.assert_allclose(cache.attend(1, query, batch), want, atol=3e-6)
    # What is too large becomes the largest.
    with cache.batch([seq], 1) as batch:
        cache.write(0, np.full((1, KV_HEADS, DIM), 1e9, np.float32), rows(0, [6], V_DIM), batch)
    assert decoded(cache, 0, seq)[0][5].max() == pytest.approx(4.48)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_storage_brings_its_scales(dtype: str, layout: str) -> None:
    bits = np.int8 if dtype == "int8" else np.uint8
    page = (KV_HEADS, PAGE_SIZE) if layout == "HND" else (PAGE_SIZE, KV_HEADS)
    storage = [
        (
            np.full((8, *page, DIM), 7, bits),
            np.full((8, *page, V_DIM), 7, bits),
            # Keys' and values' scales side by side, as a kernel of one's own may want them.
            *np.moveaxis(np.full((8, *page, 2), np.nan, np.float32), -1, 0),
        )
        for _ in range(LAYERS)
    ]
    sizes = {"num_pages": None, "num_kv_heads": None, "head_dim": None, "v_head_dim": None, "dtype": None}
    cache = small_cache(storage=storage, page_size=None, layout=layout, null_page=True, **sizes)
    assert (cache.dtype, cache.num_pages) == (dtype, 7)
    assert cache.value_scales(1).data_ptr == storage[1][3].ctypes.data
    assert not storage[0][2][0].any(), "the null page's scales were cleared"
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    child = seq.fork()
    step(cache, [child], [[6]])
    check(cache, child, [1, 2, 3, 4, 5, 6])
    assert np.isnan(storage[0][2][7]).all(), "no other page"
    # A scale per head needs no more arrays.
    pages = [layer[:2] for layer in storage]
    heads = small_cache(storage=pages, page_size=None, layout=layout, k_scale=1.0, v_scale=1.0, **sizes)
    assert (np.asarray(heads.key_scales(0)) == 1).all()
    for bad, message in (
        ([layer[:2] for layer in storage], "need a scale per token"),
        ([layer[:3] for layer in storage], "no pair"),
        ([(*layer[:3], layer[3][:5]) for layer in storage], "5 pages instead of 8"),
        ([(*layer[:3], layer[3].astype(np.float64)) for layer in storage], "float64"),
        ([(*layer[:3], layer[2]) for layer in storage], "overlap|before"),
        ([(*layer[:3], layer[0]) for layer in storage], "3 axes"),
    ):
        with pytest.raises(paged_kv.LayoutError, match=message):
            small_cache(storage=bad, page_size=None, layout=layout, **sizes)


class Pages:
    """Pages of 4 tokens, 6 tokens in pages 2 and 0, for the functions that need no cache."""

    def __init__(self, dtype: str, layout: str = "HND") -> None:
        page = (KV_HEADS, PAGE_SIZE) if layout == "HND" else (PAGE_SIZE, KV_HEADS)
        self.bits = np.int8 if dtype == "int8" else np.uint8
        self.key_pages, self.value_pages = (np.zeros((3, *page, dim), self.bits) for dim in (DIM, V_DIM))
        self.k_scale, self.v_scale = (np.full((3, *page), np.nan, np.float32) for _ in range(2))
        self.slots = np.array([8, 9, 10, 11, 0, 1])
        self.key, self.value = rows(0, range(6), DIM), rows(0, range(6), V_DIM)
        self.query = rows(99, range(6), DIM, HEADS)
        self.layout = layout

    def write(self, **scales: Any) -> None:
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale, **scales}
        paged_kv.write_pages(
            self.key,
            self.value,
            self.key_pages,
            self.value_pages,
            self.slots,
            layout=self.layout,  # type: ignore[arg-type]
            **scales,
        )

    def attend(self, **options: Any) -> Any:
        options = {"k_scale": self.k_scale, "v_scale": self.v_scale, "layout": self.layout, **options}
        query, key_pages = options.pop("query", self.query), options.pop("key_pages", self.key_pages)
        tables = np.array([[2, 0]]), np.array([6]), np.array([0, 6])
        return paged_kv.paged_attention(query, key_pages, self.value_pages, *tables, **options)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_functions_take_scales_in_every_form(dtype: str, layout: str) -> None:
    pages = Pages(dtype, layout)
    pages.write()
    cache = small_cache(dtype=dtype, layout=layout)
    seq = cache.sequence()
    with cache.batch([seq], 6) as batch:
        cache.write(0, pages.key, pages.value, batch)
        want = cache.attend(0, pages.query, batch)
    np.testing.assert_array_equal(pages.attend(), want)
    # Views of a cache come back in: elements of eight bits by DLPack's own code for them.
    tables = np.asarray(batch.block_table), np.array([6]), np.array([0, 6])
    given = (cache.key_pages(0), cache.value_pages(0), *tables)
    scales = {"k_scale": cache.key_scales(0), "v_scale": cache.value_scales(0)}
    again = paged_kv.paged_attention(pages.query, *given, layout=layout, **scales)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again, want)
    if dtype == "float8_e4m3fn":
        own = pages.key_pages.view(ml_dtypes.float8_e4m3fn)
        np.testing.assert_array_equal(pages.attend(key_pages=own), want)
    heads = {"k_scale": [0.02] * KV_HEADS, "v_scale": 0.03}
    outs = []
    for k_scale in (0.02, np.full(KV_HEADS, 0.02)):
        heads = {"k_scale": k_scale, "v_scale": 0.03}
        pages.write(**heads)
        outs.append(pages.attend(**heads))
    np.testing.assert_array_equal(*outs)
    full = {
        name: np.full_like(pages.k_scale, scale) for name, scale in (("k_scale", 0.02), ("v_scale", 0.03))
    }
    np.testing.assert_array_equal(pages.attend(**full), outs[0])


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no scale": ({"k_scale": None}, paged_kv.LayoutError, "key pages of int8 need scales"),
    "too few heads": ({"k_scale": np.ones(3)}, paged_kv.LayoutError, "scales of key pages"),
    "too few pages": (
        {"v_scale": np.ones((2, KV_HEADS, 4), np.float32)},
        paged_kv.LayoutError,
        "value pages",
    ),
    "two axes": ({"k_scale": np.ones((3, KV_HEADS))}, paged_kv.LayoutError, "k_scale must be a number"),
    "scales of 64 bits": ({"k_scale": np.ones((3, KV_HEADS, 4))}, paged_kv.LayoutError, "float64"),
    "a negative scale": ({"k_scale": -1.0}, ValueError, r"k_scale\[0\] is -1, not a positive number"),
    "a scale of zero": ({"v_scale": np.zeros(KV_HEADS)}, ValueError, r"v_scale\[0\] is 0"),
    "a scale whose products are infinite": (
        {"v_scale": 1.4e36},
        ValueError,
        r"not a positive number up to 6\.6",
    ),
    "a scale of NaN": ({"v_scale": float("nan")}, ValueError, "v_scale"),
    "no number": ({"v_scale": "one"}, TypeError, "float|number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_scales_that_make_no_sense_are_refused(name: str) -> None:
    scales, error, message = REFUSED[name]
    pages = Pages("int8")
    with pytest.raises(error, match=message):
        pages.write(**scales)
    assert not pages.key_pages.any()
    assert np.isnan(pages.k_scale).all()
    with pytest.raises(error, match=message):
        pages.attend(**scales)


def test_the_largest_floats_come_back_finite() -> None:
    largest = np.finfo(np.float32).max
    for dtype in ("int8", "float8_e4m3fn"):
        cache = paged_kv.KvCache(num_layers=1, num_kv_heads=1, head_dim=4, num_pages=1, dtype=dtype)
        value = np.full((1, 1, 4), largest, np.float32)
        with cache.batch([cache.sequence()], 1) as batch:
            cache.write(0, np.zeros_like(value), value, batch)
            out = cache.attend(0, np.zeros_like(value), batch)
        np.testing.assert_allclose(out, value, rtol=1e-6)


def test_written_arrays_that_overlap_are_refused_and_interleaved_ones_are_not() -> None:
    key, value = np.ones((2, 1, 1, 4), np.float32)
    slots = np.array([0])
    memory = np.zeros((4, 1, 2, 4), np.float32)
    scales = np.zeros((3, 1, 2), np.float32)
    eight = np.zeros((3, 1, 2, 4), np.int8)
    for keys, values, options in (
        (memory, memory, {}),
        (memory[:3], memory[1:], {}),
        (eight, eight.copy(), {"k_scale": scales, "v_scale": scales}),
        (
            eight,
            eight.copy(),
            {"k_scale": eight.ravel().view(np.float32).reshape(3, 1, 2), "v_scale": scales},
        ),
    ):
        with pytest.raises(paged_kv.LayoutError, match="are written, but overlap in memory"):
            paged_kv.write_pages(key, value, keys, values, slots, **options)
    for array in (memory, eight, scales):
        assert not array.any()
    pairs = np.zeros((3, 2, 1, 2, 4), np.float32)
    paged_kv.write_pages(key, 2 * value, pairs[:, 0], pairs[:, 1], slots)
    np.testing.assert_array_equal(pairs[0, :, 0, 0], [[1] * 4, [2] * 4])
    halves = np.zeros((3, 1, 2, 8), np.float32)
    paged_kv.write_pages(key, 2 * value, halves[..., :4], halves[..., 4:], slots)
    np.testing.assert_array_equal(halves[0, 0, 0], [1] * 4 + [2] * 4)


def test_quantised_rows_and_what_is_no_number_are_refused() -> None:
    pages = Pages("int8")
    for query in (pages.query.astype(np.int8), pages.query.astype(ml_dtypes.float8_e4m3fn)):
        with pytest.raises(paged_kv.LayoutError, match="query has dtype"):
            pages.attend(query=query)
    plain = np.zeros((3, KV_HEADS, PAGE_SIZE, DIM), np.float32)
    with pytest.raises(paged_kv.LayoutError, match="must agree"):
        pages.attend(key_pages=plain)
    pages.key[4, 1, 3] = np.inf
    with pytest.raises(ValueError, match=r"key\[4, 1\] holds NaN or infinity"):
        pages.write()
    assert not pages.key_pages.any()
    pages.slots[4] = -1
    pages.write()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8_e4m3fn", "k_scale": 1.0}, ValueError, "both k_scale= and v_scale="),
        ({"dtype": "int8", "k_scale": 1.0, "v_scale": 1.0, "num_layers": 0}, ValueError, "with layers"),
        (
            {"dtype": "bfloat16", "k_scale": 1.0, "v_scale": 1.0},
            paged_kv.LayoutError,
            "bfloat16 has no scales",
        ),
        ({"dtype": "float8_e4m3fn", "k_scale": 0.0, "v_scale": 1.0}, ValueError, "k_scale.* is 0"),
        ({"dtype": "int8", "k_scale": 1.0, "v_scale": [[1.0]]}, TypeError, "float|number"),
        ({"dtype": "int8", "k_scale": 1.0, "v_scale": np.ones(3)}, paged_kv.LayoutError, r"\[2\] \(heads\)"),
    ],
)
def test_caches_refuse_scales_that_do_not_fit(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        small_cache(**options)


def test_a_cache_of_floats_has_no_scales() -> None:
    with pytest.raises(paged_kv.LayoutError, match="float32 has no scales"):
        small_cache().key_scales(0)


@pytest.mark.parametrize("value_in_key", [False, True])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_the_error_of_quantisation_is_bounded(dtype: str, value_in_key: bool) -> None:
    cache = small_cache(dtype=dtype, value_in_key=value_in_key)
    text = list(range(30))
    key, query = rows(0, text, DIM), rows(99, text[-3:], DIM, HEADS)
    value = key[..., :V_DIM] if value_in_key else rows(0, text, V_DIM)
    seq, empty = cache.sequence(), cache.sequence()
    with cache.batch([seq, empty], [30, 0], num_queries=[3, 1]) as batch:
        cache.write(0, key, None if value_in_key else value, batch)
        query = np.concatenate([query, query[:1]])
        options: dict[str, Any] = {"scale": DIM**-0.5, "sinks": np.full(HEADS, 0.5, np.float32)}
        out, lse, bound = cache.attend(0, query, batch, return_lse=True, return_error_bound=True, **options)
        alone = cache.attend(0, query, batch, return_error_bound=True, **options)[1]
    assert (bound.shape, bound.dtype) == ((4, HEADS), np.float32)
    np.testing.assert_array_equal(alone, bound)
    np.testing.assert_array_equal(bound[3], 0)
    np.testing.assert_array_equal(lse[3], 0.5)
    wide = (array.astype(np.float64) for array in (query[:3], key, value))
    want, _ = oracle.attention(*wide, **options)
    error = np.abs(out[:3] - want).max(axis=-1)
    assert (error <= bound[:3] + 1e-6).all()
    assert (bound[:3] > 0).all()
    assert (bound[:3] < 0.3 * np.abs(value).max()).all()


def test_a_bound_is_refused_where_none_is_known() -> None:
    out = np.full((1, HEADS, V_DIM), 7, np.float32)
    for options, message in (
        ({"dtype": "float32"}, "float32 are not quantised"),
        ({"dtype": "float8_e4m3fn", "k_scale": 1.0, "v_scale": 1.0}, "one scale"),
    ):
        cache = small_cache(**options)
        with cache.batch([cache.sequence()], 1) as batch:
            cache.write(0, rows(0, [1], DIM), rows(0, [1], V_DIM), batch)
            with pytest.raises(paged_kv.LayoutError, match=message):
                cache.attend(0, rows(99, [1], DIM, HEADS), batch, return_error_bound=True, out=out)
    assert (out == 7).all()
    pages = Pages("int8")
    pages.write()
    with_lse = pages.attend(return_lse=True, return_error_bound=True)
    assert [array.shape for array in with_lse] == [(6, HEADS, V_DIM), (6, HEADS), (6, HEADS)]
    np.testing.assert_array_equal(pages.attend(return_error_bound=True)[1], with_lse[2])
