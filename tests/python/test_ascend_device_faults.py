"""Each call of a cache to the device's runtime fails once: a typed error, nothing lost, and on it goes."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import paged_kv
from ascend_device import DIM, HEADS, append, device_cache, empty_pool, read, rows, settle, write
from paged_kv import ascend
from paged_kv.ascend.flight import Flight

if TYPE_CHECKING:
    from ascend_fake import Fake


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
    answers = [out, read(cache, parent), read(cache, child, 1)]
    stream.synchronize()
    cache.stats()
    return answers


def calls_of(fake: Fake) -> dict[str, int]:
    """Count the calls of `steps` by function, those that make the cache included."""
    before = {name: fake.calls(name) for name in fake.called()}
    answers = steps(device_cache(), fake)
    assert len(answers) == 3
    gc.collect()
    return {name: n for name in fake.called() if (n := fake.calls(name) - before.get(name, 0)) > 0}


# Whose failure is somebody else's to test, or can't be told from success.
NOT_FAILED = {
    "aclGetRecentErrMsg",
    "aclrtGetSocName",
    "aclInit",
    "aclFinalize",
    "aclrtFree",
    "aclrtResetDevice",
}
NOT_FAILED |= {"aclrtDestroyEvent", "aclrtDestroyStream", "aclrtFreeHost"}


def test_every_call_may_fail_once(fake: Fake) -> None:
    ascend.open_device(0)
    want = steps(device_cache(), fake)
    counts = calls_of(fake)
    assert {"aclrtMalloc", "aclrtMemcpyAsync", "aclrtRecordEvent", "aclrtStreamWaitEvent"} <= set(counts)
    failed = 0
    for name, count in counts.items():
        if name in NOT_FAILED:
            continue
        # The first, the last, and some between.
        for nth in sorted({1, 2, count // 2, count}):
            if not 1 <= nth <= count:
                continue
            cache, error = None, None
            fake.fail(name, 500003, nth)
            try:
                cache = device_cache()
                steps(cache, fake)
            except paged_kv.DeviceError as raised:
                error = raised
            fake.clear()
            if error is not None:
                failed += 1
                assert (error.code, error.name) == (500003, "ACL_ERROR_RT_FAILURE")
                assert ("call_" if name == "emu_enqueue" else name) in str(error)  # launches have no name
            del error
            gc.collect()
            if cache is None:
                continue
            # Nothing is lost, and it goes on.
            settle(cache)
            assert empty_pool(cache), (name, nth)
            for got, expected in zip(steps(cache, fake), want, strict=True):
                np.testing.assert_array_equal(got, expected)
    assert failed > 25


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
