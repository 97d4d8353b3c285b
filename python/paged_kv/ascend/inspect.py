"""Is there anything to run on, and what is it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from paged_kv.ascend import acl as table
from paged_kv.ascend.device import MemoryInfo, open_device
from paged_kv.ascend.errors import DeviceError, unavailable
from paged_kv.ascend.kernels import load_kernels
from paged_kv.ascend.runtime import runtime

__all__ = ["Availability", "Info", "info", "is_available"]


@dataclass(frozen=True, slots=True)
class Availability:
    """True or false, and why.

    Attributes
    ----------
    reason : str
        What is missing; empty where nothing is.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


def is_available() -> Availability:
    """Say whether there is a runtime, a device and a kernel library; never raises.

    Returns
    -------
    Availability
        False with its ``reason`` where something is missing.
    """
    try:
        if num_devices() == 0:
            raise unavailable("the runtime sees no device", "see npu-smi info, and ASCEND_RT_VISIBLE_DEVICES")
        load_kernels()
    except DeviceError as error:
        return Availability(str(error))
    return Availability()


def num_devices() -> int:
    """Return how many devices the runtime sees."""
    count = ctypes.c_uint32()
    runtime().acl.aclrtGetDeviceCount(ctypes.byref(count))
    return count.value


@dataclass(frozen=True, slots=True)
class Info:
    """What a device is; None where the runtime doesn't tell.

    Attributes
    ----------
    index : int
        The device's number.
    soc : str
        The chip's name.
    num_devices : int
        Devices that the process sees.
    vector_cores, cube_cores : int or None
        Cores.
    memory : MemoryInfo
        Free and total bytes.
    l2_bytes : int or None
        Size of the L2 cache.
    runtime_version : str or None
        Of the runtime's interface.
    runtime_path : str
        The library that was loaded.
    kernels : str or None
        The kernel library; None where there is none.
    lacks : tuple of str
        Optional functions that this runtime doesn't have.
    """

    index: int
    soc: str
    num_devices: int
    vector_cores: int | None
    cube_cores: int | None
    memory: MemoryInfo
    l2_bytes: int | None
    runtime_version: str | None
    runtime_path: str
    kernels: str | None
    lacks: tuple[str, ...]


def info(index: int = 0) -> Info:
    """Describe a device, which is opened for it.

    Parameters
    ----------
    index : int
        The device's number.

    Returns
    -------
    Info
        Its description.

    Raises
    ------
    UnavailableError
        There is no runtime.
    DeviceError
        There is no such device.
    """
    one = open_device(index)
    acl = one.acl
    version = None
    if acl.has("aclrtGetVersion"):
        numbers = [ctypes.c_int32() for _ in range(3)]
        acl.aclrtGetVersion(*map(ctypes.byref, numbers))
        version = ".".join(str(number.value) for number in numbers)
    try:
        kernels = str(load_kernels().path)
    except DeviceError:
        kernels = None
    return Info(
        index=index,
        soc=acl.soc_name,
        num_devices=num_devices(),
        vector_cores=one.attribute(table.ATTR_VECTOR),
        cube_cores=one.attribute(table.ATTR_CUBE),
        memory=one.memory_info(),
        l2_bytes=one.attribute(table.ATTR_L2),
        runtime_version=version,
        runtime_path=acl.path,
        kernels=kernels,
        lacks=tuple(name for name in table.OPTIONAL if not acl.has(name)),
    )
