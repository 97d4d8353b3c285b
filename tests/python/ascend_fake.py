"""The fake CANN runtime in a test: its controls, and a fixture that lets no test leave anything behind."""

from __future__ import annotations

import ctypes
import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from ascend_support import fake_runtime, kernel_library
from paged_kv import ascend
from paged_kv.ascend import acl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paged_kv.ascend import Stream


def environment() -> dict[str, str]:
    """Return the variables with which a program finds the fake runtime and the emulated kernels."""
    return {"ASCEND_HOME_PATH": str(fake_runtime().parent), "PAGED_KV_ASCEND_KERNELS": str(kernel_library())}


class Fake:
    """What a test asks and tells the runtime."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_uint64, ctypes.c_int]
        for name in ("fake_calls", "fake_pending", "fake_memory_used"):
            getattr(self.library, name).restype = ctypes.c_uint64
        for name in ("fake_hold", "fake_release", "fake_pending"):
            getattr(self.library, name).argtypes = [ctypes.c_void_p]
        for name in ("fake_memory_limit", "fake_delay"):
            getattr(self.library, name).argtypes = [ctypes.c_uint64]

    def fail(self, name: str, code: int, nth: int = 1) -> None:
        """Let the n-th call from now on of a function fail with a code, and do nothing."""
        self.library.fake_fail(name.encode(), nth, code)

    def fail_task(self, code: int) -> None:
        """Let the next step that a stream comes to fail with a code."""
        self.library.fake_fail_task(code)

    @contextmanager
    def held(self, stream: Stream) -> Iterator[None]:
        """Let a stream begin nothing until the block ends."""
        self.hold(stream)
        try:
            yield
        finally:
            self.release(stream)

    def hold(self, stream: Stream) -> None:
        assert self.library.fake_hold(stream.handle) == 0

    def release(self, stream: Stream) -> None:
        assert self.library.fake_release(stream.handle) == 0

    def pending(self, stream: Stream) -> int:
        """Return how many steps a stream has not finished."""
        return int(self.library.fake_pending(stream.handle))

    def delay(self, microseconds: int) -> None:
        """Let each step of each stream take so much longer."""
        self.library.fake_delay(microseconds)

    def limit_memory(self, nbytes: int) -> None:
        self.library.fake_memory_limit(nbytes)

    def memory_used(self, device: int = 0) -> int:
        return int(self.library.fake_memory_used(device))

    def calls(self, name: str) -> int:
        return int(self.library.fake_calls(name.encode()))

    def _lines(self, function: str) -> list[str]:
        text = ctypes.create_string_buffer(1 << 16)
        getattr(self.library, function)(text, ctypes.c_size_t(len(text)))
        return text.value.decode().splitlines()

    def called(self) -> list[str]:
        """Return the names of the functions that were called."""
        return self._lines("fake_called")

    def leaks(self) -> list[str]:
        """Return what is still there."""
        return self._lines("fake_leaks")

    def misuse(self) -> list[str]:
        """Return what was done that ACL forbids."""
        return self._lines("fake_misuse")

    def clear_failures(self) -> None:
        """Forget failures that have not come to pass."""
        self.library.fake_clear_failures()

    def clear(self) -> None:
        """Forget counts, failures, misuse, delays and limits."""
        self.library.fake_clear()


@functools.cache
def _fake(path: str) -> Fake:
    return Fake(path)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """Put the fake runtime where CANN is looked for; afterwards nothing may be left or have been misused."""
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(acl, "_loaded", None)
    ascend.load_kernels.cache_clear()
    runtime = _fake(str(fake_runtime() / "libascendcl.so"))
    runtime.clear()
    yield runtime
    ascend.shutdown()
    ascend.load_kernels.cache_clear()
    left, misuse = runtime.leaks(), runtime.misuse()
    runtime.clear()
    assert (left, misuse) == ([], []), (left, misuse)


def decode_arrays(stream: Stream, host: dict[str, Any]) -> dict[str, ascend.DeviceMemory]:
    """Bring a decode step's arrays to the device, on the stream."""
    memory = {}
    for name, array in host.items():
        memory[name] = ascend.allocate(stream.device, array.nbytes)
        memory[name].copy_from(array, stream)
    return memory
