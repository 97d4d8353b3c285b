"""One device: its context in whatever thread, its memory and streams, and what made it unusable."""

from __future__ import annotations

import copy
import ctypes
import logging
import threading
from typing import TYPE_CHECKING, NamedTuple

from paged_kv.ascend import acl as table
from paged_kv.ascend.errors import FATAL, DeviceError, unavailable
from paged_kv.ascend.runtime import check_fork, is_forked, runtime

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable
    from types import TracebackType

    from paged_kv.ascend.acl import Acl
    from paged_kv.ascend.runtime import Runtime
    from paged_kv.ascend.stream import Stream

__all__ = ["Device", "Handle", "MemoryInfo", "open_device"]

logger = logging.getLogger("paged_kv.ascend")


class MemoryInfo(NamedTuple):
    """Bytes of a device's memory."""

    free: int
    total: int


def open_device(index: int = 0) -> Device:
    """Open a device, or return it as it is open.

    Parameters
    ----------
    index : int
        Its number among those that the process sees.

    Returns
    -------
    Device
        The same object for the same number, until it is closed.

    Raises
    ------
    ValueError
        It can't be a device's number.
    UnavailableError
        There is no CANN runtime.
    DeviceError
        There is no such device, or it can't be opened.
    """
    if not 0 <= index < 2**31:  # ctypes would drop the upper bits
        raise ValueError(f"device {index}: 0 to 2147483647")
    process = runtime()
    with process.opening:
        if process.closed:
            raise unavailable("the runtime is being shut down")
        found = process.devices.get(index)
        if found is None:
            found = process.devices[index] = Device(process, index)
        return found


class Device:
    """An open device; see :func:`paged_kv.ascend.open_device`. All methods may be called from any thread.

    The device's own (primary) context is used, the one that torch_npu uses too, so that its streams
    are valid here. A call makes it current in the calling thread, and gives the thread back the
    context that it had.

    Attributes
    ----------
    index : int
        The device's number.
    error : DeviceError or None
        The failure after which the device can do nothing more until it is closed and opened again.
    closed : bool
        Nothing can be done with it or its objects any more.
    """

    def __init__(self, process: Runtime, index: int) -> None:
        self.index = index
        self.error: DeviceError | None = None
        self.closed = False
        self.acl: Acl = process.acl
        self._process = process
        # Plain dictionaries: their single steps need no lock, in whatever thread something is dropped.
        self._owned: dict[tuple[str, int], None] = {}  # what the runtime has to be given back, and by what
        self._streams: dict[int, weakref.ref[Stream]] = {}
        self._retired: dict[int, Stream] = {}  # dropped by their owners, but still at work
        # Reentrant: a garbage collection inside may give something back.
        self._changed = threading.Condition(threading.RLock())
        self._inside: dict[int, int] = {}  # threads, and how many blocks deep they are in the runtime
        previous = current_context(self.acl)
        self.acl.aclrtSetDevice(index)
        try:
            own = current_context(self.acl)
            if own is None:
                raise unavailable(f"device {index} has no context")
            self.context: int = own
            if previous is not None and previous != own:
                self.acl.aclrtSetCurrentContext(previous)
        except DeviceError:
            if not process.shared:
                quietly(self.acl.aclrtResetDevice, index)
            raise

    def __repr__(self) -> str:
        state = ", closed" if self.closed else f", {self.error.name}" if self.error else ""
        return f"<Device ascend:{self.index}{state}>"

    def current(self) -> Current:
        """Make the device current in this thread, for a ``with`` block that gets its functions.

        :meth:`close` waits for the block's end, so the block must not wait for a thread that closes.

        Returns
        -------
        Current
            A context manager over the runtime's functions by their C names.
        """
        return Current(self)

    def check(self) -> None:
        """Raise why nothing can be done with the device, if so."""
        check_fork()
        if self.closed:
            raise unavailable(
                f"ascend:{self.index} was closed", "open it again by paged_kv.ascend.open_device()"
            )
        if self.error is not None:
            error = self.error
            raise DeviceError(
                f"ascend:{self.index} is unusable since: {error}",
                code=error.code,
                name=error.name,
                message=error.message,
                hint=error.hint,
            )

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes of the device's memory."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        with self.current() as acl:
            acl.aclrtGetMemInfo(table.MEM_HBM, ctypes.byref(free), ctypes.byref(total))
        return MemoryInfo(free.value, total.value)

    def attribute(self, number: int) -> int | None:
        """Return one of the device's figures (``acl.ATTR_…``), None where the runtime doesn't tell."""
        value = ctypes.c_int64()
        if not self.acl.has("aclrtGetDeviceInfo"):
            return None
        with self.current() as acl:
            acl.aclrtGetDeviceInfo(self.index, number, ctypes.byref(value))
        return value.value

    @property
    def num_vector_cores(self) -> int:
        """Vector cores; 40 where the runtime doesn't tell, which costs speed, not correctness."""
        return self.attribute(table.ATTR_VECTOR) or 40

    def synchronize(self) -> None:
        """Wait for all work of the device, on whatever stream."""
        self.collect()  # closes what streams keep, so that the wait covers it
        with self.current() as acl:
            acl.aclrtSynchronizeDevice()
        self.collect()

    def collect(self) -> None:
        """Let go of what streams kept for work that has passed by now; waits for nothing."""
        for stream in self._alive():
            stream.poll()
        for key in list(self._retired):
            retired = self._retired.get(key)
            if retired is not None and retired.poll():
                self._retired.pop(key, None)

    def close(self) -> None:
        """Wait for the device's work, free all that was had from it, and let it go; harmless when repeated.

        Other threads' calls are refused from then on; those that have begun come to their end first.
        Its memory, streams and events can't be used afterwards. A device that became unusable
        works again when it is opened the next time; where another library began the runtime, not
        before that library has reset the device.
        """
        if is_forked():
            return
        with self._process.opening:
            if self.closed:
                return
            with self._changed:
                self.closed = True  # from here on other threads are refused
                self._changed.wait_for(lambda: not self._inside.keys() - {threading.get_ident()})
            inside = Current(self, closing=True)
            quietly(inside.__enter__)
            if not quietly(self.acl.aclrtSynchronizeDevice):
                quietly(self.acl.aclrtSynchronizeDevice)  # streams at work must not be destroyed
            for stream in (*self._alive(), *self._retired.values()):
                stream.forget()
            self._retired.clear()
            for destroy, value in 2 * list(self._owned):  # what is refused is offered once more
                self._destroy(destroy, value)
            self._owned.clear()
            if not self._process.shared:
                quietly(self.acl.aclrtResetDevice, self.index)
            inside.__exit__(None, None, None)
            self._process.devices.pop(self.index, None)

    def _enter(self) -> bool:
        """Note that this thread calls the runtime, until :meth:`_leave`; no once the device is closed."""
        with self._changed:
            if not self.closed:
                me = threading.get_ident()
                self._inside[me] = self._inside.get(me, 0) + 1
            return not self.closed

    def _leave(self) -> None:
        with self._changed:
            me = threading.get_ident()
            self._inside[me] -= 1
            if not self._inside[me]:
                del self._inside[me]
                self._changed.notify_all()

    def _give_back(self, destroy: str, value: int) -> None:
        """Give something back, unless that was done, or is up to :meth:`close`."""
        if self._enter():
            try:
                self._destroy(destroy, value)
            finally:
                self._leave()

    def _destroy(self, destroy: str, value: int) -> None:
        """Give something back, unless that was done; what the runtime refuses stays for the end."""
        if self._owned.pop((destroy, value), self) is self:
            return
        try:
            with Current(self, closing=True) as acl:
                getattr(acl, destroy)(value)
        except DeviceError as error:
            # Its text: whoever keeps the record of an exception keeps all that its frames work on.
            logger.warning("not given back before the device is closed: %s", str(error))
            self._owned[destroy, value] = None

    def _alive(self) -> list[Stream]:
        """Return the streams that somebody holds."""
        found = (reference() for reference in list(self._streams.values()))
        return [stream for stream in found if stream is not None]


class Current:
    """A device that is current in this thread, until the block's end; a fatal failure is remembered.

    Parameters
    ----------
    device : Device
        The device.
    closing : bool
        Things are given back: the device need not be in order, and whoever closes it knows of the block.
    """

    def __init__(self, device: Device, *, closing: bool = False) -> None:
        self._device = device
        self._closing = closing
        self._previous: int | None = None

    def __enter__(self) -> Acl:
        device = self._device
        if not self._closing:
            device.check()
            if not device._enter():
                device.check()  # says that it was closed
        try:
            acl = device.acl
            previous = current_context(acl)
            if previous != device.context:
                acl.aclrtSetCurrentContext(device.context)
                self._previous = previous
        except BaseException:
            self._leave()
            raise
        return acl

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, DeviceError) and error.code in FATAL and self._device.error is None:
            self._device.error = copy.copy(error)  # without the frames, which hold what they worked on
        if self._previous is not None:
            quietly(self._device.acl.aclrtSetCurrentContext, self._previous)
        self._leave()

    def _leave(self) -> None:
        if not self._closing:
            self._device._leave()


class Handle:
    """What the runtime handed out, given back when the last reference goes.

    Parameters
    ----------
    device : Device
        Where it lives.
    destroy : str
        The function that takes it back.
    value : int
        The handle or address.
    """

    def __init__(self, device: Device, destroy: str, value: int) -> None:
        self.device = device
        self.value = value
        self._destroy = destroy
        device._owned[destroy, value] = None

    @classmethod
    def create(cls, device: Device, create: str, destroy: str, *arguments: object) -> Handle:
        """Ask the runtime for one, by a function whose first argument is where to put it."""
        value = ctypes.c_void_p()
        with device.current() as acl:
            getattr(acl, create)(ctypes.byref(value), *arguments)
            return cls(device, destroy, value.value or 0)  # inside: who closes the device finds it

    def release(self) -> None:
        """Give it back now; nothing happens after the device was closed, or in a forked child."""
        if not is_forked():
            self.device._give_back(self._destroy, self.value)

    def __del__(self) -> None:
        # May run in any thread, at any time, with the interpreter half gone.
        try:
            self.release()
        except Exception:
            logger.debug("not given back", exc_info=True)


def current_context(acl: Acl) -> int | None:
    """Return the thread's current context, if it has one."""
    context = ctypes.c_void_p()
    try:
        acl.aclrtGetCurrentContext(ctypes.byref(context))
    except DeviceError as error:
        if error.code != table.CONTEXT_NULL:
            raise
    return context.value


def quietly(function: Callable[..., object], *arguments: object) -> bool:
    """Call what is not worth giving up for when it fails; return whether it did not."""
    try:
        function(*arguments)
    except DeviceError as error:
        logger.warning("%s", str(error))
        return False
    return True
