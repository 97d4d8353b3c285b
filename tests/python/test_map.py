"""The page map: tiles, the screen, pictures, and following a program."""

from __future__ import annotations

import dataclasses
import io
import sys
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

import paged_kv
from paged_kv import telemetry
from paged_kv.cli import demo as demo_command
from paged_kv.cli import map_picture
from paged_kv.cli.map import Follower, run_map
from paged_kv.cli.map_tiles import Kind, sequence_colour, tile_colour, tiles
from paged_kv.cli.map_view import Screen
from test_cli import run, tiny

if TYPE_CHECKING:
    from pathlib import Path


class Scene:
    """Ten pages: shared, the parent's own, the child's copy, two by handles, one deferred, four free."""

    def __init__(self, num_pages: int = 10) -> None:
        self.cache = paged_kv.KvCache(num_layers=0, num_pages=num_pages, page_size=4)
        self.parent = self.cache.sequence()
        with self.cache.batch([self.parent], 6):
            pass
        self.child = self.parent.fork()
        with self.cache.batch([self.child], 1):
            pass
        self.handles = self.cache.pool.alloc(2)
        self.cache.track_leases()
        doomed = self.cache.sequence()
        with self.cache.batch([doomed], 3):
            pass
        self.lease = self.cache.batch([doomed], 0)
        doomed.free()

    def snapshot(self, **changes: Any) -> telemetry.Snapshot:
        return dataclasses.replace(telemetry.snapshot(self.cache, label="test", interval=1), **changes)


def drawn(taken: telemetry.Snapshot, width: int, height: int, rates: telemetry.Rates | None = None) -> str:
    """The screen as plain text of exactly that size."""
    file = io.StringIO()
    console = Console(file=file, width=width, height=height, color_system=None)
    console.print(Screen(taken, rates, age=0), end="")
    lines = file.getvalue().splitlines()
    assert [len(lines), {len(line) for line in lines}] == [height, {width}]
    return file.getvalue()


def test_tiles_show_what_most_of_their_used_pages_are() -> None:
    scene = Scene()
    each = tiles(scene.snapshot().cells, 100)
    assert [Kind(kind).name for kind in each.kind] == (
        ["SHARED", "PRIVATE", "COPIED", "PRIVATE", "PRIVATE", "DEFERRED"] + ["FREE"] * 4
    )
    assert each.owner.tolist() == [scene.parent.id] * 2 + [scene.child.id] + [-1] * 7
    assert each.used.tolist() == [1.0] * 6 + [0.0] * 4
    few = tiles(scene.snapshot().cells, 4)
    assert (len(few), few.pages) == (4, 3)
    assert few.used.tolist() == [1, 1, 0, 0]
    assert [Kind(kind) for kind in few.kind] == [Kind.PRIVATE, Kind.PRIVATE, Kind.FREE, Kind.FREE]
    assert few.owner.tolist() == [scene.parent.id, -1, -1, -1]
    assert len(tiles(scene.snapshot().cells, 0)) == 1


def test_sequences_that_live_together_differ_in_colour_and_nobody_has_its_own() -> None:
    colours = [sequence_colour(owner) for owner in range(-1, 12)]
    assert len(set(colours)) == len(colours)
    assert sequence_colour(5) == sequence_colour((7 << 32) | 5)
    kinds = {kind: tile_colour(kind, 3) for kind in Kind}
    assert kinds[Kind.SHARED] == kinds[Kind.PRIVATE] == sequence_colour(3)
    assert len(set(kinds.values())) == 4


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 50), (40, 10), (20, 4)])
def test_the_screen_fills_the_console(width: int, height: int) -> None:
    scene = Scene()
    text = drawn(scene.snapshot(), width, height)
    assert "test " in text
    assert text.count("▒") > 0, "the shared page is there"
    if width >= 80:
        for word in ("in use", "deferred", "open batches: 1", "sequences: 2", "copied on write", "__init__"):
            assert word in text, word


def test_a_large_cache_is_drawn_in_runs_of_pages() -> None:
    scene = Scene(num_pages=1_000_000)
    text = drawn(scene.snapshot(), 80, 24)
    assert "1,000,000 pages" in text
    assert "▁" in text, "a tile with few pages in use"
    assert "a tile is 261 pages or more" in drawn(scene.snapshot(), 200, 50)


def test_the_screen_shows_rates_and_whether_it_is_of_now() -> None:
    scene = Scene()
    rates = telemetry.Rates(1, taken_pages=1234, freed_pages=5, copied_pages=6.5, tokens=-7, sequences=0)
    text = drawn(scene.snapshot(), 80, 30, rates)
    for word in ("per second", "1,234", "6.5", "-7"):
        assert word in text
    assert "ended" in drawn(scene.snapshot(interval=0.0), 80, 24)
    file = io.StringIO()
    Console(file=file, width=80, height=24, color_system=None).print(Screen(scene.snapshot(), None, age=77))
    assert "no news for 77 s" in file.getvalue()


def test_a_program_cannot_steer_the_terminal_or_the_picture() -> None:
    scene = Scene()
    (lease,) = scene.snapshot().leases or ()
    lease = dataclasses.replace(lease, site="\x1b[2J\x07 in </text>\x1b]0;x")
    hostile = scene.snapshot(label="\x1b[31m<b>&\n[red]x", leases=[lease])
    text = drawn(hostile, 80, 24)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]x" in text, "no markup either"
    ET.fromstring(map_picture.draw(hostile).svg())


def test_pictures_show_the_tiles_in_both_formats(tmp_path: Path) -> None:
    scene = Scene()
    published = tmp_path / "cache.json"
    telemetry.write(published, scene.snapshot())
    for name in ("map.svg", "map.PNG"):
        run("map", str(published), "--snapshot", str(tmp_path / name))
    root = ET.parse(tmp_path / "map.svg").getroot()
    assert (root.get("width"), root.get("height")) == ("1200", "800")
    fills = [one.get("fill") for one in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert {sequence_colour(scene.parent.id), sequence_colour(scene.child.id)} <= set(fills)
    words = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "test: 60.0% of 10 pages in use" in words
    with Image.open(tmp_path / "map.PNG") as image:
        assert (image.format, image.size) == ("PNG", (1200, 800))
        pixels = np.asarray(image)
    for colour in (tile_colour(Kind.DEFERRED, -1), sequence_colour(scene.parent.id)):
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        # Of a tile of 48 pixels a side, marks leave most.
        assert (pixels == rgb).all(-1).sum() > 47 * 47 / 2


def test_what_cannot_be_drawn_is_one_message(tmp_path: Path) -> None:
    missing, published = tmp_path / "none", tmp_path / "cache.json"
    assert "started with --telemetry" in run("map", str(missing), status=1)
    published.write_text("{}")
    assert "not a snapshot" in run("map", str(published), status=1)
    telemetry.write(published, Scene().snapshot())
    assert ".svg or .png" in run("map", str(published), "--snapshot", "map.gif", status=1)
    beyond = str(tmp_path / "none" / "map.svg")
    assert "No such file" in run("map", str(published), "--snapshot", beyond, status=1)
    for wrong in (["map"], ["map", str(published), "--refresh", "0"], ["map", "x", "--refresh", "nan"]):
        run(*wrong, status=2)


def test_without_pillow_a_png_says_what_to_install(tmp_path: Path, monkeypatch: Any) -> None:
    published, picture = tmp_path / "cache.json", tmp_path / "map.png"
    telemetry.write(published, Scene().snapshot())
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'paged-kv[cli]'" in run("map", str(published), "--snapshot", str(picture), status=2)
    assert not picture.exists()


def test_following_reads_only_what_is_new_and_measures_rates(tmp_path: Path) -> None:
    scene, path = Scene(), tmp_path / "cache.json"
    telemetry.write(path, scene.snapshot(time=100.0))
    follower = Follower(path)
    first = follower.look()
    assert follower.look() is first
    assert follower.rates() is None
    for second in range(101, 110):
        scene.cache.pool.release(scene.cache.pool.alloc(2))
        telemetry.write(path, scene.snapshot(time=float(second)))
        assert follower.look().time == second
    rates = follower.rates()
    assert rates is not None
    assert (rates.taken_pages, rates.freed_pages) == (2, 2)
    assert 3 <= rates.seconds <= 4, "not since the beginning"
    telemetry.write(path, scene.snapshot(time=200.0, pid=1))
    follower.look()
    assert follower.rates() is None, "another program"


def test_a_terminal_is_watched_until_the_program_ends(tmp_path: Path) -> None:
    scene, path = Scene(), tmp_path / "cache.json"
    publisher = telemetry.Publisher(scene.cache, path, interval=0.01, label="watched")

    class Ending(io.StringIO):
        """A terminal during whose third picture the program ends."""

        def write(self, text: str) -> int:
            if self.getvalue().count("in use") > 2:
                publisher.close()
            return super().write(text)

    file = Ending()
    console = Console(file=file, width=80, height=24, force_terminal=True)
    run_map(path, refresh=0.01, snapshot=None, console=console)
    assert file.getvalue().count("watched") >= 3
    assert "ended" in file.getvalue().rpartition("watched")[2].splitlines()[0]


def test_demo_and_generate_publish_when_asked(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(demo_command, "SYSTEM_PROMPT", "Be kind.")
    path = tmp_path / "cache.json"
    tiny("generate", "Hello", "--max-tokens", "3", "--telemetry", str(path))
    assert telemetry.read(path).label == "paged-kv generate"
    tiny("demo", "--threads", "2", "--max-tokens", "3", "--telemetry", str(path))
    last = telemetry.read(path)
    assert (last.label, last.interval, last.leases) == ("paged-kv demo", 0, [])
    assert last.stats["copied_pages"] > 0
    output = run("map", str(path))
    assert "paged-kv demo" in output
    assert "ended" in output
    nowhere = str(tmp_path / "none" / "x")
    assert "No such file" in tiny("generate", "x", "--telemetry", nowhere, status=1)
