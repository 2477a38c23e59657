"""What the tool's own pages repeat from elsewhere: docs/cli.md from --help, the README's figures from committed records, and
docs/package.md, which a package index shows, from the README.

`python -m harness.report.pages` rewrites all three; tests fail when one is stale.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import click

from harness.cli import group
from harness.environment import COMPLETION, VARIABLES
from harness.files import write_atomic
from harness.report.markdown import markdown_table

ROOT = Path(__file__).parents[2]
PAGE, README, PACKAGE = ROOT / "docs" / "cli.md", ROOT / "README.md", ROOT / "docs" / "package.md"
WIDTH = 100
OPENING = re.compile(r"<!-- decomposition: (\S+) -->\n```text\n(.*?)```", re.DOTALL)
"""The README's block: the record that it shows, and what `harness decompose` printed of it at 80 columns."""

RATIOS = re.compile(r"<!-- ratios: (.*?) -->\n(.*?)<!-- /ratios -->", re.DOTALL)
"""The README's block of ratios to other engines: the records that it reads, those that are not there yet included."""


def readme(text: str) -> str:
    """The README with its opening and its ratios rendered anew from the records that it names."""
    from rich.console import Console

    from harness.attribution.decompose import load_decomposition
    from harness.report.decomposition import print_decomposition

    def rendered(block: re.Match[str]) -> str:
        out = io.StringIO()
        console = Console(file=out, width=80, highlight=False)
        print_decomposition(load_decomposition(ROOT / block[1]), console=console)
        lines = "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())
        return f"<!-- decomposition: {block[1]} -->\n```text\n{lines}\n```"

    def rated(block: re.Match[str]) -> str:
        return f"<!-- ratios: {block[1]} -->\n{ratios(block[1].split(), ROOT)}<!-- /ratios -->"

    return RATIOS.sub(rated, OPENING.sub(rendered, text))


def ratios(records: Sequence[str], root: Path) -> str:
    """A table row for each engine of each record ("against/1", "peers/1") below `root`; what has no record claims nothing."""
    rows = []
    for name in records:
        file = root / name
        if not file.is_file():
            continue
        held = json.loads(file.read_text(encoding="utf-8"))
        page = f"[{file.parent.name}]({Path(name).with_name('README.md').as_posix()})"
        if held["schema"] == "against/1":
            ours = held["ours"]
            for r in held["references"]:
                mark = "" if r["one_window"] else "~"
                for what, key in (("busy", "busy_ms"), ("traced wall", "traced_wall_ms")):
                    rows.append([r["name"], what, f"{r[key]:.1f} ms", f"{ours[key]:.1f} ms", f"{r[key] / ours[key]:.2f} ×{mark}", page])  # fmt: skip
        else:
            (peer,) = (name for name in held["pairs"][0] if name not in ("order", "ours"))
            walls = [median(v for pair in held["pairs"] for v in pair[who]) for who in (peer, "ours")]
            faster = median(median(pair[peer]) / median(pair["ours"]) for pair in held["pairs"])
            rows.append([peer, "wall", *(f"{w:.1f} ms" for w in walls), f"{faster:.2f} ×", page])
    return (
        markdown_table(["engine<", "of a prefill<", "theirs", "ours", "ours is faster", "record<"], rows) + "\n"
        if rows
        else ""
    )


def package(text: str) -> str:
    """The README as a package index can show it: no images and no comments, and links into the repository as paths."""
    text = re.sub(r"<!--.*?-->\n", "", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(
        r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", lambda m: f"`{m[2]}`" if m[1] == m[2] else f"{m[1]} (`{m[2]}`)", text
    )


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
    write_atomic(README, readme(README.read_text(encoding="utf-8")))
    write_atomic(PACKAGE, package(README.read_text(encoding="utf-8")))
