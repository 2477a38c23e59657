"""The parts of a round's README that a person writes: they survive regeneration and flow back into record.json.

    <!-- edit:lessons 1f3a9c02 -->
    What the next one should know.
    <!-- /edit:lessons -->

The marker carries a hash of the text as it was generated. A text that no longer has that hash was edited by hand and
goes into the record; one that still has it gives way to the record, which a command may have changed meanwhile.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from harness.rounds.record import RoundRecord

REGION = re.compile(r"<!-- edit:(\w+) ([0-9a-f]{8}) -->\n(.*?)\n?<!-- /edit:\1 -->", re.DOTALL)
EMPTY = {
    "background": "_Why this, and why now: write it here._",
    "lessons": "_What the next round should know: write it here, or with `harness round close {number} --lessons`._",
    "retry": "_When it is worth another look: one condition a line, such as_ `attention.share > 0.10`.",
}


def region(name: str, text: str, number: str) -> str:
    """An editable region as Markdown; a hint in italics where nothing was written."""
    shown = text.strip() or EMPTY[name].format(number=number)
    return f"<!-- edit:{name} {_mark(shown)} -->\n{shown}\n<!-- /edit:{name} -->"


def _mark(text: str) -> str:
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def absorb(record: RoundRecord, readme: Path) -> bool:
    """Takes a README's hand-edited regions into the record; True when that changed something."""
    if not readme.is_file():
        return False
    before = (record.background, record.lessons, record.retry_conditions)
    for name, mark, raw in REGION.findall(readme.read_text(encoding="utf-8")):
        text = raw.strip()
        if _mark(text) == mark:
            continue
        text = "" if text == EMPTY.get(name, "").format(number=record.number) else text
        if name == "background":
            record.background = text
        elif name == "lessons":
            record.lessons = text
        elif name == "retry":
            record.retry_conditions = conditions_of(text)
    return (record.background, record.lessons, record.retry_conditions) != before


def conditions_of(text: str) -> list[str]:
    """Retry conditions from Markdown: one a line, bullets and code marks taken off."""
    lines = (re.sub(r"^[-*]\s+", "", line.strip()) for line in text.splitlines())
    return [re.sub(r"^`(.*)`$", r"\1", line) for line in lines if line]


def conditions_text(conditions: list[str]) -> str:
    """The Markdown list that `conditions_of` reads back."""
    return "\n".join(f"- {c}" for c in conditions)
