"""What docs/ascend.md and the Chinese README say and show is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascend_cost import table
from ascend_support import ROOT
from paged_kv.ascend import build
from paged_kv.ascend.errors import FATAL, device_error
from test_ascend_emulation import run

PAGE = (ROOT / "docs" / "ascend.md").read_text()


def test_the_cost_is_what_the_emulation_counts() -> None:
    assert table() in PAGE


def test_the_message_is_what_the_emulation_says() -> None:
    _, message = run("barrier")
    assert message in PAGE.replace("\n[", " [")


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("page", ["README.zh-CN.md", "docs/ascend.md"])
def test_what_the_pages_show_runs_on_the_fake_runtime(page: str) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    for program in programs:
        exec(compile(program, page, "exec"), names)
    assert (names["back"] == np.arange(1024)).all()
    if page.startswith("docs"):
        assert names["sequence"].num_computed_tokens == len(names["out"]) == 5


def test_the_chinese_table_explains_known_codes() -> None:
    rows = re.findall(r"^\| ([\d、]+) \|", (ROOT / "README.zh-CN.md").read_text(), re.MULTILINE)
    codes = {int(code) for row in rows for code in row.split("、")}
    assert len(codes) > 10
    for code in codes:
        error = device_error("x", code)
        assert error.name != f"ACL_ERROR_{code}"
        assert error.hint
    assert {code for code in FATAL if str(code) not in PAGE} == set()


def test_the_build_line_is_what_build_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "compiler", lambda: Path("bisheng"))
    name = re.sub(r"-\w+\.so", "-DIGEST.so", build.library_path().name)
    line = " ".join(build.command(Path(name))).replace(str(build.sources()) + "/", "")
    assert f"```text\n{line}\n```" in PAGE
