"""The planner's arithmetic against counting one by one, and against caches that really hold the pages."""

from __future__ import annotations

import json
import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import paged_kv
from paged_kv.cli.app import app
from paged_kv.cli.plan import parse_size
from paged_kv.plan import (
    ELEMENT_TYPES,
    LayerGroup,
    ModelShape,
    TraceError,
    compare,
    fit,
    load_trace,
    most_pages,
    pages_held,
    request_bytes,
    sum_of_pages,
)

BF16 = ELEMENT_TYPES["bfloat16"]
PLAIN = ModelShape(
    name="plain", groups=(LayerGroup(num_layers=2, num_kv_heads=2, head_dim=16, v_head_dim=16),)
)
HYBRID = ModelShape(
    name="hybrid",
    groups=(
        LayerGroup(num_layers=3, num_kv_heads=2, head_dim=8, v_head_dim=8, window=10),
        LayerGroup(num_layers=1, num_kv_heads=2, head_dim=8, v_head_dim=8),
    ),
    context_length=64,
)
TRACE = [(5, 3), (1, 0), (20, 12), (7, 4), (5, 3), (31, 1)]

lengths = st.integers(1, 300)
page_sizes = st.integers(1, 40)
windows = st.none() | st.integers(1, 80)


def counted(length: int, page_size: int, window: int | None) -> int:
    """Pages of the tokens that the last query sees, one by one."""
    first = 0 if window is None else max(0, length - window)
    return len({token // page_size for token in range(first, length)})


@given(length=lengths, page_size=page_sizes, window=windows)
def test_pages_are_those_of_the_tokens_seen(length: int, page_size: int, window: int | None) -> None:
    held = [counted(n, page_size, window) for n in range(1, length + 1)]
    assert pages_held(length, page_size, window) == held[-1]
    assert most_pages(length, page_size, window) == max(held)
    first = (length + 1) // 2
    assert sum_of_pages(first, length, page_size, window) == sum(held[first - 1 :])


def test_a_cache_holds_that_many_pages() -> None:
    cache = paged_kv.KvCache(num_layers=0, num_pages=64, page_size=16)
    sequence = cache.sequence()
    for length in range(1, 200):
        sequence.append(1)
        assert len(sequence.block_table) == pages_held(length, 16)


def test_a_budget_has_room_for_what_a_cache_gets_from_it() -> None:
    budget = 1_000_000
    cache = paged_kv.KvCache(
        num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, memory=budget, dtype="bfloat16"
    )
    pages = budget // (16 * PLAIN.bytes_per_token(BF16))
    assert cache.num_pages == pages
    planned = fit(PLAIN, BF16, 16, 100, budget)
    assert planned.pages == (planned.requests * 7,)
    sequences = [cache.sequence() for _ in range(planned.requests + 1)]
    for sequence in sequences[:-1]:
        sequence.append(100)
    with pytest.raises(paged_kv.OutOfPagesError):
        sequences[-1].append(100)


def test_a_hybrid_request_takes_its_windows_and_its_whole_length() -> None:
    # Pages of 4: a window of 10 touches at most 4, a length of 33 takes 9. A token takes 2 x 2 x 8 x 2 bytes
    # in a layer.
    assert request_bytes(HYBRID, BF16, 4, 33) == (3 * 4 + 1 * 9) * 4 * 64
    planned = fit(HYBRID, BF16, 4, 33, 1 << 20)
    assert planned.requests == (1 << 20) // 5376 == 195
    assert planned.pages == (195 * 4, 195 * 9)


def held_one_by_one(shape: ModelShape, page_size: int | None, room: Any) -> tuple[Fraction, Fraction]:
    """Mean bytes held and waste, from every step of every request of TRACE."""
    held = used = steps = 0
    for prompt, answer in TRACE:
        for length in range(prompt, prompt + answer + 1):
            steps += 1
            for group in shape.groups:
                size = group.bytes_per_token(BF16)
                seen = length if group.window is None else min(length, group.window)
                used += seen * size
                if page_size is None:
                    reserved = room(prompt, answer)
                    held += size * (reserved if group.window is None else min(reserved, group.window))
                else:
                    held += size * page_size * counted(length, page_size, group.window)
    return Fraction(held, steps), 1 - Fraction(used, held)


@pytest.mark.parametrize("shape", [PLAIN, HYBRID], ids=lambda shape: shape.name)
def test_the_comparison_agrees_with_every_step_of_every_request(shape: ModelShape) -> None:
    rows = compare(shape, BF16, TRACE, page_sizes=[1, 4, 16])
    context = shape.context_length or 32
    rooms = [
        (None, lambda p, a: max(context, p + a)),
        (None, lambda p, a: p + {0: 0, 1: 1, 3: 4, 4: 4, 12: 16}[a]),
        (None, lambda p, a: p + a),
        (1, None),
        (4, None),
        (16, None),
    ]
    assert [row.page_size for row in rows] == [page_size for page_size, _ in rooms]
    for row, (page_size, room) in zip(rows, rooms, strict=True):
        mean, waste = held_one_by_one(shape, page_size, room)
        assert row.mean_bytes == pytest.approx(float(mean))
        assert row.waste == pytest.approx(float(waste))
        assert row.requests(10 * row.mean_bytes) == 10
    assert rows[3].waste == 0  # pages of one token
    assert rows[0].waste > rows[1].waste > rows[2].waste


def test_numbers_that_make_no_sense_are_refused() -> None:
    good = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "v_head_dim": 0}
    for name, bad in (
        ("num_layers", 0),
        ("num_kv_heads", 0),
        ("head_dim", 0),
        ("v_head_dim", -1),
        ("window", 0),
    ):
        with pytest.raises(ValueError, match=f"{name} is {bad}"):
            LayerGroup(**good | {name: bad})
    with pytest.raises(ValueError, match="page_size is 0"):
        fit(PLAIN, BF16, 0, 10, 1000)
    with pytest.raises(ValueError, match="page_size is 0"):
        compare(PLAIN, BF16, TRACE, page_sizes=[0])
    with pytest.raises(ValueError, match="no request"):
        compare(PLAIN, BF16, [], page_sizes=[16])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "prompt,answer\n5,3\n1,0\n"),
        ("b.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n18:15:46.68,5,3\n18:15:50.99,1,0\n"),
        (
            "c.jsonl",
            '{"input_length": 5, "output_length": 3, "x": 1}\n\n{"input_length": 1, "output_length": 0}\n',
        ),
        ("d.csv", "prompt_tokens,completion_tokens\r\n5,3\r\n1,0\r\n"),
    ],
)
def test_traces_of_several_kinds_are_read(name: str, text: str, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    assert load_trace(tmp_path / name) == [(5, 3), (1, 0)]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "prompt,answer\n5,3\nx,0\n", "line 3: prompt is 'x'"),
        ("a.csv", "prompt,answer\n5\n", "line 2: answer is None"),
        ("a.csv", "prompt,answer\n0,4\n", "line 2: prompt is '0'"),
        ("a.csv", "prompt,answer\n1,-4\n", "line 2: answer is '-4'"),
        ("a.csv", "prompt,answer\n", "no request"),
        ("a.csv", "", "no request"),
        ("a.csv", "length\n5\n", "no lengths; name them prompt and answer or"),
        ("a.jsonl", '{"prompt": 5, "answer": 2.5}\n', "line 1: answer is 2.5"),
        ("a.jsonl", '{"prompt": 5, "answer": 2}\n[5, 2]\n', "line 2: not an object"),
        ("a.jsonl", '{"prompt": 5\n', "line 1: Expecting"),
        ("a.jsonl", '{"prompt": ' + "9" * 5000 + "}\n", "line 1: Exceeds the limit"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(name: str, text: str, complaint: str, tmp_path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TraceError, match=complaint):
        load_trace(tmp_path / name)


def test_a_trace_that_is_not_there(tmp_path) -> None:
    with pytest.raises(TraceError, match="can't be read"):
        load_trace(tmp_path / "none.csv")


def run(*arguments: str, status: int = 0) -> str:
    done = CliRunner().invoke(app, ["plan", *arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


LLAMA = ["--num-layers", "32", "--num-kv-heads", "8", "--head-dim", "128"]


def test_json_has_every_figure(tmp_path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt,answer\n1000,200\n300,24\n")
    options = ["--budget", "40GiB", "--trace", str(trace), "--context", "8192", "--length", "4096", "--json"]
    plan = json.loads(run(*LLAMA, *options))
    assert [kind["dtype"] for kind in plan["dtypes"]] == list(ELEMENT_TYPES)
    first = plan["dtypes"][0]
    assert first["bytes_per_token"] == 131072
    assert first["page_bytes"] == [16 * 131072]
    assert first["pages"] == 40 * 2**30 // (16 * 131072) == 20480
    # 4096 tokens take 256 pages: 80 requests.
    assert first["requests"] == [
        {"length": 4096, "requests": 80, "pages": [20480], "request_bytes": 4096 * 131072}
    ]
    # While a request grows to 4096 tokens, 16 divides 1/16 of the lengths: (15 / 2) / mean of pages held.
    assert plan["waste"][0]["waste"]["4096"] == pytest.approx(7.5 / (4097 / 2 + 7.5))
    whole, *_ = plan["trace"]["reservations"]
    assert whole["mean_bytes"] == 8192 * 131072
    assert whole["requests"] == 40
    assert plan["trace"]["num_requests"] == 2


def test_tables_show_the_figures(tmp_path) -> None:
    config = {
        "model_type": "gemma2",
        "hidden_size": 3584,
        "max_position_embeddings": 8192,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "trace.jsonl").write_text('{"prompt": 6000, "answer": 100}\n')
    output = run(
        str(tmp_path), "--budget", "40GiB", "--trace", str(tmp_path / "trace.jsonl"), "--page-size", "32"
    )
    for shown in (
        "gemma2, context of 8,192 tokens",
        "21 layers of 8 KV heads of 256, which see the last 4,096 tokens",
        "21 layers of 8 KV heads of 256, which see all tokens",
        "344,064",
        "172,032",
        "page of 32",
        "a float32 scale per token and head, counted",
        "Requests at once in 40 GiB, pages of 32",
        "contiguous, whole context",
        "pages of 32",
        "Pages behind a window are counted as given back",
    ):
        assert shown in output
    assert "Memory of a request" in run(*LLAMA)


def test_refusals_are_one_message(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert run(str(tmp_path), status=1) == "paged-kv: config: num_hidden_layers: is missing\n"
    assert "unknown dtype 'int3'; known are" in run(*LLAMA, "--dtype", "int3", status=1)
    assert "not a number of bytes" in run(*LLAMA, "--budget", "many", status=1)
    assert "can't be read" in run(*LLAMA, "--trace", str(tmp_path / "none.csv"), status=1)
    assert "not both" in run(str(tmp_path), *LLAMA, status=2)
    assert "give a config" in run("--num-layers", "32", status=2)
    assert "give a config" in run(status=2)


def test_sizes() -> None:
    assert parse_size("40GiB") == 40 << 30
    assert parse_size(" 1.5 gb ") == 1_500_000_000
    assert parse_size("1.1TB") == 1_100_000_000_000
    assert parse_size("9" * 400) == int("9" * 400)
    assert parse_size("65536") == parse_size("65536B") == parse_size("64kib") == 65536
    for bad in ("", "GiB", "-1", "0", "4 parsecs", "1e30", "0.1 B"):
        with pytest.raises(ValueError, match="not a number of bytes"):
            parse_size(bad)


def test_the_arithmetic_needs_no_extra() -> None:
    program = (
        "import sys; sys.modules |= dict.fromkeys(['rich', 'typer']); import paged_kv.plan as plan;"
        "print(plan.most_pages(33, 16))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "3\n"
