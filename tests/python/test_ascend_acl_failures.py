"""Every call to the runtime fails once: a typed error, nothing lost, and the device works or says why not."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ascend_fake import environment
from paged_kv import DeviceError, ascend
from paged_kv.ascend import acl
from paged_kv.ascend.binary import KernelBinary

if TYPE_CHECKING:
    from ascend_fake import Fake

CODE = 500003  # any failure that is not fatal

# What nothing here calls.
UNUSED = {
    "aclrtCreateContext",
    "aclrtDestroyContext",
    "aclrtGetDevice",
    "aclrtBinaryLoadFromData",
    "aclrtLaunchKernel",
    "aclrtLaunchKernelV2",
    "aclrtLaunchKernelWithHostArgs",
}
USED = sorted({*acl.REQUIRED, *acl.OPTIONAL} - UNUSED)
# Where these fail something is being given back: it goes on, and what was refused is given back at the end.
QUIET = {
    "aclFinalize",
    "aclrtResetDevice",
    "aclrtDestroyStream",
    "aclrtDestroyEvent",
    "aclrtFree",
    "aclrtFreeHost",
    "aclrtBinaryUnLoad",
}


def scenario() -> None:
    """Use every function that the package uses, and leave nothing."""
    device, other = ascend.open_device(0), ascend.open_device(1)
    described = ascend.info(1)
    assert (described.num_devices, described.runtime_version) == (2, "1.15.0")
    stream, second = ascend.Stream(device), ascend.Stream(device)
    pages = np.arange(256, dtype=np.int16).reshape(4, 64)
    keys, values, copies = (ascend.allocate(device, n) for n in (pages.nbytes, pages.nbytes, 16))
    pinned = ascend.pinned(device, 16)
    np.asarray(pinned).view(np.int64)[:] = [3, 1]
    copies.copy_from(np.asarray(pinned), stream)
    keys.copy_from(pages)
    values.fill(0)
    values.fill(7, stream)
    begin = stream.record()
    second.wait(begin)
    assert keys.prefetch(second)
    ascend.load_kernels().copy_pages(second, keys, values, copies, 1, 128, 2)
    binary = KernelBinary(device, environment()["PAGED_KV_ASCEND_KERNELS"])
    tiling = ascend.CopyTiling(num_copies=1, chunk_bytes=128, page_bytes=128)
    binary.launch(second, "paged_kv_copy_pages", 1, keys, values, copies, tiling)
    end = second.record()
    got = np.empty_like(pages)
    keys.copy_to(got, second)
    second.synchronize()
    assert (got[1] == pages[3]).all()
    assert begin.query()
    end.synchronize()
    assert begin.elapsed(end) >= 0
    stream.synchronize(timeout=10)
    device.synchronize()
    other.close()
    assert device.memory_info().free < device.memory_info().total
    ascend.shutdown()


def attempt() -> DeviceError | None:
    """Run the scenario; return how it failed, with nothing of it alive any more."""
    try:
        scenario()
    except DeviceError as error:
        failure = error.with_traceback(None)
        failure.__context__ = None
    else:
        failure = None
    gc.collect()
    return failure


def test_the_scenario_uses_every_function_that_the_package_uses(fake: Fake) -> None:
    assert attempt() is None
    assert set(fake.called()) - {"emu_enqueue"} == set(USED)


@pytest.mark.parametrize("name", USED)
def test_each_call_may_fail_once(fake: Fake, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "paged_kv.ascend")  # warnings tell of what goes on
    assert attempt() is None
    count = fake.calls(name)
    fake.clear()
    failures = []
    for nth in range(1, count + 1, max(count // 20, 1)):
        fake.fail(name, CODE, nth)
        failure = attempt()
        if failure is not None:
            failures.append(failure)
            assert (failure.code, failure.name) == (CODE, "ACL_ERROR_RT_FAILURE")
            assert f"{name}: {CODE}" in str(failure)
            assert failure.message == f"{name} was told to fail"
            assert failure.hint
        fake.clear_failures()
        if name == "aclFinalize":  # the runtime is as if another library had begun it, and never ends
            assert fake.library.aclFinalize() == 0
        assert attempt() is None, nth  # usable afterwards
        assert (fake.leaks(), fake.misuse()) == ([], []), nth
        fake.clear()
    assert count
    assert not failures if name in QUIET else failures


def test_memory_that_is_exhausted_is_told_with_the_numbers_and_had_again(fake: Fake) -> None:
    fake.limit_memory(10_000)
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 6000)
    with pytest.raises(DeviceError) as caught:
        ascend.allocate(device, 6000)
    assert (caught.value.code, caught.value.name) == (207001, "ACL_ERROR_RT_MEMORY_ALLOCATION")
    assert "6048 bytes, 6048 of 10000 are used" in caught.value.message
    assert "fewer pages" in caught.value.hint
    # Memory that a stream may still use is not had again before.
    memory.fill(0, stream)
    with fake.held(stream):
        memory.fill(1, stream)
        del memory
        with pytest.raises(DeviceError, match="207001"):
            ascend.allocate(device, 6000)
    stream.synchronize()
    assert ascend.allocate(device, 6000).nbytes == 6000


@pytest.mark.parametrize("code", [507014, 507015, 507035])
def test_field_c78_a_fatal_failure_poisons_the_device_until_it_is_opened_again(fake: Fake, code: int) -> None:
    device, untouched = ascend.open_device(0), ascend.open_device(1)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 64)
    fake.fail_task(code)
    memory.fill(0, stream)
    with pytest.raises(DeviceError) as caught:
        stream.synchronize()
    first = caught.value
    assert (first.code, first.message) == (code, "the task was told to fail")
    assert "opened again" in first.hint
    assert device.error is not None
    for use in (
        lambda: memory.fill(0, stream),
        lambda: ascend.allocate(device, 64),
        lambda: ascend.Stream(device),
        lambda: ascend.Event(device),
        device.memory_info,
        device.synchronize,
    ):
        with pytest.raises(DeviceError, match="ascend:0 is unusable since: aclrtSynchronize") as again:
            use()
        assert (again.value.code, again.value.hint) == (code, first.hint)
    assert ascend.allocate(untouched, 64).nbytes == 64  # other devices go on
    device.close()
    fresh = ascend.open_device(0)
    assert fresh is not device
    ascend.allocate(fresh, 64).fill(0)
    with pytest.raises(ascend.UnavailableError, match="ascend:0 was closed"):
        memory.fill(0)


@pytest.mark.usefixtures("fake")
def test_field_c78_a_kernel_that_leaves_its_memory_is_507015_and_says_where() -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    pages = ascend.allocate(device, 4 * 128)
    copies = ascend.allocate(device, 16)
    copies.copy_from(np.array([0, 77], np.int64))
    kernels = ascend.load_kernels()
    kernels.copy_pages(stream, pages, pages, copies, 1, 128, 1)
    with pytest.raises(DeviceError) as caught:
        stream.synchronize()
    assert caught.value.code == 507015
    assert "kernel paged_kv_copy_pages, block 0" in caught.value.message
    assert "gm-bounds: 128 bytes" in caught.value.message
    assert "block-table entries" in caught.value.hint


@pytest.mark.usefixtures("fake")
def test_an_address_of_the_host_given_to_a_kernel_is_caught() -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    pages = ascend.allocate(device, 4 * 128)
    host = np.array([0, 1], np.int64)
    copies = ascend.DeviceMemory(device, host.ctypes.data, host.nbytes, host)
    ascend.load_kernels().copy_pages(stream, pages, pages, copies, 1, 128, 1)
    with pytest.raises(DeviceError, match="507015"):
        stream.synchronize()


def test_a_stream_of_another_device_is_107003(fake: Fake) -> None:
    first, second = ascend.open_device(0), ascend.open_device(1)
    stream = ascend.Stream(first)
    borrowed = ascend.Stream(second, stream.handle)
    with pytest.raises(DeviceError) as caught:
        ascend.allocate(second, 64).fill(0, borrowed)
    assert (caught.value.code, caught.value.name) == (107003, "ACL_ERROR_RT_STREAM_CONTEXT")
    assert "another context or device" in caught.value.hint
    assert len(fake.misuse()) == 1
    fake.clear()


def test_a_wait_that_takes_too_long_is_given_up(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 64)
    with fake.held(stream):
        memory.fill(0, stream)
        with pytest.raises(DeviceError, match="507046 ACL_ERROR_RT_STREAM_SYNC_TIMEOUT"):
            stream.synchronize(timeout=0.01)
        assert fake.pending(stream) >= 1
    stream.synchronize(timeout=10)


def test_a_launch_that_is_refused_names_the_launcher(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    pages, copies = ascend.allocate(device, 512), ascend.allocate(device, 16)
    fake.fail("emu_enqueue", 507027)
    with pytest.raises(DeviceError, match="call_copy_pages: 507027 ACL_ERROR_RT_KERNEL_LOOKUP"):
        ascend.load_kernels().copy_pages(stream, pages, pages, copies, 1, 128, 1)
    stream.synchronize()
