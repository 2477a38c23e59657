"""Figures of rounds and of the campaign: pairs against the bar, walls of the arms, a basket, what every round gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from harness.report.style import (
    BASE,
    GAIN,
    HATCH,
    INK,
    LEVER,
    MARGIN,
    MARK,
    MUTED,
    RULE,
    SMALL,
    TAX,
    WIDTH,
    Column,
    Page,
    elide,
    look,
    percents,
    spread,
    text_width,
    whole_numbers,
)  # fmt: skip
from harness.report.words import percent, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from harness.rounds.record import Basket

DASHED = (0, (5, 2.5))
ARMS = (BASE, LEVER, GAIN, "#8C1446")

Pairs = Sequence[tuple[int, float, bool]]


def plot_pairs(path: Path, *, decide: Pairs, confirm: Pairs, band: Sequence[tuple[int, float | None, float | None]], bar: float,
               delta: float, min_pairs: int, estimate: float | None, confirmed: float | None, title: str, line: str = "",
               windows: Sequence[int] = ()) -> None:  # fmt: skip
    """Gain of every pair against the bar, with the interval as it closed in.

    decide, confirm: (pair, d = ln(wall_A / wall_B), kept). band: (pair, L, U) in logarithms from min_pairs on.
    delta: in logarithms, as the landing rule has it. windows: first pair of every later window.
    """
    upper = float(np.expm1(np.log1p(bar) + delta))
    with look():
        page = Page(title, [3.6, 0.5], [line] if line else [])
        levels = [(bar, f"bar {bar:+.1%}", MARK), (upper, f"bar + δ {upper:+.1%}", MARK)]
        if estimate is not None:
            levels.append((estimate, f"estimate {estimate:+.2%}", BASE))
        if confirmed is not None and confirm:
            levels.append((confirmed, f"confirmed {confirmed:+.2%}", LEVER))
        beside = max(text_width(text, SMALL + 0.5) for _, text, _ in levels) + 0.3
        axes = page.axes(0, left=0.8, right=MARGIN + beside, top=0.06, bottom=0.5)
        handles = _pair_marks(axes, decide, confirm, band, bar, upper, min_pairs, windows)
        first, last = min((r[0] for r in decide), default=1), max((r[0] for r in decide), default=1)
        end = max([last, *(r[0] for r in confirm)])
        axes.set_xlim(0.4, end + 0.8)
        axes.axhline(0, color=RULE, lw=1)
        axes.axhspan(bar, upper, color=MARK, alpha=0.1, lw=0, zorder=0)
        axes.axhline(bar, color=MARK, lw=1.4, ls=DASHED)
        if estimate is not None:
            axes.hlines(estimate, first - 0.4, last + 0.4, color=BASE, lw=1.6)
        if confirmed is not None and confirm:
            axes.hlines(confirmed, confirm[0][0] - 0.4, confirm[-1][0] + 0.4, color=LEVER, lw=1.6)
            axes.axvline(confirm[0][0] - 0.5, color=RULE, lw=0.8)
            handles.append(Line2D([], [], color=RULE, lw=0.8, label="confirmation begins"))
        _beside(axes, levels, 3.04)
        percents(axes.yaxis)
        whole_numbers(axes.xaxis)
        axes.set(xlabel="pair", ylabel="gain of the wall")
        page.legend(1, handles, columns=4, y=0.04)
        page.save(path)


def _pair_marks(axes: Axes, decide: Pairs, confirm: Pairs, band: Sequence[tuple[int, float | None, float | None]], bar: float,
                upper: float, min_pairs: int, windows: Sequence[int]) -> list[Any]:  # fmt: skip
    """Draws pairs, interval and what may not decide yet, sets the gain's limits, and returns the legend's handles."""
    low, high = _limits([np.expm1(r[1]) for r in [*decide, *confirm]], [0.0, bar, upper])
    axes.set_ylim(low, high)
    handles: list[Any] = []
    for rows, shade, shape, text in (
        (decide, BASE, "o", "deciding pair"),
        (confirm, LEVER, "D", "confirmation pair"),
    ):
        kept = [(n, float(np.expm1(d))) for n, d, k in rows if k]
        if kept:
            inside = [(n, g) for n, g in kept if low <= g <= high]
            axes.scatter(
                [n for n, _ in inside],
                [g for _, g in inside],
                s=26,
                marker=shape,
                color=shade,
                zorder=4,
                edgecolor="white",
                linewidth=0.6,
            )
            handles.append(Line2D([], [], ls="", marker=shape, color=shade, ms=5.5, mec="white", label=text))
        for n, g in kept:
            if not low <= g <= high:
                axes.scatter(
                    n,
                    high if g > high else low,
                    marker="^" if g > high else "v",
                    s=46,
                    color=shade,
                    zorder=4,
                    clip_on=False,
                )
    beyond = [g for rows in (decide, confirm) for _, d, k in rows if k and not low <= (g := float(np.expm1(d))) <= high]
    if beyond:
        most = max(beyond, key=abs)
        handles.append(
            Line2D([], [], ls="", marker="^", color=MUTED, label=f"{len(beyond)} beyond the axis, to {most:+.1%}")
        )
    if dropped := [(n, float(np.clip(np.expm1(d), low, high))) for n, d, k in [*decide, *confirm] if not k]:
        axes.scatter(
            [n for n, _ in dropped], [g for _, g in dropped], s=30, marker="x", color=MUTED, linewidth=1.2, zorder=4
        )
        handles.append(Line2D([], [], ls="", marker="x", color=MUTED, ms=5.5, label="dropped pair"))
    if band:
        after = [b[0] for b in band]
        lower = [low if b[1] is None else float(np.expm1(b[1])) for b in band]
        top = [high if b[2] is None else float(np.expm1(b[2])) for b in band]
        axes.fill_between(after, lower, top, color=BASE, alpha=0.13, lw=0, zorder=1)
        axes.plot(after, lower, color=BASE, lw=0.9, alpha=0.7)
        axes.plot(after, top, color=BASE, lw=0.9, alpha=0.7)
        axes.plot([after[-1] + 0.3] * 2, [lower[-1], top[-1]], color=BASE, lw=3.5, solid_capstyle="butt", zorder=3)
        if len(band) > 1:
            handles.append(Patch(facecolor=(BASE, 0.13), edgecolor=BASE, linewidth=0.9, label="interval so far"))
        handles.append(Line2D([], [], color=BASE, lw=3.5, label="interval at the end"))
    if min_pairs > 1:
        axes.axvspan(
            0,
            (band[0][0] if band else min_pairs) - 0.5,
            facecolor="none",
            edgecolor=HATCH,
            hatch="//",
            lw=0,
            zorder=0,
        )
        handles.append(
            Patch(
                facecolor="none",
                edgecolor=HATCH,
                hatch="//",
                label=f"fewer than {min_pairs} pairs kept: no verdict yet",
            )
        )
    handles.append(Patch(facecolor=(MARK, 0.1), edgecolor="none", label="bar to bar + δ: no promise either way"))
    for start in windows:
        axes.axvline(start - 0.5, color=INK, lw=0.9, ls=(0, (1, 2)))
    if windows:
        handles.append(Line2D([], [], color=INK, lw=0.9, ls=(0, (1, 2)), label="a new window begins"))
    return handles


def _beside(axes: Axes, levels: Sequence[tuple[float, str, str]], inches: float) -> None:
    """Names of levels right of the axes, each tied to its level, moved apart where they would touch."""
    low, high = axes.get_ylim()
    at = spread([(v - low) / (high - low) * inches for v, _, _ in levels], [0.16] * len(levels), 0, inches, 0.02)
    for (value, text, shade), y in zip(levels, at, strict=True):
        there = y / inches
        axes.plot([1.0, 1.012, 1.03], [(value - low) / (high - low)] * 2 + [there], color=shade, lw=0.8, transform=axes.transAxes,
                  clip_on=False)  # fmt: skip
        axes.text(
            1.036, there, text, transform=axes.transAxes, color=shade, fontsize=SMALL + 0.5, va="center", ha="left"
        )


def _limits(values: Sequence[float], must_show: Sequence[float]) -> tuple[float, float]:
    """Limits that hold the values and a few lines; a value six quartile distances beyond the quartiles is left to an arrow
    at the edge."""
    kept = list(values)
    if len(kept) > 7:
        q1, q3 = np.percentile(kept, [25, 75])
        kept = [v for v in kept if q1 - 6 * (q3 - q1) <= v <= q3 + 6 * (q3 - q1)]
    low, high = float(min([*kept, *must_show])), float(max([*kept, *must_show]))
    room = 0.1 * (high - low) or 0.01
    return low - room, high + room


def plot_walls(path: Path, arms: Sequence[tuple[str, Sequence[float]]], *, title: str) -> None:
    """Every forward of each arm (ms): a histogram, its quartile box, median and p95. arms: (name, walls), base first."""
    with look():
        everything = np.concatenate([np.asarray(w) for _, w in arms])
        low, high = float(everything.min()), max(_reach(w) for _, w in arms)
        room = 0.04 * (high - low) or 0.01 * high
        bins = np.linspace(low - room, high + room, 49)
        beyond = int((everything > bins[-1]).sum())
        foot = ["Columns: how many forwards took that long. Below them, bar: quartiles; | median; ▲ 95th percentile."]
        foot += [f"Slower forwards drawn at the right edge: {beyond}."] if beyond else []
        digits = 2 if np.median(everything) >= 10 else 3
        figures = [("median", 50), ("p95", 95)]
        columns = [
            Column("forwards", [str(len(w)) for _, w in arms]),
            *(Column(f"{name}, ms", [f"{np.percentile(w, p):.{digits}f}" for _, w in arms]) for name, p in figures),
            Column("mean, ms", [f"{np.mean(w):.{digits}f}" for _, w in arms]),
        ]
        page = Page(title, [0.25 + 1.05 * len(arms) + 0.42], (), foot)
        axes = page.rows(0, [name for name, _ in arms], columns, most=2.0)
        for y, (_, walls) in enumerate(arms):
            shade, values = ARMS[y % len(ARMS)], np.asarray(walls)
            counts, _ = np.histogram(np.clip(values, bins[0], bins[-1]), bins)
            axes.bar(
                bins[:-1],
                -0.58 * counts / counts.max(),
                np.diff(bins),
                bottom=y + 0.2,
                align="edge",
                color=shade,
                alpha=0.45,
                lw=0,
            )
            q1, median, q3, p95 = np.percentile(np.clip(values, bins[0], bins[-1]), [25, 50, 75, 95])
            axes.plot([q1, q3], [y + 0.32] * 2, color=shade, lw=5, solid_capstyle="butt")
            axes.plot([median], [y + 0.32], marker="|", ms=13, mew=2.2, color=INK)
            axes.plot([p95], [y + 0.32], marker="^", ms=6, color=shade)
        axes.set_xlim(bins[0], bins[-1])
        axes.set_xlabel("wall of one forward, ms", labelpad=2)
        page.save(path)


def _reach(walls: Sequence[float]) -> float:
    """Where an arm's axis may end: three times as far above its p95 as that is above the median; spikes lie beyond."""
    median, p95, most = np.percentile(walls, [50, 95, 100])
    return float(min(most, p95 + 3 * (p95 - median)))


def plot_basket(path: Path, basket: Basket, *, bar: float, names: Sequence[str], title: str) -> None:
    """The 2 × 2: each lever alone, both, and the interaction, with intervals."""
    rows = [(names[0], basket.a), (names[1], basket.b), ("both", basket.both), ("interaction", basket.interaction)]
    with look():
        columns = [
            Column("gain", [percent(e.estimate) for _, e in rows]),
            Column("interval", [span(e.interval) for _, e in rows]),
        ]
        foot = ["Interaction: the gain of both over the product of the two alone; above 0 they help each other."]
        page = Page(title, [0.25 + 0.34 * len(rows) + 0.5, 0.25], (), foot)
        axes = page.rows(0, [name for name, _ in rows], columns, bold=[i > 1 for i in range(len(rows))])
        for y, (_, effect) in enumerate(rows):
            shade, shape = ((BASE, "o"), (BASE, "o"), (LEVER, "D"), ("#8C1446", "s"))[y]
            axes.plot(effect.interval, [y, y], color=shade, lw=3, solid_capstyle="butt", alpha=0.55)
            axes.plot([effect.estimate], [y], shape, color=shade, ms=7, mec="white")
        axes.axvline(0, color=RULE, lw=1)
        axes.axvline(bar, color=MARK, lw=1.4, ls=DASHED)
        percents(axes.xaxis)
        axes.set_xlabel("gain of the wall", labelpad=2)
        page.legend(1, [Line2D([], [], color=MARK, lw=1.4, ls=DASHED, label=f"bar {bar:+.1%}")], columns=1)
        page.save(path)


NEWEST = 30
"""Rounds that the campaign's figure shows; the index lists them all."""


@dataclass(frozen=True)
class Outcome:
    """One round in the campaign's figure. Gains are fractions of the wall."""

    name: str  # "0004 attention ours to cudnn"
    verdict: str | None
    gain: float | None = (
        None  # confirmed, else estimated; of a round that arithmetic ended, the most that it could give
    )
    interval: Sequence[float | None] | None = None
    bar: float | None = None
    control: str = ""  # "A/A" or "planted": it tests the method, not a lever
    at_most: bool = False
    promoted: bool = False
    wall: str = ""
    reference: str = ""
    anchor: tuple[str, str, str] = ("", "", "")  # tokens, regime, device


MARKS: dict[str | None, tuple[str, str, bool]] = {  # verdict → shape, colour, filled
    "LANDED": ("^", GAIN, True),
    "REVERTED": ("v", TAX, True),
    "INCONCLUSIVE": ("D", LEVER, False),
    "INVALID": ("X", MUTED, False),
    None: ("o", MUTED, False),
}


def plot_campaign(path: Path, rounds: Sequence[Outcome]) -> None:
    """What every round gained, with its interval, against its bar; the wall it left is a figure beside it, not a line.

    Walls of two windows differ by the machine's clock alone, gains do not: the arms of a pair share their window.
    """
    shown = rounds[-NEWEST:]
    varies = [len({r.anchor[i] for r in shown}) > 1 for i in range(3)]
    same = [shown[0].anchor[i] for i in range(3) if not varies[i]]
    lines = [" · ".join(filter(None, same))] if any(same) else []
    if len(shown) < len(rounds):
        lines.append(f"the newest {len(shown)} of {len(rounds)} rounds")
    if kept := [r for r in rounds if r.promoted and r.gain is not None]:
        product = float(np.prod([1 + (r.gain or 0.0) for r in kept])) - 1
        lines.append(f"{len(kept)} promoted to the base, together {product:+.2%} (the product of their gains)")
    low, high = _gain_limits(shown)
    foot = ["Line: interval of the deciding pairs; mark: the confirmed gain, else the estimate."]
    if any(_goes_on(r, low, high) != (False, False) for r in shown):
        foot[0] += " An arrow: the interval goes on."
    if any(r.control for r in shown):
        foot.append("Grey: A/A and planted rounds test the method, not a lever.")
    if any(r.wall for r in shown):
        foot.append(
            "Wall: the base's after the round. Between windows it moves with the machine's clock, so it is printed, not plotted."
        )
    with look():
        columns = [
            Column("gain", [_gain(r) for r in shown], bold=[True] * len(shown), colours=[_mark(r)[1] for r in shown]),
            Column("verdict", [_said(r) for r in shown], left=True, colours=[_mark(r)[1] for r in shown]),
        ]
        if any(r.wall for r in shown):
            columns.append(Column("wall, ms", [r.wall for r in shown]))
        if any(r.reference for r in shown):
            columns.append(Column("× ref", [r.reference for r in shown]))
        columns += [
            Column(header, [elide(r.anchor[i].removesuffix(" tokens"), 0.9) for r in shown], left=True)
            for i, header in enumerate(("tokens", "regime", "device"))
            if varies[i]
        ]
        page = Page("What each round gained", [0.25 + 0.28 * len(shown) + 0.5, 0.28], lines, foot,
                    WIDTH + 2.5 * any(varies))  # fmt: skip
        axes = page.rows(0, [r.name for r in shown], columns)
        for y, r in enumerate(shown):
            _outcome(axes, y, r, low, high)
        for bar, rows in groupby(range(len(shown)), key=lambda y: shown[y].bar):
            if bar is not None:
                run = list(rows)
                axes.plot([bar] * 2, [run[0] - 0.5, run[-1] + 0.5], color=MARK, lw=1.4, ls=DASHED, zorder=1)
        axes.set_xlim(low, high)
        axes.axvline(0, color=RULE, lw=1, zorder=1)
        percents(axes.xaxis)
        axes.set_xlabel("gain of the wall", labelpad=2)
        page.legend(1, _campaign_keys(shown), columns=7)
        page.save(path)


def _outcome(axes: Axes, y: int, r: Outcome, low: float, high: float) -> None:
    shape, shade, filled = _mark(r)
    if r.gain is None:
        return
    if r.at_most:
        axes.plot([0, r.gain], [y, y], color=shade, lw=1.2, ls=(0, (1, 1.5)), zorder=2)
    elif r.interval is not None:
        below, above = _goes_on(r, low, high)
        ends = [edge if end is None else end for end, edge in zip(r.interval, (low, high), strict=True)]
        axes.plot(np.clip(ends, low, high), [y, y], color=shade, lw=2.6, alpha=0.4, solid_capstyle="butt", zorder=2)
        inside = 0.012 * (high - low)
        for beyond, edge, arrow in ((below, low + inside, "<"), (above, high - inside, ">")):
            if beyond:
                axes.plot([edge], [y], marker=arrow, color=shade, ms=6, zorder=3)
    axes.plot([r.gain], [y], marker=shape, ls="", ms=8, mfc=shade if filled else "white", mec="white" if filled else shade,
              mew=0.8 if filled else 1.6, zorder=4)  # fmt: skip


def _goes_on(r: Outcome, low: float, high: float) -> tuple[bool, bool]:
    """Does the interval reach over the axis, below and above? An open side does."""
    if r.interval is None or r.gain is None or r.at_most:
        return False, False
    return (r.interval[0] is None or r.interval[0] < low, r.interval[1] is None or r.interval[1] > high)


def _gain_limits(rounds: Sequence[Outcome]) -> tuple[float, float]:
    """Every gain and bar, and as much of the intervals as leaves the gains apart."""
    points = [0.0, *(v for r in rounds for v in (r.gain, r.bar) if v is not None)]
    reach = max(max(points) - min(points), 0.01)
    ends = [v for r in rounds if r.interval is not None for v in r.interval if v is not None]
    low = max(min([*points, *ends]), min(points) - reach)
    high = min(max([*points, *ends]), max(points) + reach)
    room = 0.06 * (high - low)
    return low - room, high + room


def _mark(r: Outcome) -> tuple[str, str, bool]:
    """Shape, colour, filled."""
    if r.control:
        shape = "o" if r.control == "A/A" else MARKS.get(r.verdict, MARKS[None])[0]
        return shape, MUTED, True
    if r.at_most:
        return "<", MARKS.get(r.verdict, MARKS[None])[1], False
    return MARKS.get(r.verdict, MARKS[None])


def _gain(r: Outcome) -> str:
    return "" if r.gain is None else f"≤ {percent(r.gain)}" if r.at_most else percent(r.gain)


def _said(r: Outcome) -> str:
    """The verdict; an A/A has none to give: it measures noise."""
    if r.control == "A/A":
        return "A/A: noise"
    verdict = r.verdict or "open"
    return f"{verdict} ({r.control})" if r.control else verdict + (", promoted" if r.promoted else "")


def _campaign_keys(rounds: Sequence[Outcome]) -> list[Line2D]:
    keys: dict[str, tuple[str, str, bool]] = {}
    for r in rounds:
        if r.gain is not None:
            text = r.control or ("ended by arithmetic: at most" if r.at_most else r.verdict or "open")
            keys.setdefault(text, _mark(r))
    handles = [Line2D([], [], ls="", marker=shape, ms=7, mfc=shade if filled else "white", mec="white" if filled else shade,
                      mew=0.8 if filled else 1.6, label=text) for text, (shape, shade, filled) in keys.items()]  # fmt: skip
    bars = sorted({r.bar for r in rounds if r.bar is not None})
    if bars:
        text = ", ".join(f"{b:+.1%}" for b in bars[:3])
        handles.append(
            Line2D(
                [], [], color=MARK, lw=1.4, ls=DASHED, label=f"the round's bar ({text}{' …' if len(bars) > 3 else ''})"
            )
        )
    return handles
