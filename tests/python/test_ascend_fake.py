"""The fake runtime itself: each thing that ACL forbids is refused, remembered, and told."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING

import pytest

from ascend_support import kernel_library
from paged_kv.ascend import acl

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ascend_fake import Fake

H2D, D2H, D2D = acl.HOST_TO_DEVICE, acl.DEVICE_TO_HOST, acl.DEVICE_TO_DEVICE


class Program:
    """A program in C, as far as it matters: device 0 is set, one stream and 256 bytes of memory are there."""

    def __init__(self, fake: Fake) -> None:
        self.fake = fake
        self.library = fake.library
        assert self("aclInit", None) == 0
        assert self("aclrtSetDevice", 0) == 0
        self.stream = self.made("aclrtCreateStream")
        self.memory = self.made("aclrtMalloc", 256, 0)
        self.host = ctypes.create_string_buffer(256)

    def __call__(self, name: str, *arguments: object) -> int:
        """Call a function with the types of the package's table."""
        function = getattr(self.library, name)
        function.argtypes = (acl.REQUIRED | acl.OPTIONAL)[name]
        return int(function(*arguments))

    def made(self, name: str, *arguments: object) -> int:
        """Return the handle that a function makes."""
        handle = ctypes.c_void_p()
        assert self(name, ctypes.byref(handle), *arguments) == 0
        return handle.value or 0

    def copy(self, kind: int, target: object, source: object, count: int = 64, *, room: int = 256) -> int:
        return self("aclrtMemcpy", target, room, source, count, kind)

    def binary(self) -> int:
        magic = acl.BinaryLoadOptionValue(magic=acl.BINARY_MAGIC_VECTOR_CORE)
        option = acl.BinaryLoadOption(acl.BINARY_MAGIC, magic)
        options = acl.BinaryLoadOptions(ctypes.pointer(option), 1)
        binary = ctypes.c_void_p()
        assert (
            self(
                "aclrtBinaryLoadFromFile",
                bytes(kernel_library()),
                ctypes.byref(options),
                ctypes.byref(binary),
            )
            == 0
        )
        return binary.value or 0

    def end(self) -> None:
        """Give back what the test left."""
        self.fake.clear()
        self("aclInit", None)
        self("aclrtSetDevice", 0)
        for name, handle in (("aclrtDestroyStream", self.stream), ("aclrtFree", self.memory)):
            self(name, handle)
        self("aclrtResetDevice", 0)
        self("aclFinalize")
        self.fake.clear()


@pytest.fixture
def program(fake: Fake) -> Iterator[Program]:
    begun = Program(fake)
    yield begun
    begun.end()


def in_other_context(p: Program) -> int:
    """Use a stream in a context that is not its own."""
    other = p.made("aclrtCreateContext", 0)
    code = p("aclrtSynchronizeStream", p.stream)
    p("aclrtDestroyContext", other)
    return code


def at_work(p: Program, forbidden: Callable[[Program], int]) -> int:
    """Do what is forbidden while the stream is held with work."""
    p.library.fake_hold(p.stream)
    p("aclrtMemsetAsync", p.memory, 256, 0, 256, p.stream)
    code = forbidden(p)
    p.library.fake_release(p.stream)
    return code


def destroy_event(p: Program) -> int:
    event = p.made("aclrtCreateEvent")
    p("aclrtRecordEvent", event, p.stream)
    return p("aclrtDestroyEvent", event)


def launch_incomplete(p: Program) -> int:
    binary = p.binary()
    function, arguments = ctypes.c_void_p(), ctypes.c_void_p()
    p("aclrtBinaryGetFunction", binary, b"paged_kv_copy_pages", ctypes.byref(function))
    p("aclrtKernelArgsInit", function, ctypes.byref(arguments))
    code = p("aclrtLaunchKernelWithConfig", function, 1, p.stream, None, arguments, None)
    p("aclrtBinaryUnLoad", binary)
    return code


def appended_late(p: Program) -> int:
    binary = p.binary()
    function, arguments, parameter = (ctypes.c_void_p() for _ in range(3))
    p("aclrtBinaryGetFunction", binary, b"paged_kv_copy_pages", ctypes.byref(function))
    p("aclrtKernelArgsInit", function, ctypes.byref(arguments))
    p("aclrtKernelArgsFinalize", arguments)
    code = p("aclrtKernelArgsAppend", arguments, ctypes.byref(parameter), 8, ctypes.byref(parameter))
    p("aclrtBinaryUnLoad", binary)
    return code


def given_back_twice(p: Program, create: str, destroy: str, *arguments: object) -> int:
    handle = p.made(create, *arguments)
    assert p(destroy, handle) == 0
    return p(destroy, handle)


def freed_before_its_turn(p: Program) -> int:
    """Free what a step that waits for its turn will write."""
    p.library.fake_hold(p.stream)
    memory = p.made("aclrtMalloc", 64, 0)
    assert p("aclrtMemsetAsync", memory, 64, 0, 64, p.stream) == 0
    assert p("aclrtFree", memory) == 0
    p.library.fake_release(p.stream)
    return p("aclrtSynchronizeStream", p.stream)


FORBIDDEN: dict[str, tuple[Callable[[Program], int], int, str]] = {
    "a stream that is none": (lambda p: p("aclrtSynchronizeStream", p.memory), 107017, "is not a stream"),
    "an event that is none": (lambda p: p("aclrtRecordEvent", p.stream, p.stream), 107017, "is not an event"),
    "a stream of another context": (in_other_context, 107003, "is not of the current context"),
    "a stream destroyed twice": (
        lambda p: given_back_twice(p, "aclrtCreateStream", "aclrtDestroyStream"),
        107017,
        "aclrtDestroyStream",
    ),
    "an event destroyed twice": (
        lambda p: given_back_twice(p, "aclrtCreateEvent", "aclrtDestroyEvent"),
        107017,
        "aclrtDestroyEvent",
    ),
    "memory freed twice": (
        lambda p: given_back_twice(p, "aclrtMalloc", "aclrtFree", 64, 0),
        107000,
        "freed already",
    ),
    "memory of the host freed as the device's": (
        lambda p: p("aclrtFree", ctypes.addressof(p.host)),
        107000,
        "was not allocated",
    ),
    "memory of no size": (
        lambda p: p("aclrtMalloc", None, 0, 0),
        100000,
        "0 bytes",
    ),
    "a copy to the host as to the device": (lambda p: p.copy(H2D, p.host, p.host), 107000, "wrong target"),
    "a copy from the device as of the host": (
        lambda p: p.copy(H2D, p.memory, p.memory),
        107000,
        "wrong source",
    ),
    "a copy to the device as of the host": (
        lambda p: p.copy(D2H, p.memory, p.memory),
        107000,
        "wrong target",
    ),
    "a copy beyond the memory": (lambda p: p.copy(H2D, p.memory + 224, p.host), 107000, "wrong target"),
    "a copy beyond the room": (lambda p: p.copy(H2D, p.memory, p.host, room=32), 107000, "64 bytes into 32"),
    "a copy of nothing": (lambda p: p.copy(H2D, p.memory, p.host, 0), 100000, "0 bytes"),
    "a copy of no kind": (lambda p: p.copy(9, p.memory, p.host), 107000, "kind 9"),
    "an unaligned copy on the device": (
        lambda p: p("aclrtMemcpyAsync", p.memory + 32, 64, p.memory + 128, 64, D2D, p.stream),
        107000,
        "a copy on the device",
    ),
    "bytes set beyond the memory": (lambda p: p("aclrtMemset", p.memory, 512, 0, 512), 107000, "512 bytes"),
    "a prefetch of the host's": (
        lambda p: p("aclrtCmoAsync", ctypes.addressof(p.host), 64, 0, p.stream),
        107000,
        "aclrtCmoAsync",
    ),
    "another cache operation": (lambda p: p("aclrtCmoAsync", p.memory, 64, 3, p.stream), 207000, "kind 3"),
    "a stream destroyed at work": (
        lambda p: at_work(p, lambda p: p("aclrtDestroyStream", p.stream)),
        0,
        "a stream at work",
    ),
    "an event destroyed early": (lambda p: at_work(p, destroy_event), 0, "has not passed"),
    "memory freed before its turn": (freed_before_its_turn, 507015, "freed before it was set"),
    "an end with objects left": (lambda p: p("aclFinalize"), 0, "2 objects left"),
    "a reset with objects left": (lambda p: p("aclrtResetDevice", 0), 0, "2 objects left"),
    "a reset of a device that is not set": (lambda p: p("aclrtResetDevice", 1), 107000, "is not set"),
    "a launch of incomplete arguments": (launch_incomplete, 107000, "complete arguments"),
    "an argument after the last": (appended_late, 107017, "aclrtKernelArgsAppend"),
}


@pytest.mark.parametrize(("forbidden", "code", "message"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_what_acl_forbids_is_refused_and_remembered(program: Program, forbidden, code, message) -> None:
    assert forbidden(program) == code
    (told,) = program.fake.misuse()
    assert message in told


def test_nothing_works_before_the_beginning(fake: Fake) -> None:
    assert fake.library.aclrtSetDevice(0) == 100001
    assert fake.misuse() == ["aclrtSetDevice before aclInit or after aclFinalize"]
    fake.clear()


def test_what_is_left_is_listed(program: Program) -> None:
    event = program.made("aclrtCreateEvent")
    pinned = program.made("aclrtMallocHost", 4096)
    assert sorted(program.fake.leaks()) == [
        "256 bytes of device 0",
        "4096 bytes of the host",
        "event of device 0",
        "stream of device 0",
    ]
    assert program("aclrtDestroyEvent", event) == program("aclrtFreeHost", pinned) == 0


def test_the_last_message_is_told_once_and_only_to_its_thread(program: Program) -> None:
    recent = program.library.aclGetRecentErrMsg
    recent.restype = ctypes.c_char_p
    assert program("aclrtSetDevice", 9) == 107001
    told: list[bytes | None] = []
    other = threading.Thread(target=lambda: told.append(recent()))
    other.start()
    other.join()
    assert told == [None]
    assert recent() == b"device 9 of 2"
    assert recent() is None
