"""What the tool's own pages repeat from elsewhere: docs/cli.md from --help, the README's opening from a committed record.

`python -m harness.report.pages` rewrites both; tests fail when one is stale.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import click

from harness.cli import group
from harness.environment import COMPLETION, VARIABLES
from harness.files import write_atomic
from harness.report.markdown import markdown_table

ROOT = Path(__file__).parents[2]
PAGE, README = ROOT / "docs" / "cli.md", ROOT / "README.md"
WIDTH = 100
OPENING = re.compile(r"<!-- decomposition: (\S+) -->\n```text\n(.*?)```", re.DOTALL)
"""The README's block: the record that it shows, and what `harness decompose` printed of it at 80 columns."""


def readme(text: str) -> str:
    """The README with its opening rendered anew from the record that it names."""
    from rich.console import Console

    from harness.attribution.decompose import load_decomposition
    from harness.report.decomposition import print_decomposition

    def rendered(block: re.Match[str]) -> str:
        out = io.StringIO()
        console = Console(file=out, width=80, highlight=False)
        print_decomposition(load_decomposition(ROOT / block[1]), console=console)
        lines = "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
        return f"<!-- decomposition: {block[1]} -->\n```text\n{lines}\n```"

    return OPENING.sub(rendered, text)


def page() -> str:
    """The whole page: the group's help, then every command's and subcommand's."""
    parts = [
        "# The command line",
        "Generated from `--help` by `python -m harness.report.pages`; do not edit.",
        "Exit status: 0 done or LANDED, 1 a tool error (one sentence on stderr), 2 REVERTED, 3 INCONCLUSIVE, 4 the window was "
        "invalid, 5 a gate failed, 6 a check of a decomposition or a record failed, 64 wrong usage.",
    ]
    rows = [[f"`{name}`", what] for name, what in VARIABLES]
    parts += ["## Environment variables", markdown_table(["variable<", "what it does<"], rows)]
    lines = [[shell, f"`{line}`", f"`{file}`"] for shell, line, file in COMPLETION]
    parts += [
        "## Shell completion",
        "One line switches it on; commands, options, files, models, levers and rounds are completed.",
        markdown_table(["shell<", "line<", "goes into<"], lines),
    ]
    for depth, path, text in _helps(group, "harness", 2):
        text = text.split("\n\nEnvironment:\n")[0]  # the tables above
        parts.append(f"{'#' * depth} {path}\n\n```text\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def _helps(
    command: click.Command, path: str, depth: int, parent: click.Context | None = None
) -> Iterator[tuple[int, str, str]]:
    """(heading depth, command path, help text) of a command and all below it, in the order that the group lists them."""
    # As the command line makes it: click keeps the first help option that it builds, so -h must be known here too.
    context = command.make_context(
        path.split()[-1], [], parent, resilient_parsing=True, terminal_width=WIDTH, max_content_width=WIDTH
    )
    yield depth, path, "\n".join(line.rstrip() for line in command.get_help(context).rstrip().split("\n"))
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield from _helps(found, f"{path} {name}", min(depth + 1, 4), context)


if __name__ == "__main__":
    write_atomic(PAGE, page())
    write_atomic(README, readme(README.read_text()))
