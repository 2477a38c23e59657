"""Figures of decompositions, made with matplotlib's object interface (no display, no global state)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import HarnessError
from harness.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from harness.attribution.decomposition import ClassRow, Decomposition

# Okabe–Ito first (told apart with any colour vision), then Paul Tol's muted set; one colour per class in every figure.
COLOURS = {
    "gate_up": "#0072B2", "down": "#56B4E9", "q_o": "#009E73", "k_v": "#88CCAA", "attention": "#D55E00",
    "lm_head": "#CC79A7", "quantize": "#44AA99", "dequantize": "#117733", "convert": "#DDCC77", "norm": "#E69F00",
    "rope_kv": "#F0E442", "swiglu": "#999933", "embedding": "#AA4499", "tail": "#882255", "copy": "#777777",
    "gemm": "#0072B2", "gemm_fixup": "#88CCEE", "gemv": "#56B4E9", "rope": "#F0E442", "elementwise": "#882255",
    "kv_store": "#661100", "sampling": "#AA4499", "communication": "#332288", "memset": "#AAAAAA", "graph": "#CC6677",
    "other": "#000000",
}  # fmt: skip
GAP = "#E4E4E4"
INK, FAINT = "#222222", "#777777"
MAX_ROWS = 11
SMALLEST = 0.001
"""Classes below 0.1 % of busy share one row."""


def colour(cls: str) -> str:
    """The class's colour in every figure of the project."""
    return COLOURS.get(cls, "#999999")


def decomposition_figure(result: Decomposition, path: Path) -> None:
    """The wall as one stacked bar with its gap; below it, per class, the time at the roofline and the time above it.

    The format follows the path's suffix (.png, .svg, .pdf). Raises HarnessError for another one.
    """
    rows = _rows(result)
    figure = _figure(9.6, 2.35 + 0.29 * len(rows))
    bar, table = figure.subplots(2, 1, height_ratios=[1.0, 0.42 * len(rows) + 0.35])
    _title(bar, result)
    _stacked(bar, result)
    _share_and_sol(table, rows, result)
    save(figure, path)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained", facecolor="white")


def figure_format(path: Path) -> str:
    """png, svg or pdf, by the path's suffix. Raises HarnessError for another one."""
    suffix = path.suffix.lower().lstrip(".")
    if suffix not in ("png", "svg", "pdf"):
        raise HarnessError(
            f"cannot draw {path}: {path.suffix or 'no suffix'} is no figure format here; use .png, .svg or .pdf."
        )
    return suffix


def save(figure: Figure, path: Path) -> None:
    """Writes a figure whole or not at all, in the format of the path's suffix."""
    suffix = figure_format(path)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix, metadata={"Date": None} if suffix == "svg" else None)
    write_atomic(path, buffer.getvalue())


def _title(axes: Axes, result: Decomposition) -> None:
    from harness.report.decomposition import clock

    about = [result.model or "recorded trace", f"{result.tokens} tokens" if result.tokens else "", result.device]
    axes.set_title(
        " · ".join(part for part in about if part), loc="left", fontsize=11, fontweight="bold", color=INK, pad=8
    )
    if result.walls_ms:
        speed = (
            f"{clock(result.wall_ms)}  =  {result.tok_per_s:,.0f} tok/s  ({result.regime})" if result.tok_per_s else ""
        )
        axes.set_title(speed, loc="right", fontsize=10, color=INK, pad=8)
    else:
        axes.set_title(clock(result.traced_wall_ms), loc="right", fontsize=10, color=INK, pad=8)


def _stacked(axes: Axes, result: Decomposition) -> None:
    """Classes (weight types together), overlap taken out of none, then the gap, to the traced wall."""
    wall, left = result.traced_wall_ms, 0.0
    # Where launches overlap, summed class times exceed busy: scale them so that the bar is the wall.
    scale = result.busy_ms / (result.busy_ms + result.overlap_ms)
    segments = [(name, ms * scale, colour(name)) for name, ms in result.by_class().items()]
    if result.gap_ms > 0:
        segments.append(("gap", result.gap_ms, GAP))
    for name, ms, shade in segments:
        axes.barh(0, ms, left=left, height=1.0, color=shade, edgecolor="white", linewidth=1.0)
        if ms / wall >= 0.004 + 0.0076 * len(name):
            dark = _is_dark(shade)
            axes.text(left + ms / 2, 0.13, name, ha="center", va="center", fontsize=8.5, color="white" if dark else INK)
            axes.text(
                left + ms / 2,
                -0.21,
                f"{ms / wall:.0%}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if dark else INK,
            )
        left += ms
    axes.set_xlim(0, max(wall, left))
    axes.set_ylim(-0.5, 0.5)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8, colors=FAINT, length=3)
    if _in_seconds(result):
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms / 1e3:g}")
    axes.set_xlabel(f"traced wall, {'s' if _in_seconds(result) else 'ms'}", fontsize=8, color=FAINT, labelpad=2)
    _bare(axes)


def _share_and_sol(axes: Axes, rows: list[ClassRow], result: Decomposition) -> None:
    """One bar per class: solid is the floor at measured ceilings, pale is the time above it."""
    longest = max(r.sum_ms for r in rows)
    some_sol = any(r.sol is not None for r in rows)
    for y, row in enumerate(rows):
        shade = colour(row.cls)
        floor = min(row.floor_ms, row.sum_ms) if row.floor_ms is not None else 0.0
        axes.barh(y, row.sum_ms, height=0.68, color=shade, alpha=0.28 if some_sol else 1.0, linewidth=0)
        if floor:
            axes.barh(y, floor, height=0.68, color=shade, linewidth=0)
        text = f"{_time(row.sum_ms, result)}   {row.share:.1%}"
        if row.sol is not None:
            text += f"   {row.sol:.0%} of {row.bound} roof"
        if row.ratio is not None:
            text += f"   {row.ratio:.2f}× reference"
        axes.text(row.sum_ms + 0.012 * longest, y, text, va="center", fontsize=8.5, color=INK)
    axes.set_yticks(range(len(rows)), [_label(r) for r in rows], fontsize=9, color=INK)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.62)
    axes.set_xticks([])
    axes.tick_params(axis="y", length=0)
    if some_sol:
        axes.set_xlabel("solid: time at the measured roofline (SOL)      pale: time above it      share: of busy", fontsize=8,
                        color=FAINT, loc="left")  # fmt: skip
    _bare(axes)


def _in_seconds(result: Decomposition) -> bool:
    return result.traced_wall_ms >= 10_000


def _time(ms: float, result: Decomposition) -> str:
    """In the wall's unit, with as many decimals as its size needs."""
    wall = result.traced_wall_ms
    if _in_seconds(result):
        return f"{ms / 1e3:.2f} s"
    return f"{ms:,.0f} ms" if wall >= 1000 else f"{ms:.2f} ms" if wall >= 10 else f"{ms:.3f} ms"


def _label(row: ClassRow) -> str:
    return row.cls if row.weight_type in ("-", "") else f"{row.cls}  {row.weight_type}"


def _rows(result: Decomposition) -> list[ClassRow]:
    """The longest rows, and one row that sums up the rest."""
    from harness.attribution.decomposition import ClassRow

    rows = sorted(result.classes, key=lambda r: -r.sum_ms)
    shown = min(len(rows), MAX_ROWS, max(1, sum(r.share >= SMALLEST for r in rows)))
    if len(rows) - shown <= 1 and len(rows) <= MAX_ROWS:
        return rows
    shown = min(shown, MAX_ROWS - 1)
    rest = rows[shown:]
    ms = sum(r.sum_ms for r in rest)
    floors = [r.floor_ms for r in rest]
    known = all(f is not None for f in floors)
    summary = ClassRow(
        cls=f"{len(rest)} more", weight_type="-", launches=sum(r.launches for r in rest), sum_ms=ms,
        union_ms=sum(r.union_ms for r in rest), share=sum(r.share for r in rest),
        floor_ms=sum(f or 0.0 for f in floors) if known else None,
    )  # fmt: skip
    return [*rows[:shown], summary]


def _is_dark(shade: str) -> bool:
    red, green, blue = (int(shade[i : i + 2], 16) for i in (1, 3, 5))
    return 0.299 * red + 0.587 * green + 0.114 * blue < 150


def _bare(axes: Axes) -> None:
    spines: Any = axes.spines
    for side in ("top", "right", "left", "bottom"):
        spines[side].set_visible(False)
