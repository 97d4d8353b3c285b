"""What the device runtime's error codes are called, and what usually helps."""

from __future__ import annotations

from paged_kv.errors import DeviceError

__all__ = ["DeviceError", "UnavailableError", "device_error"]


class UnavailableError(DeviceError):
    """There is nothing to run on: no CANN runtime, no device, no kernel library, or a CANN too old.

    Attributes
    ----------
    code : int
        0, or the code with which the runtime refused.
    hint : str
        What to install, build or set.
    """


# Names and numbers as in CANN's public error tables (acl_base.h, rt_error_codes.h).
_CODES: dict[int, tuple[str, str]] = {
    100000: ("ACL_ERROR_INVALID_PARAM", ""),
    100001: ("ACL_ERROR_UNINITIALIZE", "the runtime was finalised or never initialised in this process"),
    100002: ("ACL_ERROR_REPEAT_INITIALIZE", "another library initialised the runtime; that is fine"),
    200000: ("ACL_ERROR_BAD_ALLOC", "the host is out of memory"),
    500000: ("ACL_ERROR_INTERNAL_ERROR", "see the plog files in ~/ascend/log"),
    500001: (
        "ACL_ERROR_GE_FAILURE",
        "libraries of different CANN versions are loaded: source one set_env.sh only",
    ),
    500003: ("ACL_ERROR_RT_FAILURE", "see the plog files in ~/ascend/log"),
    107000: ("ACL_ERROR_RT_PARAM_INVALID", ""),
    107001: (
        "ACL_ERROR_RT_INVALID_DEVICEID",
        "there is no such device; ASCEND_RT_VISIBLE_DEVICES limits and renumbers them",
    ),
    107002: ("ACL_ERROR_RT_CONTEXT_NULL", "this thread has no context: the device was reset meanwhile"),
    107003: (
        "ACL_ERROR_RT_STREAM_CONTEXT",
        "the stream belongs to another context or device than the cache, or was destroyed",
    ),
    107017: ("ACL_ERROR_RT_INVALID_HANDLE", "the object was destroyed already"),
    107019: ("ACL_ERROR_RT_WAIT_TIMEOUT", "work on the stream took longer than allowed"),
    107020: ("ACL_ERROR_RT_TASK_TIMEOUT", "work on the stream took longer than allowed"),
    207000: (
        "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
        "this device or CANN version can't do it: CANN 8.5 or newer is needed",
    ),
    207001: (
        "ACL_ERROR_RT_MEMORY_ALLOCATION",
        "device memory is exhausted: use fewer pages; npu-smi info shows who holds the rest",
    ),
    507000: ("ACL_ERROR_RT_INTERNAL_ERROR", "see the plog files in ~/ascend/log"),
    507014: ("ACL_ERROR_RT_AICORE_TIMEOUT", "a kernel hung; the device must be opened again"),
    507015: (
        "ACL_ERROR_RT_AICORE_EXCEPTION",
        "a kernel read or wrote outside its arrays: check block-table entries and lengths against the cache; "
        "the device must be opened again",
    ),
    507027: (
        "ACL_ERROR_RT_KERNEL_LOOKUP",
        "the kernel library was built for another chip or CANN: run python -m paged_kv.ascend build",
    ),
    507034: ("ACL_ERROR_RT_VECTOR_CORE_TIMEOUT", "a kernel hung; the device must be opened again"),
    507035: (
        "ACL_ERROR_RT_VECTOR_CORE_EXCEPTION",
        "a kernel read or wrote outside its arrays: check block-table entries and lengths against the cache; "
        "the device must be opened again",
    ),
    507046: ("ACL_ERROR_RT_STREAM_SYNC_TIMEOUT", "work on the stream took longer than allowed"),
    561103: (
        "ACLNN_ERR_INNER_NULLPTR",
        "the operator package is missing or of another version than the toolkit",
    ),
}

FATAL = frozenset({507000, 507014, 507015, 507034, 507035})
"""Codes after which nothing on the device's context works any more."""


def device_error(what: str, code: int, said: str = "") -> DeviceError:
    """Make the error for a call that returned `code`, with what the runtime `said` about it."""
    name, hint = _CODES.get(code, (f"ACL_ERROR_{code}", ""))
    said = " ".join(said.split())
    text = f"{what}: {code} {name}" + (f": {said}" if said else "") + (f" ({hint})" if hint else "")
    return DeviceError(text, code=code, name=name, message=said, hint=hint)


def unavailable(reason: str, hint: str = "", code: int = 0) -> UnavailableError:
    """Make the error for what is missing."""
    name = _CODES[code][0] if code in _CODES else ""
    text = reason + (f" ({hint})" if hint else "")
    return UnavailableError(text, code=code, name=name, message=reason, hint=hint)
