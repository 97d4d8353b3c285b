"""``paged-kv bench``: what it writes, never how fast anything is."""

import json
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import paged_kv
from paged_kv import _core
from paged_kv.cli import bench, bench_attention, bench_ggml, bench_plot
from paged_kv.cli.app import app
from paged_kv.cli.bench_attention import Shape
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


def test_a_shared_prefix_stands_beside_the_same_batch_without() -> None:
    rows = _core.bench_attention(
        1, cases=["c1"], dtypes=["int8"], page_sizes=[128], threads=[2], rotated_bytes=1
    )
    by_case = {row["case"].removeprefix("c1 int8 page 128 "): row for row in rows}
    assert set(by_case) == {"limit", "adjacent", "scattered", "shared"}
    shared, adjacent = by_case["shared"], by_case["adjacent"]
    assert (shared["yardstick"], shared["limit"]) == (adjacent["case"], adjacent["value"])
    assert adjacent["yardstick"] == by_case["limit"]["impl"]
    assert [shape["name"] for shape in _core.attention_shapes() if shape["shared"]] == ["c1"]


def test_instruction_sets_are_compared_in_one_run(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    best = paged_kv.isa()
    if best == "scalar":
        pytest.skip("this CPU has no other instruction set")
    bench.run_bench("attention", path, repetitions=1, **SMALL | {"threads": [1], "isas": [best, "scalar"]})
    rows = json.loads(path.read_text())
    by_case = {row["case"].removeprefix("d4 bfloat16 page 128 "): row for row in rows}
    places = ("adjacent", "scattered")
    assert list(by_case) == ["limit", *(f"{place} {isa}" for place in places for isa in (best, "scalar"))]
    for place in places:
        first, later = by_case[f"{place} {best}"], by_case[f"{place} scalar"]
        assert (first["yardstick"], first["limit"]) == (by_case["limit"]["impl"], by_case["limit"]["value"])
        assert (later["yardstick"], later["limit"]) == (first["case"], first["value"])
        assert later["ratio"] == pytest.approx(later["value"] / first["value"])
    assert all({key: type(value) for key, value in row.items()} == KEYS for row in rows)
    assert paged_kv.isa() == best


def test_one_instruction_set_is_measured_in_place_of_the_process_s() -> None:
    rows = bench_attention.bench_attention(
        1, **SMALL | {"threads": [1], "dtypes": ["float32"], "isas": ["scalar"]}
    )
    # No name, and no peers, which would stand beside the process's.
    assert [row["case"].split()[-1] for row in rows] == ["limit", "adjacent", "scattered"]
    assert {row["yardstick"] for row in rows} == {"reading the pages"}


def test_an_instruction_set_that_cannot_be_had_is_named_before_anything_is_measured() -> None:
    with pytest.raises(ValueError, match='ISA "sse2" is not one of scalar, neon'):
        _core.bench_attention(1, isas=["scalar", "sse2"])
    with pytest.raises(ValueError, match="instruction set scalar is given twice"):
        _core.bench_attention(1, isas=["scalar", "scalar"])
    lacking = "avx2" if platform.machine() == "aarch64" else "neon"
    refused = CliRunner().invoke(app, ["bench", "attention", "--isa", "scalar", "--isa", lacking])
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr.startswith(f"paged-kv: this CPU lacks {lacking}; it has scalar")


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


DECODE = Shape(name="d2", batch=3, len=70, queries=1, num_heads=6, num_kv_heads=2, head_dim=16)
PREFILL = Shape(name="p1", batch=2, len=600, queries=300, num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("shape", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_numpy_computes_the_same_and_takes_turns(shape: Shape, page_size: int) -> None:
    ours, numpy = bench_attention.callables(shape, page_size, threads=2)
    np.testing.assert_allclose(ours(), numpy(), atol=1e-5)
    rows = bench_attention.beside_numpy(shape, page_size, 1, 1)
    assert [row["impl"] for row in rows] == [bench_attention.US, bench_attention.NUMPY]
    for row in rows:
        assert {key: type(value) for key, value in row.items()} == KEYS
        assert row["unit"] == "ms"
        assert row["limit"] == rows[0]["value"]
        assert row["ratio"] == pytest.approx(row["value"] / row["limit"])


def test_a_peer_that_computes_something_else_is_no_peer(monkeypatch) -> None:
    monkeypatch.setattr(bench_attention, "contiguous_attention", lambda query, *_: query)
    with pytest.raises(RuntimeError, match="p1: numpy and paged_kv differ by"):
        bench_attention.beside_numpy(PREFILL, 16, 1, 1)


def test_float32_is_measured_beside_numpy(monkeypatch) -> None:
    monkeypatch.setattr(bench_attention._core, "bench_attention", lambda *_, **__: [])
    monkeypatch.setattr(bench_attention, "shapes", lambda: {"d2": DECODE})
    monkeypatch.setattr(bench_ggml, "is_installed", lambda: False)
    rows = bench_attention.bench_attention(1, cases=["d2"], threads=[1, 2], page_sizes=[16])
    assert [row["threads"] for row in rows] == [1, 1, 2, 2]
    assert bench_attention.bench_attention(1, cases=["d2"], dtypes=["bfloat16"]) == []


class Ggml:
    """Stands for ggml where it isn't installed: `wrong` is added to what it computes."""

    wrong = 0.0

    def __init__(self, query, key, value, threads: int) -> None:
        assert threads == 1
        rows = query.reshape(len(query), key.shape[1], -1, 1, query.shape[2])
        self.out = bench_attention.contiguous_attention(rows, key, value).reshape(query.shape) + self.wrong

    def __call__(self) -> np.ndarray:
        return self.out

    def close(self) -> None:
        self.out = None


def test_ggml_is_a_peer_of_decode_in_float16_where_it_is_installed(monkeypatch) -> None:
    monkeypatch.setattr(bench_attention._core, "bench_attention", lambda *_, **__: [])
    monkeypatch.setattr(bench_attention, "shapes", lambda: {"d2": DECODE, "p1": PREFILL})
    monkeypatch.setattr(bench_ggml, "is_installed", lambda: True)
    monkeypatch.setattr(bench_ggml, "FlashAttention", Ggml)
    rows = bench_attention.bench_attention(1, dtypes=["float16"], threads=[1], page_sizes=[16])
    assert [(row["case"], row["impl"]) for row in rows] == [
        ("d2 float16 page 16 adjacent, a call", bench_attention.US),
        ("d2 float16 contiguous, a call", bench_attention.GGML),
    ]
    assert rows[1]["ratio"] == pytest.approx(rows[1]["value"] / rows[0]["value"])
    monkeypatch.setattr(Ggml, "wrong", 1.0)
    with pytest.raises(RuntimeError, match="d2: ggml and paged_kv differ by"):
        bench_attention.beside_ggml(DECODE, 16, 1, 1)


def test_ggml_computes_the_same() -> None:
    pytest.importorskip("libggml")
    rows = bench_attention.beside_ggml(DECODE, 16, 2, 1)
    assert [row["impl"] for row in rows] == [bench_attention.US, bench_attention.GGML]


def row(case: str, impl: str, value: float, unit: str, threads: int = 2) -> dict:
    return {"case": case, "impl": impl, "value": value, "unit": unit, "threads": threads}


FIGURES = [
    row("d2 float32 page 16 limit", "reading the pages", 30.0, "GB/s"),
    row("d2 float32 page 16 adjacent", "paged_kv", 24.0, "GB/s"),
    row("d2 bfloat16 page 16 scattered", "paged_kv", 20.0, "GB/s"),
    row("d2 int8 page 16 scattered", "paged_kv", 20.0, "GB/s"),
    row("d2 float8_e4m3fn page 16 adjacent", "paged_kv", 10.0, "GB/s"),
    row("c1 float32 page 16 shared", "paged_kv", 90.0, "GB/s"),
    row("p1 float32 page 16 limit", "multiply-adds", 200.0, "GFLOP/s"),
    row("p1 float32 page 16 adjacent", "paged_kv", 150.0, "GFLOP/s"),
    row("p1 bfloat16 page 16 limit", "bfloat16 products in pairs", 400.0, "GFLOP/s"),
    row("d2 float32 page 16 adjacent, a call", "paged_kv", 10.0, "ms"),
    row("d2 float32 contiguous, a call", "numpy (BLAS)", 20.0, "ms"),
    row("d2 float16 contiguous, a call", "ggml", 40.0, "ms"),
]


def test_a_case_stands_at_its_operations_per_byte() -> None:
    found = {(point.case, point.dtype, point.kind): point for point in bench_plot.points(FIGURES)}
    # A group of four query heads: 4 · 4 operations per element of a key and a value, thus of 8 bytes.
    ours = found["d2", "float32", "adjacent"]
    assert (ours.intensity, ours.rate) == pytest.approx((2.0, 48.0))
    assert found["d2", "bfloat16", "scattered"].rate == pytest.approx(80.0)
    assert found["d2", "int8", "scattered"].rate == pytest.approx(160.0)
    assert found["d2", "float8_e4m3fn", "adjacent"].rate == pytest.approx(80.0)
    assert found["p1", "float32", "adjacent"].rate == 150.0
    # 16 sequences of 2048 tokens, 32 heads of 128: 0.537 GFLOP in 20 ms.
    assert found["d2", "float32", "numpy (BLAS)"].rate == pytest.approx(26.8, abs=0.1)
    assert found["d2", "float16", "ggml"].rate == pytest.approx(13.4, abs=0.1)
    assert len(found) == 7
    assert bench_plot.roofs(FIGURES) == {
        2: {"GB/s": 30.0, "multiply-adds": 200.0, "bfloat16 products in pairs": 400.0}
    }


SETS = [
    row("p1 float32 page 16 limit avx512", "multiply-adds", 200.0, "GFLOP/s"),
    row("p1 float32 page 16 limit avx2", "multiply-adds", 100.0, "GFLOP/s"),
    row("p1 float32 page 16 adjacent avx512", "paged_kv", 150.0, "GFLOP/s"),
    row("p1 float32 page 16 adjacent avx2", "paged_kv", 80.0, "GFLOP/s"),
    row("c1 float32 page 16 shared avx2", "paged_kv", 90.0, "GB/s"),
]


def test_each_instruction_set_has_points_and_a_roof(tmp_path: Path) -> None:
    found = {(point.kind, point.isa): point.rate for point in bench_plot.points(SETS)}
    assert found == {("adjacent", "avx512"): 150.0, ("adjacent", "avx2"): 80.0}
    assert bench_plot.roofs(SETS) == {2: {"multiply-adds avx512": 200.0, "multiply-adds avx2": 100.0}}
    bench_plot.plot(SETS, tmp_path / "roof.svg")
    assert (tmp_path / "roof.svg").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["roof.png", "roof.svg"])
def test_a_roofline_is_drawn(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setitem(bench.BENCHES, "attention", lambda **_: [{**row, **REST} for row in FIGURES])
    bench.run_bench("attention", None, plot_file=tmp_path / name)
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert len(drawn) > 10_000


REST = {"low": 1.0, "high": 1.0, "limit": 1.0, "ratio": 1.0, "kept": 1, "discarded": 0, "yardstick": ""}


def test_what_cannot_be_drawn_is_said_before_anything_is_measured(monkeypatch) -> None:
    def fail(**_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setitem(bench.BENCHES, "attention", fail)
    refused = CliRunner().invoke(app, ["bench", "attention", "--plot", "roof.txt"])
    assert (refused.exit_code, "is not a picture" in refused.stderr) == (1, True)
    monkeypatch.delitem(sys.modules, "paged_kv.cli.bench_plot", raising=False)
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    absent = CliRunner().invoke(app, ["bench", "attention", "--plot", "roof.png"])
    assert (absent.exit_code, "pip install 'paged-kv[plot]'" in absent.stderr) == (2, True)


def test_a_file_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path, monkeypatch) -> None:
    def fail(**_: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setitem(bench.BENCHES, "attention", fail)
    for file in (tmp_path, tmp_path / "none" / "x.json"):
        refused = CliRunner().invoke(app, ["bench", "attention", "--json", str(file)])
        assert (refused.exit_code, str(file) in refused.stderr) == (1, True)
    (kept := tmp_path / "kept.json").write_text("[]")
    bench.check_writable(kept)
    bench.check_writable(tmp_path / "new.json")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("kept.json", "[]")]


@pytest.mark.parametrize("option", ["--page-size", "--threads", "--repetitions"])
def test_a_number_beyond_all_use_is_refused_in_a_sentence(option) -> None:
    refused = CliRunner().invoke(app, ["bench", "attention", option, "9" * 20])
    assert (refused.exit_code, "Invalid value" in refused.stderr) == (2, True)
