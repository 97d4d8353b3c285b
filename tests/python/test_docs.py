"""What README and documentation show, runs; what there is, they name."""

from __future__ import annotations

import re
import shlex
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import typer
import typer.main
from typer.testing import CliRunner

import paged_kv
import paged_kv.ascend
import paged_kv.plan
import paged_kv.telemetry
from paged_kv.cli import app as cli
from paged_kv.cli.app import app

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REFERENCE = "".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
COMMAND = typer.main.get_command(app)


def blocks(page: Path, language: str) -> list[str]:
    """Return the fenced blocks of one language."""
    return re.findall(rf"^```{re.escape(language)}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def kernel_arguments() -> dict[str, Any]:
    """Arrays that a page may leave to its reader: two sequences of 5 and 20 keys in pages of 16."""
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((2, 4, 2, 16, 8), dtype=np.float32)
    return {
        "query": rng.standard_normal((2, 4, 8), dtype=np.float32),
        "key_pages": pages[0],
        "value_pages": pages[1],
        "block_table": np.array([[2, -1], [0, 3]], dtype=np.int32),
        "seq_lens": np.array([5, 20], dtype=np.int32),
        "cu_seqlens_q": np.array([0, 1, 2], dtype=np.int32),
    }


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=named)
def test_the_python_of_a_page_runs_as_one_program(page: Path) -> None:
    names: dict[str, Any] = kernel_arguments()
    for block in blocks(page, "python"):
        exec(compile(block, named(page), "exec"), names)


def invoke(arguments: list[str], monkeypatch: pytest.MonkeyPatch, *, dry: bool) -> int:
    """Run a command line, or only parse it; return the exit status."""

    @contextmanager
    def stop() -> Iterator[None]:
        raise typer.Exit
        yield

    with monkeypatch.context() as patch:
        if dry:
            patch.setattr(cli, "_friendly_errors", stop)  # what every command enters first
        return CliRunner().invoke(app, arguments).exit_code


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "console")], ids=named)
def test_the_commands_of_a_page_exist_and_plans_are_made(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for config in blocks(page, "json"):
        Path("config.json").write_text(config)
    for trace in blocks(page, "text"):
        if trace.startswith("prompt,answer\n"):
            Path("trace.csv").write_text(trace)
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    for line in lines:
        prompt, program, *arguments = shlex.split(line, comments=True)
        assert prompt == "$"
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
            continue
        assert program == "paged-kv", line
        # The other commands need a model, or minutes.
        assert invoke(arguments, monkeypatch, dry=arguments[0] != "plan") == 0, line


def test_a_command_line_that_does_not_exist_is_noticed(monkeypatch) -> None:
    for arguments in (["plot"], ["demo", "--colour"], ["bench", "nothing"], ["demo", "--threads", "0"]):
        assert invoke(arguments, monkeypatch, dry=True) == 2
    assert invoke(["bench", "pool"], monkeypatch, dry=True) == 0


def sections(text: str) -> dict[str, str]:
    """Split a page at its headings of the second level."""
    return {part.split("\n", 1)[0]: part for part in text.split("\n## ")[1:]}


def test_every_command_and_option_is_documented() -> None:
    documented = sections((ROOT / "docs" / "cli.md").read_text())
    context = COMMAND.make_context("paged-kv", [], resilient_parsing=True)
    commands = {name: COMMAND.get_command(context, name) for name in COMMAND.list_commands(context)}
    assert set(commands) == set(documented)
    for name, command in commands.items():
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"{option}`" in documented[name] or f"{option} " in documented[name], (
                        name,
                        option,
                    )


def test_every_public_name_is_in_the_reference() -> None:
    for module in (paged_kv, paged_kv.ascend, paged_kv.plan, paged_kv.telemetry):
        for name in set(module.__all__) - {"__version__"}:
            assert re.search(rf"^\.\. auto[a-z]+:: {name}$", REFERENCE, re.MULTILINE), name
    assert ".. automodule:: paged_kv.llm\n   :members:\n   :imported-members:\n" in REFERENCE
