"""The page map as a picture in a file: SVG, or PNG by Pillow."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from paged_kv.cli.map_tiles import LABELS, Kind, sequence_colour, tile_colour, tiles
from paged_kv.cli.text import printable

if TYPE_CHECKING:
    from pathlib import Path

    from paged_kv.telemetry import Snapshot

WIDTH, HEIGHT = 1200, 800
_MARGIN, _SIDE, _TOP = 24, 250, 64
_GROUND, _INK, _FAINT, _BED = "#16181d", "#e6e6e6", "#9aa0a6", "#24272e"
_HOLDERS = 15


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class _Label:
    x: float
    y: float
    """Of its middle."""
    text: str
    colour: str = _INK
    size: int = 15
    right: bool = False
    """Whether `x` is where it ends."""


@dataclass(slots=True)
class Picture:
    """Boxes and labels, which both formats draw alike."""

    boxes: list[_Box] = field(default_factory=list)
    labels: list[_Label] = field(default_factory=list)

    def svg(self) -> str:
        """Write it as SVG."""
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{_GROUND}"/>',
        ]
        parts += [
            f'<rect x="{box.x:.2f}" y="{box.y:.2f}" width="{box.width:.2f}" height="{box.height:.2f}" '
            f'fill="{box.colour}"/>'
            for box in self.boxes
        ]
        parts += [
            f'<text x="{one.x:.2f}" y="{one.y:.2f}" fill="{one.colour}" font-size="{one.size}" '
            f'dominant-baseline="central" text-anchor="{"end" if one.right else "start"}">'
            f"{escape(one.text)}</text>"
            for one in self.labels
        ]
        return "\n".join([*parts, "</svg>", ""])

    def save_png(self, path: Path) -> None:
        """Write it as PNG."""
        from PIL import Image, ImageDraw, ImageFont

        image = Image.new("RGB", (WIDTH, HEIGHT), _GROUND)
        draw = ImageDraw.Draw(image)
        for box in self.boxes:
            # The lower right corner belongs to what is drawn.
            corner = (round(box.x + box.width) - 1, round(box.y + box.height) - 1)
            if corner[0] >= round(box.x) and corner[1] >= round(box.y):
                draw.rectangle([(round(box.x), round(box.y)), corner], fill=box.colour)
        for one in self.labels:
            font = ImageFont.load_default(one.size)
            draw.text((one.x, one.y), one.text, one.colour, font, "rm" if one.right else "lm")
        image.save(path, "PNG")


def save(taken: Snapshot, path: Path) -> None:
    """Draw a snapshot into a file, whose name says the format.

    Raises
    ------
    ValueError
        For a name that ends in neither ``.svg`` nor ``.png``.
    OSError
        Where the file can't be written.
    """
    check_name(path)
    picture = draw(taken)
    if path.suffix.lower() == ".svg":
        path.write_text(picture.svg(), encoding="utf-8")
    else:
        picture.save_png(path)


def check_name(path: Path) -> None:
    """Raise `ValueError` for a name that tells no format."""
    if path.suffix.lower() not in (".svg", ".png"):
        raise ValueError(f"a picture is a .svg or .png file, not {path}")


def draw(taken: Snapshot) -> Picture:
    """Lay out a snapshot: tiles to the left, figures and holders to the right."""
    picture = Picture()
    _draw_title(picture, taken)
    _draw_tiles(picture, taken)
    _draw_side(picture, taken)
    return picture


def _draw_title(picture: Picture, taken: Snapshot) -> None:
    stats = taken.stats
    used = 1 - stats["free_pages"] / stats["total_pages"]
    title = f"{printable(taken.label) or 'paged_kv'}: {used:.1%} of {stats['total_pages']:,} pages in use"
    picture.labels.append(_Label(_MARGIN, _TOP / 2, title.replace("\n", " "), size=22))


def _draw_tiles(picture: Picture, taken: Snapshot) -> None:
    width, height = WIDTH - _SIDE - 3 * _MARGIN, HEIGHT - _TOP - 2 * _MARGIN
    count = len(taken.cells)
    # The largest squares of which enough fit; where none do, tiles are joined.
    side = 48
    while side > 1 and (width // side) * (height // side) < count:
        side -= 1
    per_row = width // side
    drawn = tiles(taken.cells, per_row * (height // side))
    gap = 1 if side > 3 else 0
    for i in range(len(drawn)):
        kind, owner, used = Kind(int(drawn.kind[i])), int(drawn.owner[i]), float(drawn.used[i])
        x, y = _MARGIN + i % per_row * side, _TOP + i // per_row * side
        _draw_tile(picture, x, y, side - gap, kind, tile_colour(kind, owner), used)
    note = f"a tile is {drawn.pages:,} page{'s' if drawn.pages > 1 else ''} of {taken.page_size} tokens"
    picture.labels.append(_Label(_MARGIN, HEIGHT - _MARGIN, note, _FAINT, 13))


def _draw_tile(
    picture: Picture, x: float, y: float, side: float, kind: Kind, colour: str, used: float
) -> None:
    """Draw a bed, what is used of it from below, and the mark of its kind within."""
    picture.boxes.append(_Box(x, y, side, side, _BED))
    if kind is Kind.FREE:
        return
    height = max(side * used, 1)
    picture.boxes.append(_Box(x, y + side - height, side, height, colour))
    inner, middle = side / 3, (x + side / 2, y + side / 2)
    if side < 6:
        return
    if kind is Kind.SHARED:  # a hole
        picture.boxes.append(_Box(middle[0] - inner / 2, middle[1] - inner / 2, inner, inner, _GROUND))
    elif kind is Kind.COPIED:  # a light corner
        picture.boxes.append(_Box(x + side - inner, y, inner, inner, "#ffffff"))
    elif kind in (Kind.CACHED, Kind.DEFERRED):  # a bar
        picture.boxes.append(_Box(x, middle[1] - inner / 2, side, inner, _GROUND))


def _draw_side(picture: Picture, taken: Snapshot) -> None:
    left, right, y = WIDTH - _SIDE - _MARGIN, WIDTH - _MARGIN, _TOP + 8.0
    stats = taken.stats
    for kind, label in LABELS.items():
        _draw_tile(picture, left, y - 7, 14, kind, tile_colour(kind, 0), 1)
        picture.labels.append(_Label(left + 24, y, label, _FAINT))
        y += 22
    y += 12
    for name, value in (
        ("in use", f"{stats['total_pages'] - stats['free_pages']:,}"),
        ("shared", f"{stats['shared_pages']:,}"),
        ("cached", f"{stats['cached_pages']:,}"),
        ("deferred", f"{stats['deferred_pages']:,}"),
        ("copied so far", f"{stats['copied_pages']:,}"),
        ("tokens, stored", f"{stats['stored_tokens']:,}"),
        ("tokens, unshared", f"{stats['tokens']:,}"),
        ("waste", f"{stats['waste']:.1%}"),
    ):
        picture.labels.append(_Label(left, y, name, _FAINT))
        picture.labels.append(_Label(right, y, value, right=True))
        y += 22
    y += 12
    picture.labels.append(_Label(left, y, f"sequences: {stats['sequences']:,}"))
    picture.labels.append(_Label(right, y, "pages", _FAINT, right=True))
    for one in taken.sequences[:_HOLDERS]:
        y += 20
        picture.boxes.append(_Box(left, y - 6, 12, 12, sequence_colour(one.id)))
        picture.labels.append(_Label(left + 24, y, str(one.id & 0xFFFFFFFF), _FAINT, 14))
        picture.labels.append(_Label(right, y, f"{one.num_pages:,}", size=14, right=True))
