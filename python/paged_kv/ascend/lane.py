"""What a cache has for each stream that it works on."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from paged_kv.ascend.memory import allocate
from paged_kv.ascend.runtime import check_fork

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv.ascend.device import Device
    from paged_kv.ascend.memory import DeviceMemory
    from paged_kv.ascend.stream import Stream

__all__ = ["Lane"]


class Lane:
    """A stream, and memory that the steps on it use one after the other.

    Allocating takes the device long, so memory is kept. It may be used again as soon as its last
    use was launched: the stream does things in order.

    Parameters
    ----------
    device : Device
        The stream's device.
    stream : Stream
        The stream.
    """

    def __init__(self, device: Device, stream: Stream) -> None:
        self.stream = stream
        self._lock = threading.RLock()  # reentrant: a garbage collection inside may end a batch
        self._device = device
        self._scratch: dict[str, DeviceMemory] = {}
        self._spare: list[DeviceMemory] = []

    @property
    def lock(self) -> threading.RLock:
        """What is held while a step is launched, so that those of several threads don't mix.

        Raises
        ------
        UnavailableError
            The process was forked: a thread of its parent may have held it.
        """
        check_fork()
        return self._lock

    def scratch(self, name: str, nbytes: int) -> DeviceMemory:
        """Return memory for one purpose of one step, the lock being held; its content is unknown."""
        known = self._scratch.get(name)
        if known is None or known.nbytes < nbytes:
            known = self._scratch[name] = allocate(self._device, _round_up(nbytes))
        return known[:nbytes]

    def upload(self, name: str, array: npt.NDArray[Any]) -> DeviceMemory:
        """Bring an array, which nobody changes any more, to the device, the lock being held."""
        memory = self.scratch(name, array.nbytes)
        memory.copy_from(array, self.stream)
        return memory

    def take(self, nbytes: int) -> DeviceMemory:
        """Take memory of one's own for several steps, the lock being held."""
        for i, spare in enumerate(self._spare):
            if spare.nbytes >= nbytes:
                return self._spare.pop(i)
        return allocate(self._device, _round_up(nbytes))

    def give(self, memory: DeviceMemory) -> None:
        """Give back what was taken, its last use having been launched; with or without the lock."""
        self._spare.append(memory)


def _round_up(nbytes: int) -> int:
    """Return the next power of two, so that growing needs take few allocations."""
    return max(1 << (nbytes - 1).bit_length(), 1024) if nbytes else 1024
