"""Tables and lines for a person: colour on a terminal, plain text in a pipe, and no word broken at any width.

A narrow terminal gets fewer columns (a line says which), then wrapped text, then its last column of text below each row,
then shortened names, in that order. In a pipe
the layout is that of COLUMNS, else 80, but names are whole: a line that holds a long one is longer than that.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.style import Style
from rich.text import Text

from harness.report.signs import printable

COMFORT, LONG_WORD = 16, 32
"""A column of text is not squeezed below this, nor below a word of so many signs, while a column can be left out instead."""
SHORTEST_NAME = 20
"""What a name is cut to on a terminal, at the least."""
INDENT = 4
"""Blanks before a cell that stands below its row."""
SEAMS = (re.compile(r".+(?:/|::)(?=[^/:])"), re.compile(r".+[_.,:=|+-](?=[^_.,:=|+-])"))
"""Where a word that is longer than its line is taken apart: behind a path's folders and a name's spaces, else behind one of these signs."""

Cell = str | Text


@dataclass(eq=False)
class _Column:
    """One column while the widths are found: `natural` needs no wrapping, `comfort` reads well, `least` breaks no word."""

    key: str  # as the caller names it
    name: str  # as it is printed
    kind: str  # "" figures, "<" text, "…" names
    cells: list[Text]
    whole: bool  # names are not shortened and words not taken apart
    cut: Callable[[str, int], str]
    width: int = 0

    def __post_init__(self) -> None:
        texts = [cell.plain for cell in self.cells]
        head = max(map(len, self.name.split()), default=0)
        self.natural = max(len(self.name), *map(_longest_line, texts), 0)
        if not self.kind:
            self.least = self.comfort = max(head, *map(len, texts), 0)
        elif self.kind == "<":
            self.least = max(head, *map(_longest_word, texts), 0)
            self.comfort = max(min(self.least, LONG_WORD), min(self.natural, COMFORT))
        else:
            self.least = self.comfort = max(head, min(self.natural, SHORTEST_NAME))

    def lines(self, cell: Text) -> list[Text]:
        """The cell's lines at this column's width."""
        if self.kind == "…":
            texts = [cell.plain if self.whole else self.cut(cell.plain, self.width)]
        else:
            texts = wrap(cell.plain, self.width, whole=self.whole)
        return [self.set(text, cell.style) for text in texts]

    def set(self, text: str, style: str | Style = "") -> Text:
        """One line of a cell at its place: figures to the right, all else to the left."""
        return Text(text.ljust(self.width) if self.kind else text.rjust(self.width), style)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    *,
    drop: Sequence[str | tuple[str, ...]] = (),
    rule_before: Collection[int] = (),
    styles: Sequence[str] = (),
    between: int = 2,
    short: Callable[[str], str] = str,
    cut: Callable[[str, int], str] | None = None,
    console: Console | None = None,
) -> None:
    """Prints rows of text as `table_lines` lays them out."""
    console = console or Console(highlight=False)
    print_lines(
        *table_lines(
            columns,
            rows,
            console,
            drop=drop,
            rule_before=rule_before,
            styles=styles,
            between=between,
            short=short,
            cut=cut,
        ),
        console=console,
    )


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    console: Console,
    *,
    drop: Sequence[str | tuple[str, ...]] = (),
    rule_before: Collection[int] = (),
    styles: Sequence[str] = (),
    between: int = 2,
    short: Callable[[str], str] = str,
    cut: Callable[[str, int], str] | None = None,
) -> list[Text]:
    """A table as lines that fit the console. A column whose name ends in "<" is text, left-aligned, and wraps at blanks; one
    that ends in "…" holds names, which a terminal too narrow for them shortens and a pipe never; the others are figures.

    drop: columns that a narrow console does without, the first to go first (a tuple: all at once); a last line names them. rule_before: rows that
    a rule sets apart, such as totals. styles: a rich style for each row. between: blanks between two columns. short:
    a name as a terminal shows it; cut: a name in at most so many signs, else its beginning. Without any column name there is no head (a list).
    """
    whole = not console.is_terminal
    made = []
    for place, spec in enumerate(columns):
        key, kind = (spec[:-1], spec[-1]) if spec.endswith(("<", "…")) else (spec, "")
        cells = [
            Text(printable(str(cell), console.encoding), cell.style if isinstance(cell, Text) else "")
            for cell in (row[place] for row in rows)
        ]  # the str of a Text is its text
        if kind == "…" and not whole:
            cells = [Text(short(cell.plain), cell.style) for cell in cells]
        made.append(_Column(key, printable(key, console.encoding), kind, cells, whole, cut or shortened))
    shown, below = _fit(made, console.width, drop, between)
    total = console.width if below else sum(c.width for c in shown) + between * (len(shown) - 1)
    rule = Text(printable("─", console.encoding) * min(total, console.width))
    lines: list[Text] = []
    if any(c.name for c in shown):
        headed = [*shown, *([below] if below and below.width else [])]
        heads = [[c.set(line, "bold") for line in wrap(c.name, c.width)] for c in headed]
        deepest = max(map(len, heads))
        lines += _side_by_side(
            [[c.set("")] * (deepest - len(h)) + h for c, h in zip(headed, heads, strict=True)], headed, between
        )
        lines.append(rule)
    for index in range(len(rows)):
        if index in rule_before:
            lines.append(rule)
        if below and 0 < _longest_word(below.cells[index].plain) <= below.width:
            columns_here = [*shown, below]
            row = _side_by_side([c.lines(c.cells[index]) for c in columns_here], columns_here, between)
        else:
            row = _side_by_side([c.lines(c.cells[index]) for c in shown], shown, between)
            if below:
                words = wrap(below.cells[index].plain, console.width - INDENT, whole=whole)
                row += [Text(" " * INDENT + line, below.cells[index].style) for line in words]
        for line in row:
            line.style = styles[index] if index < len(styles) else ""
        lines += row
    if gone := [c.name for c in made if c not in shown and c is not below and c.name]:
        text = f"not shown at {console.width} columns: {', '.join(gone)} (--json has all)"
        lines += [Text(line, "dim") for line in wrap(text, console.width)]
    return lines


def _fit(
    columns: Sequence[_Column], width: int, drop: Sequence[str | tuple[str, ...]], between: int
) -> tuple[list[_Column], _Column | None]:
    """The columns side by side at `width`, each with its width; and the last one where not all of its words have room beside them: such a cell stands below its row."""
    shown = list(columns)

    def over(attribute: str) -> int:
        return sum(getattr(c, attribute) for c in shown) + between * (len(shown) - 1) - width

    for keys in drop:
        if over("comfort") <= 0:
            break
        shown = [c for c in shown if c.key not in ((keys,) if isinstance(keys, str) else keys)]
    below = shown.pop() if over("least") > 0 and len(shown) > 1 and shown[-1].kind == "<" else None
    whole_names = [c for c in shown if c.kind == "…" and c.whole]
    for column in shown:
        column.width = column.comfort if column in whole_names else column.natural
    for floor in ("comfort", "least"):
        _narrow(shown, over, {id(c): getattr(c, floor) for c in shown})
    _narrow([c for c in shown if c.kind and not c.whole], over, dict.fromkeys(map(id, shown), 6))
    for column in whole_names:  # they run over the width, and the others are not squeezed for it
        column.width = column.natural
    if below:
        room = width - sum(c.width + between for c in shown)
        below.width = room if room >= COMFORT else 0
    return shown, below


def _narrow(columns: Sequence[_Column], over: Callable[[str], int], floor: dict[int, int]) -> None:
    """Takes columns from the widest, one blank at a time, until the table fits or every column is at its floor."""
    while over("width") > 0 and (wide := [c for c in columns if c.width > floor[id(c)]]):
        max(wide, key=lambda c: c.width).width -= 1


def _side_by_side(cells: Sequence[Sequence[Text]], columns: Sequence[_Column], between: int) -> list[Text]:
    """Lines of a row: each cell's lines beside the next cell's, without trailing blanks."""
    lines = []
    for depth in range(max(map(len, cells), default=0)):
        line = Text()
        for place, (cell, column) in enumerate(zip(cells, columns, strict=True)):
            line.append(" " * between if place else "")
            line.append_text(cell[depth] if depth < len(cell) else Text(" " * column.width))
        line.rstrip()
        lines.append(line)
    return lines


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _longest_line(text: str) -> int:
    return max(map(len, text.split("\n")))


def shortened(text: str, width: int) -> str:
    """The text in at most `width` signs, an ellipsis for the end that is missing."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def wrap(text: str, width: int, *, whole: bool = False) -> list[str]:
    """The lines of a text at `width`, broken at blanks. A word that is longer is taken apart at its seams (behind "_", "/",
    "."), or where there is none within a line, at the line's end; `whole`: it stays whole and sticks out."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        indent = paragraph[: len(paragraph) - len(paragraph.lstrip())]
        lines += textwrap.wrap(
            paragraph, max(width, 1), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    if whole:
        return lines
    fitting: list[str] = []
    for line in lines:
        while len(line) > max(width, 1):
            head = line[: max(width, 1) + 1]  # with the sign behind the seam
            end = next((found.end() for seam in SEAMS if (found := seam.match(head))), len(head) - 1)
            fitting.append(line[:end])
            line = line[end:]
        fitting.append(line)
    return fitting


def say(text: str = "", style: str = "", *, console: Console | None = None) -> None:
    """A paragraph, wrapped at the console's width (in a pipe: COLUMNS, else 80) but, in a pipe, never within a word."""
    console = console or Console(highlight=False)
    lines = wrap(printable(text, console.encoding), console.width, whole=not console.is_terminal)
    print_lines(*(Text(line, style) for line in lines), console=console)


def paste(command: str, *, console: Console | None = None) -> None:
    """A command on a line of its own, which is never wrapped: what is copied from it runs."""
    console = console or Console(highlight=False)
    print_lines(Text(command, "cyan"), console=console)


def print_lines(*lines: Text, console: Console) -> None:
    """Prints lines as they are: nothing is wrapped, cut or taken for markup."""
    for line in lines:
        console.print(line, soft_wrap=True)
