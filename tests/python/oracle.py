"""Attention over dense keys and values in float64, straight from its definition."""

import numpy as np
import numpy.typing as npt


def attention(
    query: npt.NDArray[np.float64],
    key: npt.NDArray[np.float64],
    value: npt.NDArray[np.float64],
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    logits_soft_cap: float = 0.0,
    alibi_slopes: npt.NDArray[np.float64] | None = None,
    sinks: npt.NDArray[np.float64] | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """One sequence: query [q, heads, dim], key and value [len, kv_heads, dim] to (out, lse)."""
    num_queries, num_heads, head_dim = query.shape
    length, num_kv_heads, _ = key.shape
    out = np.zeros((num_queries, num_heads, value.shape[2]))
    lse = np.full((num_queries, num_heads), -np.inf)
    for i in range(num_queries):
        position = length - num_queries + i
        seen = np.arange(length)
        if causal:
            seen = seen[seen <= position]
        if window_left >= 0:
            seen = seen[seen >= position - window_left]
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            logits = key[seen, kv_head] @ query[i, head] * (head_dim**-0.5 if scale is None else scale)
            if logits_soft_cap:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
            if alibi_slopes is not None:
                logits = logits - alibi_slopes[head] * (position - seen)
            extra = [] if sinks is None else [sinks[head]]
            terms = np.concatenate([logits, extra])
            if len(terms) == 0 or terms.max() == -np.inf:
                continue
            lse[i, head] = terms.max() + np.log(np.exp(terms - terms.max()).sum())
            out[i, head] = np.exp(logits - lse[i, head]) @ value[seen, kv_head]
    return out, lse
