"""``KvCache(device="ascend:0")`` on the fake device: the same answers as in host memory."""

from __future__ import annotations

import gc
import math
import os
import pickle
import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

import paged_kv
from ascend_device import (
    DIM,
    HEADS,
    KV_HEADS,
    TOLERANCE,
    append,
    device_cache,
    empty_pool,
    host_cache,
    read,
    rows,
    write,
)
from paged_kv import ascend
from paged_kv.ascend.__main__ import main

if TYPE_CHECKING:
    from ascend_fake import Fake


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("dtype", "layout", "page_size"),
    [
        ("float16", "HND", 16),
        ("float16", "NHD", 32),
        ("bfloat16", "HND", 32),
        ("bfloat16", "NHD", 16),
        ("float16", "HND", 128),
    ],
)
def test_field_c79_the_device_answers_as_the_host_does_whatever_the_page_size(
    dtype, layout, page_size
) -> None:
    options = {"dtype": dtype, "layout": layout, "page_size": page_size}
    device, host = device_cache(**options), host_cache(**options)
    assert device.device == "ascend:0"
    pairs = [(device, device.sequence(), device.sequence()), (host, host.sequence(), host.sequence())]
    for step, new in enumerate([(20, 0), (1, 33), (1, 1), (2, 5)]):
        query = rows(99 + step, sum(new), HEADS)
        results = []
        for cache, first, second in pairs:
            with cache.batch([first, second], list(new)) as batch:
                write(cache, batch, step)
                results += [cache.attend(layer, query, batch, return_lse=True) for layer in (0, 1)]
        for (out, lse), (want, want_lse) in zip(results[:2], results[2:], strict=True):
            assert out.dtype == np.float32
            np.testing.assert_allclose(out, want, rtol=0, atol=TOLERANCE[dtype])
            np.testing.assert_allclose(lse, want_lse, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.usefixtures("fake")
def test_forks_copy_on_write_and_keep_their_tokens() -> None:
    device, host = device_cache(), host_cache()
    answers = []
    for cache in (device, host):
        parent = cache.sequence()
        append(cache, [parent], 20, 1)
        child = parent.fork()
        with cache.batch([child], 2) as batch:
            assert len(batch.copies) == 1
            write(cache, batch, 2)
        append(cache, [parent], 3, 3)
        answers.append([read(cache, sequence, layer) for sequence in (parent, child) for layer in (0, 1)])
        cache.validate()
    np.testing.assert_allclose(answers[0], answers[1], rtol=0, atol=TOLERANCE["float16"])


@pytest.mark.usefixtures("fake")
def test_numbers_that_c_would_cut_short_are_refused() -> None:
    device = ascend.open_device(0)
    for number in (2**40, 2**32, -1):
        with pytest.raises(ValueError, match=f"device {number}: 0 to 2147483647"):
            ascend.open_device(number)
    for nbytes in (2**64, 2**64 + 32, -1):
        with pytest.raises(ValueError, match=f"^{nbytes} bytes"):
            ascend.allocate(device, nbytes)
        with pytest.raises(ValueError, match=f"^{nbytes} bytes"):
            ascend.pinned(device, nbytes)
    with pytest.raises(ValueError, match=f"^{2**81} bytes"):
        ascend.empty(device, (2**80,), "float16")
    for shape in ((-1,), (-2, -3)):
        with pytest.raises(ValueError, match="has a length below 0"):
            ascend.empty(device, shape, "float16")
    for address, shape in [(0, (4,)), (-5, (4,)), (2**64, (4,)), (2**64 - 4, (4,)), (64, (-1, -1))]:
        with pytest.raises(ValueError, match=r"address|length below 0"):
            ascend.as_tensor(address, device, shape=shape, dtype="float16")
    with pytest.raises(
        paged_kv.LayoutError, match="dtype float8; there are float16, bfloat16, float32, int32"
    ):
        ascend.empty(device, (4,), "float8")


@pytest.mark.usefixtures("fake")
def test_places_where_no_file_can_be_are_named(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PAGED_KV_ASCEND_KERNELS", "x" * 300)
    with pytest.raises(ascend.UnavailableError, match="there is no kernel library at xxx"):
        device_cache()
    ascend.open_device(0)
    monkeypatch.setenv("PAGED_KV_ASCEND_KERNELS", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    for arguments in (["build"], ["build", "--output", f"{os.devnull}/x.so"]):
        assert main(arguments) == 1
        assert re.match("/dev/null/.*so can't be built: .*'/dev/null", capsys.readouterr().err)
    assert main(["info", "--device", "-1"]) == 1
    assert capsys.readouterr().err == "device -1: 0 to 2147483647\n"


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "ascend:0: dtype float32; the kernels take float16 and bfloat16"),
        (
            {"dtype": "int8"},
            "dtype int8; the kernels take float16 and bfloat16, not quantised keys and values",
        ),
        ({"value_in_key": True, "v_head_dim": 8}, "value_in_key on ascend:0"),
        (
            {"dtype": "int8", "k_scale": 1.0, "v_scale": 1.0},
            "k_scale and v_scale on ascend:0: .* no quantised keys and values; float16 and bfloat16",
        ),
        ({"v_head_dim": 32}, "v_head_dim 32 and head_dim 16 have to be equal"),
        ({"head_dim": 24}, "head_dim 24: a multiple of 16"),
        ({"head_dim": 512}, "head_dim 512: a multiple of 16 up to 256"),
        ({"page_size": 8}, "page_size 8: a multiple of 16"),
        ({"num_layers": 0}, "num_layers=0 keeps tables only"),
        ({"overcommit": True}, "overcommit"),
        ({"device": "ascend:x"}, "device ascend:x is not supported"),
        ({"device": "cuda:0"}, "device cuda:0 is not supported: cpu and ascend:N"),
        ({"memory": "1MiB"}, "either num_pages= or memory="),
        ({"storage": []}, "one .key_pages, value_pages. per layer"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_by_name(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        device_cache(**options)


@pytest.mark.usefixtures("fake")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(paged_kv.DeviceError, match="107001"):
        device_cache(device="ascend:7")


def test_memory_is_budgeted_by_what_the_device_has(fake: Fake) -> None:
    page = 2 * 2 * KV_HEADS * 16 * DIM * 2
    fake.limit_memory(100 * page)
    assert device_cache(num_pages=None, memory=60 * page + 5).num_pages == 60
    with pytest.raises(
        paged_kv.CacheMemoryError, match=f"200 pages take {200 * page + 128} bytes; "
    ) as error:
        device_cache(num_pages=200)
    assert error.value.bytes == 200 * page + 4 * 32  # four arrays, each of which takes 32 bytes besides
    free = ascend.open_device(0).memory_info().free
    fake.limit_memory(fake.memory_used() + 4 * page)
    for sizes in ({"num_pages": 4}, {"num_pages": None, "memory": 4 * page}):
        with pytest.raises(paged_kv.CacheMemoryError, match=f"4 pages take {4 * page + 128} bytes; "):
            device_cache(**sizes)
    fake.limit_memory(fake.memory_used() + 4 * page + 128)
    assert device_cache(num_pages=4).num_pages == 4
    fake.limit_memory(free)
    fake.fail("aclrtMalloc", 207001, nth=3)
    with pytest.raises(paged_kv.DeviceError, match="device memory is exhausted"):
        device_cache(num_pages=4)
    gc.collect()


def test_arguments_that_do_not_fit_are_refused_and_nothing_is_launched(fake: Fake) -> None:
    cache = device_cache()
    device, other = ascend.open_device(0), ascend.open_device(1)
    good, query = rows(0, 3), rows(0, 3, HEADS)
    on_device = ascend.empty(device, query.shape, "float16")
    with cache.batch([cache.sequence()], 3) as batch:
        launched = fake.calls("aclrtMemcpyAsync"), len(fake.called())
        for key, message in [
            (rows(0, 2), r"key has shape \[2, 2, 16\] instead of \[3, 2, 16\]"),
            (good.astype(np.float64), "key is float64"),
            (good.astype(">f2"), "key is >f2 of the other byte order"),
            (good.astype(">f4"), "key is >f4 of the other byte order"),
            (good.astype(">u2"), "key is >u2 of the other byte order"),
            (
                ascend.empty(device, good.shape, "bfloat16"),
                "key is bfloat16 on the device, the cache float16",
            ),
            (ascend.empty(other, good.shape, "float16"), "key is on ascend:1, the cache on ascend:0"),
        ]:
            with pytest.raises(paged_kv.LayoutError, match=message):
                cache.write(0, key, good, batch)
        with pytest.raises(TypeError, match="key must be an array"):
            cache.write(0, [[[0.0] * DIM] * KV_HEADS] * 3, good, batch)
        with pytest.raises(ValueError, match="layer 2 is not below 2"):
            cache.write(2, good, good, batch)
        for options, message in [
            ({"alibi_slopes": np.zeros(HEADS, np.float32)}, "alibi_slopes on ascend:0"),
            ({"sinks": np.zeros(HEADS, np.float32)}, "sinks on ascend:0"),
            ({"return_error_bound": True}, "return_error_bound"),
            ({"logits_soft_cap": -1.0}, "logits_soft_cap must be 0 .off. or positive, not -1"),
            ({"logits_soft_cap": math.inf}, "logits_soft_cap must be 0 .off. or positive, not inf"),
            ({"logits_soft_cap": 1e300}, "logits_soft_cap must be 0 .off. or positive, not inf"),
            ({"logits_soft_cap": math.nan}, "logits_soft_cap must be 0 .off. or positive, not nan"),
            ({"scale": math.nan}, "scale must be finite, not nan"),
            ({"scale": -math.inf}, "scale must be finite, not -inf"),
            ({"scale": 1e300}, "scale must be finite, not inf"),
            ({"window_left": -2}, "window_left -2"),
            ({"out": query.astype(">f4")}, "out is >f4"),
            ({"out": np.zeros((3, HEADS, DIM), np.float16)}, "out is float16"),
        ]:
            with pytest.raises(ValueError, match=message):
                cache.attend(0, query, batch, **options)
        with pytest.raises(paged_kv.LayoutError, match="3 query heads over 2 KV heads"):
            cache.attend(0, rows(0, 3, 3), batch)
        with pytest.raises(paged_kv.LayoutError, match="query has 2 rows, the batch 3"):
            cache.attend(0, query[:2], batch)
        with pytest.raises(paged_kv.LayoutError, match=r"instead of \[tokens, num_heads, 16\]"):
            cache.attend(0, rows(0, 3, HEADS, 32), batch)
        with pytest.raises(paged_kv.LayoutError, match="query is >f2 of the other byte order"):
            cache.attend(0, query.astype(">f2"), batch)
        with pytest.raises(paged_kv.LayoutError, match="needs out="):
            cache.attend(0, on_device, batch)
        with pytest.raises(paged_kv.LayoutError, match="out is in host memory"):
            cache.attend(0, on_device, batch, out=query)
        with pytest.raises(paged_kv.LayoutError, match="out is bfloat16"):
            cache.attend(0, on_device, batch, out=ascend.empty(device, query.shape, "bfloat16"))
        assert fake.calls("aclrtMemcpyAsync") == launched[0]
    with pytest.raises(ValueError, match="committed or closed"):
        cache.write(0, good, good, batch)
    for stream, error in [("x", TypeError), (ascend.Stream(other), ValueError)]:
        with pytest.raises(error):
            cache.batch([cache.sequence()], 1, stream=stream)
    assert empty_pool(cache)


@pytest.mark.usefixtures("fake")
def test_field_c78_an_entry_out_of_range_never_reaches_the_device() -> None:
    """The classic way to error 507015."""
    cache, tables = device_cache(), paged_kv.KvCache(num_layers=0, num_pages=16)
    sequence = tables.sequence()
    with tables.batch([sequence], 20) as batch:
        make, arguments = pickle.loads(pickle.dumps(batch)).__reduce__()
    bad_page, bad_slot, bad_len = (list(arguments) for _ in range(3))
    bad_page[3] = np.array([[3, 16]], np.int32)
    bad_slot[6] = np.array([*range(19), 256], np.int64)
    bad_len[4] = np.array([40], np.int32)
    query = rows(0, 20, HEADS)
    with pytest.raises(paged_kv.InvalidPageError, match=r"block_table\[0, 1\] is 16, none of the 16 pages"):
        cache.attend(0, query, make(*bad_page))
    with pytest.raises(paged_kv.InvalidPageError, match="slot 256 is in page 16, not below 16"):
        cache.write(0, rows(0, 20), rows(0, 20), make(*bad_slot))
    with pytest.raises(paged_kv.LayoutError, match="lengths from 0 to 40 in tables of 32 tokens"):
        cache.attend(0, query, make(*bad_len))
    view = make(*arguments)
    cache.write(0, rows(0, 20), rows(1, 20), view)
    assert cache.attend(0, query, view).shape == (20, HEADS, DIM)


@pytest.mark.usefixtures("fake")
def test_a_slot_that_is_there_twice_is_named() -> None:
    cache, tables = device_cache(), paged_kv.KvCache(num_layers=0, num_pages=16)
    with tables.batch([tables.sequence()], 5) as batch:
        make, arguments = pickle.loads(pickle.dumps(batch)).__reduce__()
    arguments = list(arguments)
    arguments[6] = np.array([-1, 18, -1, 17, 18], np.int64)
    with pytest.raises(ValueError, match="slot 18 is there twice"):
        cache.write(0, rows(0, 5), rows(0, 5), make(*arguments))
    arguments[6][1] = 16
    cache.write(0, rows(0, 5), rows(0, 5), make(*arguments))


@pytest.mark.usefixtures("fake")
def test_a_view_of_another_cache_is_followed() -> None:
    cache, host = device_cache(), host_cache()
    parent = host.sequence()
    answers = []
    for new, fork in ((20, False), (1, True), (1, False)):
        sequence = parent.fork() if fork else parent
        with host.batch([sequence], new) as batch:
            view = pickle.loads(pickle.dumps(batch))
            cache.copy_pages(view.copies)
            for each, step in ((cache, view), (host, batch)):
                each.write(0, rows(new, new), rows(new + 1, new), step)
                answers.append(each.attend(0, rows(5, new, HEADS), step))
    for got, want in zip(answers[::2], answers[1::2], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=4e-3)


@pytest.mark.usefixtures("fake")
def test_copies_in_a_chain_are_made_in_order() -> None:
    cache = device_cache()
    keys = cache.key_pages(0)
    start = np.arange(16, dtype=np.float16)[:, None, None, None] * np.ones(keys.shape[1:], np.float16)
    keys.memory.copy_from(np.ascontiguousarray(start))
    copies = [(0, 1), (1, 2), (3, 4), (5, 3), (6, 3), (6, 7)]
    cache.copy_pages(copies)
    want = list(range(16))
    for source, destination in copies:
        want[destination] = want[source]
    assert keys.numpy()[:, 0, 0, 0].tolist() == want
    for bad in ([(0, 16)], [(-1, 2)], [(3, 3)]):
        with pytest.raises(paged_kv.InvalidPageError):
            cache.copy_pages(bad)


@pytest.mark.usefixtures("fake")
def test_the_null_page_is_zero_and_stays_so() -> None:
    cache = device_cache(null_page=True)
    append(cache, [cache.sequence(), cache.sequence()], [17, 3], 0)
    for layer in (0, 1):
        assert not cache.key_pages(layer).numpy()[0].any()
        assert not cache.value_pages(layer).numpy()[0].any()


def test_prefetch_asks_for_no_more_than_the_second_level_cache_holds(fake: Fake) -> None:
    cache = device_cache()
    sequence = cache.sequence()
    append(cache, [sequence], 40, 0)
    page = KV_HEADS * 16 * DIM * 2
    before = fake.calls("aclrtCmoAsync")
    assert sequence.prefetch() == 2 * 2 * 3 * page
    assert fake.calls("aclrtCmoAsync") - before == 12
    assert sequence.prefetch(max_bytes=2 * page + 64) == 2 * page + 64
    assert sequence.prefetch(max_bytes=0) == 0


@pytest.mark.usefixtures("fake")
def test_windows_and_soft_caps_are_those_of_the_host() -> None:
    answers = []
    for cache in (device_cache(window_left=5), host_cache(window_left=5)):
        sequence = cache.sequence()
        append(cache, [sequence], 37, 0)
        with cache.batch([sequence], 0, num_queries=3) as batch:
            answers.append(
                [
                    cache.attend(0, rows(1, 3, HEADS), batch, **options)
                    for options in (
                        {},
                        {"window_left": -1},
                        {"logits_soft_cap": 2.0},
                        {"causal": False},
                        {"scale": 0.1},
                    )
                ]
            )
    np.testing.assert_allclose(*answers, rtol=0, atol=4e-3)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("num_queries", [[1, 1], [2, 3]])
def test_a_sequence_without_tokens_in_a_step_gets_zeros(num_queries) -> None:
    answers = []
    for cache in (device_cache(), host_cache()):
        full, empty = cache.sequence(), cache.sequence()
        append(cache, [full], 20, 0)
        query = rows(1, sum(num_queries), HEADS)
        with cache.batch([full, empty], 0, num_queries=num_queries) as batch:
            answers.append(cache.attend(0, query, batch, return_lse=True))
    (out, lse), (want, want_lse) = answers
    assert not out[num_queries[0] :].any()
    assert (lse[num_queries[0] :] == -np.inf).all()
    np.testing.assert_allclose(out, want, rtol=0, atol=4e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=0, atol=4e-3)


@pytest.mark.usefixtures("fake")
def test_two_devices_at_once() -> None:
    caches = [device_cache(device=f"ascend:{i}") for i in (0, 1)]
    sequences = [cache.sequence() for cache in caches]
    for i, (cache, sequence) in enumerate(zip(caches, sequences, strict=True)):
        append(cache, [sequence], 20, i)
    first, second = (read(cache, sequence) for cache, sequence in zip(caches, sequences, strict=True))
    assert not np.allclose(first, second)
    with pytest.raises(ValueError, match="another cache"):
        caches[0].batch([sequences[1]], 1)
