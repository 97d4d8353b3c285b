"""Snapshots: what they say, their JSON, what two of them tell, and how they are published."""

import dataclasses
import json
import logging
import os
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

import paged_kv
from model import small_cache, step
from paged_kv import telemetry


def lively_cache() -> paged_kv.KvCache:
    """A cache in which every kind of holder holds something."""
    cache = small_cache(num_pages=40)
    parent = cache.sequence()
    step(cache, [parent], [range(11)])
    child = parent.fork()
    step(cache, [child], [[1]])
    cache.track_leases()
    KEPT.append((parent, child, cache.pool.alloc(3), cache.batch([parent], 0)))
    parent.truncate(2)
    return cache


KEPT: list[Any] = []


def test_a_snapshot_says_what_explain_says() -> None:
    cache = lively_cache()
    taken = telemetry.snapshot(cache, label="me", interval=2.5)
    why = cache.explain(max_cells=telemetry.MAX_CELLS)
    assert taken.stats == why.stats == cache.stats()
    assert (taken.pid, taken.label, taken.interval, taken.page_size) == (os.getpid(), "me", 2.5, 4)
    assert taken.page_bytes * 40 == taken.stats["total_bytes"]
    assert taken.sequences == list(why.sequences)
    assert taken.leases is not None
    assert taken.leases[0].deferred_pages == taken.stats["deferred_pages"] == 1
    assert why.cells is not None
    assert len(taken.cells) == 40
    assert taken.cells.owner == why.cells["owner"].tolist()
    states = [taken.cells.free, taken.cells.private, taken.cells.shared]
    states += [taken.cells.cached, taken.cells.deferred]
    assert [sum(one) for one in states] == why.cells["counts"].sum(0).tolist() == [33, 5, 1, 0, 1]
    assert sum(taken.cells.copied) == 1


def test_a_snapshot_survives_json_and_stays_small() -> None:
    taken = telemetry.snapshot(lively_cache())
    assert telemetry.Snapshot.from_json(taken.to_json()) == taken
    large = telemetry.snapshot(small_cache(num_layers=0, num_pages=1_000_000))
    assert len(large.cells) <= telemetry.MAX_CELLS
    assert len(large.to_json()) < 200_000
    for cells in (0, -1, 65_537):
        with pytest.raises(ValueError, match="max_cells"):
            telemetry.snapshot(small_cache(), max_cells=cells)


def changed(**changes: Any) -> str:
    """A snapshot's JSON with other values at dotted paths; `None` in a list of keys deletes."""
    data = json.loads(telemetry.snapshot(lively_cache()).to_json())
    for path, value in changes.items():
        *outer, last = path.split("__")
        inner = data
        for key in outer:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "[" * 100_000,
        b"\xff\xfe",
        '{"format": 2}',
        '{"format": 1}',
        changed(format="1"),
        changed(pid="1"),
        changed(pid=True),
        changed(time=float("nan")),
        changed(label=None),
        changed(stats={}),
        changed(stats__free_pages=-1),
        changed(stats__waste="x"),
        changed(stats__total_pages=0),
        changed(page_size=0),
        changed(sequences=None),
        changed(sequences=[1]),
        changed(sequences__0__num_pages="many"),
        changed(leases={}),
        changed(leases__0__age=float("inf")),
        changed(leases__0__site=7),
        changed(cells=None),
        changed(cells__free=[1]),
        changed(cells__copied=["x"] * 40),
        changed(cells__shared=[-1] * 40),
        changed(cells__owner=[0.5] * 40),
        changed(cells__owner=[2**63] * 40),
        changed(cells__owner=[-2] * 40),
        changed(cells__private=[2**32] * 40),
        changed(freed_pages=2**63),
        changed(time=10**400),
        changed(stats__used_bytes=10**400),
        changed(cells__owner=[]),
        changed(cells__pages_per_cell=0),
    ],
)
def test_what_is_no_snapshot_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="not a snapshot"):
        telemetry.Snapshot.from_json(text)


def test_rates_are_differences_per_second() -> None:
    cache = small_cache()
    seq = cache.sequence()
    step(cache, [seq], [range(4)])
    before = dataclasses.replace(telemetry.snapshot(cache), time=100.0)
    child = seq.fork()
    seq.free()
    step(cache, [child], [range(13)])
    child.truncate(6)
    after = dataclasses.replace(telemetry.snapshot(cache), time=102.0)
    rates = telemetry.rates(before, after)
    assert rates == telemetry.Rates(
        seconds=2.0, taken_pages=2.0, freed_pages=1.5, copied_pages=0.0, tokens=1.0, sequences=0.0
    )
    for earlier, later in (
        (after, before),
        (after, after),
        (before, dataclasses.replace(after, pid=1)),
        (before, dataclasses.replace(after, freed_pages=-1)),
    ):
        with pytest.raises(ValueError, match="same cache"):
            telemetry.rates(earlier, later)


def test_a_file_is_replaced_in_one_step_and_private(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text("old")
    taken = telemetry.snapshot(lively_cache())
    telemetry.write(path, taken)
    assert telemetry.read(path) == taken
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["cache.json"]
    with pytest.raises(FileNotFoundError):
        telemetry.write(tmp_path / "none" / "cache.json", taken)
    with pytest.raises(FileNotFoundError):
        telemetry.read(tmp_path / "none")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        telemetry.write(tmp_path / "folder", taken)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache.json", "folder"], (
        "nothing is left behind"
    )
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 27)
    with pytest.raises(ValueError, match="more than"):
        telemetry.read(tmp_path / "huge")


def test_readers_of_a_published_file_always_see_a_whole_snapshot(tmp_path: Path) -> None:
    path, cache = tmp_path / "cache.json", lively_cache()
    with telemetry.Publisher(cache, path, interval=0.001, label="p") as publisher:
        times = {telemetry.read(path).time for _ in range(200)}
        while len(times) < 5:
            times.add(telemetry.read(path).time)
        assert publisher.publish().interval == 0.001
    last = telemetry.read(path)
    assert (last.interval, last.label, last.stats) == (0.0, "p", cache.stats())
    assert not [thread for thread in threading.enumerate() if thread.name == "paged-kv-telemetry"]
    publisher.close()
    assert telemetry.read(path) == last, "closing again does nothing"


def test_a_publisher_that_cannot_begin_says_so_and_one_that_fails_later_goes_on(
    tmp_path: Path, caplog: Any
) -> None:
    cache = small_cache()
    with pytest.raises(FileNotFoundError):
        telemetry.Publisher(cache, tmp_path / "none" / "cache.json")
    for interval in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="interval"):
            telemetry.Publisher(cache, tmp_path / "x", interval=interval)
    folder = tmp_path / "folder"
    folder.mkdir()
    with (
        caplog.at_level(logging.WARNING, logger="paged_kv.telemetry"),
        telemetry.Publisher(cache, folder / "cache.json", interval=0.001),
    ):
        (folder / "cache.json").unlink()
        folder.rename(tmp_path / "away")
        while not caplog.records:
            pass
        (tmp_path / "away").rename(folder)
        while not (folder / "cache.json").exists():
            pass
    assert "can't publish" in caplog.records[0].getMessage()
    assert telemetry.read(folder / "cache.json").interval == 0
