"""A small cache, and one attention layer per cache layer that runs through it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import oracle
import paged_kv

LAYERS, KV_HEADS, HEADS, DIM, V_DIM, PAGE_SIZE = 2, 2, 4, 8, 6, 4


def small_cache(**options: Any) -> paged_kv.KvCache:
    sizes: dict[str, Any] = {
        "num_layers": LAYERS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "v_head_dim": V_DIM,
        "page_size": PAGE_SIZE,
        "num_pages": 16,
        "dtype": "float32",
        "num_threads": 1,
    }
    return paged_kv.KvCache(**{**sizes, **options})


def rows(layer: int, token_ids: Sequence[int], dim: int, heads: int = KV_HEADS) -> npt.NDArray[np.float32]:
    """Rows [tokens, heads, dim] that depend on nothing but the layer and the tokens' ids."""
    parts = [
        np.random.default_rng([layer, token, dim]).standard_normal((heads, dim)).astype(np.float32)
        for token in token_ids
    ]
    return np.stack(parts) if parts else np.zeros((0, heads, dim), np.float32)


def write(
    cache: paged_kv.KvCache, batch: paged_kv.Batch | paged_kv.BatchView, token_ids: Sequence[int]
) -> None:
    """Writes keys and values of the batch's new tokens in every layer."""
    for layer in range(LAYERS):
        cache.write(layer, rows(layer, token_ids, DIM), rows(layer, token_ids, V_DIM), batch)


def step(cache: paged_kv.KvCache, seqs: Sequence[paged_kv.Sequence], new: Sequence[Sequence[int]]) -> None:
    """Computes `new[i]` behind the computed tokens of each sequence."""
    flat = [token for tokens in new for token in tokens]
    with cache.batch(seqs, [len(tokens) for tokens in new]) as batch:
        write(cache, batch, flat)


def check(cache: paged_kv.KvCache, seqs: Sequence[paged_kv.Sequence], texts: Sequence[Sequence[int]]) -> None:
    """Every sequence holds exactly the tokens of its text: attention in every layer says so."""
    assert [seq.num_computed_tokens for seq in seqs] == [len(text) for text in texts]
    with cache.batch(seqs, 0, num_queries=[min(1, len(text)) for text in texts]) as batch:
        check_batch(cache, batch, texts)


def check_batch(
    cache: paged_kv.KvCache, batch: paged_kv.Batch | paged_kv.BatchView, texts: Sequence[Sequence[int]]
) -> None:
    """Each sequence's last token (if it has one) as a query sees exactly the text."""
    if not any(texts):
        return
    query = rows(99, [text[-1] for text in texts if text], DIM, HEADS)
    for layer in range(LAYERS):
        out = cache.attend(layer, query, batch)
        want = [
            oracle.attention(
                query[i : i + 1].astype(np.float64),
                rows(layer, text, DIM).astype(np.float64),
                rows(layer, text, V_DIM).astype(np.float64),
            )[0]
            for i, text in enumerate(text for text in texts if text)
        ]
        np.testing.assert_allclose(out, np.concatenate(want), atol=3e-6)
