"""The README shows what the tool prints: its opening is the committed record's own rendering, its links and commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from harness.cli import group
from harness.report.pages import OPENING, readme

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_opening_is_the_committed_records_rendering() -> None:
    shown = OPENING.search(README)
    assert shown and "tok/s" in shown[2] and "gate_up" in shown[2]
    assert readme(README) == README, "run `python -m harness.report.pages`"


@pytest.mark.parametrize("page", ["README.md", *[f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md"))]])
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_commands_that_the_readme_names_exist() -> None:
    for line in re.findall(r"`harness ([^`]+)`", README):
        words = shlex.split(line.rstrip(";"))
        command = group
        while words and hasattr(command, "get_command") and not words[0].startswith("-"):
            found = command.get_command(None, words[0])  # type: ignore[arg-type, attr-defined]
            if found is None:
                break
            command = found
            words = words[1:]
        assert command is not group, line
        known = {option for p in command.params for option in p.opts}
        for word in words:
            if word.startswith("--"):
                assert word in known, f"{word} of `harness {line}`"
