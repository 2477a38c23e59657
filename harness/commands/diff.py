"""`harness diff`: what changed between two decompositions or traces?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.commands._options import FILE, json_option, written_as
from harness.errors import Exit, HarnessError

if TYPE_CHECKING:
    from harness.attribution.diff import Diff, Row, Side


@click.command(short_help="What changed between two tables or traces?")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("--device", type=int, help="With traces: one device's launches only.  [default: all devices, pooled]")
@click.option("--rules", type=FILE, multiple=True, help="With traces: a rule file, tried before the packaged ones.")
@click.option(
    "--tokens",
    metavar="A[:B]",
    help="Tokens of one prefill, of both or of BEFORE and AFTER, where a side does not say.",
)
@click.option("--occurrence", metavar="A[:B]", help="With traces: the K-th prefill of each, by the repeating launches.")
@click.option("--range", "range_", metavar="NVTX", help="With traces: only what this NVTX range submitted.")
@click.option("--equal-work", is_flag=True, help="Declare that both sides computed the same.")
@click.option(
    "--across-windows",
    is_flag=True,
    help="Declare that two windows, regimes or devices may be compared as absolute times.",
)
@click.option(
    "--kernels",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="With traces: how many kernels to list by name.",
)
@click.option(
    "--plot",
    type=FILE,
    callback=written_as("a figure", ".png", ".svg", ".pdf"),
    help="Write what each class gained or cost (PNG, SVG or PDF).",
)
@click.option(
    "--markdown", type=FILE, callback=written_as("Markdown", ".md", ".markdown"), help="Write it as Markdown."
)
@json_option('"diff/1" JSON')
def command(
    before: Path, after: Path, device: int | None, rules: tuple[Path, ...], tokens: str | None, occurrence: str | None,
    range_: str | None, equal_work: bool, across_windows: bool, kernels: int, plot: Path | None, markdown: Path | None,
    json_path: str | None,
) -> int:  # fmt: skip
    """Compare BEFORE with AFTER by class: direct gains, hidden taxes, launches, time per launch.

    Each is a decomposition's JSON, or a trace (nsys .sqlite or .nsys-rep, Kineto .json, launches.parquet). Times are
    subtracted where both did the same work: by their tokens, by the launches that did not change, or as declared; else
    the output says that the work is unknown. Never by their windows' length.
    """
    from harness.attribution.diff import diff
    from harness.files import check_writable, emit_json, write_atomic

    for path in (json_path, markdown, plot):
        check_writable(path)
    of_tokens, of_occurrence = _pair(tokens, "--tokens"), _pair(occurrence, "--occurrence")
    sides = [
        _side(path, device, rules, t, k, range_)
        for path, t, k in zip((before, after), of_tokens, of_occurrence, strict=True)
    ]
    found = diff(*sides, across_windows=across_windows, equal_work=equal_work)
    if plot:
        from harness.report.diff_figure import diff_figure

        diff_figure(plot, found)
    if markdown:
        write_atomic(markdown, to_markdown(found))
    if json_path:
        emit_json(found.to_json(), json_path)
    if json_path != "-":
        show(found, kernels)
    return Exit.DONE


def _pair(text: str | None, option: str) -> tuple[int | None, int | None]:
    """ "3325" or "3325:2659" as a number for each side. Raises a usage error for anything else."""
    if text is None:
        return None, None
    first, colon, second = text.partition(":")
    numbers = (first, second) if colon else (first, first)
    if not all(n.isascii() and n.isdecimal() and int(n[:19]) > 0 for n in numbers):
        raise click.UsageError(f"{option} {text!r} is not A or A:B with whole numbers from 1.")
    return int(numbers[0][:19]), int(numbers[1][:19])


def _side(
    path: Path,
    device: int | None,
    rules: tuple[Path, ...],
    tokens: int | None,
    occurrence: int | None,
    range_: str | None,
) -> Side:
    """A side from either kind of file: JSON that says it is a decomposition is one, everything else is a trace."""
    from harness.attribution.decomposition import load_decomposition
    from harness.attribution.diff import side_of_decomposition, side_of_launches

    if path.suffix == ".json" and is_decomposition(path):
        table = load_decomposition(path)
        if occurrence is not None or range_ is not None:
            raise click.UsageError(
                f"--{'occurrence' if occurrence is not None else 'range'} goes with traces, and {path} is a decomposition of one window."
            )
        if tokens and table.tokens and tokens * (table.prefills or 1) != table.tokens:
            raise HarnessError(
                f"{path} is of {table.tokens // (table.prefills or 1)} tokens, not {tokens}; correct --tokens or leave it out."
            )
        if tokens and not table.tokens:
            table = table.model_copy(update={"tokens": tokens * (table.prefills or 1)})
        return side_of_decomposition(table, str(path))
    from harness.attribution.recorded import classified_launches

    launches, source, unsound = classified_launches(
        path, device=device, rules=rules, range_=range_, occurrence=occurrence
    )
    return side_of_launches(
        launches, str(path), source=source, tokens=tokens, prefills=1 if occurrence else None, unsound=unsound
    )


LARGEST_TABLE = 64 << 20
"""A decomposition has some kilobytes; JSON of more bytes than this is a trace and is streamed, never loaded whole."""


def is_decomposition(path: Path) -> bool:
    """True for JSON that is no trace: a decomposition, or something whose reader will say what is wrong with it."""
    import json

    try:
        if path.stat().st_size > LARGEST_TABLE:
            return False
        with path.open(encoding="utf-8") as file:
            head = file.read(4096)
    except (OSError, UnicodeDecodeError):
        return True
    if "traceEvents" in head or "deviceProperties" in head:
        return False
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not (isinstance(data, list) or (isinstance(data, dict) and "traceEvents" in data))


def show(found: Diff, kernels: int = 8) -> None:
    """The diff on a terminal or in a pipe."""
    from harness.report.table import say

    per_launch = found.work.per_launch
    say(f"{found.before.label} → {found.after.label}", "bold")
    say(work_line(found), "" if found.work.known else "yellow")
    say()
    floor = 0.001 * found.before.busy_ms
    rows = [_cells(r, str(r.key[0])) for r in found.classes]
    styles = ["" if abs(r.told_ms) < floor else "green" if r.delta_ms < 0 else "red" for r in found.classes]
    total_before, total_after = (sum(getattr(r, side).ms for r in found.classes) for side in ("before", "after"))
    sums = {
        "before": f"{total_before:.2f}",
        "after": f"{total_after:.2f}",
        "delta ms": f"{found.net_ms + found.noise_ms:+.2f}",
    }
    rows.append({"": "sum"} | ({"delta ms": sums["delta ms"]} if per_launch else sums))
    _print("class", rows, per_launch, [*styles, "bold"])
    if found.types:
        say()
        _print("class, weights", [_cells(r, f"{r.key[0]} {r.key[1]}") for r in found.types], per_launch)
    if found.kernels and kernels:
        say()
        _print("kernel", [_cells(r, r.key[1]) for r in found.kernels[:kernels]], per_launch)
    say()
    for what, same, detail in found.comparable:
        if same is not True:
            say(f"{'differs' if same is False else 'unknown'}: {what} ({detail})", "yellow" if same is False else "dim")
    for note in found.notes:
        say(f"note: {note}", "yellow")
    unit = " at the first window's launches" if per_launch else ""
    noisy = [str(r.key[0]) for r in found.classes if r.within_noise and abs(r.delta_ms) >= floor]
    if spread := found.spread_text():
        say(f"noise: {spread}" + (f"; within it: {', '.join(noisy)}" if noisy else ""))
    say(found.sums_text() + unit)
    say(found.sentence(), "bold")


def work_line(found: Diff) -> str:
    """How the work of the two sides compares, and how that is known."""
    if not found.work.known:
        return f"work unknown: totals are compared ({found.work.detail})"
    factor = f", work factor {found.work_factor:.3f}" if found.work_factor != 1 else ""
    return f"normalised by {found.normalised_by}{factor}: {found.work.detail}"


def to_markdown(found: Diff) -> str:
    """The diff as a Markdown page: what is compared, how the work is known, the classes, the notes, the sums."""
    lines = [
        f"# {found.before.label} → {found.after.label}", "", f"{work_line(found)}.", "",
        "| class | launches | before, ms | after, ms | delta, ms | change |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in found.classes:
        cells = _cells(row, str(row.key[0]))
        lines.append(
            "| " + " | ".join(cells[c] for c in ("", "launches", "before", "after", "delta ms", "change")) + " |"
        )
    lines += ["", f"{found.sums_text()}.", "", f"**{found.sentence()}**"]
    if found.notes:
        lines += ["", *(f"- {note}" for note in found.notes)]
    return "\n".join(lines) + "\n"


COLUMNS = ("launches", "µs/launch", "→", "before", "after", "delta ms", "change")
PER_LAUNCH, TOTALS = ("µs/launch", "→"), ("before", "after")


def _print(first: str, rows: list[dict[str, str]], per_launch: bool, styles: list[str] | None = None) -> None:
    from harness.attribution.diff import short_name
    from harness.report.table import print_table

    last = [len(rows) - 1] if rows[-1][""] == "sum" else []
    # What is compared (per launch, or the totals) stays longest.
    drop: list[str | tuple[str, ...]] = [TOTALS if per_launch else PER_LAUNCH, "launches", "change"]
    cells = [[row.get(c, "") for c in COLUMNS] for row in rows]
    if first == "kernel":  # last, so that a pipe can have them whole
        cells, columns = [[*line, row[""]] for line, row in zip(cells, rows, strict=True)], [*COLUMNS, "kernel…"]
    else:
        cells, columns = [[row[""], *line] for line, row in zip(cells, rows, strict=True)], [f"{first}<", *COLUMNS]
    print_table(columns, cells, rule_before=last, styles=styles or [], drop=drop, short=short_name)


def _cells(row: Row, name: str) -> dict[str, str]:
    def micro(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"

    change = row.delta_ms / row.before.ms if row.before.ms else None
    counts = (row.before.launches, row.after.launches)
    return {
        "": name,
        "launches": str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} → {counts[1]}",
        "µs/launch": micro(row.before.us_per_launch),
        "→": micro(row.after.us_per_launch),
        "before": f"{row.before.ms:.2f}",
        "after": f"{row.after.ms:.2f}",
        "delta ms": f"{row.delta_ms:+z.2f}",
        "change": "new" if change is None else "gone" if not counts[1] else f"{change:+z.1%}",
    }
