"""The figures of ``paged-kv bench attention`` as a roofline picture, by matplotlib.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model" (2009): how many
operations a second a case reaches, over how many it does per byte it must read. Under the slope memory
binds, under the flat roof arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from paged_kv.cli.bench_attention import GGML, NUMPY, US, shapes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_ITEMSIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
_COLOURS = {
    "float32": "#1f77b4",
    "float16": "#2ca02c",
    "bfloat16": "#d62728",
    "int8": "#9467bd",
    "float8_e4m3fn": "#ff7f0e",
}
# Of the markers of the first instruction set, the second and so on; the last for all others.
_SIZES = (7.0, 5.0, 3.5)
_MARKERS = {"adjacent": "o", "scattered": "s", NUMPY: "X", GGML: "P"}


@dataclass(frozen=True, slots=True)
class Point:
    """One case: where it stands under the roof.

    Attributes
    ----------
    case, dtype : str
        ``d2``, ``bfloat16``.
    kind : str
        ``adjacent`` or ``scattered`` pages, or the peer.
    threads : int
        Of the run.
    isa : str
        The instruction set, where several were measured, else empty.
    intensity : float
        Operations per byte of keys and values.
    rate : float
        GFLOP/s.
    """

    case: str
    dtype: str
    kind: str
    threads: int
    isa: str
    intensity: float
    rate: float


def points(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """Find the cases among the figures, each as a rate of operations.

    Those with a shared prefix are left out: they read less than is counted.
    """
    every = shapes()
    found = []
    for row in rows:
        name, dtype, *_ = row["case"].split()
        if row["impl"] not in (US, NUMPY, GGML) or (row["impl"] == US and row["unit"] == "ms"):
            continue
        place, isa = _where(row["case"])
        if place == "shared":
            continue
        shape = every[name]
        intensity = shape.operations / shape.bytes_read(_ITEMSIZE[dtype])
        rate = {
            "GB/s": row["value"] * intensity,
            "GFLOP/s": row["value"],
            "ms": shape.operations / row["value"] / 1e6,
        }[row["unit"]]
        kind = place if row["impl"] == US else row["impl"]
        found.append(Point(name, dtype, kind, row["threads"], isa, intensity, rate))
    return found


def _where(case: str) -> tuple[str, str]:
    """Find the place in the name of a case, and the instruction set, if it is named."""
    # d2 float32 page 16 adjacent avx2
    place, isa, *_ = (*case.split()[4:], "", "")
    return place, isa


def roofs(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Find the limits: for each number of threads the best bandwidth and rates of arithmetic seen.

    Returns
    -------
    dict of int to dict
        Threads to ``"GB/s"`` and the names of the kinds of arithmetic, those that were measured, each
        with its instruction set where several were.
    """
    best: dict[int, dict[str, float]] = {}
    for row in rows:
        place, isa = _where(row["case"])
        if place == "limit":
            of_threads = best.setdefault(row["threads"], {})
            limit = row["unit"] if row["unit"] == "GB/s" else f"{row['impl']} {isa}".strip()
            of_threads[limit] = max(of_threads.get(limit, 0.0), row["value"])
    return best


def plot(rows: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draw the picture, one panel for each number of threads.

    Parameters
    ----------
    rows : sequence of mapping
        What `bench_attention` returned.
    file : Path
        Its suffix says the format: ``.png``, ``.svg``, ``.pdf``.

    Raises
    ------
    ValueError
        If matplotlib can't write such a format.
    """
    check_format(file)
    cases, limits = points(rows), roofs(rows)
    panels = sorted(limits)
    sizes = _sizes(cases)
    figure = Figure(figsize=(7 * len(panels), 6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)
    intensities = [point.intensity for point in cases]
    left, right = min(intensities) / 2, max(*intensities, 100.0) * 2
    for axis, threads in zip(axes[0], panels, strict=True):
        limit = limits[threads]
        _draw_roof(axis, limit, left, right)
        here = [point for point in cases if point.threads == threads]
        for point in here:
            axis.plot(
                point.intensity,
                point.rate,
                _MARKERS[point.kind],
                color=_COLOURS[point.dtype],
                markersize=sizes[point.isa],
                alpha=0.8,
                fillstyle="none" if point.kind == "scattered" else "full",
            )
        _name_cases(axis, here)
        axis.set(
            xscale="log",
            yscale="log",
            xlim=(left, right),
            xlabel="operations per byte of keys and values",
            title=f"{threads} thread{'s' if threads > 1 else ''}",
        )
        axis.grid(which="both", alpha=0.2)
    axes[0][0].set_ylabel("GFLOP/s")
    figure.suptitle("paged-kv bench attention")
    axes[0][-1].legend(handles=_legend(cases), loc="lower right")
    figure.savefig(file, dpi=120)


def check_format(file: Path) -> None:
    """Refuse a file that matplotlib could not write, before anything is measured.

    Raises
    ------
    ValueError
        With the formats there are.
    """
    known = sorted(Figure().canvas.get_supported_filetypes())
    if file.suffix.removeprefix(".").lower() not in known:
        raise ValueError(f"{file.name!r} is not a picture; the suffix is one of {', '.join(known)}")


def _draw_roof(axis: Any, limit: Mapping[str, float], left: float, right: float) -> None:
    bandwidth = limit.get("GB/s")
    peaks = {name: rate for name, rate in limit.items() if name != "GB/s"}
    if bandwidth is not None:
        end = max(peaks.values()) / bandwidth if peaks else right
        axis.plot([left, end], [left * bandwidth, end * bandwidth], color="black", linewidth=1.5)
        # Above the slope, where no point can lie.
        high = left**0.2 * end**0.8
        axis.annotate(
            f"reading: {bandwidth:.0f} GB/s",
            (high, high * bandwidth),
            (-6, 8),
            textcoords="offset points",
            ha="right",
        )
    for name, peak in peaks.items():
        start = left if bandwidth is None else peak / bandwidth
        axis.plot([start, right], [peak, peak], color="black", linewidth=1.5)
        axis.annotate(
            f"{name}: {peak:.0f} GFLOP/s",
            (right / 1.1, peak),
            (0, 5),
            textcoords="offset points",
            ha="right",
        )


def _name_cases(axis: Any, here: Iterable[Point]) -> None:
    """Write below each column of points which cases stand in it."""
    columns: dict[float, set[str]] = {}
    for point in here:
        columns.setdefault(round(point.intensity, 3), set()).add(point.case)
    for intensity, names in columns.items():
        lowest = min(point.rate for point in here if round(point.intensity, 3) == intensity)
        axis.annotate(
            " ".join(sorted(names)),
            (intensity, lowest),
            (0, -16),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )


def _sizes(cases: Iterable[Point]) -> dict[str, float]:
    """Sizes of markers, by instruction set."""
    isas = dict.fromkeys(point.isa for point in cases if point.isa)
    return {"": _SIZES[0]} | {isa: _SIZES[min(i, len(_SIZES) - 1)] for i, isa in enumerate(isas)}


def _legend(cases: Iterable[Point]) -> list[Line2D]:
    cases = list(cases)
    dtypes = [dtype for dtype in _COLOURS if any(point.dtype == dtype for point in cases)]
    kinds = [kind for kind in _MARKERS if any(point.kind == kind for point in cases)]
    labels = {"adjacent": "pages adjacent", "scattered": "pages scattered"}
    labels |= {peer: f"{peer}, contiguous" for peer in (NUMPY, GGML)}
    handles = [Line2D([], [], color=_COLOURS[dtype], linewidth=4, label=dtype) for dtype in dtypes]
    handles += [
        Line2D(
            [],
            [],
            color="black",
            marker=_MARKERS[kind],
            linestyle="",
            fillstyle="none" if kind == "scattered" else "full",
            label=labels[kind],
        )
        for kind in kinds
    ]
    return handles + [
        Line2D([], [], color="black", marker="o", linestyle="", markersize=size, label=isa)
        for isa, size in _sizes(cases).items()
        if isa
    ]
