"""``paged-kv bench attention``: beside the machine's limits, and beside numpy and ggml without pages."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import threadpool_limits

from paged_kv import _core, paged_attention
from paged_kv.cli import bench_ggml

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

US, NUMPY, GGML = "paged_kv", "numpy (BLAS)", "ggml"
ROTATED_BYTES = 1 << 30
QUERY_BLOCK = 256
PAGE_SIZES = (16, 128)
# It sums values in float16, of which the cases with the most tokens lose the most.
GGML_ERROR = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is attended to.

    Attributes
    ----------
    name : str
        ``d1`` to ``d6`` (decode), ``c1`` (decode with a shared prefix), ``p1``, ``p2`` (prefill).
    batch, len, queries, shared : int
        Sequences, tokens of each (the new ones included), new tokens of each, and tokens that all begin
        with.
    num_heads, num_kv_heads, head_dim : int
        Query heads, KV heads, and elements of a query, key and value.
    """

    name: str
    batch: int
    len: int
    queries: int
    shared: int = 0
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def operations(self) -> float:
        """Multiplications and additions of one call, of the keys that causality leaves."""
        keys = self.queries * (self.len - (self.queries - 1) / 2)
        return 4.0 * self.batch * self.num_heads * self.head_dim * keys

    def bytes_read(self, itemsize: int) -> float:
        """Bytes of keys and values, each read once."""
        return 2.0 * self.batch * self.len * self.num_kv_heads * self.head_dim * itemsize


def shapes() -> dict[str, Shape]:
    """All shapes by name."""
    return {shape["name"]: Shape(**shape) for shape in _core.attention_shapes()}


def bench_attention(
    repetitions: int,
    *,
    cases: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    page_sizes: Sequence[int] | None = None,
    threads: Sequence[int] | None = None,
    isas: Sequence[str] | None = None,
    rotated_bytes: int = ROTATED_BYTES,
) -> list[dict[str, Any]]:
    """Measure attention: beside the machine's limits, then in float32 beside numpy, in float16 beside ggml.

    ggml takes part in decode, and where ``libggml-python`` is installed.

    Parameters
    ----------
    repetitions : int
        Of each case; all that share a limit take turns.
    cases, dtypes : sequence of str, optional
        All if None.
    page_sizes, threads : sequence of int, optional
        16 and 128; one, and as many as the process may use.
    isas : sequence of str, optional
        Instruction sets to compare, the one that the others stand beside first. With these, numpy and ggml
        take no part. If None, the process's.
    rotated_bytes : int
        Bytes of keys and values that decode rotates through.

    Returns
    -------
    list of dict
        As `paged_kv._core.bench_attention` returns it. Rows of numpy and ggml and the row of this library
        before each are in milliseconds per call, and their yardstick is this library: here a ratio above 1
        says how much longer the other takes.

    Raises
    ------
    ValueError
        If a case, dtype, page size, number of threads or instruction set is not to be had.
    """
    rows = _core.bench_attention(
        repetitions,
        cases=cases,
        dtypes=dtypes,
        page_sizes=page_sizes,
        threads=threads,
        isas=isas,
        rotated_bytes=rotated_bytes,
    )
    if isas:
        # What stands beside the peers runs with the process's set, which may be none of these.
        return rows
    every = shapes()
    # Contiguous arrays share nothing.
    alone = [every[name] for name in (every if cases is None else cases) if not every[name].shared]
    combinations = [
        (shape, page_size, count, repetitions)
        for shape in alone
        for page_size in page_sizes or PAGE_SIZES
        for count in threads or sorted({1, len(os.sched_getaffinity(0))})
    ]
    if dtypes is None or "float32" in dtypes:
        for combination in combinations:
            rows += beside_numpy(*combination)
    if bench_ggml.is_installed() and (dtypes is None or "float16" in dtypes):
        for combination in combinations:
            if combination[0].queries == 1:
                rows += beside_ggml(*combination)
    return rows


def beside_numpy(shape: Shape, page_size: int, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure one shape in float32, this library and numpy in turn.

    Each reads memory of its own, so that neither finds in a cache what the other left there.

    Raises
    ------
    RuntimeError
        If their results differ, which would make the comparison worthless.
    """
    ours, numpy = callables(shape, page_size, threads)
    with threadpool_limits(limits=threads, user_api="blas"):
        difference = float(np.abs(ours() - numpy()).max())
        if not difference < 1e-4:
            raise RuntimeError(f"{shape.name}: numpy and paged_kv differ by {difference:g}")
        figures = _core.bench_cases([(1, None, repeated(ours)), (1, None, repeated(numpy))], repetitions)
    return _rows(f"{shape.name} float32", page_size, threads, NUMPY, figures)


def beside_ggml(shape: Shape, page_size: int, threads: int, repetitions: int) -> list[dict[str, Any]]:
    """Measure one shape of decode in float16, this library and ggml in turn; needs ``libggml-python``.

    Raises
    ------
    RuntimeError
        If their results differ by more than the float16 that ggml sums values in explains.
    """
    ours, _ = callables(shape, page_size, threads, np.float16)
    ggml = bench_ggml.FlashAttention(*contents(shape), threads)
    try:
        want = ours().astype(np.float64)
        difference = float(np.linalg.norm(ggml() - want) / np.linalg.norm(want))
        if not difference < GGML_ERROR:
            raise RuntimeError(f"{shape.name}: ggml and paged_kv differ by {difference:.1%}")
        figures = _core.bench_cases([(1, None, repeated(ours)), (1, None, repeated(ggml))], repetitions)
    finally:
        ggml.close()
    return _rows(f"{shape.name} float16", page_size, threads, GGML, figures)


def _rows(
    what: str, page_size: int, threads: int, peer: str, figures: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Make rows of figures in nanoseconds: this library's, then the peer's beside it."""
    rows = []
    for impl, figure in zip((US, peer), figures, strict=True):
        figure.update({key: figure[key] / 1e6 for key in ("value", "low", "high")})
        about = {"bench": "attention", "impl": impl, "threads": threads, "unit": "ms", "yardstick": US}
        where = f"page {page_size} adjacent" if impl == US else "contiguous"
        limit = figures[0]["value"]
        rows.append(
            about
            | {"case": f"{what} {where}, a call"}
            | figure
            | {"limit": limit, "ratio": figure["value"] / limit}
        )
    return rows


def repeated(function: Callable[[], object]) -> Callable[[int], None]:
    """Make ``work(n)`` of a function."""

    def work(n: int) -> None:
        for _ in range(n):
            function()

    return work


def contents(shape: Shape) -> tuple[Floats, Floats, Floats]:
    """Make a query, [batch * queries, num_heads, head_dim], a key and a value.

    The latter are [batch, num_kv_heads, len, head_dim]; the same each time.
    """
    rng = np.random.default_rng(0)
    dense = (shape.batch, shape.num_kv_heads, shape.len, shape.head_dim)
    key, value = (rng.random(dense, np.float32) - np.float32(0.5) for _ in range(2))
    rows = (shape.batch * shape.queries, shape.num_heads, shape.head_dim)
    return rng.random(rows, np.float32) - np.float32(0.5), key, value


def callables(
    shape: Shape, page_size: int, threads: int, dtype: npt.DTypeLike = np.float32
) -> tuple[Callable[[], npt.NDArray[Any]], Callable[[], Floats]]:
    """Make attention by this library, in `dtype`, and by numpy over the same values in float32.

    Returns
    -------
    ours, numpy : callable
        Each returns its output, [batch * queries, num_heads, head_dim].
    """
    batch, kv_heads, dim = shape.batch, shape.num_kv_heads, shape.head_dim
    pages_each = -(-shape.len // page_size)
    query, key, value = contents(shape)

    def paged(array: Floats) -> npt.NDArray[Any]:
        pages = np.zeros((batch, pages_each, kv_heads, page_size, dim), np.float32)
        for page in range(pages_each):
            tokens = array[:, :, page * page_size : (page + 1) * page_size]
            pages[:, page, :, : tokens.shape[2]] = tokens
        return pages.reshape(batch * pages_each, kv_heads, page_size, dim).astype(dtype)

    key_pages, value_pages = paged(key), paged(value)
    block_table = np.arange(batch * pages_each, dtype=np.int32).reshape(batch, pages_each)
    seq_lens = np.full(batch, shape.len, np.int32)
    cu_seqlens_q = np.arange(batch + 1, dtype=np.int32) * np.int32(shape.queries)
    own_query = query.astype(dtype)
    out = np.empty_like(own_query)

    def ours() -> npt.NDArray[Any]:
        result: npt.NDArray[Any] = paged_attention(
            own_query,
            key_pages,
            value_pages,
            block_table,
            seq_lens,
            cu_seqlens_q,
            out=out,
            num_threads=threads,
        )
        return result

    by_head = query.reshape(batch, shape.queries, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4).copy()

    def numpy() -> Floats:
        result = contiguous_attention(by_head, key, value)
        return result.transpose(0, 3, 1, 2, 4).reshape(query.shape)

    return ours, numpy


def contiguous_attention(query: Floats, key: Floats, value: Floats) -> Floats:
    """Causal attention as numpy does it best: matrix products, and softmax in place between them.

    Parameters
    ----------
    query : ndarray of float32, [batch, num_kv_heads, group, queries, head_dim]
        The last tokens of each sequence; `group` query heads share a KV head.
    key, value : ndarray of float32, [batch, num_kv_heads, len, head_dim]
        Contiguous.

    Returns
    -------
    ndarray of float32
        As `query`.
    """
    batch, kv_heads, group, queries, dim = query.shape
    length = key.shape[2]
    out = np.empty_like(query)
    scale = np.float32(dim**-0.5)
    if queries == 1:
        rows = query.reshape(batch, kv_heads, group, dim)
        out.reshape(rows.shape)[:] = _softmax_sum((rows * scale) @ key.swapaxes(2, 3), value)
        return out
    future = np.triu(np.full((QUERY_BLOCK, QUERY_BLOCK), -np.inf, np.float32), 1)
    for sequence in range(batch):
        for head in range(kv_heads):
            for start in range(0, queries, QUERY_BLOCK):
                block = query[sequence, head, :, start : start + QUERY_BLOCK]
                count = block.shape[1]
                end = length - queries + start + count
                logits = (block.reshape(-1, dim) * scale) @ key[sequence, head, :end].T
                logits.reshape(group, count, end)[:, :, end - count :] += future[:count, :count]
                result = _softmax_sum(logits, value[sequence, head, :end])
                out[sequence, head, :, start : start + count] = result.reshape(group, count, dim)
    return out


def _softmax_sum(logits: npt.NDArray[Any], value: Floats) -> Floats:
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    result: Floats = logits @ value
    result /= logits.sum(axis=-1, keepdims=True)
    return result
