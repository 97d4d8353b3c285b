"""Who holds a cache's pages: what :meth:`paged_kv.KvCache.explain` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    from paged_kv._core import _Stats

__all__ = ["Explanation", "LeaseHolder", "PageCells", "PageState", "SequenceHolder"]

_SHOWN = 10
"""Sequences that ``str()`` lists."""


class PageState(IntEnum):
    """What a page is; the numbers are those of ``KvCache.page_map()["state"]``."""

    FREE = 0
    """Nobody holds it."""
    PRIVATE = 1
    """One sequence holds it, or only handles or an open batch do."""
    SHARED = 2
    """More than one sequence holds it, or a sequence and a handle."""
    CACHED = 3
    """Kept for later hits, evictable."""
    DEFERRED = 4
    """Only open batches still hold it: its sequence was freed, truncated, or moved to a copy."""
    NULL = 5
    """The null page, which no figure counts."""


class PageCells(TypedDict):
    """Runs of adjacent pages, as pictures of large caches need them."""

    pages_per_cell: int
    """Pages in each cell; the last may have fewer."""
    counts: NDArray[np.uint32]
    """``[cells, 5]``: pages by :class:`paged_kv.PageState`, null pages left out."""
    copied: NDArray[np.uint32]
    """``[cells]``: pages made by copy-on-write."""
    owner: NDArray[np.int64]
    """``[cells]``: the :attr:`paged_kv.Sequence.id` of a sequence that holds pages of the cell, -1 where none
    does. If one holds more than half of those that sequences hold, it is that one."""


@dataclass(frozen=True, slots=True)
class SequenceHolder:
    """A sequence as a holder of pages.

    Attributes
    ----------
    id : int
        The :attr:`paged_kv.Sequence.id`.
    num_pages : int
        Pages in its table, shared ones too.
    exclusive_pages : int
        Those that no other sequence and no handle holds: what freeing it gives back, once open
        batches that see it have ended.
    num_tokens, num_computed_tokens : int
        Slots reserved; tokens computed.
    """

    id: int
    num_pages: int
    exclusive_pages: int
    num_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """An open batch as a holder of pages.

    Attributes
    ----------
    num_sequences : int
        Sequences in it.
    num_pages : int
        Pages that it sees, each counted once. Most are held by its sequences as well.
    deferred_pages : int
        Those that only open batches hold: ending it gives them back, unless another sees them too.
    age : float
        Seconds since it was opened.
    site : str
        Where: file, line and function.
    """

    num_sequences: int
    num_pages: int
    deferred_pages: int
    age: float
    site: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds the pages of a cache, as one walk found it.

    ``total_pages`` is the sum of ``free_pages``, ``cached_pages`` and ``deferred_pages`` of `stats`
    and of `sequence_pages`, `batch_pages` and `handle_pages`, always; the latter three are its
    ``live_pages``. When nothing runs, `stats` is what :meth:`paged_kv.KvCache.stats` says.

    Attributes
    ----------
    stats : dict
        As :meth:`paged_kv.KvCache.stats` returns, found in the same walk.
    sequence_pages : int
        Pages in the table of at least one sequence.
    batch_pages : int
        Pages that so far only open batches hold: copies on write which no commit has published.
    handle_pages : int
        Pages that only handles of :class:`paged_kv.PagePool` hold; for an instant, also those that a
        batch has taken and not yet put into a table.
    sequences : tuple of SequenceHolder
        Every sequence not freed, those with most pages first.
    leases : tuple of LeaseHolder or None
        Open batches, oldest first; None where :meth:`paged_kv.KvCache.track_leases` was not called.
    freed_pages : int
        How often pages were freed since the cache was made, of each page modulo 2**32: its growth, and
        that of the pages in use, tell how many were taken.
    cells : PageCells or None
        The pages in runs, where asked for.
    """

    stats: _Stats
    sequence_pages: int
    batch_pages: int
    handle_pages: int
    sequences: tuple[SequenceHolder, ...]
    leases: tuple[LeaseHolder, ...] | None
    freed_pages: int
    cells: PageCells | None = field(repr=False, compare=False)

    def __str__(self) -> str:
        """Say it to people, a holder a line."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        stats = self.stats
        yield f"{stats['total_pages']} pages: {stats['free_pages']} free, {stats['cached_pages']} cached"
        shared = stats["shared_pages"]
        yield f"{self.sequence_pages:9} held by {len(self.sequences)} sequences, {shared} shared"
        for one in self.sequences[:_SHOWN]:
            yield (
                f"{one.num_pages:13} sequence {one.id}: {one.num_computed_tokens} of {one.num_tokens} tokens"
                f" computed, {one.exclusive_pages} pages its own"
            )
        if len(self.sequences) > _SHOWN:
            rest = sum(one.num_pages for one in self.sequences[_SHOWN:])
            yield f"{rest:13} {len(self.sequences) - _SHOWN} more sequences"
        yield f"{self.batch_pages:9} copied by open batches"
        yield f"{self.handle_pages:9} held by handles"
        yield f"{stats['deferred_pages']:9} held by open batches alone (deferred)"
        if self.leases is None:
            yield "          open batches are not tracked: see KvCache.track_leases"
            return
        for lease in self.leases:
            yield (
                f"{lease.num_pages:13} batch of {lease.num_sequences}, open for {lease.age:.1f} s:"
                f" {lease.deferred_pages} deferred, opened at {lease.site}"
            )


def _build(
    *,
    stats: _Stats,
    sequence_pages: int,
    batch_pages: int,
    handle_pages: int,
    sequences: list[tuple[int, int, int, int, int]],
    leases: list[tuple[tuple[int, int, int], float, str]] | None,
    freed_pages: int,
    cells: PageCells | None,
) -> Explanation:
    """Put together what the extension found."""
    holders = sorted(sequences, key=lambda one: (-one[1], one[0]))
    return Explanation(
        stats=stats,
        sequence_pages=sequence_pages,
        batch_pages=batch_pages,
        handle_pages=handle_pages,
        sequences=tuple(SequenceHolder(*one) for one in holders),
        leases=None if leases is None else tuple(LeaseHolder(*held, age, site) for held, age, site in leases),
        freed_pages=freed_pages,
        cells=cells,
    )
