"""Options and parameter types that several commands share; a file that starts with "_" is no command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from harness.errors import HarnessError

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
TAIL = click.Choice(["last_row", "ffn_last_row", "full"])
"""What the last layer computes: `engine.levers.Levers.tail`, which is not imported for `--help`."""


OTHERS = {
    ".csv", ".tsv", ".md", ".markdown", ".html", ".yaml", ".yml", ".toml", ".xml", ".xlsx", ".png", ".svg", ".pdf", ".jpg", ".parquet",
    ".sqlite", ".npy", ".gguf", ".json", ".jsonl", ".gz", ".ncu-rep", ".nsys-rep",
}  # fmt: skip
"""Suffixes that promise a format."""


def written_as(what: str, *suffixes: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that refuses a path whose suffix promises another format than `what`, the one that is written."""

    def check(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        suffix = Path(value or "").suffix.lower()
        promises = suffix in OTHERS or (what == "JSON" and suffix)
        if promises and suffix not in suffixes:
            stdout = ', or give "-" for stdout' if what == "JSON" else ""
            raise click.BadParameter(f"{value} is no name for {what}; end it in {' or '.join(suffixes)}{stdout}.")
        return value

    return check


json_named = written_as("JSON", ".json")


def complete_model(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of `harness model list`, else files (bash would drop the names for the sake of one file item)."""
    from engine.models import known

    names = [CompletionItem(name, help=what) for name, what in known() if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


def complete_lever(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`lever=value` of every lever whose values are named, `lever=` of the others."""
    from engine.levers import describe

    pairs = [f"{name}={v if '|' in values else ''}" for name, values, _ in describe() for v in values.split(" | ")]
    return [CompletionItem(pair) for pair in pairs if pair.startswith(incomplete)]


def complete_round(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Numbers of the rounds below ./reports."""
    from harness.rounds.store import round_dirs

    found = [path.name.partition("-") for path in round_dirs()]
    return [CompletionItem(number, help=slug) for number, _, slug in found if number.startswith(incomplete)]


def json_option(what: str) -> Callable[[Any], Any]:
    """`--json PATH`, passed on as `json_path`: where `what` goes as JSON; "-" is stdout, and nothing else goes there."""
    return click.option(
        "--json", "json_path", metavar="PATH", callback=json_named, help=f'Write {what}; "-" is stdout.'
    )


def lever_values(settings: tuple[str, ...], option: str) -> dict[str, Any]:
    """`lever=value` pairs of a repeated option; whole numbers become int. Raises HarnessError for a pair without "="."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise HarnessError(f"{option} {setting!r} is no lever=value pair; write for example {option} concat=on.")
        values[name] = int(value) if value.isdecimal() else value
    return values
