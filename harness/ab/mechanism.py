"""The second question of a round, from traced passes: did the ops that the lever changes get faster, and is it live?"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from harness.config import ArmConfig
from harness.rounds.record import Gate, Mechanism, OpsAffected

Table = dict[str, Any]
"""What `harness.ab.traced.trace_arm` returns, or {"there": False, "why": sentence}."""


def gates(a: Table, b: Table, base: ArmConfig, lever: ArmConfig) -> list[Gate]:
    """Every op launched, and the lever live: its kernels are in its own trace and not in the base's."""
    if not (a["there"] and b["there"]):
        why = a.get("why") or b.get("why") or "no trace"
        return [Gate(name=name, ok=None, detail=why) for name in ("every op launched", "lever live")]
    found = []
    for letter, table in (("A", a), ("B", b)):
        missing = table["missing"]
        found.append(
            Gate(name=f"every op launched, arm {letter}", ok=not missing, value=float(len(missing)), limit=0.0,
                 detail=f"without a launch: {', '.join(missing[:5])}" if missing else "")
        )  # fmt: skip
    if not lever.kernels:
        found.append(Gate(name="lever live", ok=None, detail="the lever names no `kernels` that must appear"))
        return found
    for pattern in lever.kernels:
        here, there = (any(re.search(pattern, name) for name in launch_names(table)) for table in (b, a))
        stray = there and pattern not in base.kernels
        detail = "" if here else "no launch of the lever's arm matches"
        if here and stray:
            detail = "the base arm launches it as well"
        found.append(Gate(name=f"lever live: {pattern}", ok=here and not stray, value=str(here), limit="in B, not in A", detail=detail))  # fmt: skip
    return found


def launch_names(table: Table) -> set[str]:
    """Names of all launches, and of all ops."""
    return {name for op, entry in table["ops"].items() for name in (op, *entry["kernels"])}


def changed_ops(a: Table, b: Table) -> dict[str, str]:
    """Op → added, removed or changed (other kernels, or another count), between two traced arms."""
    changes: dict[str, str] = {}
    for op in [*a["ops"], *(o for o in b["ops"] if o not in a["ops"])]:
        before, after = a["ops"].get(op), b["ops"].get(op)
        if before is None:
            changes[op] = "added"
        elif after is None:
            changes[op] = "removed"
        elif before["kernels"] != after["kernels"] or before["count"] != after["count"]:
            changes[op] = "changed"
    return changes


def ops_affected(a: Table, b: Table) -> list[OpsAffected]:
    """The changed ops as the record keeps them."""
    if not (a["there"] and b["there"]):
        return []
    return [
        OpsAffected.model_validate({"op": op, "class": entry["class"], "count": entry["count"], "change": change})
        for op, change in changed_ops(a, b).items()
        for entry in [b["ops"].get(op) or a["ops"][op]]
    ]


def compare(a: Table, b: Table, lever: ArmConfig) -> Mechanism:
    """Busy time of the lever's ops in each traced pass of both arms.

    Which ops: those of the classes that the experiment names in `ops`; else those that differ between the traces; else
    all. Positive: every pass of B is faster than every pass of A; the interval is the range that the passes span.
    """
    if not (a["there"] and b["there"]):
        return Mechanism(detail=a.get("why") or b.get("why") or "no trace")
    if lever.ops:
        chosen, what = (
            [{op for op, e in t["ops"].items() if e["class"] in lever.ops} for t in (a, b)],
            "of " + ", ".join(lever.ops),
        )
    elif changes := changed_ops(a, b):
        chosen, what = [set(changes), set(changes)], "of " + ", ".join(changes)
    else:
        chosen, what = [set(a["ops"]), set(b["ops"])], "of every op (none differs by name)"
    before, after = (
        np.sum([entry["busy_ms"] for op, entry in t["ops"].items() if op in ops] or [[0.0]], axis=0)
        for t, ops in zip((a, b), chosen, strict=True)
    )
    if min(before.min(), after.min()) <= 0:
        return Mechanism(detail=f"the busy time {what} is empty in one arm")
    found = "positive" if after.max() < before.min() else "negative" if after.min() > before.max() else "none"
    return Mechanism.model_validate(
        {
            "before_ms": before.tolist(),
            "after_ms": after.tolist(),
            "estimate": float(np.median(before) / np.median(after) - 1),
            "interval": (float(before.min() / after.max() - 1), float(before.max() / after.min() - 1)),
            "found": found,
            "detail": f"Busy time {what}, {len(before)} traced passes an arm.",
        }
    )
