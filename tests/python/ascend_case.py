"""Ragged sequences for the Ascend kernels under the emulation, and what attention over them is."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import oracle
from ascend_support import Attended, attend

DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCE = {"float16": 1e-3, "bfloat16": 4e-3}

Array = npt.NDArray[Any]


class Case:
    """Ragged sequences in shuffled pages; NaN in every unwritten slot, -1 beyond each table.

    `queries`: how many of each sequence's last tokens ask, of the prefill kernel. Without them one a
    sequence asks, of the decode kernel.
    """

    def __init__(
        self,
        lens: list[int],
        queries: list[int] | None = None,
        *,
        dtype: str = "float16",
        head_dim: int = 64,
        group: int = 1,
        num_kv_heads: int = 1,
        page_size: int = 16,
        layout: str = "HND",
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.dtype, self.layout, self.page_size = dtype, layout, page_size
        kind = DTYPES[dtype]
        pages = [-(-n // page_size) for n in lens]
        order = rng.permutation(sum(pages) + 1)
        shape = (len(order), page_size, num_kv_heads, head_dim)
        key_pages, value_pages = (np.full(shape, np.nan, kind) for _ in range(2))
        self.block_table = np.full((len(lens), max(pages) + 1), -1, np.int32)
        self.keys, self.values = [], []
        for i, n in enumerate(lens):
            own, order = order[: pages[i]], order[pages[i] :]
            self.block_table[i, : pages[i]] = own
            for paged, dense in ((key_pages, self.keys), (value_pages, self.values)):
                tokens = rng.standard_normal((n, num_kv_heads, head_dim), dtype=np.float32).astype(kind)
                for token in range(n):
                    paged[own[token // page_size], token % page_size] = tokens[token]
                dense.append(tokens.astype(np.float64))
        if layout == "HND":
            key_pages, value_pages = (
                np.ascontiguousarray(p.swapaxes(1, 2)) for p in (key_pages, value_pages)
            )
        self.key_pages, self.value_pages = key_pages, value_pages
        self.seq_lens = np.array(lens, np.int32)
        self.prefill = queries is not None
        counts = [1] * len(lens) if queries is None else queries
        self.cu_seqlens_q = np.cumsum([0, *counts], dtype=np.int32)
        shape = (sum(counts), num_kv_heads * group, head_dim)
        self.query = rng.standard_normal(shape, dtype=np.float32).astype(kind)

    def run(self, **options: Any) -> Attended:
        arrays = (self.query, self.key_pages, self.value_pages, self.block_table, self.seq_lens)
        rows = self.cu_seqlens_q if self.prefill else None
        return attend(*arrays, rows, layout=self.layout, **options)

    def expected(self, **options: Any) -> tuple[Array, Array]:
        queries = np.split(self.query.astype(np.float64), self.cu_seqlens_q[1:-1])
        rows = [
            oracle.attention(query, key, value, **options)
            for query, key, value in zip(queries, self.keys, self.values, strict=True)
        ]
        return np.concatenate([out for out, _ in rows]), np.concatenate([lse for _, lse in rows])

    def check(self, *, num_splits: int = 1, num_blocks: int = 3, **options: Any) -> Attended:
        """A row's largest error, relative to its largest element, stays within the dtype's tolerance."""
        got = self.run(num_splits=num_splits, num_blocks=num_blocks, **options)
        out, lse = self.expected(**options)
        size = np.abs(out).max(axis=-1)
        error = np.abs(got.out.astype(np.float64) - out).max(axis=-1)
        assert (error <= TOLERANCE[self.dtype] * size).all(), np.max(error / np.maximum(size, 1e-9))
        assert not got.out[np.isneginf(lse)].any()
        np.testing.assert_allclose(got.lse, lse, rtol=1e-5, atol=2e-5)
        return got
