"""Kernels of a prebuilt binary: loaded by the runtime, launched with arguments given one by one."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from paged_kv.ascend import acl as table
from paged_kv.ascend.device import Handle
from paged_kv.ascend.memory import DeviceMemory

if TYPE_CHECKING:
    from paged_kv.ascend.device import Device
    from paged_kv.ascend.stream import Stream

__all__ = ["KernelBinary"]


class KernelBinary:
    """A file of kernels built for the vector cores, such as CANN's ``ascendc_fatbin_library`` makes.

    Parameters
    ----------
    device : Device
        Where its kernels will run.
    path : path-like
        The file, built for the same chip.

    Raises
    ------
    DeviceError
        The runtime refuses the file.
    UnavailableError
        The runtime is too old to load one.
    """

    def __init__(self, device: Device, path: str | os.PathLike[str]) -> None:
        self.device = device
        self.path = Path(path).resolve()  # the runtime wants an absolute one
        magic = table.BinaryLoadOptionValue(magic=table.BINARY_MAGIC_VECTOR_CORE)
        option = table.BinaryLoadOption(table.BINARY_MAGIC, magic)
        options = table.BinaryLoadOptions(ctypes.pointer(option), 1)
        binary = ctypes.c_void_p()
        with device.current() as acl:
            acl.aclrtBinaryLoadFromFile(os.fsencode(self.path), ctypes.byref(options), ctypes.byref(binary))
            self._binary = Handle(device, "aclrtBinaryUnLoad", binary.value or 0)
        self._functions: dict[str, int] = {}
        self._lock = threading.Lock()

    def function(self, name: str) -> int:
        """Return the runtime's handle of a kernel; ``DeviceError`` (507027) where there is none."""
        with self._lock:
            if name not in self._functions:
                function = ctypes.c_void_p()
                with self.device.current() as acl:
                    acl.aclrtBinaryGetFunction(self._binary.value, name.encode(), ctypes.byref(function))
                self._functions[name] = function.value or 0
            return self._functions[name]

    def launch(
        self,
        stream: Stream,
        name: str,
        num_blocks: int,
        *arguments: DeviceMemory | ctypes.Structure,
    ) -> None:
        """Put a kernel on a stream.

        Parameters
        ----------
        stream : Stream
            Where it takes its turn; it keeps memory and binary until then.
        name : str
            The kernel.
        num_blocks : int
            Vector cores to use.
        *arguments : DeviceMemory or ctypes.Structure
            The kernel's arguments: memory is passed by its address, a structure as it is now.
        """
        function = self.function(name)
        handle, parameter = ctypes.c_void_p(), ctypes.c_void_p()
        with self.device.current() as acl:
            acl.aclrtKernelArgsInit(function, ctypes.byref(handle))
            for argument in arguments:
                value = ctypes.c_void_p(argument.address) if isinstance(argument, DeviceMemory) else argument
                size = ctypes.sizeof(value)
                acl.aclrtKernelArgsAppend(handle, ctypes.byref(value), size, ctypes.byref(parameter))
            acl.aclrtKernelArgsFinalize(handle)
            acl.aclrtLaunchKernelWithConfig(function, num_blocks, stream.handle, None, handle, None)
        stream.keep(self._binary, *(one._owner for one in arguments if isinstance(one, DeviceMemory)))
