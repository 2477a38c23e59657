"""Options and parameter types that several commands share; a file that starts with "_" is no command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.errors import HarnessError

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
TAIL = click.Choice(["last_row", "ffn_last_row", "full"])
"""What the last layer computes: `engine.levers.Levers.tail`, which is not imported for `--help`."""


def json_option(what: str) -> Callable[[Any], Any]:
    """`--json PATH`, passed on as `json_path`: where `what` goes as JSON; "-" is stdout, and nothing else goes there."""
    return click.option("--json", "json_path", metavar="PATH", help=f'Write {what}; "-" is stdout.')


def lever_values(settings: tuple[str, ...], option: str) -> dict[str, Any]:
    """`lever=value` pairs of a repeated option; whole numbers become int. Raises HarnessError for a pair without "="."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, value = (part.strip() for part in setting.partition("="))
        if not equals:
            raise HarnessError(f"{option} {setting!r} is no lever=value pair; write for example {option} concat=on.")
        values[name] = int(value) if value.isdecimal() else value
    return values
