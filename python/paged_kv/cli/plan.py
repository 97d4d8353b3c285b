"""``paged-kv plan``: the figures of a plan as one object, printed as JSON or as tables."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paged_kv.cli.plan_report import print_report
from paged_kv.plan import ELEMENT_TYPES, LayerGroup, ModelShape, compare, fit, load_trace, request_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from paged_kv.plan import ElementType

PAGE_SIZES = (16, 32, 64, 128, 256)
LENGTHS = (1024, 4096, 16384, 65536)

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def uniform_shape(
    num_layers: int, num_kv_heads: int, head_dim: int, v_head_dim: int | None, window: int | None
) -> ModelShape:
    """Describe a model whose layers are all alike.

    Parameters
    ----------
    num_layers, num_kv_heads, head_dim : int
        Layers, key/value heads of each, elements of a key.
    v_head_dim : int, optional
        Elements of a value, 0 where it is read from the key; those of a key, if None.
    window : int, optional
        Tokens that a query sees, itself included; all, if None.

    Returns
    -------
    ModelShape
        With one group of layers.
    """
    group = LayerGroup(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim if v_head_dim is None else v_head_dim,
        window=window,
    )
    return ModelShape(name="model", groups=(group,))


def parse_size(text: str) -> int:
    """Read a size such as ``40GiB``, ``1.5 GB`` or ``65536`` in bytes, at least 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    size = int(Fraction(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size < 1:
        raise ValueError(f"size {text!r} is not a number of bytes such as '40GiB', '512MiB' or '1.5GB'")
    return size


def figures(
    shape: ModelShape,
    *,
    dtypes: Sequence[str] | None = None,
    page_sizes: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    budget: str | None = None,
    trace: Path | None = None,
    context: int | None = None,
) -> dict[str, Any]:
    """Work out everything that is shown.

    Parameters
    ----------
    shape : ModelShape
        The model.
    dtypes : sequence of str, optional
        Names in `paged_kv.plan.ELEMENT_TYPES`; all, if None. Waste and trace are told for the first.
    page_sizes : sequence of int, optional
        Tokens of a page. Requests are counted for the first.
    lengths : sequence of int, optional
        Tokens of requests.
    budget : str, optional
        Memory for pages.
    trace : Path, optional
        A file of prompt and answer lengths.
    context : int, optional
        Longest request; the model's context length, if None.

    Returns
    -------
    dict
        As ``--json`` prints it; sizes in bytes.
    """
    kinds = [_element_type(name) for name in dict.fromkeys(dtypes or ELEMENT_TYPES)]
    sizes = list(dict.fromkeys(page_sizes or PAGE_SIZES))
    context = context or shape.context_length
    wanted = list(dict.fromkeys(lengths or _usual_lengths(context)))
    room = None if budget is None else parse_size(budget)
    result: dict[str, Any] = {
        "model": shape.name,
        "context_length": context,
        "notes": list(shape.notes),
        "groups": [asdict(group) for group in shape.groups],
        "page_size": sizes[0],
        "budget": room,
        "dtypes": [_memory(shape, kind, sizes[0], wanted, room) for kind in kinds],
        "waste": [_waste(shape, kinds[0], page_size, wanted) for page_size in sizes],
    }
    if trace is not None:
        requests = load_trace(trace)
        rows = compare(shape, kinds[0], requests, page_sizes=sizes, context_length=context)
        result["trace"] = {
            "file": str(trace),
            "num_requests": len(requests),
            "dtype": kinds[0].name,
            "reservations": [
                asdict(row) | ({} if room is None else {"requests": row.requests(room)}) for row in rows
            ],
        }
    return result


def _usual_lengths(context: int | None) -> list[int]:
    if context is None:
        return list(LENGTHS)
    return [*(n for n in LENGTHS if n < context), context]


def _element_type(name: str) -> ElementType:
    if name not in ELEMENT_TYPES:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(ELEMENT_TYPES)}")
    return ELEMENT_TYPES[name]


def _memory(
    shape: ModelShape, kind: ElementType, page_size: int, lengths: Sequence[int], budget: int | None
) -> dict[str, Any]:
    """Tell what one dtype takes, and what of it fits."""
    per_token = shape.bytes_per_token(kind)
    requests: list[dict[str, Any]]
    if budget is None:
        requests = [{"length": n, "request_bytes": request_bytes(shape, kind, page_size, n)} for n in lengths]
    else:
        requests = [asdict(fit(shape, kind, page_size, n, budget)) for n in lengths]
    return {
        "dtype": kind.name,
        "scales": kind.scales,
        "bytes_per_token": per_token,
        "bytes_per_token_beyond_windows": shape.bytes_per_token_beyond(kind),
        "page_bytes": [page_size * group.bytes_per_token(kind) for group in shape.groups],
        "pages": None if budget is None else budget // (page_size * per_token),
        "requests": requests,
    }


def _waste(shape: ModelShape, kind: ElementType, page_size: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Tell what a request wastes on average while it grows from its first token to each length."""
    shares = {}
    for length in lengths:
        *_, paged = compare(shape, kind, [(1, length - 1)], page_sizes=[page_size])
        shares[str(length)] = paged.waste
    return {"page_size": page_size, "waste": shares}


def show(result: dict[str, Any], *, as_json: bool) -> None:
    """Print the figures.

    Parameters
    ----------
    result : dict
        As :func:`figures` returns it.
    as_json : bool
        As one JSON object instead of tables.
    """
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_report(Console(highlight=False), result)
