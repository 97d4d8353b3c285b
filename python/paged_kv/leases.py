"""Open batches with their age and call site: what :meth:`paged_kv.KvCache.track_leases` switches on."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType

    from paged_kv._core import Batch

__all__ = ["LeaseTracker"]

logger = logging.getLogger("paged_kv.leases")

_PRUNE_BEYOND = 64
"""Remembered batches from which on ended ones are looked for."""


@dataclass(slots=True)
class _Opening:
    """When and where a batch was opened. The frame itself would keep its variables alive."""

    batch: weakref.ref[Batch]
    time: float
    code: CodeType | None
    line: int
    warned: bool = False

    def alive(self) -> Batch | None:
        """Return the batch if it is still open; one that is garbage has closed itself."""
        batch = self.batch()
        return None if batch is None or batch.is_ended else batch

    @property
    def site(self) -> str:
        if self.code is None:
            return "outside Python"
        return f"{self.code.co_filename}:{self.line} in {self.code.co_qualname}"


@dataclass(frozen=True, slots=True)
class _OpenLease:
    batch: Batch
    age: float
    site: str


class LeaseTracker:
    """Remembers open batches, each by a weak reference; called by the cache, from any thread.

    Attributes
    ----------
    warn_after : float or None
        Seconds after which an open batch is named in a warning.
    """

    def __init__(self) -> None:
        self.warn_after: float | None = None
        self._openings: list[_Opening] = []
        self._room = _PRUNE_BEYOND
        self._next_look = 0.0
        # Reentrant: a garbage collection inside may run code that opens a batch.
        self._lock = threading.RLock()

    def note(self, batch: Batch) -> None:
        """Remember a batch that the caller's caller has just opened."""
        try:
            frame = sys._getframe(1)
        except ValueError:  # opened by a thread that runs no Python
            code, line = None, 0
        else:
            code, line = frame.f_code, frame.f_lineno
        now = time.monotonic()
        opening = _Opening(weakref.ref(batch), now, code, line)
        with self._lock:
            self._openings.append(opening)
            if len(self._openings) > self._room:
                self._openings = [one for one in self._openings if one.alive() is not None]
                self._room = max(2 * len(self._openings), _PRUNE_BEYOND)
        if self.warn_after is not None and now >= self._next_look:
            self._warn(now)

    def open(self) -> list[_OpenLease]:
        """List the batches that are open, oldest first."""
        now = time.monotonic()
        self._warn(now)
        with self._lock:
            openings = self._openings.copy()
        pairs = [(opening, opening.alive()) for opening in openings]
        return [
            _OpenLease(batch, now - opening.time, opening.site)
            for opening, batch in pairs
            if batch is not None
        ]

    def _warn(self, now: float) -> None:
        """Name each batch that is open for too long, once."""
        limit = self.warn_after
        if limit is None:
            return
        late = []
        with self._lock:
            # Looking at every batch each time one is opened would cost more than opening it.
            self._next_look = now + limit / 4
            for opening in self._openings:
                batch = None if opening.warned or now - opening.time <= limit else opening.alive()
                if batch is not None:
                    opening.warned = True
                    late.append((len(batch), now - opening.time, opening.site))
        for sequences, age, site in late:
            logger.warning("a batch of %d sequences is open for %.1f s: opened at %s", sequences, age, site)
