"""Arrays on a device and of the host, as caches take and give them."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from paged_kv.ascend.dlpack import DEVICE_TYPE, HOST_TYPES, export_capsule, host_view, import_capsule
from paged_kv.ascend.memory import DeviceMemory, allocate
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.ascend.device import Device

__all__ = [
    "DeviceTensor",
    "as_tensor",
    "described",
    "device_tensor",
    "empty",
    "from_bits",
    "host_array",
    "query_bits",
    "span",
    "to_bits",
]

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4, "int64": 8}


class DeviceTensor:
    """A contiguous array in a device's memory: an address, a shape and a dtype.

    Parameters
    ----------
    memory : DeviceMemory
        Where it lies; kept alive.
    shape : tuple of int
        Length of each axis.
    dtype : str
        ``"float16"``, ``"bfloat16"`` or ``"float32"``.
    read_only : bool
        Whose it is doesn't want it written to: it is no output, and no storage of a cache.

    Raises
    ------
    LayoutError
        The memory is shorter than that, or there is no such dtype.
    ValueError
        A length is below 0.
    """

    def __init__(
        self, memory: DeviceMemory, shape: tuple[int, ...], dtype: str, *, read_only: bool = False
    ) -> None:
        _nbytes(shape, dtype)
        self.memory = memory
        self.read_only = read_only
        self.shape = tuple(shape)
        self.dtype = dtype
        if self.nbytes > memory.nbytes:
            raise LayoutError(
                f"{dtype} {list(self.shape)} takes {self.nbytes} bytes, the memory has {memory.nbytes}"
            )

    def __repr__(self) -> str:
        return f"<DeviceTensor {self.dtype} {list(self.shape)} on {self.device}>"

    @property
    def device(self) -> str:
        """Where it is: ``"ascend:0"``."""
        return f"ascend:{self.memory.device.index}"

    @property
    def data_ptr(self) -> int:
        """Address of the first element."""
        return self.memory.address

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return _nbytes(self.shape, self.dtype)

    @property
    def strides(self) -> tuple[int, ...]:
        """Elements from one entry to the next along each axis."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def numpy(self) -> npt.NDArray[Any]:
        """Return a copy in host memory, made when the device has done all its work; bfloat16 as uint16."""
        self.memory.device.synchronize()
        kind = {"bfloat16": "uint16"}.get(self.dtype, self.dtype)
        array = np.empty(self.shape, kind)
        self.memory.copy_to(array)
        return array

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's device: an extension device of the NPU's number."""
        return DEVICE_TYPE, self.memory.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Hand the memory over as a DLPack capsule, without a copy.

        Parameters
        ----------
        stream : int, optional
            Ignored: order your stream after the cache's, or wait for it.
        max_version : tuple of int, optional
            From ``(1, 0)`` on the capsule is versioned.
        dl_device : tuple of int, optional
            Must be where the memory is.
        copy : bool, optional
            Must not be True.

        Returns
        -------
        capsule
            Keeps the memory alive.

        Raises
        ------
        BufferError
            A copy or another device is asked for.
        """
        del stream
        if copy or (dl_device is not None and dl_device != self.__dlpack_device__()):
            raise BufferError(f"{self!r} is shared as it is, where it is")
        versioned = max_version is not None and max_version[0] >= 1
        return export_capsule(self, versioned=versioned)


def empty(device: Device, shape: tuple[int, ...], dtype: str) -> DeviceTensor:
    """Allocate an array on a device; its content is unknown.

    Parameters
    ----------
    device : Device
        The device.
    shape : tuple of int
        Length of each axis.
    dtype : str
        ``"float16"``, ``"bfloat16"``, ``"float32"``, ``"int32"`` or ``"int64"``.

    Raises
    ------
    LayoutError
        There is no such dtype.
    ValueError
        A length is below 0, or there can't be so many bytes.
    """
    return DeviceTensor(allocate(device, _nbytes(shape, dtype)), shape, dtype)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return the bytes of an array; refuse what can't be one."""
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"dtype {dtype}; there are {', '.join(ITEM_BYTES)}")
    lengths = [operator.index(length) for length in shape]
    if min(lengths, default=0) < 0:
        raise ValueError(f"shape {list(shape)} has a length below 0")
    return math.prod(lengths) * ITEM_BYTES[dtype]


def as_tensor(
    source: Any,
    device: Device,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    owner: object = None,
) -> DeviceTensor:
    """Take somebody's device array or address, without a copy.

    Parameters
    ----------
    source : array or int
        A torch_npu tensor, anything with ``__dlpack__``, or an address.
    device : Device
        Where it is.
    shape, dtype
        Of what lies at an address; left out for an array.
    owner : object
        What keeps an address valid.

    Returns
    -------
    DeviceTensor
        Over the same memory, which it keeps alive.

    Raises
    ------
    LayoutError
        It is in host memory, on another device, or not contiguous.
    ValueError
        There is nothing at such an address.
    """
    if isinstance(source, int) and not isinstance(source, bool):
        if shape is None or dtype is None:
            raise ValueError("an address needs shape= and dtype=")
        if not 0 < source <= 2**64 - _nbytes(shape, dtype):
            raise ValueError(f"{dtype} {list(shape)} can't be at address {source}")
        return _adopt("the array", device, source, shape, None, dtype, owner)
    tensor = device_tensor("the array", source, device)
    if tensor is None:
        raise LayoutError(f"the array is in host memory, not on {_name(device)}")
    return tensor


def device_tensor(name: str, array: object, device: Device, *, writable: bool = False) -> DeviceTensor | None:
    """Take an array of a device as it is; None where it is one of the host.

    Parameters
    ----------
    name : str
        What to call it in errors.
    array : DeviceTensor, torch_npu tensor, or anything with ``__dlpack__``
        Contiguous.
    device : Device
        Where it has to be.
    writable : bool
        Whether it will be written to.

    Raises
    ------
    LayoutError
        It is elsewhere, or not contiguous, or read-only, or of a dtype that no kernel takes.
    TypeError
        It is None.
    """
    if array is None:
        raise TypeError(f"{name} must be an array, not None")
    tensor: DeviceTensor | None = None
    if isinstance(array, DeviceTensor):
        tensor = array
    elif getattr(getattr(array, "device", None), "type", None) == "npu":
        tensor = _from_torch(name, array, device)
    elif not isinstance(array, np.ndarray) and hasattr(array, "__dlpack_device__"):
        kind, index = array.__dlpack_device__()
        if kind in HOST_TYPES:
            return None
        if (kind, index) != (DEVICE_TYPE, device.index):
            raise LayoutError(f"{name} is on DLPack device ({kind}, {index}), the cache on {_name(device)}")
        found = import_capsule(array, stream=-1)
        tensor = _adopt(name, device, found.address, found.shape, found.strides, found.dtype, found.owner)
        tensor.read_only = found.read_only
    if tensor is not None and tensor.memory.device is not device:
        raise LayoutError(f"{name} is on {tensor.device}, the cache on {_name(device)}")
    if tensor is not None and writable and tensor.read_only:
        raise LayoutError(f"{name} is read-only")
    return tensor


def described(name: str, array: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array, wherever it is; nothing waits for it.

    Raises
    ------
    TypeError
        It is none.
    """
    if hasattr(array, "shape") and hasattr(array, "dtype"):
        return tuple(array.shape), str(array.dtype).removeprefix("torch.")
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} must be an array, not {type(array).__name__}")
    # Of host memory a producer may know no streams.
    on_host = hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in HOST_TYPES
    found = import_capsule(array, stream=None if on_host else -1)
    return found.shape, found.dtype


def span(tensor: DeviceTensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and that after its last."""
    begin = tensor.data_ptr
    return begin, begin + tensor.nbytes


def _name(device: Device) -> str:
    return f"ascend:{device.index}"


def _from_torch(name: str, array: Any, device: Device) -> DeviceTensor:
    """Take a torch_npu tensor by its address: torch doesn't speak DLPack for this device everywhere."""
    index = array.device.index or 0
    if index != device.index:
        raise LayoutError(f"{name} is on npu:{index}, the cache on {_name(device)}")
    dtype = str(array.dtype).removeprefix("torch.")
    return _adopt(name, device, array.data_ptr(), tuple(array.shape), tuple(array.stride()), dtype, array)


def _adopt(
    name: str,
    device: Device,
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: str,
    owner: object,
) -> DeviceTensor:
    if dtype not in ITEM_BYTES:
        raise LayoutError(f"{name} is {dtype}; the kernels take float16 and bfloat16")
    memory = DeviceMemory(device, address, _nbytes(shape, dtype), owner)
    tensor = DeviceTensor(memory, shape, dtype)
    if strides is not None and 0 not in shape:
        wrong = [a for a, n in enumerate(shape) if n > 1 and strides[a] != tensor.strides[a]]
        if wrong:
            raise LayoutError(f"{name} of shape {list(shape)} has strides {list(strides)}: not contiguous")
    return tensor


# ---- host arrays: 16-bit floats as bits, so that bfloat16 needs no package ----


def host_array(name: str, array: Any) -> tuple[npt.NDArray[Any], str]:
    """Return an array of the host and the name of its dtype; uint16 are the bits of bfloat16.

    Raises
    ------
    TypeError
        It is no array: of numpy, or with ``__dlpack__``.
    LayoutError
        It is of a dtype that is not taken.
    """
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__dlpack__"):
            raise TypeError(f"{name} must be an array, not {type(array).__name__}")
        array = host_view(array)
    dtype = "bfloat16" if array.dtype.name == "uint16" else array.dtype.name
    if dtype not in ("float32", "float16", "bfloat16"):
        raise LayoutError(f"{name} is {dtype}; float32, float16 and bfloat16 are taken")
    if not array.dtype.isnative:
        raise LayoutError(f"{name} is {array.dtype} of the other byte order")
    return array, dtype


def to_bits(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.uint16]:
    """Return a contiguous copy rounded to float16 or bfloat16, as bits."""
    own = "bfloat16" if array.dtype.name == "uint16" else array.dtype.name
    if own == dtype:
        return np.array(array.view(np.uint16), order="C", copy=True)
    wide = from_bits(array.view(np.uint16), own) if own == "bfloat16" else array.astype(np.float32)
    if dtype == "float16":
        with np.errstate(over="ignore"):  # infinity is the rounded value
            return np.ascontiguousarray(wide.astype(np.float16)).view(np.uint16)
    bits = np.ascontiguousarray(wide).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & np.uint32(1))) >> 16
    return np.where(np.isnan(wide), np.uint32(0x7FC0), rounded).astype(np.uint16)


def query_bits(query: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.uint16]:
    """Return a query as :func:`to_bits` does.

    Raises
    ------
    ValueError
        A finite number of it would become infinite, and with it the answer NaN.
    """
    bits = to_bits(query, dtype)
    infinite = bits & 0x7FFF == (0x7C00 if dtype == "float16" else 0x7F80)
    if infinite.any():
        wide = from_bits(query.view(np.uint16), "bfloat16") if query.dtype.name == "uint16" else query
        lost = infinite & np.isfinite(wide.astype(np.float32))
        if lost.any():
            where = tuple(int(axis[0]) for axis in lost.nonzero())
            largest = {"float16": "65504", "bfloat16": "3.39e38"}[dtype]
            raise ValueError(
                f"query{list(where)} is {float(wide[where]):g}; {dtype}, in which the device multiplies, "
                f"ends at {largest}: divide the query and multiply scale="
            )
    return bits


def from_bits(bits: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[np.float32]:
    """Return float32 of the bits of float16 or bfloat16."""
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)
