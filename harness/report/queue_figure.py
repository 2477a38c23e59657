"""The figure of a queue: how large each class is, how far it is from good, and what that would give back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from harness.attribution.queue import PARITY
from harness.report.decomposition import titled
from harness.report.style import DPI, GAIN, INK, LEVER, MARK, RULE, SMALL, Page, bare, elide, look, text_width

if TYPE_CHECKING:
    from harness.attribution.queue import Candidate, Queue

WORTH_SHARE, WORTH_GAIN = 0.01, 0.001
"""A class below 1 % of busy that could not give 0.1 % of the wall is named under the figure, not drawn."""
KEY = 2.45
"""Width of the column of keys, inches."""
TALL = 4.4
PALE = "#E9EDF1"
LARGEST, SMALLEST = 0.62, 0.1
"""Diameters of the largest budget's bubble and of none, inches."""


@dataclass(frozen=True)
class _Point:
    """A class at (share, ratio), and the diameter of its bubble in inches."""

    what: Candidate
    ratio: float
    size: float


def queue_figure(path: Path, queue: Queue, *, title: str = "What is worth doing next") -> None:
    """Share × ratio; a bubble's area is its budget. Right of a bar's line a class could clear that bar alone.

    A class without a reference stands at 1 / SOL, its ratio to the roofline, and is drawn hollow.
    """
    points, left_out = _points(queue)
    with look():
        page, unnamed = _drawn(queue, title, points, _left_out(left_out))
        if unnamed:
            page, _ = _drawn(
                queue, title, points, [*_left_out(left_out), f"Without room for a name: {', '.join(unnamed)}."]
            )
        page.save(path)


def _drawn(queue: Queue, title: str, points: list[_Point], foot: list[str]) -> tuple[Page, list[str]]:
    """The figure, and the classes whose names found no place in it."""
    table = queue.table
    about = [titled(table), f"{table.tokens} tokens" if table.tokens else "", table.device, table.regime]
    line = " · ".join(filter(None, [*about, f"wall {queue.wall_ms:.2f} ms"]))
    page = Page(title, [TALL], [line], foot)
    axes = page.axes(0, left=0.75, right=KEY + 0.25, top=0.08, bottom=0.5)
    _scales(axes, points)
    curves = _bars(axes, queue)
    for p in points:
        shade, hollow = _shade(p.what), p.what.ratio is None
        axes.scatter(p.what.share, p.ratio, s=(72 * p.size) ** 2, facecolor="none" if hollow else (shade, 0.75),
                     edgecolor=shade, linewidth=1.5, zorder=3)  # fmt: skip
    unnamed = _names(axes, points, curves)
    _keys(page, points, queue)
    return page, unnamed


def _points(queue: Queue) -> tuple[list[_Point], list[tuple[Candidate, str]]]:
    """The classes to draw, largest budget first; and those not drawn, with why."""
    drawn: list[tuple[Candidate, float]] = []
    left_out: list[tuple[Candidate, str]] = []
    for c in queue.candidates:
        ratio = c.ratio if c.ratio is not None else 1 / c.sol if c.sol else None
        if ratio is None or c.share <= 0:
            left_out.append((c, "neither a reference nor a roof"))
        elif c.share < WORTH_SHARE and (c.gain or 0.0) < WORTH_GAIN:
            left_out.append((c, f"below {WORTH_SHARE:.0%} of busy and {WORTH_GAIN:.1%} of the wall"))
        else:
            drawn.append((c, ratio))
    most = max((c.budget_ms or 0.0 for c, _ in drawn), default=0.0) or 1.0
    return [_Point(c, ratio, _diameter(c.budget_ms or 0.0, most)) for c, ratio in drawn], left_out


def _diameter(budget: float, most: float) -> float:
    """Inches; the area grows with the budget, and no budget is still a dot."""
    return float((SMALLEST**2 + (LARGEST**2 - SMALLEST**2) * budget / most) ** 0.5)


def _left_out(classes: Sequence[tuple[Candidate, str]]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for c, why in classes:
        reasons.setdefault(why, []).append(c.label)
    return [f"Not drawn ({why}): {', '.join(names)}." for why, names in reasons.items()]


def _scales(axes: Axes, points: Sequence[_Point]) -> None:
    """Logarithmic both ways, with room for the bubbles: none reaches over an edge."""
    shares = [p.what.share for p in points] or [0.01, 0.5]
    ratios = [p.ratio for p in points] or [1.0]
    width, height = (float(v) / DPI for v in axes.bbox.size)
    x_low, x_high = _room(min(shares), max(shares), width, 3.0)
    y_low, y_high = _room(min(*ratios, 1.0), max(*ratios, 2.2), height, 0.5)
    if min(ratios) >= 1:  # nothing is below parity: a little room for the lowest bubbles, no empty half
        y_low = max(y_low, 0.85)
    axes.set(xscale="log", yscale="log", xlim=(x_low, x_high), ylim=(y_low, y_high))
    axes.xaxis.set_major_locator(FixedLocator([t for t in _steps(0.001, 1) if x_low <= t <= min(x_high, 1)]))
    axes.yaxis.set_major_locator(
        FixedLocator(
            [t for t in (*_steps(0.01, 0.5), 0.7, 1, 1.5, 2, 3, 5, 7, *_steps(10, 1e6)) if y_low <= t <= y_high]
        )
    )
    for axis, text in ((axes.xaxis, lambda v, _: f"{100 * v:g}%"), (axes.yaxis, lambda v, _: f"{v:g}×")):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(text))
    axes.set_xlabel("share of busy")
    axes.set_ylabel("times slower than the reference (hollow: than its roofline)")


def _room(low: float, high: float, inches: float, least: float) -> tuple[float, float]:
    """Limits of a logarithmic axis of that many inches: half the largest bubble and a little on either side."""
    span = max(np.log(high / low), np.log(1.3))
    if span < least:
        low, span = low / np.exp((least - span) / 2), least
    pad = span * (LARGEST / 2 + 0.08) / (inches - LARGEST - 0.16)
    return float(low / np.exp(pad)), float(low * np.exp(span + pad))


def _steps(low: float, high: float) -> list[float]:
    """1, 2, 5 of every decade."""
    decades = range(round(np.log10(low)), round(np.log10(high)) + 1)
    return [v for d in decades for v in (10.0**d, 2 * 10.0**d, 5 * 10.0**d) if low <= v <= high]


STYLES = ("solid", (0, (5, 2)), (0, (1, 1.5)))


def _bars(axes: Axes, queue: Queue) -> list[np.ndarray]:
    """For each bar, the line on which a class's whole budget is worth exactly that much of the wall; and
    parity. Returns the lines as (x, y) [points, 2] in inches."""
    (x_low, x_high), (y_low, y_high) = axes.get_xlim(), axes.get_ylim()
    x = np.geomspace(x_low, x_high, 800)
    busy = queue.table.busy_ms
    drawn = []
    for (_, bar), style in zip(_ranked(queue), STYLES * len(queue.bars), strict=False):
        # Budget share · busy · (1 − 1/r) saves exactly the bar of the wall where r = 1 / (1 − need / (share · busy)).
        need = queue.wall_ms * (1 - 1 / (1 + bar))
        with np.errstate(divide="ignore", invalid="ignore"):
            curve = np.where(x * busy > need, 1 / (1 - need / (x * busy)), np.nan)
        shown = np.where((curve >= 1) & (curve < 2 * y_high), curve, np.nan)
        axes.plot(x, shown, color=MARK, lw=1.3, ls=style, zorder=2)
        line = np.column_stack([x, shown])[np.isfinite(shown)]
        drawn.append(np.asarray(axes.transData.transform(line)) / DPI if len(line) else line)
    if _referenced(queue):
        axes.axhspan(y_low, min(PARITY, y_high), color=PALE, lw=0, zorder=0)
    return drawn


def _referenced(queue: Queue) -> bool:
    return any(c.ratio is not None for c in queue.candidates)


def _ranked(queue: Queue) -> list[tuple[str, float]]:
    return sorted(queue.bars.items(), key=lambda b: b[1])


def _shade(c: Candidate) -> str:
    return GAIN if c.clears and all(c.clears.values()) else LEVER if any(c.clears.values()) else RULE


def _names(axes: Axes, points: Sequence[_Point], curves: Sequence[np.ndarray]) -> list[str]:
    """A name beside each bubble, largest budget first: the nearest place that touches no bubble, no other name and, where
    there is one, no bar's line, with a line to its bubble where it had to move away. Returns the names that fit nowhere."""
    unnamed: list[str] = []
    frame = [float(v) / DPI for v in axes.bbox.extents]
    at = [np.asarray(axes.transData.transform((p.what.share, p.ratio))) / DPI for p in points]
    circles = [
        (x - p.size / 2, y - p.size / 2, x + p.size / 2, y + p.size / 2) for (x, y), p in zip(at, points, strict=True)
    ]
    taken = list(circles)
    for (x, y), p, circle in zip(at, points, circles, strict=True):
        name = elide(p.what.label, 1.3, SMALL + 0.5)
        text = f"{name}  {p.what.budget_ms:.2f} ms" if p.what.budget_ms else name
        wide, tall = text_width(text, SMALL + 0.5) + 0.04, 0.17
        found = None
        # Best where it is on no bar's line, and where the line to its bubble crosses nothing either.
        for off, clear in ((True, True), (True, False), (False, True), (False, False)):
            for left, bottom in _places(x, y, p.size / 2, wide, tall):
                box = (left, bottom, left + wide, bottom + tall)
                inside = (
                    box[0] >= frame[0] + 0.03
                    and box[1] >= frame[1] + 0.03
                    and box[2] <= frame[2]
                    and box[3] <= frame[3] - 0.03
                )
                edge = (min(max(x, box[0]), box[2]), min(max(y, box[1]), box[3]))
                blocked = inside and any(_touch(box, other) for other in taken)
                blocked = blocked or (inside and off and any(_on(box, curve) for curve in curves))
                if inside and not blocked and not (clear and _crosses((x, y), edge, p.size / 2, taken, circle)):
                    found = (box, edge)
                    break
            if found:
                break
        if found is None:
            unnamed.append(p.what.label)
            continue
        box, edge = found
        taken.append(box)
        middle = (box[0] + wide / 2, box[1] + tall / 2)
        if np.hypot(edge[0] - x, edge[1] - y) > p.size / 2 + 0.12:
            ends = axes.transData.inverted().transform([(x * DPI, y * DPI), (edge[0] * DPI, edge[1] * DPI)])
            axes.plot(*ends.T, color=RULE, lw=0.7, zorder=2)
        spot = axes.transData.inverted().transform((middle[0] * DPI, middle[1] * DPI))
        axes.text(
            float(spot[0]), float(spot[1]), text, fontsize=SMALL + 0.5, ha="center", va="center", zorder=4, color=INK,
            path_effects=[withStroke(linewidth=2.2, foreground="white")],
        )  # fmt: skip
    return unnamed


def _on(box: tuple[float, ...], curve: np.ndarray) -> bool:
    """Does a line of points pass through a box?"""
    x, y = curve[:, 0], curve[:, 1]
    return bool(((x > box[0]) & (x < box[2]) & (y > box[1] - 0.02) & (y < box[3] + 0.02)).any())


def _crosses(start: tuple[float, float], end: tuple[float, float], radius: float, taken: Sequence[tuple[float, ...]],
             own: tuple[float, ...]) -> bool:  # fmt: skip
    """Does the line from a bubble's rim to its name pass through another bubble or name?"""
    length = float(np.hypot(end[0] - start[0], end[1] - start[1]))
    for at in np.arange(radius, length, 0.04):
        x, y = (start[i] + (end[i] - start[i]) * at / length for i in (0, 1))
        if any(_touch((x, y, x, y), other) for other in taken if other is not own):
            return True
    return False


ALL_AROUND = (
    0,
    180,
    30,
    -30,
    150,
    -150,
    15,
    -15,
    165,
    -165,
    60,
    -60,
    120,
    -120,
    45,
    -45,
    135,
    -135,
    75,
    -75,
    105,
    -105,
    90,
    -90,
)


def _places(x: float, y: float, radius: float, wide: float, tall: float) -> list[tuple[float, float]]:
    """Lower left corners of places for a name, inches: right, left, above, below, then farther out all around."""
    near = radius + 0.05
    found = [
        (x + near, y - tall / 2), (x - near - wide, y - tall / 2), (x - wide / 2, y + near), (x - wide / 2, y - near - tall),
    ]  # fmt: skip
    for distance in np.arange(0.15, 2.2, 0.11):
        for angle in np.deg2rad(ALL_AROUND):
            cx, cy = x + (near + distance) * np.cos(angle), y + (near + distance) * np.sin(angle)
            found.append((cx - wide * (0.5 - 0.5 * np.cos(angle)), cy - tall / 2))
    return found


def _touch(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _keys(page: Page, points: Sequence[_Point], queue: Queue) -> None:
    """What lines, colours, fill and size mean, beside the axes."""
    x, y = page.width - KEY, 0.1
    lines = [Line2D([], [], color=MARK, lw=1.3, ls=style, label=f"{elide(name, 1.2, SMALL)}: {bar:.1%} of the wall")
             for (name, bar), style in zip(_ranked(queue), STYLES * len(queue.bars), strict=False)]  # fmt: skip
    handles: list[Line2D | Patch] = list(lines)
    if _referenced(queue):
        handles.append(Patch(color=PALE, label=f"parity with a reference: ≤ {PARITY:.2f}×"))
    page.legend(0, handles, columns=1, x=x, y=y, title="Above a line a class can clear that bar")
    y += 0.22 + 0.185 * len(handles) + 0.16
    dots = []
    shades = {_shade(p.what) for p in points}
    several = len(queue.bars) > 1
    for shade, text in (
        (GAIN, "clears every bar" if several else "clears the bar"),
        (LEVER, "clears the lower bar"),
        (RULE, "clears none alone"),
    ):
        if shade in shades:
            dots.append(
                _dot(shade, text, 8, hollow=all(p.what.ratio is None for p in points if _shade(p.what) == shade))
            )
    page.legend(0, dots, columns=1, x=x, y=y, title="Colour: if the whole budget were saved")
    y += 0.22 + 0.185 * len(dots) + 0.16
    fills = []
    if any(p.what.ratio is not None for p in points):
        fills.append(_dot(INK, "against the reference", 8))
    if any(p.what.ratio is None for p in points):
        fills.append(_dot(INK, "against its roofline (no reference)", 8, hollow=True))
    page.legend(0, fills, columns=1, x=x, y=y, title="Fill")
    y += 0.22 + 0.185 * len(fills) + 0.16
    most = max((p.what.budget_ms or 0.0 for p in points), default=0.0)
    if most:
        page.legend(0, [], columns=1, x=x, y=y, title="Area: the budget")
        key = page.axes(0, left=x, right=0.1, top=y + 0.26, bottom=TALL - y - 0.26 - LARGEST - 0.35)
        bare(key)
        wide = page.width - x - 0.1
        key.set(xlim=(0, wide), ylim=(-0.3, LARGEST + 0.05), xticks=[], yticks=[])
        left = 0.03
        for budget in (most, most / 4, 0.0):
            size = _diameter(budget, most)
            key.scatter(
                left + size / 2, size / 2 + 0.02, s=(72 * size) ** 2, facecolor="none", edgecolor=RULE, linewidth=1.5
            )
            label = f"{budget:.2f} ms" if budget else "none"
            key.text(left + size / 2, -0.08, label, ha="center", va="top", fontsize=SMALL)
            left += size / 2 + 0.75


def _dot(shade: str, label: str, size: float, *, hollow: bool = False) -> Line2D:
    return Line2D(
        [], [], marker="o", ls="", ms=size, mfc="none" if hollow else (shade, 0.75), mec=shade, mew=1.5, label=label
    )
