"""Beginnings and ends: a runtime that others use too, threads, forks, shutdown in any order."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from ascend_fake import environment
from paged_kv import DeviceError, ascend
from paged_kv.ascend.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

    from ascend_fake import Fake


def run(program: str) -> str:
    """Run a program on the fake runtime; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work` in threads at once; raise what one of them raised."""
    failures: list[BaseException] = []
    gate = threading.Barrier(count)

    def body(number: int) -> None:
        try:
            gate.wait()
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def current_context(fake: Fake) -> int | None:
    context = ctypes.c_void_p()
    return None if fake.library.aclrtGetCurrentContext(ctypes.byref(context)) else context.value


# ---- together with another library, such as torch_npu ----


def test_a_runtime_that_another_library_began_is_used_and_left_to_it(fake: Fake) -> None:
    theirs = fake.library
    assert theirs.aclInit(None) == 0
    assert theirs.aclrtSetDevice(1) == 0
    own, stream = current_context(fake), ctypes.c_void_p()
    assert theirs.aclrtCreateStream(ctypes.byref(stream)) == 0
    device = ascend.open_device(0)
    assert current_context(fake) == own  # each call leaves the thread as it was
    memory = ascend.allocate(device, 64)
    memory.fill(3)
    with pytest.raises(DeviceError):
        ascend.open_device(7)
    assert current_context(fake) == own
    # On the same device their stream is as good as ours.
    shared = ascend.open_device(1)
    borrowed = ascend.Stream(shared, stream.value)
    got = np.zeros(64, np.uint8)
    target = ascend.allocate(shared, 64)
    target.fill(9, borrowed)
    target.copy_to(got, borrowed)
    borrowed.synchronize()
    assert (got == 9).all()
    before = fake.calls("aclrtDestroyStream")
    del borrowed, memory, target
    ascend.shutdown()
    assert fake.calls("aclrtDestroyStream") == before
    assert (fake.calls("aclFinalize"), fake.calls("aclrtResetDevice")) == (0, 0)
    assert current_context(fake) == own
    assert theirs.aclrtDestroyStream(stream) == 0
    assert theirs.aclrtResetDevice(1) == theirs.aclrtResetDevice(0) == theirs.aclFinalize() == 0


def test_another_library_may_begin_and_even_end_it_after_us(fake: Fake) -> None:
    ascend.open_device(0)
    assert fake.library.aclInit(None) == 100002
    ascend.shutdown()
    assert fake.calls("aclFinalize") == 1
    device = ascend.open_device(0)
    device.close()
    assert fake.library.aclFinalize() == 0
    ascend.shutdown()  # the second end is refused by the runtime, and of no consequence
    assert fake.calls("aclFinalize") == 3


def test_a_device_has_one_object_until_it_is_closed(fake: Fake) -> None:
    device = ascend.open_device(0)
    assert ascend.open_device(0) is device
    assert repr(device) == "<Device ascend:0>"
    with pytest.raises(DeviceError, match=r"107001 ACL_ERROR_RT_INVALID_DEVICEID.*device 9 of 2"):
        ascend.open_device(9)
    device.close()
    device.close()
    assert repr(device) == "<Device ascend:0, closed>"
    assert fake.calls("aclrtResetDevice") == 1
    assert ascend.open_device(0) is not device


# ---- ends ----


@pytest.mark.usefixtures("fake")
def test_what_is_dropped_after_the_end_does_nothing() -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory, pinned = ascend.allocate(device, 64), ascend.pinned(device, 64)
    event = stream.record()
    ascend.shutdown()
    for use in (
        lambda: memory.fill(0),
        lambda: memory.fill(0, stream),
        lambda: memory.address,
        event.query,
        event.synchronize,
        stream.synchronize,
        stream.record,
        device.memory_info,
        lambda: np.asarray(pinned),
    ):
        with pytest.raises(ascend.UnavailableError, match="ascend:0 was closed"):
            use()
    device.collect()
    ascend.shutdown()  # and again when they are dropped, by the fixture


ENDS = {
    "nothing is let go": "",
    "memory first": "del memory, view",
    "the stream first, at work": "memory.fill(1, stream); del stream",
    "the device first": "device.close(); del memory, stream",
    "the end itself, twice": "ascend.shutdown(); ascend.shutdown()",
    "held by a cycle": "cycle = [stream, memory]; cycle.append(cycle); del cycle, stream, memory",
    "held by a module": "import os; os.kept = (memory, stream)",
    "in a thread that is still there": (
        "import threading\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), memory.fill(2))).start()"
    ),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_program_may_end_in_any_order(end: str) -> None:
    program = f"""
import atexit, ctypes, os
fake = ctypes.CDLL(os.path.join(os.environ["ASCEND_HOME_PATH"], "lib64", "libascendcl.so"))
def told():
    texts = [ctypes.create_string_buffer(4096) for _ in range(2)]
    fake.fake_leaks(texts[0], ctypes.c_size_t(4096)), fake.fake_misuse(texts[1], ctypes.c_size_t(4096))
    print([text.value.decode() for text in texts])
atexit.register(told)  # the first to be registered is the last to be called
from paged_kv import ascend
device = ascend.open_device(0)
stream = ascend.Stream(device)
memory = ascend.allocate(device, 1 << 16)
view = memory[64:128]
memory.fill(0, stream)
{end}
"""
    assert run(program) == "['', '']\n"


# ---- threads ----


def test_a_device_is_opened_once_by_many_threads(fake: Fake) -> None:
    found: list[ascend.Device] = []
    in_threads(8, lambda _: found.append(ascend.open_device(0)))
    assert len(set(map(id, found))) == 1
    assert (fake.calls("aclInit"), fake.calls("aclrtSetDevice")) == (1, 1)


@pytest.mark.usefixtures("fake")
def test_many_threads_work_on_two_devices_and_one_stream_of_each() -> None:
    devices = [ascend.open_device(number) for number in range(2)]
    shared = [ascend.Stream(device) for device in devices]

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        for step in range(25):
            which = int(rng.integers(2))
            device = devices[which]
            stream = shared[which] if step % 2 else ascend.Stream(device)
            source = rng.integers(0, 255, int(rng.integers(1, 5000)), np.uint8)
            first, second = (ascend.allocate(device, source.nbytes) for _ in range(2))
            first.copy_from(source, stream)
            second.copy_from(first, stream)
            got = np.zeros_like(source)
            if step % 3:
                del first
            second.copy_to(got, stream)
            (stream.synchronize if step % 5 else stream.record().synchronize)()
            np.testing.assert_array_equal(got, source)

    in_threads(8, work)
    for device in devices:
        device.synchronize()


@pytest.mark.parametrize("create", ["aclrtCreateEvent", "aclrtCreateStream", "aclrtMalloc"])
def test_a_close_waits_for_what_other_threads_are_about_to_have(fake: Fake, create: str) -> None:
    device = ascend.open_device(0)
    make = {
        "aclrtCreateEvent": lambda: ascend.Event(device),
        "aclrtCreateStream": lambda: ascend.Stream(device),
        "aclrtMalloc": lambda: ascend.allocate(device, 64),
    }[create]
    had, go, original = threading.Event(), threading.Event(), getattr(device.acl, create)
    closer = threading.Thread(target=device.close)

    def slowly(*arguments: object) -> int:
        status = original(*arguments)
        had.set()
        go.wait(30)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(device.acl._functions, create, slowly)
        maker = threading.Thread(target=make)
        maker.start()
        assert had.wait(30)
        closer.start()
        closer.join(0.3)
        assert closer.is_alive()
        go.set()
        closer.join(30)
        maker.join(30)
    assert fake.leaks() == []
    with pytest.raises(ascend.UnavailableError, match="was closed"):
        make()


def test_a_device_closed_under_threads_that_use_it_leaves_nothing(fake: Fake) -> None:
    for _ in range(5):
        device = ascend.open_device(0)
        begun = threading.Barrier(5)

        def use(number: int, device: ascend.Device = device, begun: threading.Barrier = begun) -> None:
            begun.wait()
            if number == 0:
                device.close()
                return
            with contextlib.suppress(ascend.UnavailableError):
                while True:
                    stream = ascend.Stream(device)
                    stream.record().query()
                    ascend.allocate(device, 64).fill(0, stream)

        in_threads(5, use)
        assert (fake.leaks(), fake.misuse()) == ([], [])


def test_waiting_lets_other_threads_run(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 64)
    fake.hold(stream)
    memory.fill(0, stream)
    waiting = threading.Thread(target=stream.synchronize)
    waiting.start()
    # Only a thread that runs while the other waits can release it.
    fake.release(stream)
    waiting.join()
    assert fake.pending(stream) == 0


# ---- fork ----


def test_a_forked_child_gets_an_error_and_calls_nothing(fake: Fake) -> None:
    device = ascend.open_device(0)
    stream = ascend.Stream(device)
    memory = ascend.allocate(device, 64)
    fake.hold(stream)
    memory.fill(0, stream)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forking beside threads
        child = os.fork()
    if child == 0:
        # A call to the fake runtime would end the child with status 86.
        lines = [ascend.is_available().reason]
        for use in (
            lambda: memory.fill(0, stream),
            lambda: ascend.open_device(1),
            stream.synchronize,
            lambda: ascend.allocate(device, 64),
        ):
            try:
                use()
                lines.append("passed")
            except ascend.UnavailableError as error:
                lines.append(str(error))
        device.close()
        del memory, stream, use
        gc.collect()
        ascend.shutdown()
        os.write(writer, "\n".join(lines).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(told) == 5
    for line in told:
        assert line.startswith("this process was forked after its parent had opened an Ascend device")
        assert "'spawn'" in line
    fake.release(stream)
    stream.synchronize()


def test_a_child_forked_after_the_end_is_refused_too() -> None:
    program = """
import os
from paged_kv import ascend
ascend.open_device(0).close()
ascend.shutdown()
if (child := os.fork()) == 0:
    os._exit(17 if "forked" in ascend.is_available().reason else 0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(program) == "17\n"


def test_a_child_forked_before_opens_devices_itself() -> None:
    program = """
import os
from paged_kv import ascend
child = os.fork()
device = ascend.open_device(0)
ascend.allocate(device, 64).fill(0)
ascend.shutdown()
if child == 0:
    os._exit(0)
print(os.waitpid(child, 0)[1])
"""
    assert run(program) == "0\n"


# ---- what the command line says ----


@pytest.mark.usefixtures("fake")
def test_info_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert ascend.is_available()
    assert main(["info", "--device", "1"]) == 0
    told = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in told.out.replace(" cores", "_cores").splitlines())
    assert lines["device"] == "ascend:1 of 2, Ascend910B3 (fake)"
    assert (lines["vector_cores"], lines["cube_cores"]) == ("8", "4")
    assert lines["memory"] == "256 MiB free of 256 MiB"
    assert lines["runtime"].startswith("1.15.0, ")
    assert lines["kernels"].endswith("kernels.so")
    assert told.err == ""
    assert main(["info", "--device", "5"]) == 1
    assert "107001" in capsys.readouterr().err


@pytest.mark.usefixtures("fake")
def test_info_says_that_the_kernels_are_not_built(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.delenv("PAGED_KV_ASCEND_KERNELS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["info"]) == 1
    told = capsys.readouterr()
    assert "kernels       none" in told.out
    assert "run python -m paged_kv.ascend build" in told.err
    ready = ascend.is_available()
    assert not ready
    assert ready.reason in told.err
