"""Promotion: a landed configuration becomes the base, written into its YAML in place, comments and all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from harness.config import ArmConfig, load_arm
from harness.errors import HarnessError
from harness.files import write_atomic
from harness.rounds.record import RoundRecord
from harness.rounds.store import now

PLAIN = re.compile(r"[A-Za-z][\w./-]*")
"""Scalars that need no quotes, `on` and `off` among them: only true and false are booleans in a config."""


def promote(record: RoundRecord, base: Path) -> list[str]:
    """Writes the levers of a landed round's arm B into `base`. Returns the lines "lever: old → new".

    Raises HarnessError when the round did not land, its engine is not the embedded one, something beside levers
    differs, or the file then reads differently from the arm that landed.
    """
    if record.verdict != "LANDED" or "B" not in record.arms:
        raise HarnessError(
            f"round {record.number} is {record.verdict or 'open'}; only a landed configuration becomes the base."
        )
    if record.superseded_by:
        raise HarnessError(
            f"round {record.number} was corrected by round {record.superseded_by:04d}; promote that one."
        )
    wanted = record.arms["B"].config
    if (wanted.get("engine") or {}).get("kind", "embedded") != "embedded":
        raise HarnessError(
            f"round {record.number} ran a {wanted['engine']['kind']} engine; edit its config by hand, it has no levers here."
        )
    outside = [d.key for d in record.diff if not d.key.startswith("levers.")]
    if outside:
        raise HarnessError(
            f"round {record.number} differs in {', '.join(outside)}, which is no lever; edit {base} by hand."
        )
    arm = load_arm(base)
    before = arm.what_runs()["levers"]
    after = before | {d.key.removeprefix("levers."): d.after for d in record.diff}
    text = base.read_text(encoding="utf-8")
    for name in after:
        if after[name] != before[name]:
            text = set_lever(text, name, after[name])
    _check(text, base, after)
    write_atomic(base, text)
    record.promoted = now()
    return [f"{name}: {before[name]} → {after[name]}" for name in after if after[name] != before[name]]


def _check(text: str, base: Path, levers: dict[str, Any]) -> None:
    """The new text must read back as the levers that landed; `base` is not touched before it does."""
    trial = base.with_name(f".{base.stem}.trial.yaml")
    try:
        write_atomic(trial, text)
        read: ArmConfig = load_arm(trial)
    finally:
        trial.unlink(missing_ok=True)
    if read.what_runs()["levers"] != levers:
        raise HarnessError(f"{base} could not be rewritten to the landed levers; set them by hand.")


def set_lever(text: str, name: str, value: Any) -> str:
    """YAML text with `levers.name` set, every other byte as it was."""
    shown = (
        value
        if isinstance(value, str) and PLAIN.fullmatch(value) and value not in ("true", "false", "null")
        else _scalar(value)
    )
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    levers = _value(root, "levers")
    if levers is None:
        return text.rstrip("\n") + ("\n" if text.strip() else "") + f"levers:\n  {name}: {shown}\n"
    old = _value(levers, name)
    if old is not None:
        return text[: old.start_mark.index] + shown + text[old.end_mark.index :]
    if not isinstance(levers, yaml.MappingNode) or levers.flow_style or not levers.value:
        pairs = [
            (k.value, text[v.start_mark.index : v.end_mark.index]) for k, v in getattr(levers, "value", None) or []
        ]
        inner = ", ".join(f"{k}: {v}" for k, v in [*pairs, (name, shown)])
        return text[: levers.start_mark.index] + "{" + inner + "}" + text[levers.end_mark.index :]
    key, _ = levers.value[0]
    line_start = key.start_mark.index - key.start_mark.column
    return text[:line_start] + " " * key.start_mark.column + f"{name}: {shown}\n" + text[line_start:]


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        for k, v in node.value:
            if k.value == key:
                return v
    return None


def _scalar(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).split("\n")[0]
