"""Figures of rounds and of the campaign: pairs against the bar, walls of both arms, bridge, queue, campaign.

Every function draws one PNG. The same JSON gives the same bytes: no clock, no random jitter, no software tag in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, MaxNLocator

from harness.attribution.diff import WORTH
from harness.attribution.queue import PARITY
from harness.report.figures import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from harness.attribution.diff import Diff
    from harness.attribution.queue import Candidate, Queue
    from harness.rounds.record import Basket

BASE, LEVER, GOOD, BAD, FAINT, INK = "#4f6d8f", "#e07b39", "#2f8f6b", "#c0453f", "#b9bec6", "#24292f"
VERDICT_COLOUR = {
    "LANDED": GOOD, "REVERTED": BAD, "INCONCLUSIVE": "#d6a12b", "MEAS-ONLY": BASE, "INVALID": "#8a8f98", None: "#8a8f98",
}  # fmt: skip
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK, "axes.titlesize": 11.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.grid": True, "grid.color": "#e6e8eb", "grid.linewidth": 0.8, "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 9, "figure.facecolor": "white", "svg.hashsalt": "rounds",
}  # fmt: skip


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=144, layout="constrained")


def _percent(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10]))  # never a quarter, which a label would round away
    axis.set_major_formatter(FuncFormatter(lambda v, _: f"{round(100 * v, 6):+g}%" if abs(v) > 1e-9 else "0%"))


def plot_pairs(
    path: Path,
    *,
    decide: Sequence[tuple[int, float, bool]],
    confirm: Sequence[tuple[int, float, bool]],
    band: Sequence[tuple[int, float | None, float | None]],
    bar: float,
    estimate: float | None,
    confirmed: float | None,
    title: str,
    windows: Sequence[int] = (),
) -> None:
    """Gain of every pair against the bar, with the interval as it closed in.

    decide, confirm: (pair, d = ln(wall_A / wall_B), kept). band: (pair, L, U) in logarithms from min_pairs on.
    windows: first pair of every later window.
    """
    with rc_context(STYLE):
        figure = _figure(8.4, 4.2)
        ax = figure.subplots()
        if len(band) > 1:
            n = np.array([b[0] for b in band])
            low = np.array([np.nan if b[1] is None else np.expm1(b[1]) for b in band])
            high = np.array([np.nan if b[2] is None else np.expm1(b[2]) for b in band])
            ax.fill_between(n, low, high, color=BASE, alpha=0.15, lw=0, label="interval so far")
            ax.plot(n, low, color=BASE, lw=1, alpha=0.7)
            ax.plot(n, high, color=BASE, lw=1, alpha=0.7)
        for rows, colour, label in ((decide, BASE, "deciding pair"), (confirm, LEVER, "confirmation pair")):
            kept = [(n, np.expm1(d)) for n, d, k in rows if k]
            if kept:
                ax.scatter(
                    [n for n, _ in kept],
                    [g for _, g in kept],
                    s=26,
                    color=colour,
                    zorder=3,
                    label=label,
                    edgecolor="white",
                    linewidth=0.6,
                )
        lost = [(n, np.expm1(d)) for n, d, k in [*decide, *confirm] if not k]
        if lost:
            ax.scatter(
                [n for n, _ in lost],
                [g for _, g in lost],
                s=28,
                facecolor="none",
                edgecolor="#8a8f98",
                zorder=3,
                label="dropped pair",
            )
        ax.axhline(0, color="#8a8f98", lw=1)
        ax.axhline(bar, color=BAD, lw=1.4, ls=(0, (5, 3)), label=f"bar {bar:+.1%}")
        first, last = min((r[0] for r in decide), default=1), max((r[0] for r in decide), default=1)
        if estimate is not None:
            ax.hlines(estimate, first, last, color=BASE, lw=1.8, label=f"estimate {estimate:+.2%}")
        if band and band[-1][1] is not None and band[-1][2] is not None:
            ax.plot(
                [last + 0.25] * 2,
                np.expm1([band[-1][1], band[-1][2]]),
                color=BASE,
                lw=3,
                solid_capstyle="butt",
                label="interval at the end",
            )
        if confirmed is not None and confirm:
            ax.hlines(
                confirmed, confirm[0][0], confirm[-1][0], color=LEVER, lw=1.8, label=f"confirmed {confirmed:+.2%}"
            )
            ax.axvline(confirm[0][0] - 0.5, color=FAINT, lw=1)
        for start in windows:
            ax.axvline(start - 0.5, color=FAINT, lw=1, ls=":")
        _limit(ax, [np.expm1(r[1]) for r in [*decide, *confirm]], [0.0, bar])
        _percent(ax.yaxis)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set(xlabel="pair", ylabel="gain of the wall", title=title)
        ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        save(figure, path)


def _limit(ax: Axes, values: Sequence[float], must_show: Sequence[float]) -> None:
    """Limits that hold the middle 98 % of the values and a few lines; spikes beyond are drawn at the edge."""
    if not values:
        return
    low, high = np.percentile(values, [1, 99])
    low, high = min(low, *must_show), max(high, *must_show)
    room = 0.12 * (high - low) or 0.01
    ax.set_ylim(low - room, high + room)


def plot_walls(path: Path, arms: Sequence[tuple[str, Sequence[float]]], *, title: str) -> None:
    """Every forward of each arm (ms): a histogram, its quartile box, median and p95. arms: (name, walls), base first."""
    with rc_context(STYLE):
        figure = _figure(8.4, 1.2 + 1.25 * len(arms))
        ax = figure.subplots()
        everything = np.concatenate([np.asarray(w) for _, w in arms])
        low, high = everything.min(), max(_reach(w) for _, w in arms)
        room = 0.04 * (high - low) or 0.01 * high
        bins = np.linspace(low - room, high + room, 49)
        for i, (_, walls) in enumerate(arms):
            y, colour = len(arms) - 1 - i, (BASE, LEVER, GOOD, "#8a6fb0")[i % 4]
            values = np.asarray(walls)
            counts, _ = np.histogram(np.clip(values, bins[0], bins[-1]), bins)
            heights = 0.55 * counts / counts.max()
            ax.bar(bins[:-1], heights, np.diff(bins), bottom=y, align="edge", color=colour, alpha=0.45, lw=0)
            q1, median, q3, p95 = np.percentile(values, [25, 50, 75, 95])
            ax.plot([q1, q3], [y - 0.14] * 2, color=colour, lw=5, solid_capstyle="butt")
            ax.plot([median], [y - 0.14], marker="|", ms=14, mew=2.2, color=INK)
            ax.plot([p95], [y - 0.14], marker="^", ms=6, color=colour)
        ax.set_yticks([len(arms) - 1 - i for i in range(len(arms))], [_wall_label(n, w) for n, w in arms], fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(-0.4, len(arms) - 0.3)
        ax.grid(axis="y", visible=False)
        beyond = int((everything > bins[-1]).sum())
        note = f" ({beyond} slower, drawn at the edge)" if beyond else ""
        ax.set(xlabel=f"wall of one forward, ms{note}; bar: quartiles, |: median, ▲: p95", title=title)
        save(figure, path)


def _wall_label(name: str, walls: Sequence[float]) -> str:
    median, p95 = np.percentile(walls, [50, 95])
    return f"{name}\n{len(walls)} forwards\nmedian {median:.2f} ms\nmean {np.mean(walls):.2f}, p95 {p95:.2f}"


def _reach(walls: Sequence[float]) -> float:
    """Where an arm's axis may end: three times as far above its p95 as that is above the median; spikes lie beyond."""
    median, p95, most = np.percentile(walls, [50, 95, 100])
    return float(min(most, p95 + 3 * (p95 - median)))


def plot_bridge(path: Path, found: Diff, *, title: str = "", most: int = 9) -> None:
    """A waterfall from the first side's busy to the second's, at the first side's work: gains down, taxes up; what lies
    within noise is one grey step."""
    with rc_context(STYLE):
        ranked = sorted((r for r in found.classes if not r.within_noise), key=lambda r: -abs(r.delta_ms))
        shown = [r for r in ranked[:most] if abs(r.delta_ms) >= WORTH * found.before.busy_ms]
        rows = sorted(shown, key=lambda r: r.delta_ms)
        rest = sum(r.delta_ms for r in ranked if r not in shown)
        start = sum(r.before.ms for r in found.classes)
        steps = [(str(r.key[0]), r.delta_ms, GOOD if r.delta_ms < 0 else BAD) for r in rows]
        steps += [("the rest", rest, GOOD if rest < 0 else BAD)] if abs(rest) >= 0.005 else []
        steps += [("within noise", found.noise_ms, FAINT)] if abs(found.noise_ms) >= 0.005 else []
        end = start + found.net_ms + found.noise_ms
        figure = _figure(8.4, 4.4)
        ax = figure.subplots()
        labels = ["before", *(s for s, *_ in steps), "after"]
        ax.bar(0, start, color=BASE, width=0.62)
        level, levels = start, [start, end]
        for i, (_, delta, colour) in enumerate(steps, 1):
            ax.bar(i, delta, bottom=level, color=colour, width=0.62)
            ax.plot([i - 0.69, i + 0.31], [level, level], color="#8a8f98", lw=0.8)
            level += delta
            levels.append(level)
        ax.plot([len(steps) + 0.31, len(steps) + 0.69], [level, level], color="#8a8f98", lw=0.8)
        ax.bar(len(steps) + 1, end, color=BASE, width=0.62)
        span = max(levels) - min(levels)
        bottom = max(0.0, min(levels) - max(1.2 * span, 0.02 * start))
        top = max(levels) + max(0.25 * span, 0.004 * start)
        ax.set_ylim(bottom, top)
        pad = 0.012 * (top - bottom)
        level = start
        for i, (_, delta, _) in enumerate(steps, 1):
            ax.text(i, max(level, level + delta) + pad, f"{delta:+.2f}", ha="center", va="bottom", fontsize=9)
            level += delta
        for x, value in ((0, start), (len(steps) + 1, end)):
            ax.text(x, value + pad, f"{value:.2f}", ha="center", va="bottom", fontsize=9, fontweight="bold")
        ax.set_xticks(
            range(len(labels)),
            labels,
            rotation=0 if len(labels) <= 8 else 30,
            ha="center" if len(labels) <= 8 else "right",
        )
        ax.grid(axis="x", visible=False)
        broken = " (axis does not start at 0)" if bottom > 0 else ""
        unit = "busy, ms" if found.normalised_by == "tokens" else "busy at the first window's work, ms"
        ax.set_ylabel(unit + broken)
        ax.set_title(title or found.sums_text())
        save(figure, path)


def plot_queue(path: Path, queue: Queue, *, title: str = "") -> None:
    """Share × ratio, the bubble's area is the budget: top right is worth doing, under the parity line is terrain.

    A class without a reference stands at 1 / SOL, its ratio to the roofline, and is drawn hollow.
    """
    with rc_context(STYLE):
        figure = _figure(8.4, 4.8)
        ax = figure.subplots()
        points = []
        for c in queue.candidates:
            height = c.ratio if c.ratio is not None else 1 / c.sol if c.sol else None
            if height is not None and c.share > 0:
                points.append((c, height))
        most = max((c.budget_ms or 0.0 for c, _ in points), default=1.0) or 1.0
        shares = np.array([c.share for c, _ in points]) if points else np.array([0.01, 1])
        x_low, x_high = max(shares.min() / 1.8, 1e-4), min(shares.max() * 2.0, 1.6)
        heights = [h for _, h in points] or [1.0]
        y_low, y_high = min(0.7, min(heights) / 1.15), max(2.2, max(heights) * 1.35)
        x = np.geomspace(x_low, x_high, 200)
        busy = queue.table.busy_ms
        for (name, bar), style in zip(
            sorted(queue.bars.items(), key=lambda b: b[1]), ((0, (5, 3)), (0, (1, 2))), strict=False
        ):
            # Budget share · busy · (1 − 1/r) saves exactly the bar of the wall where r = 1 / (1 − need / (share · busy)).
            need = queue.wall_ms * (1 - 1 / (1 + bar))
            with np.errstate(divide="ignore", invalid="ignore"):
                curve = np.where(x * busy > need, 1 / (1 - need / (x * busy)), np.nan)
            curve = np.where(curve > PARITY, curve, np.nan)
            ax.plot(x, curve, color=BAD, lw=1.2, ls=style, label=f"clears the {name} bar ({bar:.1%})")
        ax.axhspan(y_low, PARITY, color="#eef1f4", lw=0)
        ax.text(
            x_low * 1.05,
            PARITY * 0.985,
            f"parity: ratio ≤ {PARITY:.2f}, no budget",
            va="top",
            fontsize=8.5,
            color="#6b7280",
        )
        for c, height in points:
            clears = any(c.clears.values())
            colour = GOOD if all(c.clears.values()) and c.clears else LEVER if clears else "#8a8f98"
            hollow = c.ratio is None
            ax.scatter(c.share, height, s=_size(c, most), facecolor="none" if hollow else colour, edgecolor=colour, alpha=0.75 if not hollow else 1,
                       linewidth=1.6, zorder=3)  # fmt: skip
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlim(x_low, x_high)
        ax.set_ylim(y_low, y_high)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:g}%"))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        ticks = [t for t in (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 20, 50, 100) if y_low <= t <= y_high]
        ax.set_yticks(ticks, minor=False)
        ax.minorticks_off()
        ax.set_xlabel("share of busy")
        ax.set_ylabel("ratio to the reference (hollow: to the roofline)")
        ax.set_title(title or "What is worth doing next")
        ax.set_xticks([t for t in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1) if x_low <= t <= x_high])
        ax.minorticks_off()
        ax.legend(loc="lower right", ncols=2)
        figure.draw_without_rendering()
        _label_points(ax, points, most)
        save(figure, path)


def _label_points(ax: Axes, points: Sequence[tuple[Candidate, float]], most: float) -> None:
    """Names to the right of their bubbles, largest budget first; a name that would touch an earlier one moves down."""
    taken: list[tuple[float, float]] = []
    for c, height in sorted(points, key=lambda p: -(p[0].budget_ms or 0.0)):
        x, y = ax.transData.transform((c.share, height)) * 72 / ax.figure.dpi  # points
        right = _size(c, most) ** 0.5 / 2 + 4
        down = 0.0
        while any(abs(x + right - a) < 115 and abs(y - down - b) < 11 for a, b in taken):
            down += 3
        taken.append((x + right, y - down))
        text = c.label if not c.budget_ms else f"{c.label}  {c.budget_ms:.1f} ms"
        ax.annotate(
            text, (c.share, height), xytext=(right, -down), textcoords="offset points", fontsize=9, va="center", zorder=4,
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip


def _size(c: Candidate, most: float) -> float:
    """A bubble's area in points²: proportional to the budget, never invisible."""
    return 40 + 1500 * (c.budget_ms or 0.0) / most


def plot_basket(path: Path, basket: Basket, *, bar: float, names: Sequence[str], title: str) -> None:
    """The 2 × 2: each lever alone, both, and the interaction, with intervals."""
    rows = [(names[0], basket.a), (names[1], basket.b), ("both", basket.both), ("interaction", basket.interaction)]
    with rc_context(STYLE):
        figure = _figure(8.4, 2.8)
        ax = figure.subplots()
        for i, (_, effect) in enumerate(rows):
            y, colour = len(rows) - 1 - i, (BASE, BASE, LEVER, "#8a6fb0")[i]
            ax.plot(effect.interval, [y, y], color=colour, lw=3, solid_capstyle="round")
            ax.plot([effect.estimate], [y], "o", color=colour, ms=8, mec="white")
            ax.annotate(
                f"{effect.estimate:+.2%}",
                (effect.estimate, y),
                xytext=(0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=9,
            )
        ax.axvline(0, color="#8a8f98", lw=1)
        ax.axvline(bar, color=BAD, lw=1.4, ls=(0, (5, 3)))
        ax.set_yticks([3, 2, 1, 0], [r[0] for r in rows])
        ax.set_ylim(-0.5, 3.7)
        ax.grid(axis="y", visible=False)
        _percent(ax.xaxis)
        ax.set(xlabel=f"gain of the wall (dashed: bar {bar:+.1%})", title=title)
        save(figure, path)


def plot_campaign(
    path: Path,
    *,
    walls: Sequence[tuple[str, Sequence[tuple[int, float, str | None]]]],
    references: Sequence[tuple[str, Sequence[tuple[int, float]]]],
) -> None:
    """Wall by round for every anchor (tokens, regime, device), and the multiple of each reference engine below it.

    walls: (anchor, [(round, ms, verdict)]); references: (name, [(round, reference wall / ours)]).
    """
    with rc_context(STYLE):
        panels = 2 if references else 1
        figure = _figure(8.4, 3.6 + 2.2 * (panels - 1))
        axes = figure.subplots(panels, 1, sharex=True, squeeze=False, height_ratios=[3, 2][:panels])
        ax = axes[0, 0]
        for i, (anchor, rows) in enumerate(walls):
            colour = (BASE, LEVER, "#8a6fb0", GOOD)[i % 4]
            numbers, values = [r[0] for r in rows], [r[1] for r in rows]
            ax.step(numbers, values, where="post", color=colour, lw=1.6, alpha=0.8, label=anchor)
            ax.scatter(
                numbers,
                values,
                s=46,
                zorder=3,
                color=[VERDICT_COLOUR[r[2]] for r in rows],
                edgecolor="white",
                linewidth=0.8,
            )
            ax.annotate(
                f"{values[-1]:.2f} ms",
                (numbers[-1], values[-1]),
                xytext=(8, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        seen = dict.fromkeys(r[2] for _, rows in walls for r in rows)
        marks = [
            Line2D([], [], marker="o", ls="", color=VERDICT_COLOUR[v], label=v or "open")
            for v in VERDICT_COLOUR
            if v in seen
        ]
        handles, _ = ax.get_legend_handles_labels()
        ax.legend(handles=[*handles, *marks], loc="center left", bbox_to_anchor=(1.0, 0.5))
        ax.set_ylabel("wall, ms")
        ax.set_title("The base's wall by round: every dot a round, coloured by its verdict")
        _grounded(ax, [r[1] for _, rows in walls for r in rows])
        if references:
            lower = axes[1, 0]
            for i, (name, rows2) in enumerate(references):
                colour = (BASE, LEVER, "#8a6fb0", GOOD)[i % 4]
                lower.plot([r[0] for r in rows2], [r[1] for r in rows2], "o-", color=colour, ms=5, lw=1.4, label=name)
            lower.axhline(1, color="#8a8f98", lw=1, ls=(0, (5, 3)))
            lower.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
            lower.set_ylabel("× the reference")
            lower.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        numbers = [r[0] for _, rows in walls for r in rows]
        axes[-1, 0].set_xlim(min(numbers) - 0.6, max(numbers) + 0.8)
        axes[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes[-1, 0].set_xlabel("round")
        save(figure, path)


def _grounded(ax: Axes, values: Sequence[float]) -> None:
    """Starts the axis at 0 unless the values would then fill less than a quarter of it; spans ±5 % of the median at least,
    so that noise does not look like a trend."""
    low, high = min(values), max(values)
    if high - low > 0.25 * high:
        ax.set_ylim(0, 1.1 * high)
        return
    middle, margin = float(np.median(values)), 0.1 * (high - low)
    ax.set_ylim(min(low - margin, 0.95 * middle), max(high + margin, 1.05 * middle))
