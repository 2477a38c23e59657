"""The figure of a decomposition: the wall as one bar, and below it every class against its roofline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.report.style import (
    BODY,
    INK,
    MARGIN,
    RULE,
    SMALL,
    TAX,
    WIDTH,
    Column,
    Page,
    bare,
    elide,
    is_dark,
    look,
    spread,
    text_width,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.attribution.decomposition import ClassRow, Decomposition

# One colour per class in every figure. Classes that usually stand side by side stay apart for protan, deutan and tritan
# vision too (CIE76 above 15 in Machado's simulation, see the test); every segment and row is named as well.
COLOURS = {
    "gate_up": "#27459F", "down": "#45B0EA", "q_o": "#15825F", "k_v": "#A3DD95", "attention": "#B63410",
    "lm_head": "#E98FB4", "quantize": "#9DB29B", "dequantize": "#0B4A2C", "convert": "#F4C562", "norm": "#E08A0B",
    "rope_kv": "#F0E442", "swiglu": "#BE9668", "embedding": "#B277CF", "tail": "#8C1446", "copy": "#777777",
    "gemm": "#27459F", "gemm_fixup": "#6FDDF2", "gemv": "#45B0EA", "rope": "#F0E442", "elementwise": "#6E2A68",
    "kv_store": "#3E4416", "sampling": "#B277CF", "communication": "#2C1A6B", "memset": "#A6A6A6", "graph": "#D98880",
    "other": "#111111",
}  # fmt: skip
UNNAMED = ("#27459F", "#E08A0B", "#15825F", "#B63410", "#45B0EA", "#8C1446", "#A3DD95", "#BE9668")
"""Classes of a user's rule file, in the order of their time."""
GAP = "#E4E4E4"
MAX_ROWS = 16
SMALLEST = 0.001
"""Classes below 0.1 % of busy share one row."""
ROW = 0.25
"""Height of a row, inches."""


def colours(classes: list[str]) -> dict[str, str]:
    """Class → its colour: the project's own, or one of a small set for those that it does not know."""
    new = [cls for cls in dict.fromkeys(classes) if cls not in COLOURS]
    return COLOURS | {cls: UNNAMED[i % len(UNNAMED)] for i, cls in enumerate(new)}


def decomposition_figure(result: Decomposition, path: Path) -> None:
    """The traced wall as one stacked bar with its gap; below it, per class, the time at the roofline and the time above it.

    Every share is of busy, in both. The format follows the path's suffix (.png, .svg, .pdf). Raises HarnessError for
    another one.
    """
    rows = _rows(result)
    shades = colours(list(result.by_class()))
    with look():
        title, lines = _heading(result)
        page = Page(title, [1.5, 0.25 + ROW * len(rows) + 0.42], lines, _footnotes(result))
        _stacked(page, result, shades)
        _by_roofline(page, rows, result, shades)
        page.save(path)


def _heading(result: Decomposition) -> tuple[str, list[str | tuple[str, str]]]:
    from harness.report.decomposition import titled
    from harness.report.words import clock

    what = [titled(result), f"{result.tokens} tokens" if result.tokens else "", result.device]
    lines: list[str | tuple[str, str]] = []
    if result.walls_ms:
        speed = f" = {result.tok_per_s:,.0f} tok/s" if result.tok_per_s else ""
        lines.append((f"wall {clock(result.wall_ms)}{speed}, {result.regime}", INK))
    traced = f"traced wall {_time(result.traced_wall_ms, result)} = busy {_time(result.busy_ms, result)} + gap {_time(result.gap_ms, result)}"
    if float(_figure(result.overlap_ms, result).replace(",", "")):
        traced += f"; overlap {_time(result.overlap_ms, result)}; the bar's classes are drawn shorter by it"
    lines.append(traced)
    if failed := [c.name for c in result.checks if not c.ok]:
        lines.append((f"✗ failed check{'s' * (len(failed) > 1)}: {', '.join(failed)}; do not quote this table", TAX))
    return " · ".join(part for part in what if part), lines


def _footnotes(result: Decomposition) -> list[str]:
    from harness.report.decomposition import above_roof

    notes = [
        f"Shares are of busy ({_time(result.busy_ms, result)}), in the bar and in the rows; the gap is the rest of the traced wall."
    ]
    if any(r.sol is not None for r in result.classes):
        notes.append(
            "SOL: time at the measured ceilings over time spent. In the rows, solid: time at the ceilings; pale: time above it."
        )
    if above := above_roof(result):
        notes.append(above)
    if (result.reference or {}).get("one_window", True) is False:
        notes.append("× ref ~: the reference was measured in another window.")
    return notes


def _stacked(page: Page, result: Decomposition, shades: dict[str, str]) -> None:
    """Classes (weight types together), overlap taken out of none, then the gap, to the traced wall."""
    axes = page.axes(0, left=MARGIN, top=0.48, bottom=0.46)
    wall = max(result.traced_wall_ms, result.busy_ms)
    # Where launches overlap, summed class times exceed busy: scale them so that the bar is the wall.
    scale = result.busy_ms / ((result.busy_ms + result.overlap_ms) or 1.0)
    busy = result.busy_ms or 1.0
    segments = [(cls, ms * scale, f"{ms / busy:.1%}", shades[cls]) for cls, ms in result.by_class().items()]
    room = WIDTH - 2 * MARGIN
    small = [s for s in segments if s[1] / wall * room < 0.045]
    if 1 < len(small) < len(segments):
        segments = [s for s in segments if s not in small]
        segments.append(
            (
                f"{len(small)} more",
                sum(ms for _, ms, _, _ in small),
                f"{sum(ms for _, ms, _, _ in small) / scale / busy:.1%}",
                "#999999",
            )
        )
    if result.gap_ms > 0:
        segments.append(("gap", result.gap_ms, _time(result.gap_ms, result), GAP))
    left = 0.0
    beside: list[tuple[float, str, float]] = []
    for name, ms, share, shade in segments:
        axes.barh(0, ms, left=left, height=1.0, color=shade, edgecolor="white", linewidth=0.8,
                  hatch="////" if name == "gap" else None)  # fmt: skip
        ink = "white" if is_dark(shade) else INK
        if max(text_width(name, BODY), text_width(share, SMALL)) + 0.04 <= ms / wall * room:
            backed = {"boxstyle": "round,pad=0.12", "fc": GAP, "ec": "none"} if name == "gap" else None
            axes.text(left + ms / 2, 0.17, name, ha="center", va="center", fontsize=BODY, color=ink, bbox=backed)
            axes.text(left + ms / 2, -0.23, share, ha="center", va="center", fontsize=SMALL, color=ink, bbox=backed)
        else:
            beside.append((left + ms / 2, f"{elide(name, 1.3, SMALL)} {share}", ms))
        left += ms
    _leaders(axes, beside, wall, room)
    axes.set(xlim=(0, max(wall, left)), ylim=(-0.5, 0.5), yticks=[])
    unit, size = _unit(result)
    if size != 1:
        axes.xaxis.set_major_formatter(lambda ms, _: f"{ms / size:g}")
    axes.set_xlabel(f"traced wall, {unit}", labelpad=2)
    bare(axes)


def _leaders(axes: Axes, labels: list[tuple[float, str, float]], wall: float, room: float) -> None:
    """Names above the segments too narrow to hold one, each tied to its segment; the shortest go unnamed where all do not fit."""
    gap = 0.12
    while sum(text_width(text, SMALL) + gap for _, text, _ in labels) > room:
        labels.remove(min(labels, key=lambda item: item[2]))
    at = spread([x / wall * room for x, _, _ in labels], [text_width(t, SMALL) for _, t, _ in labels], 0, room, gap)
    for (x, text, _), label_x in zip(labels, at, strict=True):
        there = label_x * wall / room
        axes.plot([x, x, there], [0.5, 0.58, 0.98], color=RULE, lw=0.7, clip_on=False)
        axes.text(there, 1.02, text, fontsize=SMALL, color=INK, ha="center", va="bottom")


def _by_roofline(page: Page, rows: list[ClassRow], result: Decomposition, shades: dict[str, str]) -> None:
    """One bar per class on an axis of its own: solid is the floor at measured ceilings, pale the time above it."""
    some_sol = any(r.sol is not None for r in rows)
    named, unit = _unit(result)
    columns = [
        Column(named, [_figure(r.sum_ms, result) for r in rows]),
        Column("share of busy", [f"{r.share:.1%}" for r in rows]),
    ]
    if some_sol:
        columns.append(Column("SOL", ["" if r.sol is None else f"{r.sol:.0%}" for r in rows]))
    if any(r.bound for r in rows):
        columns.append(Column("roof", [r.bound or "" for r in rows], left=True))
    if any(r.ratio is not None for r in rows):
        mark = "" if (result.reference or {}).get("one_window", True) else "~"
        columns.append(Column("× ref", ["" if r.ratio is None else f"{r.ratio:.2f}×{mark}" for r in rows]))
    axes = page.rows(1, [_label(r) for r in rows], columns)
    for y, row in enumerate(rows):
        shade = shades.get(row.cls, "#999999")
        floor = min(row.floor_ms, row.sum_ms) if row.floor_ms is not None else 0.0 if some_sol else row.sum_ms
        # The outline keeps the shortest class visible, and the pale part a part of its bar.
        axes.barh(y, row.sum_ms / unit, height=0.66, facecolor=(shade, 0.25), edgecolor=shade, linewidth=0.7)
        axes.barh(y, floor / unit, height=0.66, color=shade, linewidth=0)
    axes.set_xlim(0, 1.02 * max(max(r.sum_ms for r in rows), 1e-9) / unit)
    axes.set_xlabel(f"time of the class, {named}", labelpad=2)


def _in_seconds(result: Decomposition) -> bool:
    return result.traced_wall_ms >= 10_000


def _in_micros(result: Decomposition) -> bool:
    return result.traced_wall_ms < 0.1


def _unit(result: Decomposition) -> tuple[str, float]:
    """The unit of the wall, and its milliseconds."""
    return ("s", 1e3) if _in_seconds(result) else ("µs", 1e-3) if _in_micros(result) else ("ms", 1.0)


def _figure(ms: float, result: Decomposition) -> str:
    """In the wall's unit, with as many decimals as its size needs."""
    wall = result.traced_wall_ms
    if _in_seconds(result):
        return f"{ms / 1e3:.2f}"
    return (
        f"{ms * 1e3:,.3f}"
        if _in_micros(result)
        else f"{ms:,.1f}"
        if wall >= 1000
        else f"{ms:.2f}"
        if wall >= 10
        else f"{ms:.3f}"
    )


def _time(ms: float, result: Decomposition) -> str:
    return f"{_figure(ms, result)} {_unit(result)[0]}"


def _label(row: ClassRow) -> str:
    return row.cls if row.weight_type in ("-", "") else f"{row.cls} {row.weight_type}"


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
    floor = sum(f for f in floors if f is not None) if None not in floors else None
    summary = ClassRow(
        cls=f"{len(rest)} more", weight_type="-", launches=sum(r.launches for r in rest), sum_ms=ms,
        union_ms=sum(r.union_ms for r in rest), share=sum(r.share for r in rest),
        floor_ms=floor, sol=floor / ms if floor is not None and ms else None,
    )  # fmt: skip
    return [*rows[:shown], summary]
