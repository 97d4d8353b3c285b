"""DLPack capsules in ctypes, for device arrays that Python alone passes on."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    c_char_p,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    from paged_kv.ascend.tensor import DeviceTensor

__all__ = ["DEVICE_TYPE", "export_capsule", "import_capsule"]

DEVICE_TYPE = 12
"""kDLExtDev: what frameworks call devices that DLPack has no number for."""

_READ_ONLY = 1
"""The flag of an array that its consumer must not write to."""

_CODES = {(2, 16): "float16", (2, 32): "float32", (4, 16): "bfloat16", (0, 32): "int32", (0, 64): "int64"}
_NUMBERS = {name: code for code, name in _CODES.items()}


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_Deleter = CFUNCTYPE(None, c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", c_void_p), ("deleter", c_void_p))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _Tensor),
    )


_KINDS: dict[bytes, type[_Managed | _Versioned]] = {
    b"dltensor_versioned": _Versioned,
    b"dltensor": _Managed,
}

_api = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, c_char_p]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, c_char_p]

_USED = {name: b"used_" + name for name in _KINDS}  # capsules don't copy their names


class _Owner:
    """Gives an imported array back to its producer when the last reference goes."""

    def __init__(self, address: int, deleter: int | None, producer: object) -> None:
        self.producer = producer
        self._give_back = (_Deleter(deleter), address) if deleter else None

    def __del__(self) -> None:
        if self._give_back:
            deleter, address = self._give_back
            deleter(address)


def import_capsule(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, object, bool]:
    """Take an array over by its ``__dlpack__``.

    Returns
    -------
    address, shape, strides, dtype, owner, read_only
        Strides in elements, or None where it is contiguous; whoever keeps `owner` keeps the memory.
    """
    try:
        capsule = array.__dlpack__(stream=-1, max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(stream=-1)
    name = next((name for name in _KINDS if _api.PyCapsule_IsValid(capsule, name)), None)
    if name is None:
        raise LayoutError("the DLPack capsule is of an unknown kind, or was used before")
    address = _api.PyCapsule_GetPointer(capsule, name)
    managed = _KINDS[name].from_address(address)
    _api.PyCapsule_SetName(capsule, _USED[name])
    owner = _Owner(address, managed.deleter, array)
    read_only = False
    if isinstance(managed, _Versioned):
        if managed.major > 1:  # nothing but the deleter's place is known then
            raise LayoutError(f"DLPack version {managed.major}.{managed.minor}; up to 1 is taken")
        read_only = bool(managed.flags & _READ_ONLY)
    tensor = managed.tensor
    dtype = _CODES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise LayoutError(f"DLPack type code {tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, owner, read_only


class _Lent:
    """Device memory as numpy wants it described; numpy never looks at what an array holds unasked."""

    def __init__(self, tensor: DeviceTensor, nbytes: int) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "data": (tensor.data_ptr, tensor.read_only),
            "shape": tensor.shape,
            "typestr": np.dtype(f"i{nbytes}").str,
            "version": 3,
        }


_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether numpy makes versioned capsules."""


def export_capsule(array: DeviceTensor, *, versioned: bool) -> object:
    """Return a capsule that keeps `array` alive until its consumer lets go; unversioned where numpy is old.

    numpy makes it, and only device and type are put right: a consumer that refuses drops the capsule
    while its exception is on the way, when C code may free things, but Python code can't run.
    """
    code, bits = _NUMBERS[array.dtype]
    versioned = versioned and _VERSIONED
    lent = np.asarray(_Lent(array, bits // 8))
    capsule = lent.__dlpack__(max_version=(1, 0)) if versioned else lent.__dlpack__()
    name = b"dltensor_versioned" if versioned else b"dltensor"
    tensor = _KINDS[name].from_address(_api.PyCapsule_GetPointer(capsule, name)).tensor
    (tensor.device_type, tensor.device_id), tensor.code = array.__dlpack_device__(), code
    return capsule
