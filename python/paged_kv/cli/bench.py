"""``paged-kv bench``: run a built-in measurement, print it as a table, and write it as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paged_kv import _core

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


def run_bench(name: str, json_file: Path | None) -> None:
    """Measure `name` and show the figures.

    Parameters
    ----------
    name : str
        ``"pool"`` or ``"cache"``.
    json_file : Path, optional
        Where to write a list of objects with bench, case, impl, threads, value, unit, limit, ratio.
    """
    rows: list[dict[str, Any]] = _core.bench(name)  # type: ignore[attr-defined]
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    Console().print(bench_table(name, rows))


def bench_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the figures out; a ratio beyond its limit stands out in words and colour."""
    table = Table(title=f"bench {name}")
    for column in ("case", "implementation"):
        table.add_column(column)
    for column in ("threads", "value", "ratio", "limit"):
        table.add_column(column, justify="right")
    for row in rows:
        ratio, limit = row["ratio"], row["limit"]
        missed = ratio is not None and limit is not None and ratio > limit
        table.add_row(
            str(row["case"]),
            str(row["impl"]),
            str(row["threads"]),
            f"{row['value']:,.1f} {row['unit']}",
            "" if ratio is None else f"{ratio:.2f}" + (" missed" if missed else ""),
            "" if limit is None else f"{limit:.2f}",
            style="red" if missed else None,
        )
    return table
