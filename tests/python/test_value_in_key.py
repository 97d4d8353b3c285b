"""Values that are the first elements of keys, as in the latent cache of MLA."""

from typing import Any

import numpy as np
import pytest

import oracle
import paged_kv
from model import DIM, HEADS, LAYERS, PAGE_SIZE, V_DIM, rows, small_cache


def latent_cache(**options: Any) -> paged_kv.KvCache:
    return small_cache(num_kv_heads=1, value_in_key=True, **options)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_it_is_stored_once_and_attended_to(layout: str, dtype: str) -> None:
    cache = latent_cache(layout=layout, dtype=dtype)
    assert cache.value_in_key
    row = DIM * 4 if dtype == "float32" else DIM + 4
    assert cache.stats()["total_bytes"] == LAYERS * 16 * PAGE_SIZE * row
    seq = cache.sequence()
    key = rows(0, range(6), DIM, 1)
    with cache.batch([seq], 6) as batch:
        cache.write(0, key, None, batch)
        query = rows(99, range(6), DIM, HEADS)
        out = cache.attend(0, query, batch, scale=0.3)
    want, _ = oracle.attention(
        query.astype(np.float64), key.astype(np.float64), key[..., :V_DIM].astype(np.float64), scale=0.3
    )
    np.testing.assert_allclose(out, want, atol=3e-6 if dtype == "float32" else 0.05)
    values = cache.value_pages(0, writable=True)
    assert values.readonly
    assert values.data_ptr == cache.key_pages(0).data_ptr
    assert values.shape == (*cache.key_pages(0).shape[:3], V_DIM)
    assert seq.physical_address(0, 3, "value") == seq.physical_address(0, 3, "key")
    assert seq.prefetch() == 2 * LAYERS * np.asarray(cache.key_pages(0))[0].nbytes
    child = seq.fork()
    with cache.batch([child], 1) as batch:
        cache.write(0, rows(0, [7], DIM, 1), None, batch)
        both = cache.attend(0, query[:1], batch, scale=0.3)
    assert np.isfinite(both).all()
    pages = [np.asarray(cache.key_pages(0))[s.block_table[1]] for s in (seq, child)]
    axis = 1 if layout == "HND" else 0
    np.testing.assert_array_equal(pages[0].take([0, 1], axis), pages[1].take([0, 1], axis))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_functions_and_adopted_arrays_give_the_same(dtype: str) -> None:
    element = np.float32 if dtype == "float32" else np.int8
    key_pages = np.zeros((8, 1, PAGE_SIZE, DIM), element)
    scales = np.zeros(key_pages.shape[:3], np.float32)
    scale = {} if dtype == "float32" else {"k_scale": scales}
    key, query = rows(0, range(6), DIM, 1), rows(99, range(6), DIM, HEADS)
    paged_kv.write_pages(key, None, key_pages, None, np.arange(6), **scale)
    tables = np.array([[0, 1]]), np.array([6]), np.array([0, 6])
    out = paged_kv.paged_attention(query, key_pages, None, *tables, v_head_dim=V_DIM, scale=0.3, **scale)
    layer = (key_pages, None) if dtype == "float32" else (key_pages, None, scales, None)
    adopted = latent_cache(
        num_layers=1, storage=[layer], num_pages=None, page_size=None, head_dim=None, dtype=None
    )
    own = latent_cache(num_layers=1, dtype=dtype)
    for cache in (adopted, own):
        with cache.batch([cache.sequence()], 6) as batch:
            cache.write(0, key, None, batch)
            np.testing.assert_array_equal(cache.attend(0, query, batch, scale=0.3), out)
    assert adopted.value_pages(0).data_ptr == key_pages.ctypes.data


def test_a_head_may_have_one_scale() -> None:
    cache = latent_cache(dtype="float8_e4m3fn", k_scale=0.02)
    assert (np.asarray(cache.value_scales(1)) == np.float32(0.02)).all()
    with pytest.raises(ValueError, match="leave v_scale= out"):
        latent_cache(dtype="float8_e4m3fn", k_scale=0.02, v_scale=0.02)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="needs v_head_dim="):
        latent_cache(v_head_dim=None)
    with pytest.raises(paged_kv.LayoutError, match="keys of 8 elements hold no values of 9"):
        latent_cache(v_head_dim=9)
    cache, plain = latent_cache(), small_cache(num_kv_heads=1)
    key, value = rows(0, [1], DIM, 1), rows(0, [1], V_DIM, 1)
    query = rows(99, [1], DIM, HEADS)
    with cache.batch([cache.sequence()], 1) as batch:
        with pytest.raises(paged_kv.LayoutError, match="value must be None"):
            cache.write(0, key, value, batch)
        cache.write(0, key, None, batch)
        with pytest.raises(ValueError, match="scale must be given"):
            cache.attend(0, query, batch)
    with (
        pytest.raises(paged_kv.LayoutError, match="values are needed"),
        plain.batch([plain.sequence()], 1) as batch,
    ):
        plain.write(0, key, None, batch)
    pages = np.zeros((1, 1, PAGE_SIZE, DIM), np.float32)
    tables = np.array([[0]]), np.array([1]), np.array([0, 1])
    for options, error, message in (
        ({}, ValueError, "either value_pages or v_head_dim="),
        ({"v_head_dim": 4}, ValueError, "scale must be given"),
        ({"v_head_dim": 9, "scale": 1.0}, paged_kv.LayoutError, "hold no values of 9"),
        ({"v_head_dim": 4, "scale": 1.0, "v_scale": 1.0}, paged_kv.LayoutError, "leave v_scale out"),
    ):
        with pytest.raises(error, match=message):
            paged_kv.paged_attention(query, pages, None, *tables, **options)
    with pytest.raises(ValueError, match="both be given"):
        paged_kv.write_pages(key, value, pages, None, np.array([0]))
    storage = [(pages, pages)] * LAYERS
    with pytest.raises(paged_kv.LayoutError, match="given as None"):
        latent_cache(storage=storage, num_pages=None, page_size=None)
