"""The README shows what the tool prints: its opening is the committed record's own rendering, its links and commands exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from harness.cli import group
from harness.report.pages import OPENING, PACKAGE, RATIOS, package, ratios, readme

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_opening_is_the_committed_records_rendering() -> None:
    shown = OPENING.search(README)
    assert shown and "tok/s" in shown[2] and "gate_up" in shown[2]
    assert readme(README) == README, "run `python -m harness.report.pages`"


def test_ratios_to_other_engines_come_from_records_or_are_not_there() -> None:
    shown = RATIOS.search(README)
    assert shown is not None
    there = [name for name in shown[1].split() if (ROOT / name).is_file()]
    assert there and all(f"[{Path(name).parent.name}](" in shown[2] for name in there)
    assert "PyTorch" not in shown[2] or any("llama" not in name for name in there)
    outside = README.replace(shown[0], "")
    assert not re.search(r"\d × (?:faster|the speed|PyTorch|llama)", outside.replace("1.1 × faster is +10 %", "")), (
        "a ratio outside the block can go stale"
    )


def test_a_row_of_ratios_is_what_its_record_says(tmp_path: Path) -> None:
    pairs = [
        {"order": "AB", "ours": [10.0, 20.0, 30.0], "Other": [30.0, 40.0, 50.0]},
        {"order": "BA", "ours": [20.0], "Other": [30.0]},
    ]
    (tmp_path / "peers").mkdir()
    (tmp_path / "peers" / "peers.json").write_text(json.dumps({"schema": "peers/1", "pairs": pairs}))
    (tmp_path / "pair").mkdir()
    held = {"name": "X", "one_window": False, "busy_ms": 30.0, "traced_wall_ms": 40.0}
    ours = {"busy_ms": 10.0, "traced_wall_ms": 16.0}
    (tmp_path / "pair" / "against.json").write_text(
        json.dumps({"schema": "against/1", "ours": ours, "references": [held]})
    )
    text = ratios(["pair/against.json", "peers/peers.json", "not/yet.json"], tmp_path)
    assert "| X | busy | 30.0 ms | 10.0 ms | 3.00 ×~ | [pair](pair/README.md) |" in text
    assert "| X | traced wall | 40.0 ms | 16.0 ms | 2.50 ×~ |" in text
    assert "| Other | wall | 35.0 ms | 20.0 ms | 1.75 × | [peers](peers/README.md) |" in text
    assert ratios(["not/yet.json"], tmp_path) == "", "what has no record claims nothing"


def test_the_page_of_a_package_index_has_nothing_that_breaks_there() -> None:
    text = PACKAGE.read_text()
    assert text == package(README), "run `python -m harness.report.pages`"
    assert "![" not in text and "<!--" not in text and not re.search(r"\]\((?!https?:)", text)
    assert "docs/landing.md" in text and "tok/s" in text and "```sh\nmake decompose" in text
    assert f'readme = "{PACKAGE.relative_to(ROOT).as_posix()}"' in (ROOT / "pyproject.toml").read_text()


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
