"""Device memory, page-locked host memory, and copies between them and arrays."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from paged_kv.ascend import acl as table
from paged_kv.ascend.device import Handle
from paged_kv.errors import LayoutError

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.ascend.device import Device
    from paged_kv.ascend.stream import Stream

__all__ = ["DeviceMemory", "PinnedMemory", "allocate", "allocated_bytes", "pinned"]

ALIGNMENT = 64
"""Bytes: where an allocation begins, and where both sides of a copy on the device have to."""


class DeviceMemory:
    """Bytes on a device, freed when the last reference goes and no stream may use them any more.

    Made by :func:`allocate` or from someone else's address; slices are parts of the same memory.

    Parameters
    ----------
    device : Device
        Where the bytes are.
    address : int
        Address of the first.
    nbytes : int
        How many.
    owner : object
        What keeps them alive.
    """

    def __init__(self, device: Device, address: int, nbytes: int, owner: object) -> None:
        self.device = device
        self.nbytes = nbytes
        self._address = address
        self._owner = owner

    def __repr__(self) -> str:
        return f"<DeviceMemory {self.nbytes} bytes on ascend:{self.device.index}>"

    @property
    def address(self) -> int:
        """Address of the first byte."""
        self.device.check()
        return self._address

    def __getitem__(self, part: slice) -> DeviceMemory:
        start, stop, step = part.indices(self.nbytes)
        if step != 1:
            raise LayoutError(f"memory is sliced byte by byte, not in steps of {step}")
        return DeviceMemory(self.device, self._address + start, max(stop - start, 0), self._owner)

    def copy_from(self, source: npt.NDArray[Any] | DeviceMemory, stream: Stream | None = None) -> None:
        """Copy to the beginning of this memory, from an array of the host or from the same device.

        Parameters
        ----------
        source : ndarray or DeviceMemory
            C-contiguous where it is an array.
        stream : Stream, optional
            The copy takes its turn there, and the source must not be changed before; it is kept
            alive. Without, the copy is done on return, and knows nothing of what streams are doing.

        Raises
        ------
        LayoutError
            The source is longer than this memory, or not contiguous, or not aligned to 64 bytes for
            a copy on the device.
        """
        kind = table.HOST_TO_DEVICE
        if isinstance(source, DeviceMemory):
            kind = table.DEVICE_TO_DEVICE
            if self.device is not source.device:
                raise LayoutError(f"a copy from ascend:{source.device.index} to ascend:{self.device.index}")
            if (self._address | source.address) % ALIGNMENT:
                raise LayoutError(
                    f"addresses {self._address:#x} and {source.address:#x}: "
                    f"a copy on the device begins at multiples of {ALIGNMENT}"
                )
        self._copy(self.address, self.nbytes, _address(source), source.nbytes, kind, stream, source)

    def copy_to(self, target: npt.NDArray[Any], stream: Stream | None = None) -> None:
        """Fill an array of the host from the beginning of this memory.

        Parameters
        ----------
        target : ndarray
            C-contiguous and writable, not longer than this memory.
        stream : Stream, optional
            The copy takes its turn there; the array's content is unknown before. Without, the copy
            is done on return, and knows nothing of what streams are doing.

        Raises
        ------
        LayoutError
            The array is longer than this memory, not contiguous, or read-only.
        """
        if not target.flags.writeable:
            raise LayoutError("the target is read-only")
        if target.nbytes > self.nbytes:
            raise LayoutError(f"{target.nbytes} bytes from memory of {self.nbytes}")
        self._copy(
            _address(target), target.nbytes, self.address, target.nbytes, table.DEVICE_TO_HOST, stream, target
        )

    def _copy(
        self,
        target: int,
        room: int,
        source: int,
        nbytes: int,
        kind: int,
        stream: Stream | None,
        other: object,
    ) -> None:
        if nbytes > room:
            raise LayoutError(f"{nbytes} bytes into memory of {room}")
        if nbytes == 0:
            return
        if stream is not None:
            keep = (self._owner, other._owner if isinstance(other, DeviceMemory) else other)
            stream.submit("aclrtMemcpyAsync", target, room, source, nbytes, kind, keep=keep)
            return
        with self.device.current() as acl:
            acl.aclrtMemcpy(target, room, source, nbytes, kind)

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        """Set every byte, on a stream or before returning."""
        if not 0 <= byte <= 255:
            raise ValueError(f"byte {byte}: 0 to 255")
        if self.nbytes == 0:
            return
        arguments = (self.address, self.nbytes, byte, self.nbytes)
        if stream is not None:
            stream.submit("aclrtMemsetAsync", *arguments, keep=(self._owner,))
            return
        with self.device.current() as acl:
            acl.aclrtMemset(*arguments)

    def prefetch(self, stream: Stream) -> bool:
        """Bring the bytes into the device's L2 cache; return whether the runtime can.

        Where it can't nothing happens: no result depends on it.
        """
        if self.nbytes == 0 or not self.device.acl.has("aclrtCmoAsync"):
            return False
        stream.submit("aclrtCmoAsync", self.address, self.nbytes, table.CMO_PREFETCH, keep=(self._owner,))
        return True


class PinnedMemory:
    """Page-locked bytes of the host, from and to which devices copy without staging.

    ``numpy.asarray`` shows them as an array of bytes, which keeps them alive.

    Parameters
    ----------
    handle : Handle
        The allocation.
    nbytes : int
        Its size.
    """

    def __init__(self, handle: Handle, nbytes: int) -> None:
        self.nbytes = nbytes
        self._handle = handle

    @property
    def __array_interface__(self) -> dict[str, object]:
        self._handle.device.check()
        return {"data": (self._handle.value, False), "shape": (self.nbytes,), "typestr": "|u1", "version": 3}


def allocated_bytes(nbytes: int) -> int:
    """Return what an allocation takes: the runtime wants its bytes rounded up to 32, and 32 more."""
    return (nbytes + 31) // 32 * 32 + 32


def allocate(device: Device, nbytes: int) -> DeviceMemory:
    """Allocate memory of a device; its content is unknown.

    Parameters
    ----------
    device : Device
        The device.
    nbytes : int
        Bytes; it takes a few more, see ``allocated_bytes``.

    Returns
    -------
    DeviceMemory
        Beginning at a multiple of 64 bytes.

    Raises
    ------
    ValueError
        There can't be so many bytes.
    DeviceError
        The device's memory is exhausted (207001).
    """
    _check_size(nbytes)
    device.collect()
    size = allocated_bytes(nbytes)
    handle = Handle.create(device, "aclrtMalloc", "aclrtFree", size, table.MALLOC_HUGE_FIRST)
    if handle.value % ALIGNMENT:
        raise LayoutError(f"the runtime gave address {handle.value:#x}, not a multiple of {ALIGNMENT}")
    return DeviceMemory(device, handle.value, nbytes, handle)


def pinned(device: Device, nbytes: int) -> PinnedMemory:
    """Allocate page-locked host memory for copies to and from a device."""
    _check_size(nbytes, least=1)
    return PinnedMemory(Handle.create(device, "aclrtMallocHost", "aclrtFreeHost", nbytes), nbytes)


def _check_size(nbytes: int, least: int = 0) -> None:
    """Refuse what C's size_t can't hold: ctypes would drop the upper bits."""
    if not least <= operator.index(nbytes) < 2**63:
        raise ValueError(f"{nbytes} bytes: {least} to 2^63 - 1")


def _address(source: npt.NDArray[Any] | DeviceMemory) -> int:
    """Return the address of contiguous bytes."""
    if isinstance(source, DeviceMemory):
        return source.address
    if not source.flags.c_contiguous:
        raise LayoutError(f"strides {source.strides} of shape {source.shape}: a C-contiguous array is needed")
    return int(source.ctypes.data)
