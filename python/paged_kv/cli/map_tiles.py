"""What a page map draws: one tile a page, or a run of pages where there are more than there is room."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from paged_kv.telemetry import Cells


class Kind(IntEnum):
    """What most of a tile's used pages are."""

    FREE = 0
    PRIVATE = 1
    COPIED = 2
    SHARED = 3
    CACHED = 4
    DEFERRED = 5


LABELS = {
    Kind.PRIVATE: "one sequence's",
    Kind.COPIED: "copied on write",
    Kind.SHARED: "shared",
    Kind.CACHED: "cached",
    Kind.DEFERRED: "deferred",
    Kind.FREE: "free",
}

# Neighbours in number differ in colour, on dark ground and on light.
_SEQUENCE_COLOURS = (
    "#4e9af1",
    "#f28e2b",
    "#59a14f",
    "#d37295",
    "#b6992d",
    "#86bcb6",
    "#b07aa1",
    "#7d6bd6",
    "#8cd17d",
    "#9c755f",
    "#5ad1e6",
    "#f1ce63",
)
NOBODYS_COLOUR = "#c8c8c8"
_KIND_COLOURS = {Kind.FREE: "#4a4a4a", Kind.CACHED: "#6f7fa8", Kind.DEFERRED: "#ff4d4d"}


def sequence_colour(owner: int) -> str:
    """Choose a sequence's colour, as ``#rrggbb``; pages that no sequence holds have one as well."""
    # The lower half is the slot: sequences that live at the same time differ in it.
    return NOBODYS_COLOUR if owner < 0 else _SEQUENCE_COLOURS[(owner & 0xFFFFFFFF) % len(_SEQUENCE_COLOURS)]


def tile_colour(kind: Kind, owner: int) -> str:
    """Choose a tile's colour, as ``#rrggbb``."""
    return _KIND_COLOURS.get(kind) or sequence_colour(owner)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles in the order of their pages.

    Attributes
    ----------
    pages : int
        Pages of a tile; the last may have fewer.
    kind : numpy.ndarray
        int64 ``[tiles]``: each a `Kind`.
    owner : numpy.ndarray
        int64 ``[tiles]``: a sequence that holds pages there, or -1.
    used : numpy.ndarray
        float64 ``[tiles]``: the part of its pages that is not free, 0 to 1.
    """

    pages: int
    kind: NDArray[np.int64]
    owner: NDArray[np.int64]
    used: NDArray[np.float64]

    def __len__(self) -> int:
        """Count the tiles."""
        return len(self.kind)


def tiles(cells: Cells, room: int) -> Tiles:
    """Make at most `room` tiles of a snapshot's cells; a tile is a whole number of cells.

    Parameters
    ----------
    cells : Cells
        The cells.
    room : int
        Tiles at most; at least 1.

    Returns
    -------
    Tiles
        Where cells are joined, the owner is that of the fullest.
    """
    joined = -(-len(cells) // max(room, 1))
    count = -(-len(cells) // joined)

    def groups(numbers: list[int], blank: int = 0) -> NDArray[np.int64]:
        padded = np.full(count * joined, blank, np.int64)
        padded[: len(numbers)] = numbers
        return padded.reshape(count, joined)

    free, private, copied, shared, cached, deferred = (
        groups(numbers)
        for numbers in (
            cells.free, cells.private, cells.copied, cells.shared, cells.cached, cells.deferred,
        )
    )  # fmt: skip
    by_kind = np.stack(
        [
            np.zeros(count, np.int64),
            # A copy that was shared since counts as shared.
            (private - np.minimum(copied, private)).sum(1),
            np.minimum(copied, private).sum(1),
            shared.sum(1),
            cached.sum(1),
            deferred.sum(1),
        ],
        axis=1,
    )
    used_pages = by_kind.sum(1)
    fullest = (private + shared).argmax(1)
    return Tiles(
        pages=joined * cells.pages_per_cell,
        kind=np.where(used_pages > 0, by_kind.argmax(1), Kind.FREE),
        owner=groups(cells.owner, -1)[np.arange(count), fullest],
        used=used_pages / np.maximum(used_pages + free.sum(1), 1),
    )
