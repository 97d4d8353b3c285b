"""Arrays that a cache on the fake device takes and gives: of the host, of the device, of other libraries."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

import paged_kv
from ascend_device import (
    DIM,
    HEADS,
    KV_HEADS,
    append,
    device_cache,
    host_cache,
    rows,
    write,
)
from paged_kv import ascend
from paged_kv.ascend import dlpack

if TYPE_CHECKING:
    from ascend_fake import Fake


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


class OnlyDlpack:
    """An array of the host, of which nothing but DLPack is known."""

    def __init__(self, array: np.ndarray, versioned: bool = True) -> None:
        self.array, self.versioned = array, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, *, stream: None = None, **options: Any) -> object:
        assert stream is None
        if not self.versioned and "max_version" in options:
            raise TypeError("max_version")
        bits = self.array.dtype.name == "bfloat16"
        capsule = (self.array.view(np.int16) if bits else self.array).__dlpack__(**options)
        if bits:
            name = b"dltensor_versioned" if self.versioned else b"dltensor"
            dlpack._KINDS[name].from_address(dlpack._api.PyCapsule_GetPointer(capsule, name)).tensor.code = 4
        return capsule


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_arrays_of_the_host_may_have_nothing_but_dlpack(kind, versioned) -> None:
    numpy_dtype = ml_dtypes.bfloat16 if kind == "bfloat16" else kind
    key, value, query = (
        rows(i, 5, heads).astype(numpy_dtype) for i, heads in enumerate((KV_HEADS, KV_HEADS, HEADS))
    )
    sliced = np.zeros((5, 2 * KV_HEADS, DIM), numpy_dtype)
    sliced[:, KV_HEADS:] = value
    kinds = []
    answers = []
    for cache in (device_cache(), host_cache()):
        with cache.batch([cache.sequence()], 5) as batch:
            arrays = [OnlyDlpack(array, versioned) for array in (key, sliced[:, KV_HEADS:], query)]
            cache.write(0, *arrays[:2], batch)
            out, lse = cache.attend(0, arrays[2], batch, return_lse=True)
            kinds.append([(type(array), array.dtype, array.shape) for array in (out, lse)])
            given = OnlyDlpack(np.zeros_like(query), versioned)
            assert cache.attend(0, arrays[2], batch, out=given) is given
            np.testing.assert_array_equal(given.array, np.asarray(out))
            answers.append(np.asarray(out).astype(np.float32))
            for bad, message in [
                (OnlyDlpack(np.zeros((4, HEADS, DIM), numpy_dtype)), "out"),
                (OnlyDlpack(np.zeros_like(query, dtype=np.float64)), "out|float64|type code"),
            ]:
                with pytest.raises(ValueError, match=message):
                    cache.attend(0, arrays[2], batch, out=bad)
    assert kinds[0] == kinds[1]
    np.testing.assert_allclose(*answers, rtol=0, atol=0.03 if kind == "bfloat16" else 4e-3)


@pytest.mark.usefixtures("fake")
def test_an_output_of_the_host_that_cannot_be_written_to_is_refused() -> None:
    cache, query = device_cache(), rows(0, 1, HEADS)
    fixed = np.zeros_like(query)
    fixed.flags.writeable = False
    with cache.batch([cache.sequence()], 1) as batch:
        write(cache, batch, 0)
        for out in (fixed, OnlyDlpack(fixed)):
            with pytest.raises(paged_kv.LayoutError, match=r"out is float32 .*, writable: False"):
                cache.attend(0, query, batch, out=out)
        with pytest.raises(TypeError, match="out must be an array, not list"):
            cache.attend(0, query, batch, out=query.tolist())
        with pytest.raises(paged_kv.LayoutError, match="out is on the device, the query in host memory"):
            cache.attend(0, query, batch, out=ascend.empty(ascend.open_device(0), query.shape, "float16"))


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("versioned", [True, False])
def test_storage_may_have_nothing_but_dlpack(versioned) -> None:
    device, shape = ascend.open_device(0), (8, KV_HEADS, 16, DIM)
    pages = [ascend.empty(device, shape, "bfloat16") for _ in range(2)]
    cache = paged_kv.KvCache(
        num_layers=1, device="ascend:0", storage=[[Foreign(tensor, versioned) for tensor in pages]]
    )
    assert (cache.dtype, cache.num_pages, cache.page_size, cache.head_dim) == ("bfloat16", 8, 16, DIM)
    assert cache.value_pages(0).data_ptr == pages[1].data_ptr


@pytest.mark.usefixtures("fake")
def test_storage_that_is_none_is_named() -> None:
    device, shape = ascend.open_device(0), (8, KV_HEADS, 16, DIM)
    pages = [ascend.empty(device, shape, "float16") for _ in range(2)]
    with pytest.raises(TypeError, match="key_pages of layer 0 in storage must be an array, not str"):
        paged_kv.KvCache(num_layers=1, device="ascend:0", storage=[("pages", "pages")])
    for layers, message in [
        ([pages * 2], r"layer 0 in storage has 4 arrays: \(key_pages, value_pages\) .* no quantised"),
        ([pages, pages[:1]], "layer 1 in storage has 1 arrays"),
    ]:
        with pytest.raises(paged_kv.LayoutError, match=message):
            paged_kv.KvCache(num_layers=len(layers), device="ascend:0", storage=layers)
    with pytest.raises(paged_kv.LayoutError, match="key_pages of layer 0 in storage is in host memory"):
        paged_kv.KvCache(num_layers=1, device="ascend:0", storage=[[np.zeros(shape, np.float16)] * 2])
    with pytest.raises(paged_kv.LayoutError, match="key_pages of layer 0 in storage is in host memory"):
        paged_kv.KvCache(
            num_layers=1, device="ascend:0", storage=[[OnlyDlpack(np.zeros(shape, np.float16))] * 2]
        )
    with pytest.raises(TypeError, match="value_pages of layer 0 in storage must be an array, not None"):
        paged_kv.KvCache(num_layers=1, device="ascend:0", storage=[(pages[0], None)])


@pytest.mark.usefixtures("fake")
def test_numbers_that_c_would_cut_short_are_refused() -> None:
    device = ascend.open_device(0)
    stream, cache = ascend.Stream(device), device_cache()
    sequence = cache.sequence()
    for handle in (2**64 + stream.handle, stream.handle - 2**64, 0):
        with pytest.raises(ValueError, match=f"stream {handle} is no handle"):
            cache.batch([sequence], 1, stream=handle)
        with pytest.raises(ValueError, match="is no handle"):
            ascend.Stream(device, handle)
    assert len(sequence) == 0
    for timeout in (-1, 2**31 / 1000, float("nan")):
        with pytest.raises(ValueError, match="0 to 2147483 seconds"):
            stream.synchronize(timeout=timeout)
    stream.synchronize(timeout=float("inf"))
    with pytest.raises(TypeError):
        ascend.allocate(device, 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        ascend.as_tensor(64, device, shape=(2.5,), dtype="float16")  # type: ignore[arg-type]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("dtype", "beyond"), [("float16", 65520.0), ("bfloat16", 3.4e38)])
def test_a_query_beyond_the_dtype_of_the_device_is_refused_by_place(dtype, beyond) -> None:
    device, host = device_cache(dtype=dtype), host_cache(dtype=dtype)
    query = rows(2, 5, HEADS)
    for bad in (query, query.astype(ml_dtypes.bfloat16), query.astype(ml_dtypes.bfloat16).view(np.uint16)):
        if dtype == "bfloat16" and bad is not query:
            continue
        wrong = bad.copy()
        (wrong.view(ml_dtypes.bfloat16) if wrong.dtype == np.uint16 else wrong)[3, 1, 7] = -beyond
        with device.batch([device.sequence()], 5) as batch:
            write(device, batch, 0)
            with pytest.raises(ValueError, match=rf"query\[3, 1, 7\] is -.*; {dtype}, .* ends at"):
                device.attend(0, wrong, batch)
            out = device.attend(0, bad, batch)
        assert np.isfinite(out.astype(np.float32) if out.dtype != np.uint16 else out).all()
    # What is infinite or no number already is as it is in host memory; so are keys that become infinite.
    query[2, 0, 0], key = np.inf, rows(1, 5)
    key[4, 1, 2] = -beyond
    answers = []
    for cache in (device, host):
        with cache.batch([cache.sequence()], 5) as batch:
            cache.write(0, key, rows(3, 5), batch)
            answers.append(np.isnan(cache.attend(0, query, batch)))
            keys = cache.key_pages(0)
            page = np.asarray(keys.numpy() if cache is device else keys)[batch.block_table[0, 0], 1, 4, 2]
            assert page.view(np.uint16) == {"float16": 0xFC00, "bfloat16": 0xFF80}[dtype]
    np.testing.assert_array_equal(answers[0][2], answers[1][2])
