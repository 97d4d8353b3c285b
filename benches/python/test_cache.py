"""What a Python program waits for: ``pytest benches/python --benchmark-enable --benchmark-only``.

For comparing one commit with another (``--benchmark-autosave``, ``--benchmark-compare``); beside the
machine's limits the same is measured by ``paged-kv bench cache``.
"""

import numpy as np
import pytest

import paged_kv

PAGE_SIZE = 16


@pytest.mark.parametrize("batch_size", [1, 64, 256])
def test_decode_step(benchmark, batch_size: int) -> None:
    # Enough pages for every round that pytest-benchmark may want.
    cache = paged_kv.KvCache(num_layers=0, page_size=PAGE_SIZE, num_pages=1 << 22)
    seqs = [cache.sequence() for _ in range(batch_size)]
    cache.batch(seqs, list(range(100, 100 + batch_size))).commit()
    benchmark(lambda: cache.batch(seqs, 1).commit())
    cache.validate()


def test_decode_step_with_arrays(benchmark) -> None:
    cache = paged_kv.KvCache(num_layers=0, page_size=PAGE_SIZE, num_pages=1 << 16)
    seqs = [cache.sequence() for _ in range(256)]
    cache.batch(seqs, 1024).commit()

    def step() -> None:
        with cache.batch(seqs, 1) as batch:
            _ = batch.block_table, batch.seq_lens, batch.slot_mapping
            batch.close()

    benchmark(step)


@pytest.mark.parametrize("num_tokens", [128, 128 << 10])
def test_fork(benchmark, num_tokens: int) -> None:
    cache = paged_kv.KvCache(num_layers=0, page_size=PAGE_SIZE, num_pages=num_tokens // PAGE_SIZE)
    parent = cache.sequence()
    cache.batch([parent], num_tokens).commit()
    child = benchmark(parent.fork)
    assert len(child) == num_tokens


def test_attend_small(benchmark) -> None:
    # One layer's decode of SmolLM2-135M, eight requests: here a call's own cost counts.
    rng = np.random.default_rng(0)
    cache = paged_kv.KvCache(
        num_layers=1, num_kv_heads=3, head_dim=64, page_size=PAGE_SIZE, num_pages=512, dtype="float32"
    )
    seqs = [cache.sequence() for _ in range(8)]
    with cache.batch(seqs, 256) as batch:
        key, value = rng.standard_normal((2, 8 * 256, 3, 64), np.float32)
        cache.write(0, key, value, batch)
    query = rng.standard_normal((8, 9, 64), np.float32)
    with cache.batch(seqs, 0, num_queries=1) as batch:
        out = benchmark(cache.attend, 0, query, batch)
    assert np.isfinite(out).all()
