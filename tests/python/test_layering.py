"""The package's layers: the core stands on numpy alone, the model runner and the command line on it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "python" / "paged_kv"

# What each part may import besides the standard library; `paged_kv` is the core itself.
ALLOWED = {
    "core": {"numpy", "paged_kv"},
    "llm": {"numpy", "paged_kv", "paged_kv.llm", "gguf", "jinja2", "platformdirs", "tokenizers"},
    "ascend": {"numpy", "paged_kv", "paged_kv.ascend"},
    "plan": {"paged_kv.plan"},
    "cli": {
        "numpy",
        "paged_kv",
        "paged_kv.llm",
        "paged_kv.plan",
        "paged_kv.cli",
        "matplotlib",
        "PIL",
        "rich",
        "threadpoolctl",
        "typer",
    },
}


def part_of(path: Path) -> str:
    """Name the part that a file belongs to; `__main__.py` is the command line's front door."""
    first = path.relative_to(PACKAGE).parts[0]
    return "cli" if first == "__main__.py" else first if first in ALLOWED else "core"


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """List every imported name of a file, at any depth, with its line."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; name the module in full"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def root_of(name: str) -> str:
    """Reduce a dotted name to what ALLOWED speaks of."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first == "paged_kv" and rest and rest[0] in ALLOWED else first


def violations(part: str, source: str) -> list[str]:
    allowed = ALLOWED[part] | sys.stdlib_module_names
    return [
        f"line {line}: {part} imports {name}"
        for line, name in imported(ast.parse(source))
        if root_of(name) not in allowed
    ]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_part_imports_only_what_stands_before_it(path: Path) -> None:
    source = path.read_text()
    assert violations(part_of(path), source) == []
    assert len(source.splitlines()) <= 500, "split it"


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("core", "import typer"),
        ("core", "from paged_kv.llm import Model"),
        ("core", "def f():\n    from paged_kv import cli"),
        ("core", "from paged_kv.ascend import open_device"),
        ("ascend", "import torch_npu"),
        ("llm", "import paged_kv.cli.app"),
        ("llm", "import torch"),
        ("plan", "import numpy"),
        ("plan", "import paged_kv"),
        ("cli", "import gguf"),
    ],
)
def test_the_rule_fires(part: str, source: str) -> None:
    assert len(violations(part, source)) == 1


def test_importing_the_package_loads_nothing_but_numpy() -> None:
    code = "import sys, paged_kv; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(run.stdout.split())
    assert "paged_kv" in loaded
    assert loaded.isdisjoint({"gguf", "tokenizers", "rich", "typer", "torch", "ml_dtypes"})
