"""Ours against other engines: the terminal's table, the page, and the figure of the walls side by side."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from engine.titles import title
from harness.report.markdown import markdown_table
from harness.report.table import print_table, say
from harness.report.words import ms

NAMED = 4
"""How many roles the opening names of each difference."""


def ratio(value: float | None, one_window: bool) -> str:
    """Ours / theirs; "~" marks another window's figures, a dash what has no counterpart."""
    return "–" if value is None else f"{value:.2f}×" + ("" if one_window else "~")


def conclusion(record: dict[str, Any]) -> list[str]:
    """A sentence for each engine: device time and wall against ours, and the roles that make most of the difference."""
    ours = record["ours"]
    said = []
    for r in record["references"]:
        parts = sorted(
            ((role["theirs_ms"] or 0.0) - (role["ours_ms"] or 0.0), role["role"]) for role in r["roles"]
        )  # fmt: skip
        slower = r["busy_ms"] > ours["busy_ms"]
        largest = [f"{name} {abs(d):.1f}" for d, name in (parts[::-1] if slower else parts)[:NAMED]]
        said.append(
            f"{r['name']}: ours is busy for {ms(ours['busy_ms'])} ms where it takes {ms(r['busy_ms'])} ms "
            f"({ratio(r['busy_ratio'], r['one_window'])}; traced wall {ms(ours['traced_wall_ms'])} to {ms(r['traced_wall_ms'])} ms, "
            f"{ratio(r['wall_ratio'], r['one_window'])}). Most of those {abs(r['busy_ms'] - ours['busy_ms']):.1f} ms: {', '.join(largest)}."
        )
    return said


def table(record: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(columns, rows): a role a row, then busy, gap and traced wall; each engine's ms and the ratio of ours to it."""
    ours, references = record["ours"], record["references"]
    columns = ["role<", "ours, ms"]
    for r in references:
        columns += [f"{r['name']}, ms", "ratio"]
    roles = {role["role"]: role["ours_ms"] for r in references for role in r["roles"]}
    rows = []
    for name, mine in roles.items():
        row = [name, ms(mine)]
        for r in references:
            found = next((role for role in r["roles"] if role["role"] == name), None)
            row += [ms(found["theirs_ms"]), ratio(found["ratio"], r["one_window"])] if found else ["–", "–"]
        rows.append(row)
    for label, key, rate in (("busy", "busy_ms", "busy_ratio"), ("gap", "gap_ms", None), ("traced wall", "traced_wall_ms", "wall_ratio")):  # fmt: skip
        row = [label, ms(ours[key])]
        for r in references:
            row += [ms(r[key]), ratio(r[rate], r["one_window"]) if rate else ""]
        rows.append(row)
    return columns, rows


def legend(record: dict[str, Any]) -> str:
    """What the ratio is, and what does not compare."""
    text = (
        "ratio: ours / theirs, of µs per GMAC where the role has multiply-accumulates and of ms where it has none; below 1 ours is faster. "
        "–: one of the two has no such role."
    )
    if not all(r["one_window"] for r in record["references"]):
        text += " ~: another window's figures, so part of a ratio may be the machine's."
    return text


def print_against(record: dict[str, Any]) -> None:
    """The comparison on a terminal or in a pipe."""
    columns, rows = table(record)
    width = sum(2 + max(len(row[i].removesuffix("<")) for row in [columns, *rows]) for i in range(len(columns)))
    if width <= Console().width or len(record["references"]) == 1:
        print_table(columns, rows, rule_before=(len(rows) - 3,))
    else:
        for r in record["references"]:
            say(f"{r['name']}:")
            _, rows = table(record | {"references": [r]})
            print_table(["role<", "ours, ms", "theirs, ms", "ratio"], rows, rule_before=(len(rows) - 3,))
            say()
    say(legend(record), "dim")
    say()
    for line in conclusion(record):
        say(line)


def to_markdown(record: dict[str, Any], figure: str | None) -> str:
    """The page. figure: as it links it."""
    ours, references = record["ours"], record["references"]
    columns, rows = table(record)
    rows[-3:] = [[f"**{row[0]}**", *row[1:]] for row in rows[-3:]]
    names = " and ".join(r["name"] for r in references)
    lines = [f"# Ours against {names}, by role: {title(ours['model'])}, {record['tokens']} tokens", ""]
    lines += [f"- **{line.partition('). ')[0]}).** {line.partition('). ')[2]}" for line in conclusion(record)]
    if figure:
        lines += ["", f"![The traced wall of each engine, by role]({figure})"]
    lines += ["", markdown_table(columns, rows), "", legend(record)]
    lines += ["", "## What was compared", ""]
    header = ["engine<", "device<", "traced by<", "work, GMAC", "table<", "trace<"]
    held = [("ours", ours), *((r["name"], r) for r in references)]
    about = [
        [name, f["device"], f["source"], f"{f['gmac']:,.1f}", f"`{f['file']}`" if f.get("file") else "–",
         f"`{f['trace']}`, SHA-256 `{f['trace_sha256'][:16]}…`" if f.get("trace_sha256") else "its own, in process"]
        for name, f in held
    ]  # fmt: skip
    lines.append(markdown_table(header, about))
    for name, f in held[1:]:
        lines += ["", *(f"- {name}: {note}." for note in f["notes"])]
    if traced := [line for _, f in held[1:] if (line := _decompose_line(f, record["tokens"]))]:
        lines += ["", "Tables of recorded traces, which are not kept here, by:", "", "```sh", *traced, "```"]
    lines += [
        "",
        "A recorded trace holds the span from its first launch to its last, without the host's time before that.",
    ]
    if record.get("command"):
        lines += ["", "Made from those tables by:", "", "```sh", record["command"], "```"]
    return "\n".join(lines) + "\n"


def _decompose_line(facts: dict[str, Any], tokens: int) -> str:
    """The command that decomposes the trace that a table names; "" for a table of no trace."""
    if not facts.get("trace"):
        return ""
    which = re.search(r"occurrence (\d+) of", " ".join(facts["notes"]))
    words = ["harness", "decompose", "--trace", facts["trace"], "--gguf", facts["model"], "--tokens", str(tokens)]
    words += ["--occurrence", which[1]] if which else []
    words += ["--tail", facts["tail"]] if facts.get("tail") else []
    return shlex.join([*words, "--json", Path(facts["file"]).name])
