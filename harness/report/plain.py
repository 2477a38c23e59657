"""Printing rich renderables: colours on a terminal, plain lines without trailing blanks in a pipe."""

from __future__ import annotations

from rich.console import Console, RenderableType


def print_lines(*renderables: RenderableType, console: Console | None = None) -> None:
    """Prints each renderable at the console's width (in a pipe: COLUMNS, else 80)."""
    console = console or Console(highlight=False)
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    console.file.write("\n".join(line.rstrip() for line in captured.get().split("\n")))
