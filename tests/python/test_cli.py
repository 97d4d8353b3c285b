"""The command line: what it prints, for people and for programs, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from threadpoolctl import threadpool_info
from typer.testing import CliRunner

import paged_kv
from llm_support import dense_cache, tiny_model, tiny_path
from paged_kv.cli import demo as demo_command
from paged_kv.cli.app import app
from paged_kv.cli.blas import few_blas_threads
from paged_kv.cli.text import printable
from paged_kv.llm import SamplingParams, generate

RUNNER = CliRunner()


def run(*arguments: str, status: int = 0) -> str:
    """Run the command in this process; return what it wrote to standard output."""
    done = RUNNER.invoke(app, list(arguments))
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.stdout if status == 0 else done.stderr


def tiny(*arguments: str, status: int = 0) -> str:
    return run(*arguments, "--model", str(tiny_path()), status=status)


def test_generate_prints_the_answer() -> None:
    tokenizer = tiny_model().tokenizer
    cache = dense_cache(tiny_model().config)
    params = SamplingParams(max_tokens=12, stop_ids=tokenizer.stop_ids)
    (answer,) = generate(tiny_model().model, cache, [tokenizer.encode_chat("Hello")], params)
    assert (
        tiny("generate", "Hello", "--max-tokens", "12")
        == printable(tokenizer.decode(answer.token_ids)) + "\n"
    )


def test_generate_json_has_one_object_per_prompt_with_token_ids() -> None:
    output = tiny("generate", "one", "two", "three", "--json", "--max-tokens", "9", "--raw")
    answers = [json.loads(line) for line in output.splitlines()]
    tokenizer = tiny_model().tokenizer
    assert [answer["prompt"] for answer in answers] == ["one", "two", "three"]
    for index, answer in enumerate(answers):
        assert answer["index"] == index
        assert answer["prompt_token_ids"] == tokenizer.encode(answer["prompt"])
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
        assert answer["finish_reason"] in ("length", "stop")
    params = SamplingParams(max_tokens=9, stop_ids=tokenizer.stop_ids)
    alone = generate(tiny_model().model, dense_cache(tiny_model().config), [tokenizer.encode("two")], params)
    assert answers[1]["token_ids"] == alone[0].token_ids


@pytest.mark.parametrize("options", [["--page-size", "1"], ["--page-size", "128"], ["--dtype", "float32"]])
def test_cache_options_do_not_change_the_answer(options: list[str]) -> None:
    arguments = ["generate", "Hello", "--json", "--max-tokens", "20"]
    assert tiny(*arguments, *options) == tiny(*arguments)


def test_sampling_repeats_with_a_seed() -> None:
    arguments = ["generate", "x", "--json", "--max-tokens", "20", "--temperature", "1", "--top-p", "0.9"]
    assert tiny(*arguments, "--seed", "1") == tiny(*arguments, "--seed", "1")
    assert tiny(*arguments, "--seed", "1") != tiny(*arguments, "--seed", "2")


def test_demo_ends_in_the_accounts_without_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(demo_command, "SYSTEM_PROMPT", "Be kind.")
    output = tiny("demo", "--threads", "9", "--max-tokens", "8", "--check", "--page-size", "4")
    assert "\x1b" not in output
    for row in (
        "requests at once",
        "contiguous, room for the longest answer each",
        "pages of 4, shared by fork",
        "saved by sharing",
        "pages copied on write",
        "waste",
        "tokens/s",
        "are the same without paging",
    ):
        assert row in output
    for question in demo_command.QUESTIONS[:9]:
        assert question in output


def test_demo_draws_a_table_on_a_terminal(monkeypatch) -> None:
    monkeypatch.setattr(demo_command, "SYSTEM_PROMPT", "Be kind.")
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    output = tiny("demo", "--threads", "8", "--max-tokens", "4")
    assert "\x1b[" in output
    assert "done (" in output


def test_answers_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[31m\x07\x9b é🌊\n\t") == "a�[31m�� é🌊\n\t"


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_blas_takes_one_thread_unless_told_otherwise(monkeypatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    before = blas_threads()
    with few_blas_threads():
        assert blas_threads() == [1] * len(before)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with few_blas_threads():
        assert blas_threads() == before


def test_version() -> None:
    assert run("--version") == paged_kv.__version__ + "\n"


def test_failures_are_one_message_and_a_status(tmp_path) -> None:
    missing = tmp_path / "none.gguf"
    assert (
        run("generate", "x", "--model", str(missing), status=1) == f"paged-kv: no model file at {missing}\n"
    )
    (tmp_path / "bad.gguf").write_bytes(b"bad")
    assert "not a readable GGUF" in run("generate", "x", "--model", str(tmp_path / "bad.gguf"), status=1)
    assert "top_p" in tiny("generate", "x", "--top-p", "0", status=1)
    assert "dtype" in tiny("generate", "x", "--dtype", "int3", status=1)
    assert "--raw" in tiny("generate", "x", "--raw", "--system", "y", status=1)


def test_wrong_usage_has_status_2() -> None:
    for arguments in (["generate"], ["generate", "x", "--page-size", "0"], ["nothing"], ["bench"], []):
        run(*arguments, status=2)


@pytest.mark.parametrize(
    ("missing", "extra"),
    [("typer", "cli"), ("rich", "cli"), ("threadpoolctl", "cli")]
    + [(module, "llm") for module in ("gguf", "jinja2", "platformdirs", "tokenizers")],
)
def test_without_an_extra_the_command_says_which(missing: str, extra: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from paged_kv.cli import main; main()"
    command = [sys.executable, "-c", program, "generate", "x", "--model", str(tiny_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    complaint, advice = done.stderr.splitlines()
    assert f"needs {missing}, which is not installed" in complaint
    assert advice == f"Install it with: pip install 'paged-kv[{extra}]'"


def test_without_its_extra_the_model_runner_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['tokenizers'] = None; import paged_kv.llm"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "pip install 'paged-kv[llm]'" in done.stderr.splitlines()[-1]


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "paged_kv", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in ("generate", "demo", "plan", "bench"):
        assert name in done.stdout
