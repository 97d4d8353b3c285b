"""What docs/ascend.md says of the kernels' cost and of the emulation's messages is so."""

from __future__ import annotations

from ascend_cost import table
from ascend_support import ROOT
from test_ascend_emulation import run

PAGE = (ROOT / "docs" / "ascend.md").read_text()


def test_the_cost_is_what_the_emulation_counts() -> None:
    assert table() in PAGE


def test_the_message_is_what_the_emulation_says() -> None:
    _, message = run("barrier")
    assert message in PAGE.replace("\n[", " [")
