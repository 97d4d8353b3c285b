"""Each call of a cache to the device's runtime fails once: a typed error, nothing lost, and on it goes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import paged_kv
from ascend_device import DIM, HEADS, append, device_cache, empty_pool, read, rows, settle, write
from paged_kv import ascend
from paged_kv.ascend import acl
from paged_kv.ascend.flight import Flight

if TYPE_CHECKING:
    from collections.abc import Callable

    from ascend_fake import Fake


def made() -> paged_kv.KvCache:
    return device_cache(null_page=True)


def steps(cache: paged_kv.KvCache, fake: Fake) -> list[Any]:
    """All that a cache does on its device; return what was computed."""
    late, stream = (ascend.Stream(ascend.open_device(0)) for _ in range(2))
    parent = cache.sequence()
    with fake.held(late):
        append(cache, [parent], 18, 1, stream=late)
        child = parent.fork()
        batch = cache.batch([child], 1, stream=stream)  # waits for the other stream
    with batch:
        assert len(batch.copies) == 1
        write(cache, batch, 2)
        out = cache.attend(0, rows(3, 1, HEADS), batch)
    query, target = (ascend.empty(ascend.open_device(0), (3, HEADS, DIM), "float16") for _ in range(2))
    query.memory.copy_from(rows(4, 3, HEADS).astype(np.float16))
    with cache.batch([parent], 3, stream=stream) as batch:
        write(cache, batch, 5)
        cache.attend(1, query, batch, out=target, return_lse=True)
        batch.commit([2])
    parent.prefetch()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no context
        elsewhere = pool.submit(read, cache, parent)
    answers = [out, elsewhere.result(), read(cache, child, 1)]
    stream.synchronize()
    cache.stats()
    return answers


# What a cache and its end use; the rest of the table is for binaries, pinned memory, and those who ask.
CALLED = {
    *("aclInit", "aclrtSetDevice", "aclrtGetCurrentContext", "aclrtSetCurrentContext", "aclrtGetDeviceInfo"),
    *("aclrtGetMemInfo", "aclrtMalloc", "aclrtMemset", "aclrtMemcpy", "aclrtMemcpyAsync", "aclrtCmoAsync"),
    *("aclrtCreateStream", "aclrtSynchronizeStream", "aclrtStreamWaitEvent"),
    *("aclrtCreateEvent", "aclrtRecordEvent", "aclrtQueryEventStatus", "aclrtSynchronizeEvent"),
    *("aclrtSynchronizeDevice", "aclrtFree", "aclrtDestroyEvent", "aclrtDestroyStream", "aclrtResetDevice"),
    "emu_enqueue",  # a launch
}
# Where these fail something is being given back: it goes on, and what was refused is given back at the end.
GIVEN_BACK = {"aclrtFree", "aclrtDestroyEvent", "aclrtDestroyStream", "aclrtResetDevice"}
# Called here by who looks what has passed, and by who closes: neither is told, both try again.
UNTOLD = {"aclrtQueryEventStatus", "aclrtSynchronizeDevice", "aclrtSetCurrentContext"}


def life(fake: Fake) -> list[Any]:
    """Open the device, use a cache, and close it."""
    ascend.open_device(0)
    answers = steps(made(), fake)
    gc.collect()
    ascend.open_device(0).close()
    return answers


def failure_of(act: Callable[[], Any]) -> tuple[Any, str]:
    """Return what it gave, or how it failed, with nothing of it alive any more."""
    got, error, text = None, None, ""
    try:
        got = act()
    except paged_kv.DeviceError as raised:
        error = raised
        assert (error.code, error.name) == (500003, "ACL_ERROR_RT_FAILURE")
        text = str(error)
    del error
    gc.collect()
    return got, text


def test_these_are_all_functions_that_a_cache_calls(fake: Fake) -> None:
    life(fake)
    assert set(fake.called()) - {"aclGetRecentErrMsg", "aclrtGetSocName"} == CALLED
    assert {name for name in acl.REQUIRED | acl.OPTIONAL if name in CALLED} == CALLED - {"emu_enqueue"}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.stress)])
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", sorted(CALLED - {"aclInit"}))  # whose failure is the runtime's
def test_every_call_may_fail_once(fake: Fake, name: str, every: bool) -> None:
    want = life(fake)
    count = fake.calls(name)
    assert count
    failed = 0
    untold = name in GIVEN_BACK | UNTOLD
    some = [nth for nth in sorted({1, 2, count // 2, count}) if nth]
    # Who polls is told nothing, and which calls are polls is a matter of time: then others are tried.
    for nth in [*some, *(nth for nth in range(1, count + 1) if nth not in some)]:
        if nth not in some and not every and (failed or untold):
            break
        fake.fail(name, 500003, nth)
        cache, text = failure_of(made)
        got = None
        if cache is not None:
            got, text = failure_of(lambda cache=cache: steps(cache, fake))
        fake.clear_failures()
        failed += bool(text)
        assert (got is None) == bool(text)
        assert not text or ("call_" if name == "emu_enqueue" else name) in text  # launches have no name
        if cache is not None:  # nothing is lost, and it goes on
            settle(cache)
            assert empty_pool(cache), nth
            got = steps(cache, fake)
        if got is not None:
            for array, expected in zip(got, want, strict=True):
                np.testing.assert_array_equal(array, expected)
        del cache
        ascend.open_device(0).close()
        assert (fake.leaks(), fake.misuse()) == ([], []), nth
        fake.clear()
    assert bool(failed) == (not untold)


@pytest.mark.parametrize("name", sorted(CALLED - {"aclInit"}))
def test_whatever_fails_while_a_device_is_closed_it_is_closed_and_opened_again(fake: Fake, name: str) -> None:
    cache = made()
    sequence = cache.sequence()
    append(cache, [sequence], 5, 0)
    fake.fail(name, 500003)
    ascend.open_device(0).close()
    fake.clear_failures()
    assert (fake.leaks(), fake.misuse()) == ([], [])
    with pytest.raises(ascend.UnavailableError, match="was closed"):
        append(cache, [sequence], 1, 0)
    life(fake)


@pytest.mark.parametrize("code", [507015, 507034])
def test_a_kernel_that_crashes_poisons_the_device_and_says_why(fake: Fake, code) -> None:
    cache = device_cache()
    sequence = cache.sequence()
    append(cache, [sequence], 5, 0)
    fake.fail_task(code)
    with pytest.raises(paged_kv.DeviceError, match=str(code)):
        append(cache, [sequence], 1, 0)
        read(cache, sequence)
    with pytest.raises(paged_kv.DeviceError, match=f"ascend:0 is unusable since.*{code}"):
        append(cache, [sequence], 1, 0)
    with pytest.raises(paged_kv.DeviceError, match="unusable"):
        cache.key_pages(0).numpy()
    assert cache.stats()["total_pages"] == 16  # the host's side still tells
    ascend.open_device(0).close()
    with pytest.raises(paged_kv.DeviceError, match="was closed"):
        append(cache, [sequence], 1, 0)
    again = device_cache()
    append(again, [again.sequence()], 5, 0)


def test_a_failed_commit_leaves_the_batch_open_and_a_with_block_closes_it(fake: Fake) -> None:
    cache = device_cache()
    sequence = cache.sequence()
    batch = cache.batch([sequence], 5)
    write(cache, batch, 0)
    fake.fail("aclrtRecordEvent", 500003)
    with pytest.raises(paged_kv.DeviceError, match="aclrtRecordEvent"):
        batch.commit()
    assert not batch.is_ended
    batch.commit()
    assert sequence.num_computed_tokens == 5
    with (
        pytest.raises(paged_kv.DeviceError, match="aclrtRecordEvent"),
        cache.batch([sequence], 5) as batch,
    ):
        write(cache, batch, 0)
        fake.fail("aclrtRecordEvent", 500003)
    assert batch.is_ended
    assert sequence.num_computed_tokens == len(sequence) == 5
    sequence.free()
    settle(cache)
    assert empty_pool(cache)


def test_copies_that_a_device_refused_are_not_counted(fake: Fake) -> None:
    cache = device_cache()
    parent = cache.sequence()
    append(cache, [parent], 5, 0)
    child = parent.fork()
    settle(cache)
    fake.fail("emu_enqueue", 500003)
    with pytest.raises(paged_kv.DeviceError, match="call_copy_pages"):
        cache.batch([child], 1)
    assert cache.stats()["copied_pages"] == 0
    append(cache, [child], 1, 0)
    assert cache.stats()["copied_pages"] == 1
    again = parent.fork()
    ascend.open_device(0).close()
    with pytest.raises(paged_kv.DeviceError, match="was closed"):
        cache.batch([again], 1)
    assert cache.stats()["copied_pages"] == 1


@pytest.mark.parametrize("held", ["a stream's", "the cache's"])
def test_a_forked_child_is_refused_though_a_thread_of_its_parent_holds_a_lock(fake: Fake, held) -> None:
    cache, stream = device_cache(), ascend.Stream(ascend.open_device(0))
    batch = cache.batch([cache.sequence()], 1, stream=stream)
    go, inside = threading.Event(), threading.Event()

    def stop(*_: object) -> int:
        inside.set()
        go.wait(30)
        return 0

    with fake.held(stream), pytest.MonkeyPatch.context() as patch:
        append(cache, [cache.sequence()], 3, 0, stream=stream)  # something to look for the end of
        if held == "a stream's":
            patch.setattr(ascend.Stream, "launch", stop)
            thread = threading.Thread(target=write, args=(cache, batch, 0))
        else:
            patch.setattr(Flight, "passed", stop)
            thread = threading.Thread(target=cache.stats)
        thread.start()
        assert inside.wait(30)
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # newer Pythons warn of forking beside threads
            child = os.fork()
        if child == 0:
            signal.alarm(10)
            refused = 0
            for use in (
                lambda: write(cache, batch, 0),
                lambda: cache.batch([cache.sequence()], 1),
                stream.synchronize,
            ):
                try:
                    use()
                except ascend.UnavailableError as error:
                    refused += "forked" in str(error)
            cache.stats()
            batch.close()
            os._exit(refused)
        status = os.waitpid(child, 0)[1]
        go.set()
        thread.join()
    assert os.waitstatus_to_exitcode(status) == 3
    batch.close()
