"""`harness queue`: what is worth doing next?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.commands._options import FILE, json_option, written_as
from harness.errors import Exit, HarnessError

if TYPE_CHECKING:
    from harness.attribution.queue import Queue


@click.command(short_help="What is worth doing next?")
@click.argument("decomposition", required=False, type=FILE)
@click.option(
    "--claim",
    "claims",
    multiple=True,
    metavar="CLASS=FACTOR",
    help="Price a claimed speed-up of one class, such as attention=2.0; may be repeated.",
)
@click.option(
    "--bar",
    type=click.FloatRange(0, 1, min_open=True),
    help="One bar instead of the landing protocols' two, as a fraction.",
)
@click.option("--stale-ok", is_flag=True, help="Use a table that has expired.")
@click.option(
    "--plot",
    type=FILE,
    callback=written_as("a figure", ".png", ".svg", ".pdf"),
    help="Write share × ratio, with what each class could give back (PNG, SVG or PDF).",
)
@json_option('"queue/1" JSON')
def command(
    decomposition: Path | None,
    claims: tuple[str, ...],
    bar: float | None,
    stale_ok: bool,
    plot: Path | None,
    json_path: str | None,
) -> int:
    """Rank the classes of a DECOMPOSITION by what they could give back, against the landing bars.

    Without one, the newest under ./reports is used. A table that a landing, or a wall moved by more than 5 %, has
    expired is refused. Retry conditions of earlier rounds are answered from the same table.
    """
    from harness.attribution.decomposition import load_decomposition, sound
    from harness.attribution.queue import build_queue, price
    from harness.files import emit_json
    from harness.rounds.retry import evaluate
    from harness.rounds.store import load_rounds
    from harness.rounds.tables import expired, newest, round_of

    path = decomposition or newest().path
    table = sound(load_decomposition(path), path, "a queue")
    rounds = load_rounds()
    stale = expired(table, rounds, round_of(path))
    if stale and not stale_ok:
        raise HarnessError(
            f"{path} has expired: {stale}; run `harness decompose` again, or use it knowingly with --stale-ok."
        )
    bars = {"asked": bar} if bar is not None else landing_bars()
    queue = build_queue(table, bars)
    queue.claims = [price(table, claim, bars) for claim in claims]
    if stale:
        queue.warnings.insert(0, f"expired: {stale}")
    for record in rounds:
        if record.verdict == "LANDED" or record.superseded_by:
            continue
        for condition in record.retry_conditions:
            answer = evaluate(condition, table)
            queue.retries.append(
                {
                    "round": record.round,
                    "slug": record.slug,
                    "condition": condition,
                    "state": answer.state,
                    "detail": answer.detail,
                }
            )
    if plot:
        from harness.report.queue_figure import queue_figure

        queue_figure(plot, queue)
    if json_path:
        emit_json(queue.to_json() | {"decomposition": str(path)}, json_path)
    if json_path != "-":
        show(queue, path)
    return Exit.DONE


def landing_bars() -> dict[str, float]:
    """The bars of the two landing protocols."""
    from harness.ab.protocol import LandingProtocol
    from harness.config import load_protocol

    return {name: load_protocol(name, LandingProtocol).bar for name in ("landing", "landing-strict")}


def show(queue: Queue, path: Path) -> None:
    """The queue on a terminal or in a pipe."""
    from harness.report.decomposition import titled
    from harness.report.table import print_table, say

    table = queue.table
    what = " · ".join(
        filter(None, [titled(table), f"{table.tokens} tokens" if table.tokens else "", table.device, table.regime])
    )
    say(f"{path}: {what}", "bold")
    say(f"wall {queue.wall_ms:.2f} ms, busy {table.busy_ms:.2f} ms, gap {table.gap_ms:.2f} ms")
    say()
    header = [
        "class<",
        "ms",
        "share",
        "ratio",
        "SOL",
        "budget",
        "gain",
        *(f"≥{b:.1%}" for b in queue.bars.values()),
        "<",
    ]
    rows, styles = [], []
    for c in queue.candidates:
        rows.append([
            c.label, f"{c.ms:.2f}", f"{c.share:.1%}", "–" if c.ratio is None else f"{c.ratio:.2f}×", "–" if c.sol is None else f"{c.sol:.0%}",
            "–" if c.budget_ms is None else f"{c.budget_ms:.2f}", "–" if c.gain is None else f"{c.gain:+.1%}",
            *("yes" if c.clears[b] else "no" if c.gain is not None else "?" for b in queue.bars), _short(c.note),
        ])  # fmt: skip
        styles.append("green" if c.clears and all(c.clears.values()) else "yellow" if any(c.clears.values()) else "dim")
    print_table(header, rows, styles=styles, drop=["", "share", "ratio", "ms", "SOL"])
    for claim in queue.claims:
        say()
        say(
            f"claim {claim.cls} {claim.speed_up:g}× faster: {claim.ms:.2f} → {claim.ms / claim.speed_up:.2f} ms, the wall {claim.gain:+.2%}",
            "bold",
        )
        for name, bar in queue.bars.items():
            needed = claim.needed[name]
            least = f"{needed:.2f}× is what it takes" if needed is not None else "no speed-up of this class alone can"
            say(
                f"  {'clears' if claim.clears[name] else 'misses'} the {name} bar of {bar:.1%}: {least}",
                "green" if claim.clears[name] else "red",
            )
        if claim.beyond_roof:
            say("  beyond the class's roofline: the claim must remove work, not only run faster", "yellow")
    if queue.retries:
        say()
        print_table(
            ["round<", "retry when<", "now<", "read<"],
            [[f"{r['round']:04d}", r["condition"], r["state"], r["detail"]] for r in queue.retries],
            styles=[
                "green" if r["state"] == "met" else "dim" if r["state"] == "not met" else "" for r in queue.retries
            ],
        )
    if queue.warnings:
        say()
    for warning in queue.warnings:
        say(f"warning: {warning}", "yellow")


def _short(note: str) -> str:
    """A row's note in a word: what keeps its budget at zero, or what it is read against."""
    return (
        "parity"
        if note.startswith("at parity")
        else "to roof"
        if note.startswith("to the roof")
        else "no figure"
        if note
        else ""
    )
