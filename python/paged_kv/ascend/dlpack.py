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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.ascend.tensor import DeviceTensor

__all__ = ["DEVICE_TYPE", "HOST_TYPES", "Imported", "export_capsule", "host_view", "import_capsule"]

DEVICE_TYPE = 12
"""kDLExtDev: what frameworks call devices that DLPack has no number for."""

HOST_TYPES = (1, 3, 11)
"""Memory of the host, page-locked by somebody or not."""

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


class Imported(NamedTuple):
    """An array that was taken over: whoever keeps `owner` keeps the memory. Strides count elements."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    dtype: str
    owner: object
    read_only: bool


def import_capsule(array: Any, stream: int | None = None) -> Imported:
    """Take an array over by its ``__dlpack__``.

    Parameters
    ----------
    array : object with ``__dlpack__``
        Whose it is.
    stream : int, optional
        -1 for an array of a device, whose content needs not be there yet; None for one of the host.

    Raises
    ------
    LayoutError
        It is of a kind, a version or a dtype that is not taken.
    """
    try:
        capsule = array.__dlpack__(stream=stream, max_version=(1, 0))
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(stream=stream)
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
    return Imported((tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, owner, read_only)


class _Lent:
    """Memory as numpy wants it described; numpy never looks at what an array holds unasked."""

    def __init__(
        self, address: int, shape: tuple[int, ...], kind: str, owner: object, *, read_only: bool = False
    ) -> None:
        self.owner = owner
        self.__array_interface__: dict[str, object] = {
            "data": (address, read_only),
            "shape": shape,
            "typestr": np.dtype(kind).str,
            "version": 3,
        }


def host_view(array: Any) -> npt.NDArray[Any]:
    """Return an array of the host that has ``__dlpack__`` as one of numpy; bfloat16 as its bits. No copy."""
    found = import_capsule(array)
    kind = np.dtype("uint16" if found.dtype == "bfloat16" else found.dtype)
    if 0 in found.shape:
        return np.empty(found.shape, kind)
    lent = _Lent(found.address, found.shape, kind.str, found.owner, read_only=found.read_only)
    if found.strides is not None:
        lent.__array_interface__["strides"] = tuple(step * kind.itemsize for step in found.strides)
    return np.asarray(lent)


_VERSIONED = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Whether numpy makes versioned capsules."""


def export_capsule(array: DeviceTensor, *, versioned: bool) -> object:
    """Return a capsule that keeps `array` alive until its consumer lets go; unversioned where numpy is old.

    numpy makes it, and only device and type are put right: a consumer that refuses drops the capsule
    while its exception is on the way, when C code may free things, but Python code can't run.
    """
    code, bits = _NUMBERS[array.dtype]
    versioned = versioned and _VERSIONED
    lent = np.asarray(_Lent(array.data_ptr, array.shape, f"i{bits // 8}", array, read_only=array.read_only))
    capsule = lent.__dlpack__(max_version=(1, 0)) if versioned else lent.__dlpack__()
    name = b"dltensor_versioned" if versioned else b"dltensor"
    tensor = _KINDS[name].from_address(_api.PyCapsule_GetPointer(capsule, name)).tensor
    (tensor.device_type, tensor.device_id), tensor.code = array.__dlpack_device__(), code
    return capsule
