"""Work that devices have not done yet: which pages it touches, and who has to wait for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from paged_kv.ascend.errors import DeviceError
from paged_kv.ascend.runtime import is_forked

if TYPE_CHECKING:
    import numpy.typing as npt

    from paged_kv._core import PageLease
    from paged_kv.ascend.stream import Event, Stream

__all__ = ["Flight", "Flights"]


class Flight:
    """What one batch gave a stream to do.

    Parameters
    ----------
    stream : Stream
        The stream.
    lease : PageLease or None
        Keeps the pages from being handed out until the work has passed; None where that is someone
        else's business.
    num_pages : int
        Pages of the cache.

    Attributes
    ----------
    event : Event or None
        The work's end; None where it is still to be marked.
    ended : bool
        The batch is over: no further work will come.
    """

    def __init__(self, stream: Stream, lease: PageLease | None, num_pages: int) -> None:
        self.stream = stream
        self._lease = lease
        self.event: Event | None = None
        self.ended = False
        self._num_pages = num_pages
        self._reads: list[npt.NDArray[np.integer]] = []
        self._writes: list[npt.NDArray[np.integer]] = []

    def touch(self, reads: npt.NDArray[np.integer], writes: npt.NDArray[np.integer]) -> None:
        """Add pages that the work reads or writes, entries below 0 being none."""
        self._reads.append(reads)
        self._writes.append(writes)

    def pages(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return bool [num_pages] of the pages that are read, and of those that are written."""
        return self.mask(self._reads), self.mask(self._writes)

    def mask(self, lists: list[npt.NDArray[np.integer]]) -> npt.NDArray[np.bool_]:
        """Return bool [num_pages] of the pages that the arrays name."""
        mask = np.zeros(self._num_pages, np.bool_)
        for pages in lists:
            mask[pages[pages >= 0]] = True
        return mask

    def mark(self) -> Event:
        """Return the event of the work so far."""
        if self.event is None:
            self.event = self.stream.fence()
        return self.event

    def so_far(self) -> Event | None:
        """Return an event of the work so far, though more may come; None where it has passed."""
        try:
            return self.event or self.stream.fence()
        except DeviceError as error:
            if self.stream.is_gone(error):
                return None
            raise

    def release(self) -> None:
        """Let the pages go."""
        if self._lease is not None:
            self._lease.release()

    def passed(self) -> bool:
        """Say whether the batch is over and all its work done; no where the device doesn't tell."""
        if not self.ended:
            return False
        try:
            self.event = event = self.so_far()
            return event is None or event.query()
        except DeviceError:
            # Nobody asked for this; whoever uses the device next is told. Until then the pages stay.
            return False


class Flights:
    """The work of one cache that has begun and has not passed; from any thread."""

    def __init__(self) -> None:
        # Reentrant: a garbage collection inside may end a batch.
        self._lock = threading.RLock()
        # In the order in which each was last given something, so that of one stream the last one's end
        # is the end of all.
        self._flights: dict[Flight, None] = {}

    def put_last(self, flight: Flight) -> None:
        """Note that a flight is given something now; before it is launched."""
        with self._lock:
            self._flights.pop(flight, None)
            self._flights[flight] = None

    def remove(self, flight: Flight) -> None:
        """Forget a flight of which nothing was launched."""
        with self._lock:
            self._flights.pop(flight, None)

    def poll(self) -> bool:
        """End the leases of work that has passed; return whether there was any. Never waits."""
        if is_forked():  # nothing passes here, and a thread of the parent may have held the lock
            return False
        with self._lock:
            passed, waiting = [], set()
            for flight in list(self._flights):
                # A stream works in order: where one is not done, none after it is.
                if flight.stream.handle in waiting:
                    continue
                if flight.passed():
                    passed.append(flight)
                    del self._flights[flight]
                elif flight.ended:
                    waiting.add(flight.stream.handle)
        for flight in passed:
            flight.release()
        return bool(passed)

    def order(self, flight: Flight, reads: npt.NDArray[np.integer], writes: npt.NDArray[np.integer]) -> None:
        """Let a flight's stream wait for the work of other streams on pages that it reads or writes next.

        Of two that only read neither waits.

        Raises
        ------
        DeviceError
            The stream can't be made to wait.
        """
        mine = flight.stream.handle
        with self._lock:
            others = [other for other in self._flights if other.stream.handle != mine]
        if not others:
            return
        reading, writing = flight.mask([reads]), flight.mask([writes])
        latest = {}
        for other in others:
            read, written = other.pages()
            if (writing & (read | written)).any() or (reading & written).any():
                latest[other.stream.handle] = other
        for other in latest.values():
            event = other.so_far()
            if event is not None:
                flight.stream.wait(event)

    def __len__(self) -> int:
        with self._lock:
            return len(self._flights)
