"""Options and parameter types that several commands share; a file that starts with "_" is no command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
TAIL = click.Choice(["last_row", "ffn_last_row", "full"])
"""What the last layer computes: `engine.levers.Levers.tail`, which is not imported for `--help`."""


def json_option(what: str) -> Callable[[Any], Any]:
    """`--json PATH`, passed on as `json_path`: where `what` goes as JSON; "-" is stdout, and nothing else goes there."""
    return click.option("--json", "json_path", metavar="PATH", help=f'Write {what}; "-" is stdout.')
