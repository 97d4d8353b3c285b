"""``paged-kv bench``: run a built-in measurement, print it as a table, and write it as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from paged_kv import _core
from paged_kv.cli.bench_attention import bench_attention
from paged_kv.cli.bench_cache import bench_cache

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

BENCHES = {"attention": bench_attention, "pool": _core.bench_pool, "cache": bench_cache}
REPETITIONS = 101


def run_bench(
    name: str,
    json_file: Path | None,
    repetitions: int = REPETITIONS,
    plot_file: Path | None = None,
    **choices: Sequence[str | int] | None,
) -> None:
    """Measure `name` and show the figures.

    Parameters
    ----------
    name : str
        ``"attention"``, ``"pool"`` or ``"cache"``.
    json_file : Path, optional
        Where to write a list of objects with bench, case, impl, threads, value (median), low and
        high (quartiles), unit, yardstick, limit (the yardstick's figure in the same run), ratio
        (value / limit), kept and discarded (repetitions in which a thread waited for a core).
    repetitions : int
        Of each case; all cases take turns.
    plot_file : Path, optional
        Where to draw the figures of attention as a roofline. Needs matplotlib.
    **choices
        What else the benchmark takes, to measure less.

    Raises
    ------
    ModuleNotFoundError, ValueError, OSError
        Before anything is measured, where `plot_file` can't be drawn, or a file not be written.
    """
    if plot_file is not None:
        from paged_kv.cli.bench_plot import check_format, plot

        check_format(plot_file)
    for file in filter(None, (json_file, plot_file)):
        check_writable(file)
    rows: list[dict[str, Any]] = BENCHES[name](repetitions=repetitions, **choices)
    if json_file is not None:
        json_file.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot(rows, plot_file)
    Console().print(bench_table(name, rows))


def check_writable(file: Path) -> None:
    """Raise ``OSError`` where a file can't be written; what is there stays as it is."""
    is_new = not file.exists()
    file.open("ab").close()
    if is_new:
        file.unlink()


def bench_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Lay the figures out, each beside what the same machine took for its yardstick."""
    table = Table(
        title=f"bench {name}",
        caption="median (quartiles) of the repetitions kept: those in which no thread waited for a core",
    )
    for column in ("case", "implementation"):
        table.add_column(column)
    for column in ("threads", "value", "quartiles", "limit", "ratio", "kept"):
        table.add_column(column, justify="right")
    table.add_column("limit is")
    for row in rows:
        table.add_row(
            row["case"],
            row["impl"],
            str(row["threads"]),
            f"{row['value']:,.1f} {row['unit']}",
            f"{row['low']:,.1f} - {row['high']:,.1f}",
            f"{row['limit']:,.1f}",
            f"{row['ratio']:.2f}",
            f"{row['kept']}/{row['kept'] + row['discarded']}",
            row["yardstick"],
            style="bold" if row["impl"] == "paged_kv" else None,
        )
    return table
