"""Streams and events: what is ordered on the device, and what has to stay until it has passed."""

from __future__ import annotations

import ctypes
import logging
import math
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from paged_kv.ascend import acl as table
from paged_kv.ascend.device import Handle
from paged_kv.ascend.errors import DeviceError
from paged_kv.ascend.runtime import check_fork, is_forked

if TYPE_CHECKING:
    from collections.abc import Callable

    from paged_kv.ascend.device import Device

__all__ = ["Event", "Stream"]

logger = logging.getLogger("paged_kv.ascend")

_CLOSE_AFTER = 64
"""Kept objects after which an event is recorded that tells when they may go."""


_LONGEST = (2**31 - 1) // 1000
"""Seconds that the runtime can be told to wait at most."""

_GONE = frozenset({table.STREAM_CONTEXT, table.INVALID_HANDLE})
"""What the runtime says of a stream that was destroyed."""


class _Batch:
    """Objects kept together, with the event after which they may go; without one, the next batch's tells."""

    __slots__ = ("event", "is_fence", "objects")

    def __init__(self, objects: list[object], fence: Handle | None = None) -> None:
        self.objects = objects
        self.event = fence
        self.is_fence = fence is not None  # somebody else looks at the event: it is not recorded again


class Event:
    """A point in a stream's work.

    Parameters
    ----------
    device : Device
        The device whose streams will record it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._handle = Handle.create(device, "aclrtCreateEvent", "aclrtDestroyEvent")

    @property
    def handle(self) -> int:
        """The runtime's event."""
        return self._handle.value

    def record(self, stream: Stream) -> None:
        """Mark the end of what `stream` was given so far."""
        with self.device.current() as acl:
            acl.aclrtRecordEvent(self.handle, stream.handle)
        stream.keep(self._handle)

    def query(self) -> bool:
        """Say whether the work before the mark has passed; true as long as nothing was marked."""
        status = ctypes.c_int32()
        with self.device.current() as acl:
            acl.aclrtQueryEventStatus(self.handle, ctypes.byref(status))
        return status.value == table.EVENT_COMPLETE

    def synchronize(self) -> None:
        """Wait until the work before the mark has passed."""
        with self.device.current() as acl:
            acl.aclrtSynchronizeEvent(self.handle)

    def elapsed(self, later: Event) -> float:
        """Return the milliseconds from this mark to a later one, both passed."""
        milliseconds = ctypes.c_float()
        with self.device.current() as acl:
            acl.aclrtEventElapsedTime(ctypes.byref(milliseconds), self.handle, later.handle)
        return milliseconds.value


class Stream:
    """A queue of work on a device, done in order, on its own time.

    Parameters
    ----------
    device : Device
        The device.
    handle : int, optional
        A stream of someone else, such as ``torch_npu.npu.Stream().npu_stream``, to be used and
        not destroyed; without it a new one is made. Its owner may destroy it when its work has passed;
        where something was kept without a mark, whoever notices waits for the device.

    Raises
    ------
    TypeError, ValueError
        The handle is no integer, or none that a pointer can be.
    """

    def __init__(self, device: Device, handle: int | None = None) -> None:
        self.device = device
        self._handle = None
        if handle is not None:
            check_handle(handle)
        else:
            self._handle = Handle.create(device, "aclrtCreateStream", "aclrtDestroyStream")
            handle = self._handle.value
        self._value = handle
        self._lock = threading.RLock()
        self._open: list[object] = []
        self._kept: deque[_Batch] = deque()
        self._spare: Handle | None = None
        key, streams = id(self), device._streams
        streams[key] = weakref.ref(self, lambda _: streams.pop(key, None))

    @property
    def handle(self) -> int:
        """The runtime's stream."""
        return self._value if self._handle is None else self._handle.value

    @property
    def is_owner(self) -> bool:
        """Whether the runtime's stream is destroyed with this object."""
        return self._handle is not None

    def submit(self, function: str, *arguments: object, keep: tuple[object, ...] = ()) -> None:
        """Call a function of the runtime whose last argument is the stream.

        Parameters
        ----------
        function : str
            Its C name.
        *arguments : object
            Its arguments before the stream.
        keep : tuple of object
            What must not be let go before the work has passed.
        """
        with self.device.current() as acl:
            getattr(acl, function)(*arguments, self.handle)
        self.keep(*keep or (None,))

    def launch(self, launcher: Callable[[int], int], keep: tuple[object, ...] = ()) -> int:
        """Call `launcher` with the stream's handle, the device being current; return its status."""
        with self.device.current():
            status = launcher(self.handle)
        self.keep(*keep or (None,))
        return status

    def record(self) -> Event:
        """Return an event for what the stream was given so far."""
        event = Event(self.device)
        event.record(self)
        return event

    def fence(self) -> Event:
        """Return an event as :meth:`record` does, which nobody may record again: what is kept goes by it."""
        event = Event(self.device)
        with self._lock, self.device.current() as acl:
            acl.aclrtRecordEvent(event.handle, self.handle)
            self._close()
            self._kept.append(_Batch([], event._handle))
        self.poll()
        return event

    def is_gone(self, error: DeviceError) -> bool:
        """Say whether a refusal means that its owner destroyed the stream; if so its work has passed.

        Owners have to wait for the work first. In case one didn't, this waits for the device.
        """
        if self.is_owner or error.code not in _GONE:
            return False
        with self.device.current() as acl:
            acl.aclrtSynchronizeDevice()
        return True

    def wait(self, event: Event) -> None:
        """Let later work of this stream wait for the event; the host doesn't."""
        with self.device.current() as acl:
            acl.aclrtStreamWaitEvent(self.handle, event.handle)
        self.keep(event._handle)

    def synchronize(self, timeout: float | None = None) -> None:
        """Wait for all work of the stream.

        Parameters
        ----------
        timeout : float, optional
            Seconds after which to give up: 0 to 2147483, and infinity, which is as None.

        Raises
        ------
        ValueError
            Another number of seconds; nothing is waited for then.
        DeviceError
            Some of the work failed, or it took longer.
        """
        if timeout == math.inf:
            timeout = None
        # C's int of milliseconds would drop the upper bits.
        if timeout is not None and not 0 <= timeout <= _LONGEST:
            raise ValueError(f"timeout={timeout}: 0 to {_LONGEST} seconds")
        check_fork()  # before the lock, which a thread of the parent may have held
        with self._lock:
            self._close()
            last = self._kept[-1] if self._kept else None
            # Those that another thread records from now on may pass after the wait.
            events = [batch.event for batch in self._kept if batch.event is not None]
        with self.device.current() as acl:
            if timeout is None:
                acl.aclrtSynchronizeStream(self.handle)
            else:
                acl.aclrtSynchronizeStreamWithTimeout(self.handle, int(timeout * 1000))
        if last is not None:
            self._drop(last, events)

    def keep(self, *objects: object) -> None:
        """Hold on to objects until the work given so far has passed."""
        with self._lock:
            self._open.extend(objects)
            full = len(self._open) >= _CLOSE_AFTER
        if full:
            self.poll()

    def poll(self) -> bool:
        """Let go of what is kept for work that has passed; return whether nothing is kept. Never waits."""
        if is_forked():
            return False
        status = ctypes.c_int32()
        try:
            with self._lock:
                self._close()
                self._mark()
                marks = [batch for batch in self._kept if batch.event is not None]
            for batch in marks:
                with self._lock, self.device.current() as acl:
                    if batch.event is None:  # another thread was faster
                        continue
                    acl.aclrtQueryEventStatus(batch.event.value, ctypes.byref(status))
                if status.value != table.EVENT_COMPLETE:
                    break
                self._drop(batch, None)
        except DeviceError:
            # Nobody asked for this; whoever synchronises is told. What is kept stays.
            return False
        with self._lock:
            return not self._kept and not self._open

    def _mark(self) -> None:
        """Record an event for what is kept without one, the lock being held."""
        if not self._kept or self._kept[-1].event is not None:
            return
        event = self._spare or Handle.create(self.device, "aclrtCreateEvent", "aclrtDestroyEvent")
        self._spare = None
        try:
            with self.device.current() as acl:
                acl.aclrtRecordEvent(event.value, self.handle)
        except DeviceError as error:
            if not self.is_gone(error):
                raise
            self._kept.clear()
        else:
            self._kept[-1].event = event

    def _close(self) -> None:
        """Begin another batch, the lock being held."""
        if self._open:
            self._kept.append(_Batch(self._open))
            self._open = []

    def _drop(self, last: _Batch, events: list[Handle] | None) -> None:
        """Let go of all batches up to one whose work has passed, and with it these events (None: all)."""
        dropped: list[object] = []  # after the lock: what frees itself may take its time
        with self._lock:
            while last in self._kept:
                batch = self._kept.popleft()
                dropped.append(batch.objects)
                if batch.event is None:
                    continue
                if events is not None and batch.event not in events:
                    self._open.append(batch.event)
                elif not batch.is_fence:
                    self._spare = batch.event
                batch.event = None

    def forget(self) -> None:
        """Let go of everything, the device having come to rest."""
        with self._lock:
            kept = (self._open, self._kept, self._spare)
            self._open, self._kept, self._spare = [], deque(), None
        del kept

    def __del__(self) -> None:
        # A stream at work must not be destroyed, and waiting here would be a surprise: the device
        # takes it over, and lets it go when it has come to rest.
        try:
            if not self.device.closed and not is_forked() and not self.poll():
                self.device._retired[id(self)] = self
        except Exception:
            logger.debug("a stream was not retired", exc_info=True)


def check_handle(handle: object) -> int:
    """Return a stream's raw handle; refuse what ctypes would cut to one, or take for one."""
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise TypeError(f"stream must be a Stream or a handle, not {type(handle).__name__}")
    if not 0 < handle < 2**64:
        raise ValueError(f"stream {handle} is no handle: 1 to 2^64 - 1")
    return handle
