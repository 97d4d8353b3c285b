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

from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    from paged_kv.ascend.tensor import DeviceTensor

__all__ = ["DEVICE_TYPE", "export_capsule", "import_capsule"]

DEVICE_TYPE = 12
"""kDLExtDev: what frameworks call devices that DLPack has no number for."""

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
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = [c_void_p, c_char_p, c_void_p]
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, c_char_p]
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, c_char_p]
_api.PyCapsule_SetName.argtypes = [ctypes.py_object, c_char_p]

# The same for a capsule that is being destroyed, which must not become an object again.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, c_void_p, c_char_p)(("PyCapsule_IsValid", _api))
_pointer = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))

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


def import_capsule(array: Any) -> tuple[int, tuple[int, ...], tuple[int, ...] | None, str, object]:
    """Take an array over by its ``__dlpack__``.

    Returns
    -------
    address, shape, strides, dtype, owner
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
    tensor = managed.tensor
    _api.PyCapsule_SetName(capsule, _USED[name])
    owner = _Owner(address, managed.deleter, array)
    dtype = _CODES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        raise LayoutError(f"DLPack type code {tensor.code} of {tensor.bits} bits, {tensor.lanes} lanes")
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, owner


# What capsules point to, by address, until their consumers give it back.
_exported: dict[int, tuple[object, ...]] = {}


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _drop(capsule: int) -> None:
    """Forget what nobody took: the capsule's name would say ``used``."""
    for name in _KINDS:
        if _is_valid(capsule, name):
            _forget(_pointer(capsule, name))


# What C calls; kept as long as the module, since capsules may outlive everything else.
_forget_in_c, _drop_in_c = _Deleter(_forget), _Deleter(_drop)


def export_capsule(array: DeviceTensor, *, versioned: bool) -> object:
    """Return a capsule that keeps `array` alive until its consumer lets go."""
    code, bits = _NUMBERS[array.dtype]
    ndim = len(array.shape)
    shape, strides = (c_int64 * ndim)(*array.shape), (c_int64 * ndim)(*array.strides)
    name = b"dltensor_versioned" if versioned else b"dltensor"
    managed = _KINDS[name]()
    managed.deleter = ctypes.cast(_forget_in_c, c_void_p)
    if isinstance(managed, _Versioned):
        managed.major = 1
    tensor = managed.tensor
    tensor.data, (tensor.device_type, tensor.device_id) = array.data_ptr, array.__dlpack_device__()
    tensor.ndim, tensor.code, tensor.bits, tensor.lanes = ndim, code, bits, 1
    tensor.shape, tensor.strides = shape, strides
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, strides, array)
    return _api.PyCapsule_New(address, name, ctypes.cast(_drop_in_c, c_void_p))
