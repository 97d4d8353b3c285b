"""Snapshots in a file: written in one step, read, and kept fresh by a thread."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paged_kv.telemetry.snapshots import MAX_CELLS, Snapshot, snapshot

if TYPE_CHECKING:
    from types import TracebackType

    from paged_kv._core import KvCache

__all__ = ["DEFAULT_INTERVAL", "Publisher", "read", "write"]

logger = logging.getLogger("paged_kv.telemetry")

DEFAULT_INTERVAL = 0.5
"""Seconds between snapshots."""
_MAX_BYTES = 1 << 26
_IDLE_PER_WORK = 25
"""Seconds to rest for each second that a snapshot took of a core: so a publisher takes at most 4 %."""


def write(path: str | os.PathLike[str], taken: Snapshot) -> None:
    """Replace a file by a snapshot in one step; only its owner may read it.

    Raises
    ------
    OSError
        Where it can't be written; the file is what it was then.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(taken.to_json())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: str | os.PathLike[str]) -> Snapshot:
    """Read a published snapshot.

    Raises
    ------
    OSError
        Where the file can't be read.
    ValueError
        Where it is no snapshot.
    """
    with Path(path).open("rb") as file:
        text = file.read(_MAX_BYTES + 1)
    if len(text) > _MAX_BYTES:
        raise ValueError(f"not a snapshot: more than {_MAX_BYTES} bytes")
    return Snapshot.from_json(text)


class Publisher:
    """Publishes a cache's snapshots from a thread of its own until it is closed.

    Parameters
    ----------
    cache : KvCache
        The cache; kept alive until the publisher is closed.
    path : path-like
        The file that each snapshot replaces. It stays when the publisher is closed, with a last
        snapshot whose `interval` is 0.
    interval : float
        Seconds between snapshots; more where the cache is so large that this would take more than 4 %
        of a core.
    label : str
        What to call the program.
    max_cells : int
        As in :func:`snapshot`.

    Raises
    ------
    ValueError
        For an interval that is not positive and finite.
    OSError
        Where the first snapshot can't be written. A later failure is logged and tried again: a full
        disk must not stop the program.
    """

    def __init__(
        self,
        cache: KvCache,
        path: str | os.PathLike[str],
        *,
        interval: float = DEFAULT_INTERVAL,
        label: str = "",
        max_cells: int = MAX_CELLS,
    ) -> None:
        if not (math.isfinite(interval) and interval > 0):
            raise ValueError(f"interval is {interval}; it is a positive number of seconds")
        self._cache, self._path, self._interval = cache, Path(path), interval
        self._label, self._max_cells = label, max_cells
        self._closed = threading.Event()
        self._failed = False
        self.publish()
        # A daemon, so that a program that forgets to close it still ends.
        self._thread = threading.Thread(target=self._run, name="paged-kv-telemetry", daemon=True)
        self._thread.start()

    def publish(self) -> Snapshot:
        """Publish a snapshot now, besides those that come by themselves."""
        interval = 0.0 if self._closed.is_set() else self._interval
        taken = snapshot(self._cache, label=self._label, interval=interval, max_cells=self._max_cells)
        write(self._path, taken)
        return taken

    def _run(self) -> None:
        pause = self._interval
        while not self._closed.wait(pause):
            before = time.thread_time()
            self._try()
            pause = max(self._interval, _IDLE_PER_WORK * (time.thread_time() - before))

    def _try(self) -> None:
        try:
            self.publish()
        except (OSError, MemoryError) as error:
            if not self._failed:
                logger.warning("can't publish to %s: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        """Publish a last snapshot and stop; does nothing the second time."""
        if not self._closed.is_set():
            self._closed.set()
            self._thread.join()
            self._try()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
