"""What a snapshot says, its JSON, and what two of them tell."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from paged_kv.explanation import LeaseHolder, PageState, SequenceHolder

if TYPE_CHECKING:
    from paged_kv._core import KvCache

__all__ = ["MAX_CELLS", "MAX_SEQUENCES", "STATES", "Cells", "Rates", "Snapshot", "rates", "snapshot"]

_T = TypeVar("_T")

FORMAT = 1
"""Raised when a reader of the former format would misread the present one."""
MAX_CELLS = 3840
"""Cells of a snapshot, unless asked for others: a terminal of 200 columns and 50 rows can show them."""
MAX_SEQUENCES = 64
"""Sequences, and leases, that a snapshot lists."""
STATES = tuple(state.name.lower() for state in PageState if state is not PageState.NULL)
"""States that cells count."""

_PLAIN: dict[str, type] = {"int": int, "float": float, "str": str, "list[int]": list, "dict[str, Any]": dict}
_COUNTERS = (
    "total_pages",
    "free_pages",
    "live_pages",
    "shared_pages",
    "cached_pages",
    "deferred_pages",
    "copied_pages",
    "sequences",
    "tokens",
    "stored_tokens",
    "reserved_tokens",
    "total_bytes",
    "used_bytes",
)


@dataclass(frozen=True, slots=True)
class Cells:
    """Runs of adjacent pages, in order.

    Attributes
    ----------
    pages_per_cell : int
        Pages in each; the last may have fewer.
    free, private, shared, cached, deferred : list of int
        ``[cells]``: pages in each state.
    copied : list of int
        ``[cells]``: pages made by copy-on-write.
    owner : list of int
        ``[cells]``: number of a sequence that holds pages there, or -1.
    """

    pages_per_cell: int
    free: list[int]
    private: list[int]
    shared: list[int]
    cached: list[int]
    deferred: list[int]
    copied: list[int]
    owner: list[int]

    def __len__(self) -> int:
        """Count the cells."""
        return len(self.owner)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A cache at one moment.

    Attributes
    ----------
    time : float
        Seconds since the epoch.
    pid : int
        The process that took it.
    label : str
        What the process calls itself.
    interval : float
        Seconds until the next one is due; 0 if none is.
    page_size, page_bytes : int
        Tokens of a page; its bytes in all layers.
    stats : dict
        As :meth:`paged_kv.KvCache.stats` returns.
    freed_pages : int
        How often pages were freed since the cache was made.
    sequence_pages, batch_pages, handle_pages : int
        As in :class:`paged_kv.Explanation`.
    sequences : list of SequenceHolder
        Those that hold most pages, at most `MAX_SEQUENCES`.
    leases : list of LeaseHolder or None
        Open batches, oldest first, at most as many; None where they are not tracked.
    cells : Cells
        The pages.
    """

    time: float
    pid: int
    label: str
    interval: float
    page_size: int
    page_bytes: int
    stats: dict[str, Any]
    freed_pages: int
    sequence_pages: int
    batch_pages: int
    handle_pages: int
    sequences: list[SequenceHolder]
    leases: list[LeaseHolder] | None
    cells: Cells

    def to_json(self) -> str:
        """Write it as one JSON object."""
        return json.dumps(
            {"format": FORMAT, **_fields(self)}, default=_fields, separators=(",", ":"), allow_nan=False
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` wrote.

        Raises
        ------
        ValueError
            For anything else.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not a snapshot: {error}") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"not a snapshot of format {FORMAT}: {found!r:.40}")
        leases = data.get("leases")
        snapshot = _record(
            cls,
            {
                **data,
                "sequences": _records(SequenceHolder, data.get("sequences")),
                "leases": None if leases is None else _records(LeaseHolder, leases),
                "cells": _record(Cells, data.get("cells")),
            },
        )
        snapshot._check()
        return snapshot

    def _check(self) -> None:
        """Look for numbers that readers would stumble over."""
        stats, cells = self.stats, self.cells
        missing = [name for name in _COUNTERS if not _is_count(stats.get(name))]
        if missing or type(stats.get("waste")) not in (int, float):
            raise ValueError(f"not a snapshot: stats lack {', '.join(missing) or 'waste'}")
        lists = [getattr(cells, name) for name in (*STATES, "copied")]
        if any(len(numbers) != len(cells) for numbers in lists):
            raise ValueError("not a snapshot: the lists of its cells differ in length")
        if not all(_is_count(number, 1 << 32) for numbers in lists for number in numbers):
            raise ValueError("not a snapshot: a cell counts what is no number of pages")
        if not all(_is_count(owner) or owner == -1 for owner in cells.owner) or not len(cells):
            raise ValueError("not a snapshot: a cell's owner is no number")
        if min(cells.pages_per_cell, self.page_size, stats["total_pages"]) < 1:
            raise ValueError("not a snapshot: a cache, or cells or pages, of no size")


def _fields(record: Any) -> dict[str, Any]:
    """Name a dataclass's fields; not `asdict`, which copies every number."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _is_count(number: object, below: int = 1 << 63) -> bool:
    return type(number) is int and 0 <= number < below


def _records(kind: type[_T], rows: object) -> list[_T]:
    if not isinstance(rows, list):
        raise ValueError(f"not a snapshot: no list of {kind.__name__}")
    return [_record(kind, row) for row in rows]


def _record(kind: type[_T], row: object) -> _T:
    """Make a dataclass of an object with the same fields, each of its type."""
    if not isinstance(row, dict):
        raise ValueError(f"not a snapshot: no {kind.__name__}")
    values = {}
    for field in fields(kind):  # type: ignore[arg-type]
        value = row.get(field.name)
        wanted = _PLAIN.get(str(field.type))
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            raise ValueError(f"not a snapshot: {kind.__name__}.{field.name} is too large")
        if wanted is float and type(value) is int:
            value = float(value)
        # Fields of other types were made by `from_json` itself.
        if wanted is not None and type(value) is not wanted:
            raise ValueError(f"not a snapshot: {kind.__name__}.{field.name} is {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"not a snapshot: {kind.__name__}.{field.name} is {value}")
        values[field.name] = value
    return kind(**values)


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two snapshots, each per second.

    Attributes
    ----------
    seconds : float
        The time between them.
    taken_pages, freed_pages, copied_pages : float
        Pages handed out, given back, and copied on write.
    tokens, sequences : float
        By how much the sequences' computed tokens, and the sequences, have become more; negative
        where they have become fewer.
    """

    seconds: float
    taken_pages: float
    freed_pages: float
    copied_pages: float
    tokens: float
    sequences: float


def rates(before: Snapshot, after: Snapshot) -> Rates:
    """Compare two snapshots of the same cache.

    Raises
    ------
    ValueError
        Where the second is not a later one of the same process and cache.
    """
    seconds = after.time - before.time
    freed = after.freed_pages - before.freed_pages
    copied = after.stats["copied_pages"] - before.stats["copied_pages"]
    same = after.pid == before.pid and after.stats["total_pages"] == before.stats["total_pages"]
    if not same or seconds <= 0 or freed < 0 or copied < 0:
        raise ValueError("rates need two snapshots of the same cache, the earlier one first")
    used = before.stats["free_pages"] - after.stats["free_pages"]
    return Rates(
        seconds=seconds,
        taken_pages=max(freed + used, 0) / seconds,
        freed_pages=freed / seconds,
        copied_pages=copied / seconds,
        tokens=(after.stats["tokens"] - before.stats["tokens"]) / seconds,
        sequences=(after.stats["sequences"] - before.stats["sequences"]) / seconds,
    )


def snapshot(
    cache: KvCache, *, label: str = "", interval: float = 0.0, max_cells: int = MAX_CELLS
) -> Snapshot:
    """Take a snapshot, in one walk over the tables that stops nobody.

    Parameters
    ----------
    cache : KvCache
        The cache.
    label : str
        What to call the program.
    interval : float
        Seconds until the next one is due; 0 if none is.
    max_cells : int
        Runs of adjacent pages to tell apart at most.

    Raises
    ------
    ValueError
        For a number out of range.
    """
    if not 1 <= max_cells <= 1 << 16:
        raise ValueError(f"max_cells is {max_cells}; a snapshot has 1 to 65536 cells")
    why = cache.explain(max_cells=max_cells)
    cells = why.cells
    assert cells is not None, "asked for"
    by_state = dict(zip(STATES, cells["counts"].T.tolist(), strict=True))
    return Snapshot(
        time=time.time(),
        pid=os.getpid(),
        label=label,
        interval=interval,
        page_size=cache.page_size,
        page_bytes=why.stats["total_bytes"] // why.stats["total_pages"],
        stats=dict(why.stats),
        freed_pages=why.freed_pages,
        sequence_pages=why.sequence_pages,
        batch_pages=why.batch_pages,
        handle_pages=why.handle_pages,
        sequences=list(why.sequences[:MAX_SEQUENCES]),
        leases=None if why.leases is None else list(why.leases[:MAX_SEQUENCES]),
        cells=Cells(
            pages_per_cell=cells["pages_per_cell"],
            copied=cells["copied"].tolist(),
            owner=cells["owner"].tolist(),
            **by_state,
        ),
    )
