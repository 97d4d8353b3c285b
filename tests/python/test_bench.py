"""``paged-kv bench``: what it writes, never how fast anything is."""

import json
from pathlib import Path

import pytest

from paged_kv import _core
from paged_kv.cli import bench
from paged_kv.cli.bench_cache import bench_cache

KEYS = {
    "bench": str,
    "case": str,
    "impl": str,
    "threads": int,
    "value": float,
    "low": float,
    "high": float,
    "unit": str,
    "yardstick": str,
    "limit": float,
    "ratio": float,
    "kept": int,
    "discarded": int,
}


SMALL = {"cases": ["d4"], "dtypes": ["bfloat16"], "page_sizes": [128], "threads": [1, 2], "rotated_bytes": 1}


@pytest.fixture(params=["attention", "pool", "cache"])
def rows(request, tmp_path: Path, monkeypatch, capsys) -> list[dict]:
    monkeypatch.setitem(
        bench.BENCHES, "cache", lambda repetitions: bench_cache(repetitions, stream_bytes=1 << 20)
    )
    path = tmp_path / "figures.json"
    bench.run_bench(request.param, path, repetitions=1, **(SMALL if request.param == "attention" else {}))
    rows = json.loads(path.read_text())
    assert {row["bench"] for row in rows} == {request.param}
    assert f"bench {request.param}" in capsys.readouterr().out
    return rows


def test_every_figure_stands_beside_its_limit(rows: list[dict]) -> None:
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == KEYS
        assert 0 < row["low"] <= row["value"] <= row["high"]
        assert row["ratio"] == pytest.approx(row["value"] / row["limit"])
        assert row["kept"] + row["discarded"] >= 1
    # Every yardstick was measured itself, in the same run.
    ones = {row["impl"] for row in rows if row["ratio"] == 1.0}
    ones |= {row["case"] for row in rows}
    assert {row["yardstick"] for row in rows} <= ones


def test_what_is_measured(rows: list[dict]) -> None:
    ours = {(row["case"], row["threads"]) for row in rows if row["impl"] == "paged_kv"}
    assert len(ours) == sum(row["impl"] == "paged_kv" for row in rows), "each once"
    if rows[0]["bench"] == "pool":
        peers = {"Mutex<Vec>", "Treiber stack", "crossbeam SegQueue", "crossbeam ArrayQueue"}
        assert peers < {row["impl"] for row in rows}
        assert {threads for _, threads in ours} == {1, 2}
        assert len(ours) == 4
    elif rows[0]["bench"] == "attention":
        where = {f"d4 bfloat16 page 128 {place}" for place in ("adjacent", "scattered")}
        assert ours == {(case, threads) for case in where for threads in (1, 2)}
        assert {row["unit"] for row in rows} == {"GB/s"}
        with pytest.raises(ValueError, match="d9"):
            _core.bench_attention(1, cases=["d9"])
    else:
        for batch in (1, 64, 256):
            assert (f"decode step, batch {batch}, 8 pages each", 1) in ours
        assert any(case.startswith("fork of 131072 tokens") for case, _ in ours)
        assert any(case.startswith("copy on write") for case, _ in ours)


def test_cases_are_prepared_and_worked_on_in_turn() -> None:
    calls = []
    cases = [
        (8, lambda: calls.append("prepare"), lambda n: calls.append(n)),
        (80, None, lambda n: calls.append(n)),
    ]
    figures = _core.bench_cases(cases, 1)
    # Once more for each time that the machine was busy otherwise.
    assert calls[:7] == [2, "prepare", 0, 8, 11, 0, 80]
    assert len(figures) == 2
    for figure in figures:
        assert 0 < figure["low"] <= figure["value"] <= figure["high"]
        assert figure["kept"] <= 1 <= figure["kept"] + figure["discarded"] <= 4


def test_the_first_exception_ends_a_measurement() -> None:
    calls = []

    def fail(n: int) -> None:
        calls.append(n)
        raise KeyError("seventeen")

    with pytest.raises(KeyError, match="seventeen"):
        _core.bench_cases([(8, None, fail), (8, None, calls.append)], 3)
    assert calls == [2]


@pytest.mark.parametrize(
    "measure", [_core.bench_pool, lambda repetitions: _core.bench_cases([], repetitions)]
)
def test_a_repetition_at_least(measure) -> None:
    with pytest.raises(ValueError, match="repetitions is 0"):
        measure(0)
