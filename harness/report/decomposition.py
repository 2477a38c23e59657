"""A decomposition for a person: the table on a terminal (colour) or in a pipe (plain), and Markdown.

A narrow terminal drops the columns that are needed least; the JSON always has all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from harness.attribution.checks import CEILING_SLACK
from harness.attribution.classify import short_name
from harness.attribution.decompose import headline
from harness.attribution.decomposition import ClassRow, Decomposition
from harness.report import by_range
from harness.report.markdown import templates
from harness.report.table import print_table, say
from harness.report.words import WALL, clock, in_one_unit

BAR_CELLS = 10


@dataclass(frozen=True)
class Column:
    """One column: its header, its text for a row, and when to drop it (1 first; 0 never)."""

    header: str
    text: Callable[[ClassRow], str]
    drop: int = 0
    left: bool = False


def columns_of(result: Decomposition) -> list[Column]:
    """Every column that this decomposition has something for, in reading order."""
    digits = 1 if result.busy_ms >= 1000 else 2 if result.busy_ms >= 10 else 3
    ms = f",.{digits}f"
    rows = result.classes
    some = {
        name: any(getattr(r, name) is not None for r in rows)
        for name in ("gmac", "gb_per_s", "sol", "ratio", "budget_ms")
    }
    typed = any(r.weight_type != "-" for r in rows)
    columns = [Column("class", lambda r: r.cls, left=True)]
    if typed:
        columns.append(Column("weights", lambda r: "" if r.weight_type == "-" else r.weight_type, drop=9, left=True))
    columns += [
        Column("launches", lambda r: f"{r.launches:,}", drop=5),
        Column("ms", lambda r: f"{r.sum_ms:{ms}}"),
        Column("share", lambda r: f"{r.share:.1%}"),
        Column("", lambda r: bar(r.share), drop=1, left=True),
    ]
    if some["gmac"]:
        columns += [
            Column("GMAC", lambda r: figure(r.gmac) if r.gmac else "", drop=4),
            Column("µs/GMAC", lambda r: figure(r.us_per_gmac)),
            Column("TFLOP/s", lambda r: figure(r.tflop_per_s), drop=6),
        ]
    if some["gb_per_s"]:
        columns.append(Column("GB/s", lambda r: figure(r.gb_per_s), drop=3))
    if some["sol"]:
        columns += [
            Column("bound", lambda r: r.bound or "", drop=8, left=True),
            Column("SOL", lambda r: percent(r.sol)),
        ]
    if some["ratio"]:
        mark = "" if (result.reference or {}).get("one_window", True) else "~"
        columns += [
            Column("ref µs/GMAC", lambda r: figure(r.ref_us_per_gmac), drop=2),
            Column("ratio", lambda r: f"{r.ratio:.2f}×{mark}" if r.ratio is not None else ""),
        ]
    if some["budget_ms"]:
        columns.append(Column("budget", lambda r: f"{r.budget_ms:{ms}}" if r.budget_ms is not None else "", drop=7))
    return columns


def figure(value: float | None) -> str:
    """Three significant digits or so: 0.0123, 2.65, 753, 12,191, 161k."""
    if value is None:
        return ""
    if abs(value) >= 99_950:
        return f"{value / 1e6:,.3g}M" if abs(value) >= 999_500 else f"{value / 1e3:,.0f}k"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.0995 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A fraction as a whole percentage; below 1 % with a digit more."""
    if value is None:
        return ""
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}"


def above_roof(result: Decomposition) -> str:
    """What an SOL above 100 % means, for wherever a table with one is shown; "" where no row prints one."""
    over = [r for r in result.classes if r.sol is not None and round(100 * r.sol) > 100]
    if not over:
        return ""
    limit = next((c.limit for c in result.checks if c.name == "possibility" and c.limit), 1 + CEILING_SLACK)
    names = ", ".join(dict.fromkeys(f"{r.cls} {percent(r.sol)}" for r in over))
    cached = "; bytes may come from cache, whose ceiling is higher" if any(r.bound == "memory" for r in over) else ""
    return f"SOL above 100 % ({names}): ceilings are measured too, and the check tolerates {limit - 1:.0%} above one{cached}."


def bar(share: float) -> str:
    """A horizontal bar of a share, in eighths of a cell."""
    eighths = round(min(share, 1.0) * BAR_CELLS * 8)
    return "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")


def totals(result: Decomposition) -> list[tuple[str, str, str]]:
    """(name, ms, share of busy) of the lines under the classes."""
    digits = 1 if result.busy_ms >= 1000 else 2 if result.busy_ms >= 10 else 3
    lines = [("busy", result.busy_ms), ("+ gap", result.gap_ms), ("= traced wall", result.traced_wall_ms)]
    if result.overlap_ms > 5e-4:
        lines.insert(0, ("− overlap", result.overlap_ms))
    # Beyond ten times busy a percentage is no longer read; the milliseconds are.
    return [
        (name, f"{ms:,.{digits}f}", f"{ms / result.busy_ms:.1%}" if ms < 10 * result.busy_ms else "")
        for name, ms in lines
    ]


def print_decomposition(result: Decomposition, console: Console | None = None) -> None:
    """The whole answer: what was measured, the table, the checks, the provenance, and one line that sums it up."""
    console = console or Console(highlight=False)
    for line, style in heading(result):
        say(line, style, console=console)
    say(console=console)
    _print_table(result, console)
    if result.roles:  # the second view of a foreign trace: the same launches by what they are for
        say("\nBy role, from launch order:\n", console=console)
        _print_table(result.model_copy(update={"classes": result.roles}), console)
    if result.ranges:
        say(f"\n{by_range.TITLE}:\n", console=console)
        by_range.print_ranges(result, console)
    say(console=console)
    _print_below(result, console)
    say(console=console)
    say(headline(result), "bold", console=console)


def heading(result: Decomposition) -> list[tuple[str, str]]:
    """(line, style) of what was measured, and the wall."""
    what = [titled(result)]
    if result.tokens:
        what.append(f"{result.tokens} tokens")
    what += [part for part in (result.device, result.regime if result.walls_ms else "") if part]
    lines = [(" · ".join(what), "bold")]
    (median, *ends), unit = in_one_unit(
        [result.wall_ms, *(f(result.walls_ms) for f in (min, max) if result.walls_ms)], WALL
    )
    wall = f"wall {median} {unit}"
    if result.walls_ms:
        wall += f" median of {len(result.walls_ms)} ({' … '.join(ends)} {unit})"
    if result.tok_per_s:
        several = result.prefills and result.prefills > 1
        wall += f"{f' with {result.prefills} prefills, of one' if several else ' ='} {result.tok_per_s:,.0f} tok/s"
    if result.band_tok_per_s:
        wall += f" ({result.band_tok_per_s[0]:,.0f} … {result.band_tok_per_s[1]:,.0f})"
    if result.vs_reference:
        wall += f", {result.vs_reference:.2f}× the reference's speed"
    lines.append((wall, ""))
    changed = changed_levers(result)
    if changed:
        lines.append((f"levers {changed}", ""))
    if result.structure:
        lines.append((result.structure, "dim"))
    return lines


def changed_levers(result: Decomposition) -> str:
    """The levers that differ from their defaults, as `name=value`."""
    from engine.levers import Levers

    defaults = Levers().to_dict()
    return " ".join(f"{k}={v}" for k, v in result.levers.items() if defaults.get(k) != v)


def titled(result: Decomposition) -> str:
    """The model's name for a heading; its identifier stays `result.model`."""
    from engine.titles import title

    return str(result.provenance.get("model_title") or title(result.model)) or "recorded trace"


def _print_table(result: Decomposition, console: Console) -> None:
    columns = columns_of(result)
    rows: list[list[Text]] = [[_cell(c, row) for c in columns] for row in result.classes]
    for name, ms, share in totals(result):
        cells = {"class": name, "ms": ms, "share": share}
        if name == "busy":
            cells |= {"launches": f"{result.launches:,}"}
        style = "bold" if name == "busy" else "dim"
        rows.append([Text(cells.get(c.header, ""), style=style) for c in columns])
    print_table(
        [c.header + "<" * c.left for c in columns],
        rows,
        drop=[c.header for c in sorted(columns, key=lambda c: c.drop) if c.drop],
        rule_before=[len(result.classes)],
        console=console,
    )


def _cell(column: Column, row: ClassRow) -> Text:
    text = column.text(row)
    style = ""
    if row.cls == "other":
        style = "red"
    elif column.header == "SOL" and row.sol is not None:
        style = "green" if row.sol >= 0.75 else "yellow" if row.sol >= 0.4 else "red"
    elif column.header == "ratio" and row.ratio is not None:
        style = "green" if row.ratio <= 1.10 else "yellow" if row.ratio <= 2 else "red"
    elif column.header == "":
        style = "cyan"
    elif column.header in ("class", "ms"):
        style = "bold"
    return Text(text, style=style)


def _print_below(result: Decomposition, console: Console) -> None:
    """Checks, what it was measured on, and notes, their texts aligned."""
    rows: list[list[Text]] = []
    for check in result.checks:
        mark = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        rows.append([mark, Text(check.name), Text(check.detail, style="dim" if check.ok else "red")])
    rows.append([Text("on"), Text(), Text(provenance_line(result), style="dim")])
    rows += [
        [Text(name), Text(), Text(line)] for name, line in gap_lines(result, NAME if console.is_terminal else None)
    ]
    for note in filter(None, [above_roof(result), *result.notes]):
        rows.append([Text("note", style="yellow"), Text(), Text(note)])
    print_table(["<", "<", "<"], rows, between=1, console=console)


NAME = 36
"""Characters of a kernel's name beside the checks on a terminal of 60 columns."""


def gap_lines(result: Decomposition, width: int | None = None) -> list[tuple[str, str]]:
    """(name, line): the gap by cause where calls tell it, and the longest waits where the gap is worth a look (2 % of the
    wall). width: of a kernel's name, which a narrow terminal has no room for; None: whole."""
    lines = []
    causes = {cause: ms for cause, ms in result.gap_causes_ms.items() if ms >= 5e-4}
    if causes:
        figures, unit = in_one_unit(list(causes.values()), WALL)
        lines.append(("gap", ", ".join(f"{cause} {v} {unit}" for cause, v in zip(causes, figures, strict=True))))
    if result.regime == "recorded" and result.gap_ms >= 0.02 * result.traced_wall_ms:
        for idle in [i for i in result.idle[:3] if i.ms >= 0.02 * result.gap_ms]:
            cause = f", {idle.cause}" if idle.cause else ""
            lines.append(
                (
                    "idle",
                    f"{clock(idle.ms)} at {clock(idle.start_ms)}, {short_name(idle.before, width)} → {short_name(idle.after, width)}{cause}",
                )
            )
    return lines


def provenance_line(result: Decomposition) -> str:
    """The provenance in one paragraph: device, driver, clocks, commit, model's hash, source, protocol."""
    p = result.provenance
    clocks = p.get("clocks") or {}
    parts = [p.get("gpu") or p.get("cpu") or result.device]
    if p.get("driver"):
        parts.append(f"driver {p['driver']}")
    if clocks:
        mean = clocks.get("mean_sm_mhz") or clocks.get("sm_mhz") or 0
        parts.append(f"SM {mean:.0f} of {clocks.get('sm_max_mhz')} MHz, memory {clocks.get('memory_mhz')} MHz")
    if p.get("power_limit_w"):
        parts.append(f"power limit {p['power_limit_w']:.0f} W")
    if p.get("threads"):
        parts.append(f"{p['threads']} threads")
    if p.get("commit"):
        parts.append(f"engine {p['commit']}")
    if p.get("model_sha256"):
        parts.append(f"model {str(p['model_sha256'])[:12]}")
    parts.append(f"source {result.source}")
    protocol = p.get("protocol")
    if isinstance(protocol, dict):
        parts.append(f"protocol {protocol.get('name')} ({protocol.get('regime')})")
    c = result.ceilings
    if c:
        parts.append(
            f"ceilings {figure(c['tflop_per_s'])} TFLOP/s {c['precision']}, {figure(c['gb_per_s'])} GB/s (cache {figure(c['cache_gb_per_s'])})"
        )
    if result.config_hash:
        parts.append(f"configuration {result.config_hash}")
    return " · ".join(str(part) for part in parts if part)


def to_markdown(result: Decomposition, figure_path: str | None = None) -> str:
    """The same as Markdown, every column kept. figure_path: as the Markdown file should link it."""
    columns = columns_of(result)
    return templates().get_template("decomposition.md.j2").render(
        d=result, title=titled(result), heading=heading(result), headline=headline(result), totals=totals(result),
        columns=columns, provenance=provenance_line(result), figure=figure_path, protocol=_protocol(result), bar=bar,
        above_roof=above_roof(result), ranges=by_range.to_markdown(result), ranges_title=by_range.TITLE,
    )  # fmt: skip


def _protocol(result: Decomposition) -> dict[str, Any]:
    protocol = result.provenance.get("protocol")
    return protocol if isinstance(protocol, dict) else {}
