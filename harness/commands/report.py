"""`harness report`: rebuild every page from the JSON."""

from __future__ import annotations

import click

from harness.commands._options import json_option
from harness.errors import Exit


@click.command(short_help="Rebuild every page from its JSON.")
@click.option(
    "--figures/--no-figures",
    default=True,
    show_default=True,
    help="Draw every PNG again, or only those that are missing.",
)
@json_option("the list of files as JSON")
def command(figures: bool, json_path: str | None) -> int:
    """Rebuild reports/ from its JSON: every round's README and figures, INDEX.md and campaign.png.

    So are pages of saved decompositions, comparisons and counters, where a page lies beside its record.
    Text that was edited between a README's comments is kept, and goes into the round's record.
    """
    from harness.files import emit_json
    from harness.report.rounds import rebuild

    pages = rebuild(figures=figures)
    if json_path:
        emit_json({"schema": "report/1", "files": [str(p) for p in pages]}, json_path)
    if json_path != "-":
        rounds = sum(p.parent.parent.name == "rounds" for p in pages)
        others = sum(p.suffix == ".md" and p.name != "INDEX.md" for p in pages) - rounds
        more = f" and {others} other page{'s' * (others != 1)}" if others else ""
        click.echo(
            f"{rounds} round{'s' * (rounds != 1)}{more} rebuilt; the index is {next(p for p in pages if p.name == 'INDEX.md')}"
        )
    return Exit.DONE
