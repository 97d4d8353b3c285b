"""Devices, streams, memory and launches through ctypes, on the fake runtime."""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from ascend_fake import Fake, decode_arrays
from ascend_support import DTYPES, attend, kernel_library
from paged_kv import ascend
from paged_kv.ascend.tiling import LAYOUTS, Shape, WriteTiling


def decode_case(dtype: type, *, num_splits: int = 2) -> tuple[dict[str, np.ndarray], Shape, np.ndarray]:
    """Return the arrays of a decode step, what is asked for, and the result without a device."""
    rng = np.random.default_rng(0)
    batch, heads, kv_heads, dim, page_size = 3, 4, 2, 32, 16
    seq_lens = np.array([70, 0, 33], np.int32)
    shape = (16, kv_heads, page_size, dim)
    key_pages, value_pages = (rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(2))
    query = rng.standard_normal((batch, heads, dim), np.float32).astype(dtype)
    table = rng.permutation(16)[:15].astype(np.int32).reshape(3, 5)
    inputs = [query, key_pages, value_pages, table, seq_lens]
    want = attend(*inputs, num_splits=num_splits)
    asked = Shape(
        batch=batch,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        page_size=page_size,
        table_width=5,
        dtype=DTYPES[np.dtype(dtype).name],
        layout=LAYOUTS["HND"],
        max_len=70,
        num_splits=num_splits,
        num_cores=8,
        window_left=-1,
        scale=dim**-0.5,
    )
    names = ["query", "key_pages", "value_pages", "block_table", "seq_lens"]
    return dict(zip(names, inputs, strict=True)), asked, want.out


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_decode_on_a_stream_computes_what_the_kernel_computes(fake: Fake, dtype) -> None:
    host, asked, want = decode_case(dtype)
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    kernels = ascend.load_kernels()
    tiling = kernels.plan_decode(asked)
    arrays = decode_arrays(stream, host)
    parts = asked.batch * asked.num_kv_heads * tiling.num_splits
    assert tiling.num_splits == 2
    for name, nbytes in {
        "out": want.nbytes,
        "lse": asked.batch * asked.num_heads * 4,
        "partial_out": parts * tiling.group * asked.head_dim * 4,
        "partial_lse": parts * tiling.lanes * 4,
    }.items():
        arrays[name] = ascend.allocate(device, nbytes)
    out = np.zeros_like(want)
    with fake.held(stream):
        kernels.decode(stream, arrays, tiling, device.num_vector_cores)
        tiling.group = 99  # arguments were copied at the launch
        arrays["out"].copy_to(out, stream)
        used = fake.memory_used()
        memory = arrays["out"]
        arrays.clear()  # the stream keeps what its work reads
        assert fake.memory_used() == used
        assert not out.any()
    stream.synchronize()
    np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))
    device.collect()
    assert fake.memory_used() == (memory.nbytes + 31) // 32 * 32 + 32


def test_writes_and_copies_of_pages_take_their_turn(fake: Fake) -> None:
    rng = np.random.default_rng(0)
    device = ascend.open_device(1)
    stream = ascend.Stream(device)
    kernels = ascend.load_kernels()
    key, value = (rng.standard_normal((20, 2, 16), np.float32).astype(np.float16) for _ in range(2))
    pages = np.zeros((6, 2, 16, 16), np.float16)
    slots = np.arange(20, dtype=np.int64)
    copies = np.array([[0, 4], [1, 3]], np.int64)
    memory = decode_arrays(
        stream,
        {
            "key": key,
            "value": value,
            "key_pages": pages,
            "value_pages": pages,
            "slots": slots,
            "copies": copies,
        },
    )
    tiling = kernels.plan_write_pages(
        WriteTiling(num_tokens=20, num_kv_heads=2, head_dim=16, page_size=16), "HND"
    )
    with fake.held(stream):
        names = ["key", "value", "key_pages", "value_pages", "slots"]
        kernels.write_pages(stream, *(memory[name] for name in names), tiling, 2)
        kernels.copy_pages(
            stream, memory["key_pages"], memory["value_pages"], memory["copies"], 2, pages[0].nbytes, 2
        )
        got = np.empty_like(pages)
        memory["key_pages"].copy_to(got, stream)
    stream.synchronize()
    want = pages.copy()
    want[0], want[1, :, :4] = key[:16].swapaxes(0, 1), key[16:].swapaxes(0, 1)
    want[4], want[3] = want[0], want[1]
    np.testing.assert_array_equal(got, want)


def test_a_decode_of_a_prebuilt_binary_is_the_same(fake: Fake) -> None:
    host, asked, want = decode_case(np.float16, num_splits=1)
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    tiling = ascend.load_kernels().plan_decode(asked)
    arrays = decode_arrays(stream, host)
    out, lse, spare = (ascend.allocate(device, nbytes) for nbytes in (want.nbytes, 48, 64))
    binary = ascend.KernelBinary(device, kernel_library())
    got = np.zeros_like(want)
    with fake.held(stream):
        binary.launch(stream, "paged_kv_decode", 3, *arrays.values(), out, lse, spare, spare, tiling)
        tiling.group = 99
        out.copy_to(got, stream)
        del binary  # the stream keeps it, too
        gc.collect()
    stream.synchronize()
    np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("fake")
def test_a_binary_refuses_unknown_kernels_and_other_arguments(tmp_path) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    binary = ascend.KernelBinary(device, kernel_library())
    with pytest.raises(ascend.DeviceError, match=r"507027 ACL_ERROR_RT_KERNEL_LOOKUP.*no kernel nothing"):
        binary.launch(stream, "nothing", 1)
    with pytest.raises(ascend.DeviceError, match="107000"):
        ascend.KernelBinary(device, tmp_path / "nowhere.o")


def test_a_launch_with_other_arguments_is_refused(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    binary = ascend.KernelBinary(device, kernel_library())
    with pytest.raises(ascend.DeviceError, match="the kernel takes other arguments"):
        binary.launch(stream, "paged_kv_copy_pages", 1, ascend.CopyTiling())
    assert fake.misuse() == ["the kernel takes other arguments"]
    fake.clear()


# ---- copies ----


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("on_stream", [False, True])
def test_bytes_go_there_and_back(on_stream: bool) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device) if on_stream else None
    source = np.arange(1000, dtype=np.int32)
    memory, second = ascend.allocate(device, source.nbytes), ascend.allocate(device, source.nbytes)
    memory.copy_from(source, stream)
    second.copy_from(memory, stream)
    second[256:512].fill(0, stream)
    second[64:128].copy_from(memory[128:192], stream)
    memory[4:4].copy_from(np.empty(0, np.int32), stream)
    memory[4:4].fill(1, stream)
    got = np.zeros_like(source)
    second.copy_to(got, stream)
    device.synchronize()
    want = source.copy()
    want[64:128] = 0
    want[16:32] = source[32:48]
    np.testing.assert_array_equal(got, want)
    part = np.zeros(3, np.int32)
    second[800:].copy_to(part)
    np.testing.assert_array_equal(part, [200, 201, 202])
    assert second[-8:].nbytes == 8
    assert repr(second[:8]) == "<DeviceMemory 8 bytes on ascend:0>"


@pytest.mark.usefixtures("fake")
def test_pinned_memory_is_an_array_that_keeps_it() -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    array = np.asarray(ascend.pinned(device, 4096)).view(np.float32)
    array[:] = np.arange(1024)
    memory = ascend.allocate(device, 4096)
    memory.copy_from(array, stream)
    array = np.asarray(ascend.pinned(device, 4096))
    memory.copy_to(array, stream)
    stream.synchronize()
    np.testing.assert_array_equal(array.view(np.float32), np.arange(1024))


@pytest.mark.usefixtures("fake")
def test_memory_begins_at_64_bytes_and_ends_where_it_ends() -> None:
    device = ascend.open_device(0)
    for nbytes in (0, 1, 31, 32, 33, 64, 1000):
        memory = ascend.allocate(device, nbytes)
        assert memory.address % 64 == 0
        assert memory.nbytes == nbytes
    with pytest.raises(ValueError, match="-1 bytes"):
        ascend.allocate(device, -1)
    with pytest.raises(ValueError, match="0 bytes"):
        ascend.pinned(device, 0)


REFUSED = {
    "a longer source": (lambda m: m.copy_from(np.zeros(65, np.int8)), "65 bytes into memory of 64"),
    "a longer target": (lambda m: m.copy_to(np.zeros(65, np.int8)), "65 bytes from memory of 64"),
    "a view of columns": (
        lambda m: m.copy_from(np.zeros((4, 8), np.int8)[:, :4]),
        r"strides \(8, 1\) of",
    ),
    "a transposed target": (lambda m: m.copy_to(np.zeros((4, 8), np.int8).T), r"strides \(1, 8\) of"),
    "a read-only target": (lambda m: m.copy_to(np.frombuffer(b"12345678")), "read-only"),
    "an unaligned copy on the device": (lambda m: m[:8].copy_from(m[32:40]), "begins at multiples of 64"),
    "steps": (lambda m: m[::2], "in steps of 2"),
    "no byte": (lambda m: m.fill(256), "byte 256"),
    "another device": (
        lambda m: m.copy_from(ascend.allocate(ascend.open_device(1), 64)),
        "a copy from ascend:1 to ascend:0",
    ),
}


@pytest.mark.parametrize(("use", "message"), REFUSED.values(), ids=REFUSED)
def test_field_c80_what_a_copy_would_get_wrong_is_refused(fake: Fake, use, message) -> None:
    memory = ascend.allocate(ascend.open_device(0), 64)
    with pytest.raises(ValueError, match=message):
        use(memory)
    assert not {"aclrtMemcpy", "aclrtMemcpyAsync", "aclrtMemset"} & set(fake.called())


def test_memory_of_someone_else_is_used_and_left_to_them(fake: Fake) -> None:
    device = ascend.open_device(0)
    theirs = ascend.allocate(device, 128)
    borrowed = ascend.DeviceMemory(device, theirs.address + 64, 64, owner=None)
    borrowed.fill(5)
    del borrowed
    got = np.zeros(128, np.uint8)
    theirs.copy_to(got)
    assert (got[64:] == 5).all()
    assert fake.calls("aclrtFree") == 0


# ---- order ----


def test_a_held_stream_holds_what_waits_for_it_and_nothing_else(fake: Fake) -> None:
    device = ascend.open_device(0)
    writing, reading, free = (ascend.Stream(device) for _ in range(3))
    memory, other = ascend.allocate(device, 64), ascend.allocate(device, 64)
    memory.fill(0)
    got, free_got = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    fake.hold(writing)
    memory.fill(7, writing)
    written = writing.record()
    reading.wait(written)
    memory.copy_to(got, reading)
    read = reading.record()
    other.fill(3, free)
    other.copy_to(free_got, free)
    free.synchronize()
    assert (free_got == 3).all()
    assert not written.query()
    assert not read.query()
    assert not reading.poll()
    fake.release(writing)
    read.synchronize()
    assert written.query()
    assert (got == 7).all()


def test_what_a_stream_keeps_goes_when_its_work_has_passed(fake: Fake) -> None:
    class Thing:
        pass

    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 64)
    things = [Thing() for _ in range(200)]
    alive = [weakref.ref(thing) for thing in things]
    with fake.held(stream):
        while things:
            stream.submit("aclrtMemsetAsync", memory.address, 64, 0, 64, keep=(things.pop(),))
        assert not stream.poll()
        assert all(one() is not None for one in alive)
        assert fake.calls("aclrtRecordEvent") <= 5  # one for many
    stream.synchronize()
    assert all(one() is None for one in alive)
    assert stream.poll()


def test_a_stream_dropped_at_work_finishes_first(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream, watch = ascend.Stream(device), ascend.Stream(device)
    handle = stream.handle
    memory = ascend.allocate(device, 64)
    got = np.zeros(64, np.uint8)
    fake.hold(stream)
    memory.fill(9, stream)
    memory.copy_to(got, stream)
    watch.wait(stream.record())
    del stream, memory
    gc.collect()
    device.collect()
    assert fake.calls("aclrtDestroyStream") == 0
    assert fake.library.fake_release(handle) == 0
    watch.synchronize()
    device.synchronize()
    assert (got == 9).all()
    device.collect()
    assert fake.calls("aclrtDestroyStream") == 1


def test_an_event_dropped_before_it_has_passed_does_no_harm(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream, other = ascend.Stream(device), ascend.Stream(device)
    with fake.held(stream):
        other.wait(stream.record())
        event = ascend.Event(device)
        assert event.query()  # nothing was marked
        event.record(stream)
        del event
        gc.collect()
        device.collect()
        assert fake.calls("aclrtDestroyEvent") == 0
    other.synchronize()
    stream.synchronize()


def test_prefetching_says_whether_it_can(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 4096)
    assert memory[64:1024].prefetch(stream)
    assert not memory[:0].prefetch(stream)
    stream.synchronize()
    assert fake.calls("aclrtCmoAsync") == 1


def test_the_memory_of_a_device_is_counted(fake: Fake) -> None:
    device = ascend.open_device(1)
    before = device.memory_info()
    memory = ascend.allocate(device, 1 << 20)
    after = device.memory_info()
    assert before.total == after.total == 256 << 20
    assert before.free - after.free == (1 << 20) + 32 == fake.memory_used(1)
    assert device.num_vector_cores == 8
    del memory
    assert device.memory_info() == before
