"""The C interface of the CANN runtime (ACL) as a table for ctypes; importing this loads no library.

Signatures and numbers are those of the public headers of CANN 8.5 to 9.1. Functions that older
versions lack are optional: symbols are probed, versions are not compared.
"""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import (
    POINTER,
    c_char_p,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint32,
    c_void_p,
)
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_kv.ascend.errors import device_error, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

# ---- numbers ----

HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = range(4)
MALLOC_HUGE_FIRST = 0
MEM_HBM = 1
CMO_PREFETCH = 0
EVENT_COMPLETE = 1
BINARY_MAGIC, BINARY_MAGIC_VECTOR_CORE = 2, 0x41415246
ATTR_AICORE, ATTR_CUBE, ATTR_VECTOR, ATTR_TOTAL_MEMORY, ATTR_L2 = 101, 102, 201, 301, 302
REPEAT_INITIALIZE = 100002
CONTEXT_NULL, STREAM_CONTEXT, INVALID_HANDLE = 107002, 107003, 107017
OUT_OF_MEMORY = 207001

# ---- structures ----


class LaunchKernelAttrValue(ctypes.Union):
    """Value of one launch attribute, 16 bytes."""

    _fields_ = (
        ("schemMode", c_uint8),
        ("engineType", c_uint32),
        ("blockDimOffset", c_uint32),
        ("timeout", c_uint16),
        ("rsv", c_uint32 * 4),
    )


class LaunchKernelAttr(ctypes.Structure):
    """One launch attribute, 20 bytes."""

    _fields_ = (("id", c_uint32), ("value", LaunchKernelAttrValue))


class LaunchKernelCfg(ctypes.Structure):
    """Attributes of a launch, 16 bytes."""

    _fields_ = (("attrs", POINTER(LaunchKernelAttr)), ("numAttrs", c_size_t))


class BinaryLoadOptionValue(ctypes.Union):
    """Value of one load option, 16 bytes."""

    _fields_ = (
        ("isLazyLoad", c_uint32),
        ("magic", c_uint32),
        ("cpuKernelMode", c_int32),
        ("rsv", c_uint32 * 4),
    )


class BinaryLoadOption(ctypes.Structure):
    """One load option, 20 bytes."""

    _fields_ = (("type", c_uint32), ("value", BinaryLoadOptionValue))


class BinaryLoadOptions(ctypes.Structure):
    """Options of a load, 16 bytes."""

    _fields_ = (("options", POINTER(BinaryLoadOption)), ("numOpt", c_size_t))


class PlaceHolderInfo(ctypes.Structure):
    """Where in the arguments an address is to be filled in, 8 bytes."""

    _fields_ = (("addrOffset", c_uint32), ("dataOffset", c_uint32))


# ---- functions ----

_HANDLE = c_void_p  # every handle is a void*
_OUT = POINTER(c_void_p)

# Those that are needed, and that every CANN since 8.0 has; they return an error code.
REQUIRED: dict[str, list[Any]] = {
    "aclInit": [c_char_p],
    "aclFinalize": [],
    "aclrtGetDeviceCount": [POINTER(c_uint32)],
    "aclrtSetDevice": [c_int32],
    "aclrtResetDevice": [c_int32],
    "aclrtSetCurrentContext": [_HANDLE],
    "aclrtGetCurrentContext": [_OUT],
    "aclrtCreateStream": [_OUT],
    "aclrtDestroyStream": [_HANDLE],
    "aclrtSynchronizeStream": [_HANDLE],
    "aclrtSynchronizeDevice": [],
    "aclrtCreateEvent": [_OUT],
    "aclrtDestroyEvent": [_HANDLE],
    "aclrtRecordEvent": [_HANDLE, _HANDLE],
    "aclrtSynchronizeEvent": [_HANDLE],
    "aclrtQueryEventStatus": [_HANDLE, POINTER(c_int32)],
    "aclrtEventElapsedTime": [POINTER(c_float), _HANDLE, _HANDLE],
    "aclrtStreamWaitEvent": [_HANDLE, _HANDLE],
    "aclrtMalloc": [_OUT, c_size_t, c_int32],
    "aclrtFree": [_HANDLE],
    "aclrtMallocHost": [_OUT, c_size_t],
    "aclrtFreeHost": [_HANDLE],
    "aclrtMemcpy": [c_void_p, c_size_t, c_void_p, c_size_t, c_int32],
    "aclrtMemcpyAsync": [c_void_p, c_size_t, c_void_p, c_size_t, c_int32, _HANDLE],
    "aclrtMemset": [c_void_p, c_size_t, c_int32, c_size_t],
    "aclrtMemsetAsync": [c_void_p, c_size_t, c_int32, c_size_t, _HANDLE],
    "aclrtGetMemInfo": [c_int32, POINTER(c_size_t), POINTER(c_size_t)],
}

# Those that some version lacks, or that nothing here needs.
OPTIONAL: dict[str, list[Any]] = {
    "aclrtGetDevice": [POINTER(c_int32)],
    "aclrtCreateContext": [_OUT, c_int32],
    "aclrtDestroyContext": [_HANDLE],
    "aclrtGetVersion": [POINTER(c_int32)] * 3,
    "aclrtGetDeviceInfo": [c_uint32, c_int32, POINTER(c_int64)],
    "aclrtSynchronizeStreamWithTimeout": [_HANDLE, c_int32],
    "aclrtCmoAsync": [c_void_p, c_size_t, c_int32, _HANDLE],
    "aclrtBinaryLoadFromFile": [c_char_p, POINTER(BinaryLoadOptions), _OUT],
    "aclrtBinaryLoadFromData": [c_void_p, c_size_t, POINTER(BinaryLoadOptions), _OUT],
    "aclrtBinaryGetFunction": [_HANDLE, c_char_p, _OUT],
    "aclrtBinaryUnLoad": [_HANDLE],
    "aclrtKernelArgsInit": [_HANDLE, _OUT],
    "aclrtKernelArgsAppend": [_HANDLE, c_void_p, c_size_t, _OUT],
    "aclrtKernelArgsFinalize": [_HANDLE],
    "aclrtLaunchKernel": [_HANDLE, c_uint32, c_void_p, c_size_t, _HANDLE],
    "aclrtLaunchKernelWithConfig": [_HANDLE, c_uint32, _HANDLE, POINTER(LaunchKernelCfg), _HANDLE, c_void_p],
    "aclrtLaunchKernelV2": [_HANDLE, c_uint32, c_void_p, c_size_t, POINTER(LaunchKernelCfg), _HANDLE],
    "aclrtLaunchKernelWithHostArgs": [
        _HANDLE,
        c_uint32,
        _HANDLE,
        POINTER(LaunchKernelCfg),
        c_void_p,
        c_size_t,
        POINTER(PlaceHolderInfo),
        c_size_t,
    ],
}

# These return text, and can't fail.
TEXTS = ("aclGetRecentErrMsg", "aclrtGetSocName")

LIBRARIES = ("libascendcl.so", "libacl_rt.so")  # the classic name first; newer runtimes have the second


class Acl:
    """A loaded runtime: every function under its C name, raising :class:`DeviceError` where it fails.

    Parameters
    ----------
    path : str
        The library, as ``dlopen`` takes it.

    Raises
    ------
    OSError
        It can't be loaded.
    UnavailableError
        It lacks a function that is needed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        library = ctypes.CDLL(path)
        missing = [name for name in (*REQUIRED, *TEXTS) if not hasattr(library, name)]
        if missing:
            raise unavailable(f"{path} lacks {', '.join(missing)}", "CANN 8.5 or newer is needed")
        self._functions: dict[str, Callable[..., int]] = {}
        for name in TEXTS:
            getattr(library, name).restype = c_char_p
        self._recent: Callable[[], bytes | None] = library.aclGetRecentErrMsg
        self._soc_name: Callable[[], bytes | None] = library.aclrtGetSocName
        for name, arguments in (REQUIRED | OPTIONAL).items():
            if not hasattr(library, name):
                continue
            function = getattr(library, name)
            function.restype, function.argtypes = c_int32, arguments
            function.errcheck = self._check
            self._functions[name] = function

    def __getattr__(self, name: str) -> Callable[..., int]:
        try:
            return self._functions[name]
        except KeyError:
            if name in OPTIONAL:
                raise unavailable(f"{self.path} lacks {name}", "a newer CANN has it") from None
            raise AttributeError(name) from None

    def has(self, *names: str) -> bool:
        """Say whether the runtime has all of these functions."""
        return all(name in self._functions for name in names)

    @property
    def soc_name(self) -> str:
        """The chip's name, such as ``Ascend910B3``; empty where the runtime doesn't know."""
        return (self._soc_name() or b"").decode(errors="replace")

    def _check(self, code: int, function: Any, _arguments: Any) -> int:
        # The message is the thread's last one: nothing may be called between the failure and this.
        if code == 0:
            return 0
        said = (self._recent() or b"").decode(errors="replace")
        raise device_error(function.__name__, code, said)


def candidates() -> list[str]:
    """List where the runtime is looked for: ``$ASCEND_HOME_PATH/lib64`` first, then the loader's path."""
    home = os.environ.get("ASCEND_HOME_PATH")
    inside = [str(Path(home) / "lib64" / name) for name in LIBRARIES] if home else []
    return [*inside, *LIBRARIES]


_lock = threading.Lock()
_loaded: Acl | None = None


def load() -> Acl:
    """Load the runtime, once in a process.

    Returns
    -------
    Acl
        The table of its functions.

    Raises
    ------
    UnavailableError
        There is none, or one that is too old; the message says for each place what was wrong.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _first(candidates())
        return _loaded


def _first(paths: list[str]) -> Acl:
    reasons = []
    for path in paths:
        try:
            return Acl(path)
        except OSError as error:
            reasons.append(str(error) if path in str(error) else f"{path}: {error}")
    hint = "install CANN 8.5 or newer and source its set_env.sh, which sets ASCEND_HOME_PATH"
    raise unavailable("no CANN runtime: " + "; ".join(reasons), hint)
