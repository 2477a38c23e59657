"""`harness report`: rebuild every page from the JSON."""

from __future__ import annotations

import click

from harness.commands._options import json_option
from harness.errors import Exit


@click.command()
@click.option(
    "--figures/--no-figures",
    default=True,
    show_default=True,
    help="Draw every PNG again, or only those that are missing.",
)
@json_option("the list of files as JSON")
def command(figures: bool, json_path: str | None) -> int:
    """Rebuild reports/ from its JSON: every round and saved decomposition with its figures, INDEX.md and campaign.png.

    Text that was edited between a README's comments is kept, and goes into the round's record.
    """
    from harness.files import emit_json
    from harness.report.rounds import rebuild
    from harness.rounds.store import README

    pages = rebuild(figures=figures)
    if json_path:
        emit_json({"schema": "report/1", "files": [str(p) for p in pages]}, json_path)
    if json_path != "-":
        index = next(p for p in pages if p.name == "INDEX.md")
        rounds = sum(p.name == README and p.parents[1] == index.parent / "rounds" for p in pages)
        tables = sum(p.name == README for p in pages) - rounds
        said = f"{rounds} round{'s' * (rounds != 1)}" + (
            f" and {tables} saved table{'s' * (tables != 1)}" if tables else ""
        )
        click.echo(f"{said} rebuilt; the index is {index}")
    return Exit.DONE
