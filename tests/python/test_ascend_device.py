"""``KvCache(device="ascend:0")`` on the fake device: the same answers as in host memory."""

from __future__ import annotations

import gc
import math
import os
import pickle
import re
from typing import TYPE_CHECKING, Any

import ml_dtypes
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
from paged_kv.ascend import dlpack
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
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", "bits"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_arrays_of_the_host_are_converted_both_ways(dtype, kind) -> None:
    numpy_dtype = {"bfloat16": ml_dtypes.bfloat16, "bits": ml_dtypes.bfloat16}.get(kind, kind)
    key, value, query = (
        rows(i, 5, heads).astype(numpy_dtype) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))
    )
    answers = []
    for cache in (device_cache(dtype=dtype), host_cache(dtype=dtype)):
        arrays = [array.view(np.uint16) if kind == "bits" else array for array in (key, value, query)]
        with cache.batch([cache.sequence()], 5) as batch:
            cache.write(0, arrays[0][::1], arrays[1], batch)
            out = np.zeros_like(arrays[2])
            assert cache.attend(0, arrays[2], batch, out=out) is out
        answers.append(out.view(ml_dtypes.bfloat16 if kind == "bits" else out.dtype).astype(np.float32))
    np.testing.assert_allclose(
        *answers, rtol=0, atol=0.05 if "bfloat16" in (dtype, str(kind)) or kind == "bits" else 4e-3
    )


def test_arrays_of_the_device_are_used_where_they_are_and_nothing_is_waited_for(fake: Fake) -> None:
    cache, host = device_cache(), host_cache()
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    arrays = [rows(i, 20, heads).astype(np.float16) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))]
    key, value, query, out = (ascend.empty(device, array.shape, "float16") for array in (*arrays, arrays[2]))
    for tensor, array in zip((key, value, query), arrays, strict=True):
        tensor.memory.copy_from(array)
    calls = fake.calls("aclrtMemcpyAsync")
    sequence = cache.sequence()
    with fake.held(stream), cache.batch([sequence], 20, stream=stream) as batch:
        cache.write(0, key, value, batch)
        got, lse = cache.attend(0, query, batch, out=out, return_lse=True)
        assert got is out
        batch.commit()  # before anything was done
        assert fake.pending(stream) > 2
        assert fake.calls("aclrtMemcpyAsync") - calls == 1  # the batch's arrays, at once
    with host.batch([host.sequence()], 20) as batch:
        host.write(0, arrays[0], arrays[1], batch)
        want, want_lse = host.attend(0, arrays[2], batch, return_lse=True)
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=4e-3)
    np.testing.assert_allclose(lse.numpy(), want_lse, rtol=0, atol=4e-3)
    assert out.numpy().dtype == np.float16


def test_storage_of_the_device_is_adopted_and_pages_are_given_out(fake: Fake) -> None:
    device = ascend.open_device(0)
    arrays = [[ascend.empty(device, (8, KV_HEADS, 16, DIM), "float16") for _ in range(2)] for _ in range(2)]
    used = fake.memory_used()
    cache = paged_kv.KvCache(num_layers=2, device="npu:0", storage=(pair for pair in arrays))
    assert fake.memory_used() == used
    assert (cache.device, cache.num_pages, cache.page_size) == ("ascend:0", 8, 16)
    assert (cache.num_kv_heads, cache.head_dim, cache.dtype) == (KV_HEADS, DIM, "float16")
    sequence = cache.sequence()
    append(cache, [sequence], 17, 0)
    pages = sequence.block_table
    keys = arrays[1][0].numpy()
    want = rows(1, 17).astype(np.float16)
    np.testing.assert_array_equal(keys[pages[0]].swapaxes(0, 1), want[:16])
    np.testing.assert_array_equal(keys[pages[1]][:, 0], want[16])
    assert cache.key_pages(1).data_ptr == arrays[1][0].data_ptr
    assert cache.value_pages(1).shape == (8, KV_HEADS, 16, DIM)
    base, page_bytes = arrays[1][1].data_ptr, KV_HEADS * 16 * DIM * 2
    place = int(pages[1]) * page_bytes + 1 * 16 * DIM * 2
    assert sequence.physical_address(1, 16, "value", head=1) == base + place


class Foreign:
    """Somebody's array: DLPack is all that it has."""

    def __init__(self, tensor: ascend.DeviceTensor, versioned: bool) -> None:
        self.tensor, self.versioned = tensor, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: object) -> object:
        if not self.versioned and "max_version" in options:
            raise TypeError("max_version")
        return self.tensor.__dlpack__(max_version=(1, 0) if self.versioned else None)


def test_dlpack_carries_device_arrays_both_ways(fake: Fake) -> None:
    device = ascend.open_device(1)
    tensor = ascend.empty(device, (3, 4), "bfloat16")
    tensor.memory.copy_from(np.arange(12, dtype=np.uint16))

    for versioned in (True, False):
        got = ascend.as_tensor(Foreign(tensor, versioned), device)
        assert (got.shape, got.dtype, got.data_ptr) == ((3, 4), "bfloat16", tensor.data_ptr)
        np.testing.assert_array_equal(got.numpy(), np.arange(12, dtype=np.uint16).reshape(3, 4))
        assert (
            tensor.__dlpack__(max_version=(1, 0) if versioned else None) is not None
        )  # not taken by anybody
    address = ascend.as_tensor(tensor.data_ptr, device, shape=(12,), dtype="bfloat16", owner=tensor)
    assert address.numpy()[5] == 5
    with pytest.raises(BufferError):
        tensor.__dlpack__(copy=True)
    with pytest.raises(paged_kv.LayoutError, match=r"\(12, 1\), the cache on ascend:0"):
        ascend.as_tensor(Foreign(tensor, True), ascend.open_device(0))
    del got, address
    used = fake.memory_used(1)
    del tensor
    gc.collect()
    assert fake.memory_used(1) < used


def test_a_consumer_that_refuses_says_why_and_keeps_nothing(fake: Fake) -> None:
    tensor = ascend.empty(ascend.open_device(0), (1024, 4), "float16")
    for source in (tensor, Foreign(tensor, True), Foreign(tensor, False)):
        with pytest.raises((BufferError, RuntimeError), match="nsupported device"):
            np.from_dlpack(source)
    used = fake.memory_used()
    del tensor, source
    gc.collect()
    assert fake.memory_used() < used


class Marked(Foreign):
    """An array whose capsule says that it is read-only, or of some version."""

    def __init__(self, tensor: ascend.DeviceTensor, field: str, value: int) -> None:
        super().__init__(tensor, True)
        self.field, self.value = field, value

    def __dlpack__(self, **options: Any) -> object:
        capsule = super().__dlpack__(**options)
        address = dlpack._api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        setattr(dlpack._Versioned.from_address(address), self.field, self.value)
        return capsule


def test_read_only_arrays_and_unknown_versions_are_refused(fake: Fake) -> None:
    device, cache = ascend.open_device(0), device_cache()
    query = ascend.empty(device, (1, HEADS, DIM), "float16")
    query.memory.copy_from(np.zeros(query.nbytes, np.uint8))
    pages = [ascend.empty(device, (8, KV_HEADS, 16, DIM), "float16") for _ in range(2)]
    marked = Marked(ascend.empty(device, (1, HEADS, DIM), "float16"), "flags", 1)
    with cache.batch([cache.sequence()], 1) as batch:
        for out in (marked, ascend.as_tensor(marked, device)):
            with pytest.raises(paged_kv.LayoutError, match="out is read-only"):
                cache.attend(0, query, batch, out=out)
        cache.attend(0, Marked(query, "flags", 1), batch, out=marked.tensor)
        with pytest.raises(paged_kv.LayoutError, match=r"DLPack version 2\.0; up to 1 is taken"):
            cache.attend(0, Marked(query, "major", 2), batch, out=marked.tensor)
    with pytest.raises(paged_kv.LayoutError, match="value_pages of layer 0 in storage is read-only"):
        storage = [(pages[0], Marked(pages[1], "flags", 1))]
        paged_kv.KvCache(num_layers=1, device="ascend:0", storage=storage)
    again = ascend.as_tensor(ascend.as_tensor(marked, device), device)
    with pytest.raises(BufferError, match="readonly"):
        again.__dlpack__()
    used = fake.memory_used()
    del query, pages, marked, out, storage, again
    gc.collect()
    assert fake.memory_used() < used


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


class TorchDevice:
    type, index = "npu", 0


class TorchTensor:
    """What torch_npu's tensors have."""

    def __init__(self, tensor: ascend.DeviceTensor, strides: tuple[int, ...] | None = None) -> None:
        self.tensor, self.strides = tensor, strides or tensor.strides
        self.shape, self.dtype, self.device = tensor.shape, f"torch.{tensor.dtype}", TorchDevice()

    def data_ptr(self) -> int:
        return self.tensor.data_ptr

    def stride(self) -> tuple[int, ...]:
        return self.strides


@pytest.mark.usefixtures("fake")
def test_field_c80_torch_tensors_are_taken_by_address_and_views_of_them_refused() -> None:
    device = ascend.open_device(0)
    key, value, query, out = (
        ascend.empty(device, (3, heads, DIM), "float16") for heads in (KV_HEADS, KV_HEADS, HEADS, HEADS)
    )
    for tensor in (key, value, query):
        tensor.memory.copy_from(rows(tensor.shape[1], 3, tensor.shape[1]).astype(np.float16))
    cache, host = device_cache(), host_cache()
    with cache.batch([cache.sequence()], 3) as batch:
        cache.write(0, TorchTensor(key), TorchTensor(value), batch)
        cache.attend(0, TorchTensor(query), batch, out=TorchTensor(out))
        sliced = (2 * KV_HEADS * DIM, DIM, 1)  # keys and values behind each other in one tensor
        for arguments in ((TorchTensor(key, sliced), value), (key, TorchTensor(value, sliced))):
            with pytest.raises(paged_kv.LayoutError, match=r"has strides \[64, 16, 1\]: not contiguous"):
                cache.write(0, *arguments, batch)
    with host.batch([host.sequence()], 3) as batch:
        host.write(0, rows(KV_HEADS, 3), rows(KV_HEADS, 3), batch)
        want = host.attend(0, rows(HEADS, 3, HEADS), batch)
    np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=4e-3)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "ascend:0: dtype float32; the kernels take float16 and bfloat16"),
        ({"dtype": "int8"}, "ascend:0: dtype int8"),
        ({"value_in_key": True, "v_head_dim": 8}, "value_in_key"),
        ({"dtype": "int8", "k_scale": 1.0, "v_scale": 1.0}, "k_scale"),
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


def part(memory: ascend.DeviceMemory, offset: int, shape: tuple[int, ...]) -> ascend.DeviceTensor:
    return ascend.DeviceTensor(memory[offset:], shape, "float16")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("tokens", [1, 5])
def test_an_output_in_the_way_of_what_is_read_is_refused(tokens) -> None:
    device, cache = ascend.open_device(0), device_cache()
    shape = (tokens, HEADS, DIM)
    memory = ascend.allocate(device, 2 * tokens * HEADS * DIM * 2 + 64)
    memory.copy_from(np.zeros(memory.nbytes, np.uint8))
    query = part(memory, 64, shape)
    sequence = cache.sequence()
    append(cache, [sequence], 20, 0)
    with cache.batch([sequence], tokens) as batch:
        write(cache, batch, 1)
        for out, message in [
            (part(memory, 0, shape), "out, 0x[0-9a-f]+ to 0x[0-9a-f]+, overlaps query, 0x"),
            (part(memory, 96, shape), "out, 0x[0-9a-f]+ to 0x[0-9a-f]+, overlaps query, 0x"),
            (part(memory, 64 + query.nbytes - 32, shape), "overlaps query"),
            (part(memory, 66, shape), "out begins at 0x[0-9a-f]+, no multiple of 32"),
            (part(cache.value_pages(1).memory, 4096, shape), "lies in the cache's own pages at 0x"),
        ]:
            with pytest.raises(paged_kv.LayoutError, match=message):
                cache.attend(0, query, batch, out=out)
        after = part(memory, 64 + query.nbytes, shape)
        cache.attend(0, query, batch, out=after)
        cache.attend(0, query, batch, out=query)
        np.testing.assert_array_equal(query.numpy(), after.numpy())


@pytest.mark.usefixtures("fake")
def test_storage_that_overlaps_is_refused() -> None:
    device, shape = ascend.open_device(0), (8, KV_HEADS, 16, DIM)
    nbytes = 8 * KV_HEADS * 16 * DIM * 2
    memory = ascend.allocate(device, 2 * nbytes + 64)
    for first, second in [(0, 64), (64, 0), (0, 0), (64, 64 + nbytes - 32)]:
        pair = (part(memory, first, shape), part(memory, second, shape))
        with pytest.raises(paged_kv.LayoutError, match=r"value_pages of layer 0 .* overlaps the array given"):
            paged_kv.KvCache(num_layers=1, device="ascend:0", storage=[pair])
    pair = (part(memory, nbytes, shape), part(memory, 0, shape))
    assert paged_kv.KvCache(num_layers=1, device="ascend:0", storage=[pair]).num_pages == 8


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
