"""The Ascend NPU: devices, memory, streams and kernels, through the CANN runtime.

Importing this needs neither CANN nor an NPU and loads nothing; :func:`is_available` says what is missing.
"""

from paged_kv.ascend.binary import KernelBinary
from paged_kv.ascend.build import build_kernels
from paged_kv.ascend.device import Device, MemoryInfo, open_device
from paged_kv.ascend.errors import DeviceError, UnavailableError
from paged_kv.ascend.inspect import Availability, Info, info, is_available
from paged_kv.ascend.kernels import KernelLibrary, load_kernels
from paged_kv.ascend.memory import DeviceMemory, PinnedMemory, allocate, pinned
from paged_kv.ascend.runtime import shutdown
from paged_kv.ascend.stream import Event, Stream
from paged_kv.ascend.tensor import DeviceTensor, as_tensor, empty
from paged_kv.ascend.tiling import (
    CopyTiling,
    DecodeArrays,
    DecodeTiling,
    PrefillArrays,
    PrefillTiling,
    Shape,
    WriteTiling,
)

__all__ = [
    "Availability",
    "CopyTiling",
    "DecodeArrays",
    "DecodeTiling",
    "Device",
    "DeviceError",
    "DeviceMemory",
    "DeviceTensor",
    "Event",
    "Info",
    "KernelBinary",
    "KernelLibrary",
    "MemoryInfo",
    "PinnedMemory",
    "PrefillArrays",
    "PrefillTiling",
    "Shape",
    "Stream",
    "UnavailableError",
    "WriteTiling",
    "allocate",
    "as_tensor",
    "build_kernels",
    "empty",
    "info",
    "is_available",
    "load_kernels",
    "open_device",
    "pinned",
    "shutdown",
]
