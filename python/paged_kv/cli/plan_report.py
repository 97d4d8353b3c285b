"""The figures of a plan as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

WINDOWED = (
    "Pages behind a window are counted as given back; while a prompt is computed, its chunk comes on top."
)


def print_report(console: Console, plan: Mapping[str, Any]) -> None:
    """Print a plan.

    Parameters
    ----------
    console : Console
        Where to.
    plan : Mapping
        What ``--json`` prints.
    """
    context = plan["context_length"]
    console.print(plan["model"], style="bold", markup=False, end="")
    console.print("" if context is None else f", context of {context:,} tokens")
    for group in plan["groups"]:
        console.print(f"  {_describe(group)}", markup=False)
    windowed = any(group["window"] is not None for group in plan["groups"])
    for note in [*plan["notes"], *([WINDOWED] if windowed else [])]:
        console.print(f"  Note: {note}", markup=False)
    console.print()
    console.print(_memory_table(plan, windowed))
    for kind in plan["dtypes"]:
        if kind["scales"]:
            console.print(f"  {kind['dtype']}: {kind['scales']}", markup=False)
    console.print()
    console.print(_requests_table(plan))
    console.print()
    console.print(_waste_table(plan))
    if "trace" in plan:
        console.print()
        console.print(_trace_table(plan))


def _describe(group: Mapping[str, Any]) -> str:
    keys, values = group["head_dim"], group["v_head_dim"]
    what = f"{keys}" if keys == values else f"{keys} (values {values or 'read from the keys'})"
    reach = "all tokens" if group["window"] is None else f"the last {group['window']:,} tokens"
    return f"{group['num_layers']} layers of {group['num_kv_heads']} KV heads of {what}, which see {reach}"


def _memory_table(plan: Mapping[str, Any], windowed: bool) -> Table:
    table = Table(title="A token, and a page in every layer")
    table.add_column("dtype")
    table.add_column("bytes per token", justify="right")
    if windowed:
        table.add_column("beyond the windows", justify="right")
    table.add_column(f"page of {plan['page_size']}", justify="right")
    if plan["budget"] is not None:
        table.add_column(f"pages in {_size(plan['budget'])}", justify="right")
    for kind in plan["dtypes"]:
        row = [kind["dtype"], f"{kind['bytes_per_token']:,}"]
        if windowed:
            row.append(f"{kind['bytes_per_token_beyond_windows']:,}")
        row.append(_size(sum(kind["page_bytes"])))
        if plan["budget"] is not None:
            row.append(f"{kind['pages']:,}")
        table.add_row(*row)
    return table


def _requests_table(plan: Mapping[str, Any]) -> Table:
    budget = plan["budget"]
    title = "Memory of a request" if budget is None else f"Requests at once in {_size(budget)}"
    table = Table(title=f"{title}, pages of {plan['page_size']}")
    table.add_column("tokens", justify="right")
    for kind in plan["dtypes"]:
        table.add_column(kind["dtype"], justify="right")
    for cells in zip(*(kind["requests"] for kind in plan["dtypes"]), strict=True):
        shown = (_size(c["request_bytes"]) if budget is None else f"{c['requests']:,}" for c in cells)
        table.add_row(f"{cells[0]['length']:,}", *shown)
    return table


def _waste_table(plan: Mapping[str, Any]) -> Table:
    table = Table(title="Average waste of a request that grows to this many tokens")
    table.add_column("page size", justify="right")
    for length in plan["waste"][0]["waste"]:
        table.add_column(f"{int(length):,}", justify="right")
    for row in plan["waste"]:
        table.add_row(str(row["page_size"]), *(f"{share:.2%}" for share in row["waste"].values()))
    return table


def _trace_table(plan: Mapping[str, Any]) -> Table:
    trace, budget = plan["trace"], plan["budget"]
    table = Table(title=f"{trace['num_requests']:,} requests of a trace, {trace['dtype']}, nothing shared")
    table.add_column("how memory is reserved")
    table.add_column("held by a request", justify="right")
    table.add_column("waste", justify="right")
    if budget is not None:
        table.add_column(f"at once in {_size(budget)}", justify="right")
    for row in trace["reservations"]:
        cells = [row["name"], _size(row["mean_bytes"]), f"{row['waste']:.1%}"]
        if budget is not None:
            cells.append(f"{row['requests']:,}")
        table.add_row(*cells, style="bold green" if row["page_size"] == plan["page_size"] else None)
    return table


def _size(size: float) -> str:
    units = ["TiB", "GiB", "MiB", "KiB", "bytes"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop()
    return f"{size:,.0f} {units[-1]}" if size == int(size) else f"{size:,.1f} {units[-1]}"
