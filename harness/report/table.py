"""Tables for a person: rich on a terminal, plain columns in a pipe, both right at 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    caption: str = "",
    strong: Sequence[int] = (),
    rule_before: Sequence[int] = (),
) -> None:
    """Prints rows of text. A column whose name ends in "<" is left-aligned and may wrap; the others are figures.

    strong: rows to stress; rule_before: rows that a rule sets apart (totals).
    """
    console = Console(highlight=False)
    table = Table(
        title=title or None, caption=caption or None, title_justify="left", caption_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, show_edge=False, pad_edge=False, padding=(0, 1),
    )  # fmt: skip
    if not console.is_terminal:
        table.box = box.Box("    \n    \n -- \n    \n -- \n -- \n    \n    \n", ascii=True)
    for name in columns:
        left = name.endswith("<")
        table.add_column(name.removesuffix("<"), justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for index, row in enumerate(rows):
        if index in rule_before:
            table.add_section()
        table.add_row(*row, style="bold" if index in strong else None)
    console.print(table)


def say(text: str = "") -> None:
    """A paragraph, wrapped at the console's width, markup off."""
    Console(highlight=False, markup=False).print(text, soft_wrap=not Console().is_terminal)
