"""Tables and lines for a person: rich on a terminal, plain text in a pipe, both right at 80 columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.box import Box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

RULED = Box("    \n    \n ── \n    \n ── \n ── \n    \n    \n")
"""A rule under the header and above the totals, nothing else."""


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    rule_before: Collection[int] = (),
    styles: Sequence[str] = (),
    console: Console | None = None,
) -> None:
    """Prints rows of text. A column whose name ends in "<" is left-aligned and wraps; the others are figures.

    rule_before: rows that a rule sets apart, such as totals. styles: a rich style for each row.
    """
    console = console or Console(highlight=False)
    table = Table(box=RULED, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in columns:
        left = name.endswith("<")
        table.add_column(name.removesuffix("<"), justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for index, row in enumerate(rows):
        if index in rule_before:
            table.add_section()
        table.add_row(*(Text(cell) for cell in row), style=styles[index] if index < len(styles) else None)
    console.print(table)


def say(text: str = "", style: str = "") -> None:
    """A paragraph, wrapped at the console's width; brackets in it are text."""
    console = Console(highlight=False)
    console.print(Text(text, style=style), soft_wrap=False)


def print_lines(*renderables: RenderableType, console: Console | None = None) -> None:
    """Prints each renderable at the console's width (in a pipe: COLUMNS, else 80, and no trailing blanks)."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    console.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
