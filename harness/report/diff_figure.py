"""The figure of a diff: what each class gave or took, from 0, and what is within noise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.patches import Patch

from harness.attribution.diff import WORTH
from harness.report.style import GAIN, GRID, INK, MUTED, NOISE, RULE, TAX, Column, Page, elide, look, signed

if TYPE_CHECKING:
    from harness.attribution.diff import Diff, Row

MOST = 12
"""Classes of each sign that have a bar of their own."""
ROW = 0.27


def rises_above_noise(found: Diff) -> bool:
    """True when the figure has something to say: a change beyond noise that is worth 0.1 % of busy."""
    return any(abs(r.told_ms) >= WORTH * found.before.busy_ms for r in found.classes)


def diff_figure(path: Path, found: Diff, *, title: str = "") -> None:
    """One bar per class from 0: gains to the left, taxes to the right (hatched), within noise in grey; then their net.

    Times are at the first side's work. The bars of each kind add up to the sums in the heading.
    """
    bars = _bars(found)
    before = sum(r.before.ms for r in found.classes)
    change = found.net_ms + found.noise_ms
    same_work = found.normalised_by == "tokens" and found.work_factor == 1
    digits = 2 if before >= 10 else 3
    with look():
        columns = [
            Column("before, ms", [b.before(digits) for b in bars]),
            Column("after", [b.after(digits) for b in bars]),
            Column("change, ms", [signed(b.delta, digits) for b in bars], bold=[True] * len(bars), colours=[MUTED if b.ink == NOISE else b.ink for b in bars]),
            Column("", [b.word for b in bars], left=True),
        ]  # fmt: skip
        lines: list[str | tuple[str, str]] = [
            (found.sums_text(), INK),
            f"busy {before:.{digits}f} → {before + change:.{digits}f} ms ({signed(100 * change / before, 1)} %)"
            + ("" if same_work else ", at the first side's work"),
        ]
        spread = found.spread_text()
        foot = [f"Noise: {spread}; the pale band is what a class's own passes span together."] if spread else []
        if not title:
            lines.insert(0, " → ".join(elide(side.label, 4.0) for side in (found.before, found.after)))
        page = Page(title or "Busy time by class", [0.3 + ROW * len(bars) + 0.42, 0.3], lines, foot)
        axes = page.rows(0, [b.name for b in bars], columns, bold=[b.sum for b in bars], most=2.6)
        for y, b in enumerate(bars):
            if b.noise:
                axes.barh(y, 2 * b.noise, left=-b.noise, height=0.82, color=GRID, linewidth=0, zorder=1)
            axes.barh(y, b.delta, height=0.56, color=b.ink if b.ink != INK else RULE, linewidth=0, zorder=2,
                      hatch="/////" if b.ink == TAX else None, edgecolor="white")  # fmt: skip
        reach = [0.0, *(edge for b in bars for edge in (b.delta, b.noise, -b.noise))]
        room = 0.04 * (max(reach) - min(reach)) or 0.01 * before
        axes.set_xlim(min(reach) - room, max(reach) + room)
        axes.axvline(0, color=INK, lw=0.9, zorder=3)
        axes.axhline(sum(not b.sum for b in bars) - 0.5, color=RULE, lw=0.8)
        axes.xaxis.set_major_formatter(lambda v, _: f"{v:+g}".replace("-", "−") if v else "0")
        axes.set_xlabel("change of busy, ms: less ← 0 → more", labelpad=2)
        page.legend(1, _keys(bars), columns=4, y=0.04)
        page.save(path)


class _Bar:
    """One row of the figure: a class, several small ones together, or a sum."""

    def __init__(
        self, name: str, rows: list[Row], ink: str, *, total: bool = False, delta: float | None = None
    ) -> None:
        self.name, self.rows, self.ink, self.sum = name, rows, ink, total
        self.delta = sum(r.delta_ms for r in rows) if delta is None else delta
        self.noise = rows[0].noise_ms if len(rows) == 1 and not total else 0.0
        one = rows[0] if len(rows) == 1 and not total else None
        side = "new" if one and not one.before.launches else "gone" if one and not one.after.launches else ""
        kind = {GAIN: "gain", TAX: "tax", NOISE: "within noise"}.get(ink, "")
        self.word = "" if total else f"{kind}, {side}" if side else kind

    def before(self, digits: int) -> str:
        if self.sum:
            return ""
        held = any(r.before.launches for r in self.rows)
        return f"{sum(r.before.ms for r in self.rows):.{digits}f}" if held else "–"

    def after(self, digits: int) -> str:
        """At the first side's work."""
        if self.sum:
            return ""
        held = any(r.after.launches for r in self.rows)
        return f"{max(sum(r.before.ms + r.delta_ms for r in self.rows), 0.0):.{digits}f}" if held else "–"


def _bars(found: Diff) -> list[_Bar]:
    """Gains, largest first; taxes; what is within noise; the sums. Small ones of a kind share a bar."""
    bars: list[_Bar] = []
    worth = WORTH * found.before.busy_ms
    told = sorted((r for r in found.classes if not r.within_noise), key=lambda r: -abs(r.delta_ms))
    noisy = sorted((r for r in found.classes if r.within_noise), key=lambda r: -abs(r.delta_ms))
    for rows, ink, what in (
        ([r for r in told if r.delta_ms < 0], GAIN, "smaller gain"),
        ([r for r in told if r.delta_ms > 0], TAX, "smaller tax"),
        (noisy, NOISE, "smaller change"),
    ):
        large = [r for r in rows if abs(r.delta_ms) >= worth][:MOST]
        small = [r for r in rows if r not in large]
        bars += [_Bar(str(r.key[0]), [r], ink) for r in large]
        if small and (abs(sum(r.delta_ms for r in small)) >= 0.005 or not large):
            plural = "es" if what.endswith("x") else "s"
            name = str(small[0].key[0]) if len(small) == 1 else f"{len(small)} {what}{plural}"
            bars.append(_Bar(name, small, ink))
    bars.append(_Bar("net (gain + tax)", [], INK, total=True, delta=found.net_ms))
    if noisy:
        bars.append(_Bar("with what is within noise", [], INK, total=True, delta=found.net_ms + found.noise_ms))
    return bars


def _keys(bars: list[_Bar]) -> list[Patch]:
    seen = {b.ink for b in bars}
    keys = [
        (GAIN, Patch(facecolor=GAIN, label="direct gain: less time")),
        (TAX, Patch(facecolor=TAX, edgecolor="white", hatch="/////", linewidth=0, label="hidden tax: more time")),
        (NOISE, Patch(facecolor=NOISE, label="within noise: not told")),
    ]
    found = [patch for ink, patch in keys if ink in seen]
    if any(b.noise for b in bars):
        found.append(Patch(facecolor=GRID, label="what the passes span"))
    return found
