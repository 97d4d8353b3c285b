"""What the README shows, runs."""

import re
from pathlib import Path
from typing import Any

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_first_look_runs(capsys: Any) -> None:
    first = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert first is not None
    names: dict[str, Any] = {}
    exec(compile(first[1], "README.md", "exec"), names)
    assert capsys.readouterr().out.startswith("120 110 ")
    assert names["out"].shape == (2, 8, 64)
    names["cache"].validate()


def test_every_make_target_it_names_exists() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    named = set(re.findall(r"`make ([a-z]+)`", README))
    assert {"demo", "test", "loom", "asan", "stress", "bench", "stubs", "wheel", "fmt", "lint"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_its_table_lists_every_example() -> None:
    listed = re.findall(r"^\| \[`([a-z_]+\.py)`\]\(examples/\1\)", README, re.MULTILINE)
    programs = {path.name for path in (Path(__file__).parents[2] / "examples").glob("*.py")}
    assert {*listed, "tiny_llama.py"} == programs
