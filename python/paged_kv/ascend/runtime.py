"""The process's one use of the CANN runtime: initialised late, shared with others, ended in any order."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import TYPE_CHECKING

from paged_kv.ascend import acl as table
from paged_kv.ascend.errors import DeviceError, unavailable

if TYPE_CHECKING:
    from paged_kv.ascend.acl import Acl
    from paged_kv.ascend.device import Device

__all__ = ["Runtime", "check_fork", "runtime", "shutdown"]


class Runtime:
    """An initialised runtime and the devices opened in it.

    Attributes
    ----------
    acl : Acl
        The functions.
    shared : bool
        Another library had initialised the runtime: then it is that library's to finalise, and
        its devices are not ours to reset.
    devices : dict of int to Device
        Devices by number.
    opening : RLock
        Held while a device is opened or closed.
    closed : bool
        After :func:`shutdown`; whatever is dropped from then on stays the runtime's own affair.
    """

    def __init__(self) -> None:
        self.acl: Acl = table.load()
        self.shared = False
        self.devices: dict[int, Device] = {}
        self.opening = threading.RLock()
        self.closed = False
        try:
            self.acl.aclInit(None)
        except DeviceError as error:
            if error.code != table.REPEAT_INITIALIZE:
                raise
            self.shared = True

    def close(self) -> None:
        """Close all devices, and end the runtime where it was begun here."""
        for device in list(self.devices.values()):
            device.close()
        self.closed = True
        if not self.shared:
            # Whoever initialised it after us may have ended it already.
            with contextlib.suppress(DeviceError):
                self.acl.aclFinalize()


# Reentrant: dropping an object inside may come back here.
_lock = threading.RLock()
_runtime: Runtime | None = None
_begun = False  # whether this process ever had one: its threads don't live on in a child
_forked = False


def runtime() -> Runtime:
    """Return the runtime, initialised by the first call.

    Raises
    ------
    UnavailableError
        There is no CANN runtime.
    DeviceError
        It can't be initialised, or the process is a forked child of one that did.
    """
    global _runtime, _begun
    check_fork()
    with _lock:
        if _runtime is None:
            _runtime = Runtime()
            _begun = True
        return _runtime


def shutdown() -> None:
    """Close all devices and end the runtime; done at exit, harmless when repeated.

    Waits for the work on the devices. Objects that are dropped later do nothing.
    """
    global _runtime
    if _forked:
        return
    with _lock:
        ending, _runtime = _runtime, None
        if ending is not None:
            ending.close()


def check_fork() -> None:
    """Refuse in a child that was forked after the runtime began: it would wait for threads it hasn't got."""
    if _forked:
        raise unavailable(
            "this process was forked after its parent had opened an Ascend device",
            "start workers by the method 'spawn' or 'forkserver', or open devices after forking",
        )


def is_forked() -> bool:
    """Say whether the runtime in this process is a copy without its threads."""
    return _forked


def _after_fork() -> None:
    global _lock, _forked
    _lock = threading.RLock()  # some thread of the parent may have held the other one
    _forked = _forked or _begun


os.register_at_fork(after_in_child=_after_fork)
atexit.register(shutdown)
