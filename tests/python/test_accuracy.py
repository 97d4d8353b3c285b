"""How exact attention is as a Python program sees it: Gaussian keys, every dtype and instruction set."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import oracle
import paged_kv

KV_HEADS, HEADS, DIM = 2, 6, 64
ALLOWED = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 4e-3}
TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.fixture(params=["scalar", "neon", "avx2", "avx512", "avx512_bf16"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = paged_kv.isa()
    try:
        paged_kv.set_isa(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    paged_kv.set_isa(before)


@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize(("length", "queries"), [(600, 1), (200, 40)], ids=["decode", "prefill"])
def test_gaussian_values_are_as_exact_as_their_dtype(isa: str, dtype: str, length: int, queries: int) -> None:
    rng = np.random.default_rng(30)
    key, value = rng.standard_normal((2, length, KV_HEADS, DIM)).astype(TYPES[dtype])
    # Five times a Gaussian: logits of up to some 25.
    query = (5 * rng.standard_normal((queries, HEADS, DIM))).astype(TYPES[dtype])
    cache = paged_kv.KvCache(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, num_pages=64, page_size=16, dtype=dtype
    )
    seq = cache.sequence()
    with cache.batch([seq], length - queries) as batch:
        cache.write(0, key[: length - queries], value[: length - queries], batch)
    with cache.batch([seq], queries) as batch:
        cache.write(0, key[-queries:], value[-queries:], batch)
        out, lse = cache.attend(0, query, batch, return_lse=True)
    want, want_lse = oracle.attention(*(x.astype(np.float64) for x in (query, key, value)))
    assert 10 < want_lse.max() < 30
    error = np.linalg.norm(out.astype(np.float64) - want) / np.linalg.norm(want)
    assert error <= ALLOWED[dtype], (isa, error)
    np.testing.assert_allclose(lse, want_lse, atol=1e-4)
