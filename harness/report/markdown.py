"""Markdown pages: the templates, tables, and one blank line between blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates() -> Environment:
    """The templates of `harness/report/templates`; a name that a template asks for and is not given is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("harness.report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A GitHub table; a column whose name ends in "<" is left-aligned. Bars in cells are escaped."""
    names = [h.removesuffix("<") for h in header]
    rule = [":--" if h.endswith("<") else "--:" for h in header]
    lines = ["| " + " | ".join(names) + " |", "|" + "|".join(rule) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def tidy(text: str) -> str:
    """One blank line between blocks (headings, tables, lists, images, paragraphs), none doubled, one newline at the end.

    What a person wrote, and what stands between fences, stays as it is.
    """
    lines: list[str] = []
    verbatim = False
    for raw in text.split("\n"):
        closes = raw.startswith(("<!-- /edit:", "```"))
        if verbatim:
            lines.append(raw)
            verbatim = not closes
            continue
        line, last = raw.rstrip(), lines[-1] if lines else ""
        if line and last and _block(line) != _block(last):
            lines.append("")
        if line or last:
            lines.append(line)
        verbatim = line.startswith(("<!-- edit:", "```"))
    return "\n".join(lines).strip() + "\n"


def _block(line: str) -> str:
    """The kind of Markdown block that a line belongs to. Every heading and image is one of its own."""
    for start in ("|", "- ", "> ", "<!--"):
        if line.startswith(start):
            return start
    return line if line.startswith(("#", "![", "```")) else "text"
