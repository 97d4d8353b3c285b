"""The page map on a terminal: tiles, counters, rates, and who holds most."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.layout import Layout
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from paged_kv.cli.map_tiles import LABELS, Kind, sequence_colour, tile_colour, tiles
from paged_kv.cli.text import printable

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from paged_kv.cli.map_tiles import Tiles
    from paged_kv.telemetry import Cells, Rates, Snapshot

_GLYPHS = {
    Kind.FREE: "·",
    Kind.PRIVATE: "█",
    Kind.COPIED: "▓",
    Kind.SHARED: "▒",
    Kind.CACHED: "░",
    Kind.DEFERRED: "X",
}
# How much of a tile's pages is used: for kinds that are drawn as a whole block.
_LEVELS = "▁▂▃▄▅▆▇█"
_SIDE_WIDTH = 29
_MAX_SCALE = 4
_DIM, _BOLD = Style(dim=True), Style(bold=True)

_Line: TypeAlias = tuple[list[Segment], str]
"""A name, coloured, and its value."""


@lru_cache(maxsize=64)
def _style(colour: str) -> Style:
    return Style(color=colour)


def _glyph(kind: Kind, used: float) -> str:
    """Show a part-filled tile of one sequence as a bar: the higher, the more of it is used."""
    if kind is Kind.PRIVATE and used < 1:
        return _LEVELS[min(int(used * len(_LEVELS)), len(_LEVELS) - 2)]
    return _GLYPHS[kind]


class Grid:
    """The tiles, as many as the console has room for.

    Parameters
    ----------
    cells : Cells
        Of a snapshot.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw row after row."""
        width, height = options.max_width, options.height or console.height
        scale = _scale(len(self._cells), width, height)
        tile_width, tile_height = (2 * scale, scale) if scale else (1, 1)
        per_row = max(width // tile_width, 1)
        drawn = tiles(self._cells, per_row * max(height // tile_height, 1))
        for start in range(0, len(drawn), per_row):
            row = [*_row(drawn, start, min(start + per_row, len(drawn)), tile_width), Segment.line()]
            # High tiles are told apart by a gap, as wide ones are.
            gap = 1 if tile_height > 2 else 0
            for _ in range(tile_height - gap):
                yield from row
            if gap:
                yield Segment.line()


def _scale(count: int, width: int, height: int) -> int:
    """Choose how high tiles may be, at twice as many columns: then they are about square.

    Returns
    -------
    int
        0 where there isn't even room for two columns a tile.
    """
    scale = _MAX_SCALE
    while scale and (width // (2 * scale)) * (height // scale) < count:
        scale -= 1
    return scale


def _row(drawn: Tiles, start: int, end: int, width: int) -> RenderResult:
    """Join neighbours that look alike: a terminal is slow at changing colours."""
    kind, owner = drawn.kind[start:end], drawn.owner[start:end]
    level = np.floor(drawn.used[start:end] * len(_LEVELS)).astype(np.int64)
    changes = np.flatnonzero((np.diff(kind) != 0) | (np.diff(owner) != 0) | (np.diff(level) != 0)) + 1
    begins = [0, *changes.tolist()]
    # Wide tiles are told apart by a gap.
    gap = " " if width > 2 else ""
    for begin, stop in zip(begins, [*begins[1:], end - start], strict=True):
        what = Kind(int(kind[begin]))
        tile = _glyph(what, float(drawn.used[start + begin])) * (width - len(gap)) + gap
        yield Segment(tile * (stop - begin), _style(tile_colour(what, int(owner[begin]))))


def legend() -> Text:
    """Name the glyphs in one line."""
    text = Text(no_wrap=True, overflow="crop")
    for kind, label in LABELS.items():
        text.append(_GLYPHS[kind], _style(tile_colour(kind, 0)))
        text.append(f" {label}  ", _DIM)
    return text


def header(taken: Snapshot, age: float) -> Text:
    """Say whose cache it is, how full, and whether the picture is of now."""
    stats = taken.stats
    used = stats["total_pages"] - stats["free_pages"]
    name = printable(taken.label).replace("\n", " ") or "paged_kv"
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{name} {taken.pid}", "bold")
    text.append(f"  {stats['total_pages']:,} pages of {taken.page_size} tokens, ")
    text.append(f"{used / stats['total_pages']:.1%} in use", "bold")
    if taken.interval == 0:
        text.append("  ended", "bold yellow")
    elif age > max(3 * taken.interval, 5):
        text.append(f"  no news for {age:.0f} s", "bold red")
    return text


class Side:
    """The column of figures beside the map: counters first, then as many holders as fit.

    Parameters
    ----------
    taken : Snapshot
        What to show.
    measured : Rates, optional
        What happened lately.
    """

    def __init__(self, taken: Snapshot, measured: Rates | None) -> None:
        self._taken, self._measured = taken, measured

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw line by line; a table would take longer than the map."""
        width, height = options.max_width, options.height or console.height
        for segments, value in self._lines(height)[:height]:
            room = max(width - len(value) - 1 - sum(one.cell_length for one in segments[:-1]), 0)
            *before, name = segments
            yield from before
            yield Segment(set_cell_size(name.text, room) + " ", name.style)
            yield Segment(value)
            yield Segment.line()

    def _lines(self, height: int) -> list[_Line]:
        taken, stats, measured = self._taken, self._taken.stats, self._measured
        total, free = stats["total_pages"], stats["free_pages"]
        lines = [
            _line("in use", f"{total - free:,}"),
            _line("free", f"{free:,}"),
            _line("shared", f"{stats['shared_pages']:,}"),
            _line("cached", f"{stats['cached_pages']:,}"),
            _line("deferred", f"{stats['deferred_pages']:,}"),
            _line("held by handles", f"{taken.handle_pages:,}"),
            _line("copied so far", f"{stats['copied_pages']:,}"),
            _line("tokens, stored", f"{stats['stored_tokens']:,}"),
            _line("tokens, unshared", f"{stats['tokens']:,}"),
            _line("waste", f"{stats['waste']:.1%}"),
        ]
        if taken.page_bytes:
            lines.append(_line("memory", _bytes(stats["used_bytes"])))
        if measured is not None:
            lines += [
                _line("per second", "", _BOLD),
                _line("pages taken", f"{measured.taken_pages:,.0f}"),
                _line("pages freed", f"{measured.freed_pages:,.0f}"),
                _line("pages copied", f"{measured.copied_pages:,.1f}"),
                _line("tokens", f"{measured.tokens:+,.0f}"),
            ]
        return lines + _holders(taken, height - len(lines))


def _holders(taken: Snapshot, room: int) -> list[_Line]:
    """List leases, since those are few and tell of trouble, then the largest sequences."""
    lines = []
    if taken.leases:
        lines.append(_line(f"open batches: {len(taken.leases)}", "age, s", _BOLD))
        shown = taken.leases[: max(room // 3, 1)]
        lines += [_line(_site(lease.site), f"{lease.age:.1f}") for lease in shown]
    lines.append(_line(f"sequences: {taken.stats['sequences']:,}", "pages", _BOLD))
    for one in taken.sequences[: max(room - len(lines), 0)]:
        swatch = Segment("█ ", _style(sequence_colour(one.id)))
        lines.append(([swatch, Segment(f"{one.id & 0xFFFFFFFF}")], f"{one.num_pages:,}"))
    return lines


def _line(name: str, value: str, style: Style | None = None) -> _Line:
    return [Segment(name, style)], value


def _site(site: str) -> str:
    """Shorten a call site to the file's name, the line and the function's last name."""
    where, _, function = printable(site).replace("\n", " ").rpartition(" in ")
    return f"{Path(where).name} {function.rpartition('.')[2]}"


def _bytes(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


class Screen:
    """All of it, in the size of the console.

    Parameters
    ----------
    taken : Snapshot
        What to show.
    measured : Rates, optional
        What happened lately.
    age : float
        Seconds since the snapshot was taken.
    """

    def __init__(self, taken: Snapshot, measured: Rates | None, age: float) -> None:
        self._taken, self._measured, self._age = taken, measured, age

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Lay out the parts."""
        height = options.height or console.height
        body = max(height - 2, 1)
        layout = Layout(size=height)
        layout.split_column(
            Layout(header(self._taken, self._age), size=1),
            Layout(name="body", size=body),
            Layout(self._footer(options.max_width), size=1),
        )
        parts = [Layout(Grid(self._taken.cells))]
        if options.max_width >= 2 * _SIDE_WIDTH:
            parts += [
                Layout(Text(" "), size=1),
                Layout(Side(self._taken, self._measured), size=_SIDE_WIDTH),
            ]
        layout["body"].split_row(*parts)
        yield from console.render(layout, options.update(height=height))

    def _footer(self, width: int) -> Text:
        text, pages = legend(), self._taken.cells.pages_per_cell
        note = f"a tile is {pages:,} pages or more" if pages > 1 else ""
        if note and cell_len(text.plain) + len(note) <= width:
            text.append(note, _DIM)
        return text
