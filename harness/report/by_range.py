"""A decomposition by named range: the table on a terminal or in a pipe, as Markdown, and every row as CSV."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

from rich.console import Console

from harness.attribution.decomposition import Decomposition, RangeRow
from harness.report.markdown import markdown_table
from harness.report.table import print_table, say, shortened
from harness.report.words import clock

TITLE = "By named range, each without the ranges inside it"
LINES = 40
"""Printed at most, the longest ranges first; JSON and CSV have all."""
HEADS = ("class<", "ms", "share", "busy ms", "launches", "×", "range…")
_NAMES = {"outside": "outside any range", "no_call": "call not recorded"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True)
class _Line:
    cells: list[str]
    style: str


def name_of(row: RangeRow) -> str:
    """ "prefill / layer0 / attn", on one line whatever the text holds."""
    return " / ".join(_CONTROL.sub(" ", part).strip() or "(unnamed)" for part in row.path) or _NAMES[row.kind]


def print_ranges(result: Decomposition, console: Console) -> None:
    """The longest ranges with their classes, the rest in one row, what is outside, and the sum. Names are last on a line,
    so that one that is whole in a pipe moves no figure."""
    lines, total = _lines(result)
    print_table(
        HEADS,
        [line.cells for line in [*lines, total]],
        drop=["busy ms", "×", "launches"],
        rule_before=[len(lines)],
        styles=[line.style for line in [*lines, total]],
        cut=_ends,
        console=console,
    )
    if rest := _split(result)[1]:
        say(f"{_more(rest)}, {clock(sum(r.sum_ms for r in rest))}: --json and --csv have all", "dim", console=console)


def to_markdown(result: Decomposition) -> str:
    """The same lines as a Markdown table; "" without ranges."""
    if not result.ranges:
        return ""
    lines, total = _lines(result)
    rows = [[*line.cells[-1:], *line.cells[:-1]] for line in [*lines, total]]
    return markdown_table(["range<", *HEADS[:-1]], rows)


def to_csv(result: Decomposition) -> str:
    """One line per range and class: kind, range, instances, class, weight_type, launches, sum_ms, union_ms, share."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["kind", "range", "instances", "class", "weight_type", "launches", "sum_ms", "union_ms", "share"])
    for row in result.ranges:
        for part in row.classes:
            out.writerow([row.kind, name_of(row), row.instances, part.cls, part.weight_type, part.launches,
                          f"{part.sum_ms:.6f}", f"{part.union_ms:.6f}", f"{part.share:.6f}"])  # fmt: skip
    return text.getvalue()


def _split(result: Decomposition) -> tuple[list[RangeRow], list[RangeRow]]:
    """(ranges that are printed, the rest)."""
    named = [row for row in result.ranges if row.kind == "range"]
    height = 0
    for i, row in enumerate(named):
        height += len(row.classes) + (len(row.classes) > 1)
        if i and height > LINES:
            return named[:i], named[i:]
    return named, []


def _more(rest: list[RangeRow]) -> str:
    return f"… and {len(rest):,} more range{'s' if len(rest) > 1 else ''}"


def _lines(result: Decomposition) -> tuple[list[_Line], _Line]:
    """(lines of the table, the line of the sum)."""
    shown, rest = _split(result)
    lines = [line for row in shown for line in _of_row(result, row)]
    if rest:
        launches, instances = sum(r.launches for r in rest), sum(r.instances for r in rest)
        lines.append(_line(result, "", sum(r.sum_ms for r in rest), None, launches, instances, _more(rest), "dim"))
    for row in result.ranges:
        if row.kind != "range":
            lines += _of_row(result, row)
    total = result.busy_ms + result.overlap_ms
    return lines, _line(result, "sum", total, result.busy_ms, result.launches, 0, "busy + overlap", "bold")


def _line(
    result: Decomposition, cls: str, ms: float, busy: float | None, launches: int, instances: int, name: str, style: str
) -> _Line:
    digits = 1 if result.busy_ms >= 1000 else 2 if result.busy_ms >= 10 else 3
    share = f"{ms / result.busy_ms:.1%}" if result.busy_ms else ""
    held = "" if busy is None else f"{busy:,.{digits}f}"
    times = f"{instances:,}" if instances else ""
    return _Line([cls, f"{ms:,.{digits}f}", share, held, f"{launches:,}", times, name], style)


def _of_row(result: Decomposition, row: RangeRow) -> list[_Line]:
    """A range's line, and where it has several classes one for each below it."""
    labels = [f"{part.cls} {part.weight_type}".removesuffix(" -") for part in row.classes]
    what = labels[0] if len(labels) == 1 else f"{len(labels)} classes"
    lines = [_line(result, what, row.sum_ms, row.union_ms, row.launches, row.instances, name_of(row), "")]
    if len(labels) > 1:
        lines += [
            _line(result, f"– {label}", part.sum_ms, part.union_ms, part.launches, 0, "", "dim")
            for label, part in zip(labels, row.classes, strict=True)
        ]
    return lines


def _ends(name: str, width: int) -> str:
    """The name in at most `width` signs: the outermost range and as many of the innermost ones as fit, which tell it apart."""
    outer, *inner = name.split(" / ")
    if len(name) <= width or not inner:
        return shortened(name, width)
    for kept in range(len(inner) - 1, 0, -1):
        if len(text := " / ".join([outer, "…", *inner[-kept:]])) <= width:
            return text
    room = width - len(inner[-1]) - 3
    by = " / " if len(inner) == 1 else " … "
    return f"{shortened(outer, room)}{by}{inner[-1]}" if room >= 6 else shortened(f"… / {inner[-1]}", width)
