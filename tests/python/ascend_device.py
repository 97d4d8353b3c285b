"""Caches on the fake device, and the same steps on the host to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import paged_kv
from paged_kv import ascend

LAYERS, KV_HEADS, HEADS, DIM = 2, 2, 4, 16

Array = npt.NDArray[Any]
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}


def device_cache(**options: Any) -> paged_kv.KvCache:
    """Make a small cache on ``ascend:0``."""
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "num_pages": 16,
        "dtype": "float16",
        "device": "ascend:0",
    }
    return paged_kv.KvCache(**{**sizes, **options})


def host_cache(**options: Any) -> paged_kv.KvCache:
    return device_cache(**options, device="cpu")


def rows(seed: int, tokens: int, heads: int = KV_HEADS, dim: int = DIM) -> Array:
    """Rows float32 [tokens, heads, dim] that depend on the seed alone."""
    return np.random.default_rng(seed).standard_normal((tokens, heads, dim), dtype=np.float32)


def write(cache: paged_kv.KvCache, batch: paged_kv.Batch, seed: int) -> None:
    """Write keys and values for the batch's new tokens in all layers."""
    tokens = len(batch.positions)
    for layer in range(cache.num_layers):
        cache.write(layer, rows(seed + layer, tokens), rows(seed + layer + 1000, tokens), batch)


def append(
    cache: paged_kv.KvCache, seqs: list[paged_kv.Sequence], new: Any, seed: int, stream: Any = None
) -> None:
    """Compute `new` tokens of each sequence."""
    with cache.batch(seqs, new, stream=stream) as batch:
        write(cache, batch, seed)


def read(cache: paged_kv.KvCache, sequence: paged_kv.Sequence, layer: int = 0) -> Array:
    """Attend of one query over all of a sequence: a digest of what it holds."""
    with cache.batch([sequence], 0, num_queries=1) as batch:
        return np.asarray(cache.attend(layer, rows(7, 1, HEADS, cache.head_dim), batch))


def settle(cache: paged_kv.KvCache) -> None:
    """Let all work of the device pass, that whose end nobody could mark included.

    Asking marks one end a stream, and finds out about it the next time.
    """
    for _ in range(100):
        ascend.open_device(0).synchronize()
        if cache.stats()["deferred_pages"] == 0:
            break


def empty_pool(cache: paged_kv.KvCache) -> bool:
    """Say whether every page came back."""
    cache.validate()
    return bool(cache.pool.num_free == cache.num_pages)
