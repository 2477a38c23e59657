"""`harness diff`: what changed between two decompositions or traces?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.commands._options import FILE, json_option, written_as
from harness.errors import Exit

if TYPE_CHECKING:
    from harness.attribution.diff import Diff, Row, Side


@click.command(short_help="What changed between two tables or traces?")
@click.argument("before", type=FILE)
@click.argument("after", type=FILE)
@click.option("--device", type=int, help="With traces: one device's launches only.  [default: all devices, pooled]")
@click.option("--rules", type=FILE, multiple=True, help="With traces: a rule file, tried before the packaged ones.")
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
@json_option('"diff/1" JSON')
def command(
    before: Path, after: Path, device: int | None, rules: tuple[Path, ...], across_windows: bool, kernels: int, plot: Path | None,
    json_path: str | None,
) -> int:  # fmt: skip
    """Compare BEFORE with AFTER by class: direct gains, hidden taxes, launches, time per launch.

    Each is a decomposition's JSON, or a trace (nsys .sqlite or .nsys-rep, Kineto .json, launches.parquet). Two
    decompositions of the same tokens are subtracted; traces are compared per launch, never by their windows' length.
    """
    from harness.attribution.diff import diff
    from harness.files import emit_json

    found = diff(_side(before, device, rules), _side(after, device, rules), across_windows=across_windows)
    if plot:
        from harness.report.diff_figure import diff_figure

        diff_figure(plot, found)
    if json_path:
        emit_json(found.to_json(), json_path)
    if json_path != "-":
        show(found, kernels)
    return Exit.DONE


def _side(path: Path, device: int | None, rules: tuple[Path, ...]) -> Side:
    """A side from either kind of file: JSON that says it is a decomposition is one, everything else is a trace."""
    from harness.attribution.decomposition import load_decomposition
    from harness.attribution.diff import side_of_decomposition, side_of_launches

    if path.suffix == ".json" and is_decomposition(path):
        return side_of_decomposition(load_decomposition(path), str(path))
    from harness.attribution.recorded import classified_launches

    launches, source = classified_launches(path, device=device, rules=rules)
    return side_of_launches(launches, str(path), source=source)


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

    per_launch = found.normalised_by == "launches"
    say(f"{found.before.label} → {found.after.label}", "bold")
    say(
        f"normalised by {found.normalised_by}"
        + (f", work factor {found.work_factor:.3f}" if found.work_factor != 1 else "")
    )
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
