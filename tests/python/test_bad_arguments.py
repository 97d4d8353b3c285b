"""Whatever is passed, the answer is a result or an exception of Python's, never a panic of Rust's."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import paged_kv
from model import DIM, HEADS, V_DIM, rows, small_cache, step


def weird(cache: paged_kv.KvCache) -> Iterator[Any]:
    yield from (None, -1, 0, 1, 3, 2**31, 2**32, 2**40, 2**63, 2**64, -(2**63), True, 1.5)
    yield from (
        float("nan"),
        float("inf"),
        "",
        "x",
        b"",
        [],
        [1],
        [-1],
        [2**70],
        [None],
        (),
        {},
        object(),
        int,
    )
    for dtype in (np.float32, np.int32, np.int64, np.uint64, bool, object):
        for shape in (
            (),
            (0,),
            (1,),
            (0, 0),
            (1, 2),
            (0, 0, 0),
            (1, 1, 1),
            (2, 0, 8),
            (1, 1, 1, 1),
            (1,) * 12,
        ):
            yield np.zeros(shape, dtype)
    yield np.full(3, -1)
    yield np.full(3, 2**62)
    yield np.array([np.iinfo(np.int64).min])
    yield np.broadcast_to(np.zeros((), np.int32), (2**50,))
    yield np.broadcast_to(np.zeros((), np.float32), (2**20, 2**20, 2**20))
    yield np.zeros((3, 4, 8), np.float32)[::-1, ::-1]
    seq = cache.sequence()
    yield seq
    yield [seq, seq]
    yield cache.key_pages(0)
    closed = cache.batch([seq], 1)
    closed.close()
    yield closed


def calls(cache: paged_kv.KvCache) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every callable with arguments that work."""
    seq = cache.sequence()
    step(cache, [seq], [[1, 2, 3, 4, 5]])
    batch = cache.batch([seq], 2)
    view_class, view_arguments = batch.__reduce__()  # type: ignore[misc]
    key, value, query = rows(0, [6, 7], DIM), rows(0, [6, 7], V_DIM), rows(0, [6, 7], DIM, HEADS)
    keys, values = (np.zeros((4, 2, 4, dim), np.float32) for dim in (DIM, V_DIM))
    lse = np.zeros((2, HEADS), np.float32)
    other = cache.sequence()
    handles = cache.pool.alloc(2)
    attention = {"scale": 1.0, "causal": True, "window_left": 3, "logits_soft_cap": 1.0, "return_lse": True}
    attention |= {
        "alibi_slopes": np.zeros(HEADS),
        "sinks": np.zeros(HEADS),
        "out": np.zeros((2, 4, 6), np.float32),
    }
    names = list(inspect.signature(view_class).parameters)
    return {
        "KvCache": (small_cache, {"layout": "HND", "window_left": -1, "device": "cpu", "storage": None}
            | {"null_page": False, "memory": None, "page_bytes": None, "num_pages": 4, "num_layers": 1}
            | {"dtype": "float16", "page_size": 4, "num_kv_heads": 1, "head_dim": 2, "v_head_dim": 2}
            | {"huge_pages": "off", "overcommit": False, "num_threads": 1}),
        "sequence": (cache.sequence, {"token_ids": [1]}),
        "batch": (cache.batch, {"seqs": [other], "num_new_tokens": 1, "token_ids": [1], "num_queries": 1}),
        "reorder": (cache.reorder, {"seqs": [other], "indices": [0]}),
        "write": (cache.write, {"layer": 0, "key": key, "value": value, "batch": batch}),
        "attend": (cache.attend, {"layer": 0, "query": query, "batch": batch, **attention}),
        "copy_pages": (cache.copy_pages, {"copies": [(3, 4)]}),
        "key_pages": (cache.key_pages, {"layer": 0, "writable": False}),
        "stats": (cache.stats, {"detail": True}),
        "append": (other.append, {"n": 1}),
        "extend": (other.extend, {"token_ids": [1]}),
        "truncate": (other.truncate, {"n": 0}),
        "commit": (other.commit, {"n": None}),
        "physical_address": (seq.physical_address, {"layer": 0, "position": 1, "which": "key", "head": 0}),
        "physical_offset": (seq.physical_offset, {"byte_offset": 3}),
        "prefetch": (seq.prefetch, {"max_bytes": 64}),
        "fill": (batch.fill, {"block_table": np.zeros((2, 3), int), "seq_lens": np.zeros(2, int)}
            | {"kv_indices": np.zeros(9, int), "slot_mapping": np.zeros(2, int)}),
        "Batch.commit": (cache.batch([other], 0).commit, {"num_tokens": [0]}),
        "BatchView": (view_class, dict(zip(names, view_arguments, strict=True))),
        "alloc": (cache.pool.alloc, {"n": 0}),
        "page_ids": (cache.pool.page_ids, {"handles": handles}),
        "retain": (cache.pool.retain, {"handles": handles}),
        "release": (cache.pool.release, {"handles": []}),
        "ref_count": (cache.pool.ref_count, {"handles": handles}),
        "owners": (cache.pool.owners, {"handles": handles}),
        "paged_attention": (
            paged_kv.paged_attention,
            {"query": query, "key_pages": keys, "value_pages": values, "block_table": np.zeros((1, 2), int)}
            | {"seq_lens": np.array([5]), "cu_seqlens_q": np.array([0, 2]), "layout": "HND", "num_threads": 1}
            | attention,
        ),
        "write_pages": (
            paged_kv.write_pages,
            {"key": key, "value": value, "key_pages": keys, "value_pages": values, "layout": "HND"}
            | {"slot_mapping": np.array([0, 1])},
        ),
        "merge_states": (paged_kv.merge_states, {"out_a": query, "lse_a": lse, "out_b": query, "lse_b": lse}),
        "alibi_slopes": (paged_kv.alibi_slopes, {"num_heads": 3}),
        "kv_bytes_per_token": (
            paged_kv.kv_bytes_per_token,
            {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 1, "dtype": "float16"},
        ),
        "set_isa": (paged_kv.set_isa, {"name": "scalar"}),
    }  # fmt: skip


NAMES = list(calls(small_cache(num_pages=64)))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_makes_rust_panic(name: str) -> None:
    cache = small_cache(num_pages=64)
    isa = paged_kv.isa()
    function, good = calls(cache)[name]
    function(**good)
    if name in ("Batch.commit", "reorder"):
        function, good = calls(cache)[name]
    strange = list(weird(cache))
    picks = itertools.chain(
        ((argument, thing) for argument in good for thing in strange),
        ((None, thing) for thing in strange),
    )
    for argument, thing in picks:
        arguments = good | {argument: thing} if argument else dict.fromkeys(good, thing)
        try:
            function(**arguments)
        except (Exception, paged_kv.PagedKvError) as error:
            # A panic would be no Exception, and so not be caught here.
            assert str(error) or isinstance(error, (KeyError, MemoryError)), (argument, thing)  # noqa: PT017
    paged_kv.set_isa(isa)
    cache.validate()
