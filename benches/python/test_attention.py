"""Attention of the cases of ``paged-kv bench attention``, ours and numpy's, over float32 and bfloat16.

``pytest benches/python/test_attention.py --benchmark-enable --benchmark-only`` compares one commit with
another (``--benchmark-autosave``, ``--benchmark-compare``); ``paged-kv bench attention`` has the machine's
limits beside it.
"""

import ml_dtypes
import numpy as np
import pytest

from paged_kv.cli.bench_attention import callables, shapes

SHAPES = shapes()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("name", SHAPES)
def test_attend(benchmark, name: str, page_size: int, dtype: type) -> None:
    ours, _ = callables(SHAPES[name], page_size, threads=2, dtype=dtype)
    assert np.isfinite(benchmark(ours).astype(np.float32)).all()


@pytest.mark.parametrize("name", SHAPES)
def test_numpy_over_contiguous_arrays(benchmark, name: str) -> None:
    _, numpy = callables(SHAPES[name], 128, threads=2)
    assert np.isfinite(benchmark(numpy)).all()
