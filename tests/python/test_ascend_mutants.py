"""Take any one barrier, flag or queue step out of a kernel, and the emulation notices."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ascend_support
from ascend_case import Case
from ascend_support import ASCEND, RefusedError
from test_ascend_pages import copy_pages, random_pages, write_pages

STEP = re.compile(
    r"(?:\bThen\(\)|(?:Set|Wait)Flag<HardEvent::\w+>\(EVENT_ID0\)|\w+\.(?:EnQue|FreeTensor)\(\w+\));"
)
MUTANTS = [
    pytest.param(name, match.start(), match.end(), id=f"{name}:{text[: match.start()].count(chr(10)) + 1}")
    for name in ("tiles.h", "attend.h", "decode.h", "prefill.h", "combine.h", "pages.h")
    for text in [(ASCEND / "kernel" / name).read_text()]
    for match in STEP.finditer(text)
]


def run_everything() -> None:
    """Visit every line of the kernels, with several tiles, heads, splits, and tasks on a block."""
    for dtype in ("float16", "bfloat16"):
        Case([300, 0, 21, 1], dtype=dtype, group=2, head_dim=80).run(logits_soft_cap=5.0, num_blocks=1)
        Case([300, 0, 21, 1], dtype=dtype, group=2, head_dim=32).run(num_splits=3, num_blocks=1)
        chunks = Case([150, 2, 21, 0], [40, 5, 1, 0], dtype=dtype, group=2, head_dim=80)
        chunks.run(logits_soft_cap=5.0, window_left=70, num_blocks=1)
    Case([4400], head_dim=16).run()  # more than one chunk of the table
    rng = np.random.default_rng(0)
    pages = random_pages(rng, (9, 1, 16, 16), np.float16)
    key, value = random_pages(rng, (130, 1, 16), np.float16)
    write_pages(key, value, pages, np.arange(130), layout="HND", num_blocks=1)
    copy_pages(pages, np.array([[0, 1], [2, 3], [4, 5]]), num_blocks=1)


def test_the_kernels_as_they_are_pass() -> None:
    run_everything()
    assert len(MUTANTS) > 60


def test_the_kernels_pass_under_the_sanitizers() -> None:
    compiler = os.environ.get("CXX", "g++")
    libraries = [
        subprocess.check_output([compiler, f"-print-file-name={name}.so"], text=True).strip()
        for name in ("libasan", "libstdc++")  # the second so that the first finds who throws
    ]
    environment = os.environ | {
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1",  # Python's own leaks are not ours
        "ASCEND_CXXFLAGS": "-O0 -fsanitize=address,undefined -fno-sanitize-recover=all",
        "PYTHONPATH": str(Path(__file__).parent),
    }
    program = "import test_ascend_mutants; test_ascend_mutants.run_everything(); print('all ran')"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "all ran\n", done.stderr


@pytest.mark.stress
@pytest.mark.parametrize(("name", "start", "end"), MUTANTS)
def test_no_step_of_order_can_be_left_out(
    name: str, start: int, end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("emu", "kernel"):
        shutil.copytree(ASCEND / folder, tmp_path / folder)
    file = tmp_path / "kernel" / name
    text = file.read_text()
    file.write_text(text[:start] + "{}" + text[end:])
    library = ascend_support.build("kernel/entry.cpp", "-O1", "-Wno-unused-parameter", root=tmp_path)
    monkeypatch.setattr(ascend_support, "kernels", lambda: library)
    with pytest.raises(RefusedError) as error:
        run_everything()
    assert error.value.rule
