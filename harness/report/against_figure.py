"""The figure of ours against other engines: every role's time side by side, then the gap and the wall."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.titles import title
from harness.report.style import BODY, GAIN, INK, LEVER, MARK, RULE, SMALL, Column, Page, elide, look, text_width

ENGINES = (("#27459F", ""), (LEVER, "////"), ("#8C1446", "...."), (GAIN, "xxxx"), (MARK, "----"))
"""Colour and hatch of ours and of each reference; beyond four references they repeat."""
WORTH = 0.005
"""Roles below 0.5 % of the longest wall share a row."""
BAR = 0.12
"""Height of one bar, inches."""


def against_figure(record: dict[str, Any], path: Path) -> None:
    """One group of bars per role, one bar per engine in the order of the heading; ms and ours / theirs beside them.

    record: the "against/1" mapping: `tokens`; `ours` and each of `references` with name, model, device, gap_ms,
    traced_wall_ms; each reference with `roles` [{role, ours_ms, theirs_ms, ratio}], wall_ratio and one_window.
    """
    ours, references = record["ours"], record["references"]
    engines = [("ours", ours), *((r["name"], r) for r in references)]
    groups = _groups(ours, references)
    walls = "traced wall: " + ", ".join(f"{name} {_ms(e['traced_wall_ms'])} ms" for name, e in engines)
    with look():
        columns = [Column("ours, ms", [_ms(g[1][0]) for g in groups])]
        for i, r in enumerate(references, 1):
            mark = "" if r["one_window"] else "~"
            columns.append(Column(f"{_headed(r['name'])}, ms", [_ms(g[1][i]) for g in groups]))
            columns.append(Column("ratio", ["–" if g[2][i] is None else f"{g[2][i]:.2f}×{mark}" for g in groups]))
        foot = ["Ratio: ours over theirs, per MAC where a role has MACs; below 1 ours takes less time."]
        if not all(r["one_window"] for r in references):
            foot.append("~: another window's figures, so part of a ratio may be the machine's.")
        height = BAR * len(engines) + 0.12
        page = Page(f"{title(ours['model'])} · {record['tokens']} tokens · {ours['device']}", [0.25 + height * len(groups) + 0.42, 0.3],
                    [(walls, INK), "one traced prefill by role"], foot)  # fmt: skip
        axes = page.rows(
            0, [name for name, *_ in groups], columns, bold=[name == "traced wall" for name, *_ in groups], most=1.6
        )
        for y, (_, times, _) in enumerate(groups[:-1]):  # the wall is told, not drawn: it would dwarf its parts
            for i, time in enumerate(times):
                shade, hatch = ENGINES[i % len(ENGINES)]
                at = y + (i - (len(engines) - 1) / 2) * BAR / height
                axes.barh(
                    at,
                    time or 0.0,
                    height=0.82 * BAR / height,
                    color=shade,
                    hatch=hatch,
                    edgecolor="white",
                    linewidth=0,
                )
        axes.axhline(len(groups) - 1.5, color=RULE, lw=0.8)
        axes.set_xlim(0, 1.02 * max(t or 0.0 for _, times, _ in groups[:-1] for t in times))
        axes.set_xlabel("ms of one prefill", labelpad=2)
        page.legend(1, _keys([name for name, _ in engines]), columns=len(engines), y=0.04)
        page.save(path)


def _headed(name: str) -> str:
    """An engine's name over its column: its first words, as many as fit; the key has it whole."""
    words = name.split()
    while len(words) > 1 and text_width(" ".join(words), SMALL) > 1.1:
        words.pop()
    return elide(" ".join(words), 1.1, SMALL)


def _keys(names: list[str]) -> list[Any]:
    from matplotlib.patches import Patch

    pairs = [(name, *ENGINES[i % len(ENGINES)]) for i, name in enumerate(names)]
    return [
        Patch(facecolor=shade, hatch=hatch, edgecolor="white", linewidth=0, label=elide(name, 2.2, BODY))
        for name, shade, hatch in pairs
    ]


Group = tuple[str, list[float | None], list[float | None]]


def _groups(ours: dict[str, Any], references: list[dict[str, Any]]) -> list[Group]:
    """(name, ms of every engine, ratio to every engine): roles, the longest first; the small ones together; gap; wall."""
    roles: dict[str, Group] = {}
    for i, r in enumerate(references, 1):
        for role in r["roles"]:
            name = role["role"]
            blank: Group = (name, [role["ours_ms"], *([None] * len(references))], [None] * (len(references) + 1))
            group = roles.setdefault(name, blank)
            group[1][i], group[2][i] = role["theirs_ms"], role["ratio"]
    least = WORTH * max(e["traced_wall_ms"] for e in (ours, *references))
    ranked = sorted(roles.values(), key=lambda g: -max(t or 0.0 for t in g[1]))
    shown = [g for g in ranked if max(t or 0.0 for t in g[1]) >= least]
    small = ranked[len(shown) :]
    none: list[float | None] = [None] * (len(references) + 1)
    if small:
        shown.append((f"{len(small)} more", [sum(g[1][i] or 0.0 for g in small) for i in range(len(none))], none))
    shown.append(("gap", [e["gap_ms"] for e in (ours, *references)], none))
    walls: list[float | None] = [e["traced_wall_ms"] for e in (ours, *references)]
    return [*shown, ("traced wall", walls, [None, *(r["wall_ratio"] for r in references)])]


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
