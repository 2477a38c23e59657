"""`harness round verify`: everything that a record concludes, computed again from its samples and preregistered numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.ab.verdict import conclude, outcome
from harness.attribution.queue import wall_gain
from harness.rounds.record import RoundRecord, Sample
from harness.rounds.store import SAMPLES, file_sha256, load_record, read_samples

TOLERANCE = 1e-9
"""Relative: the same arithmetic on the same numbers, through JSON, which keeps doubles exactly."""
UNTIMED = ("gate-failed", "no-op", "analysis-negative", "measured")
"""Outcomes that no sample decides."""


def verify(path: Path) -> list[str]:
    """What differs between a round's record and what its files say, one clause each; [] where everything agrees."""
    record = load_record(path)
    if record.verdict is None:
        return ["the round is still open: it has no verdict yet (`harness ab --resume` continues it)"]
    samples = read_samples(path)
    found = _frozen(record)
    found += _figures(record, samples)
    if record.analysis is not None:
        found += _analysis(record)
    found += _verdict(record, samples)
    if (record.samples_sha256 or samples) and file_sha256(path / SAMPLES) != record.samples_sha256:
        found.append(f"{SAMPLES} is not the file that the round was closed with (its SHA-256 differs)")
    for name, digest in record.attachments.items():
        if file_sha256(path / name) != digest:
            found.append(f"{name} is not the file that the round was closed with")
    return found


def _frozen(record: RoundRecord) -> list[str]:
    if record.frozen_sha256() == record.frozen_hash:
        return []
    return ["the preregistered numbers (bar, alpha, seed, prediction, configs …) changed after the first pair"]


def _figures(record: RoundRecord, samples: Sequence[Sample]) -> list[str]:
    """Every number that the samples decide, recorded against recomputed."""
    if record.kind == "MEAS-ONLY" or (not samples and record.outcome in UNTIMED):
        return []
    again = conclude(samples, record)
    evidence = record.evidence
    pairs: list[tuple[str, Any, Any]] = [
        ("pairs", record.pairs, again.pairs),
        ("dropped", record.dropped, again.dropped),
        ("estimate", record.estimate, again.estimate),
        ("interval", record.interval, again.interval),
        ("evidence for", evidence and evidence.log_for, again.log_for if evidence or again.pairs else None),
        ("evidence against", evidence and evidence.log_against, again.log_against if evidence or again.pairs else None),
        ("confirmed", record.confirmed, again.confirmed),
        ("p95 interval", record.p95_gain_interval, again.p95_interval),
    ]
    for letter, wall in again.walls.items():
        recorded = record.arms[letter].wall if letter in record.arms else None
        for name in type(wall).model_fields:
            pairs.append((f"arm {letter}'s {name}", recorded and getattr(recorded, name), getattr(wall, name)))
    if record.basket is not None or again.basket is not None:
        for name in ("a", "b", "both", "interaction"):
            for part in ("estimate", "interval"):
                recorded_part = getattr(getattr(record.basket, name, None), part, None)
                pairs.append(
                    (f"basket {name} {part}", recorded_part, getattr(getattr(again.basket, name, None), part, None))
                )
    return [
        f"{name} is {_show(old)} in the record and {_show(new)} by its samples"
        for name, old, new in pairs
        if not same(old, new)
    ]


def _verdict(record: RoundRecord, samples: Sequence[Sample]) -> list[str]:
    failed = [g.name for g in record.gates if g.ok is False]
    if failed and record.verdict not in ("REVERTED", "INVALID"):
        return [f"gate {failed[0]} failed, and the verdict is {record.verdict}"]
    if record.kind == "MEAS-ONLY":
        return [] if record.verdict == "MEAS-ONLY" else [f"a measurement-only round cannot be {record.verdict}"]
    if record.outcome in UNTIMED:
        return [] if record.verdict == "REVERTED" else [f"outcome {record.outcome} cannot be {record.verdict}"]
    again = conclude(samples, record)
    if record.verdict == "INVALID":
        # A worker that died, or a base arm off its anchor, ends a round whatever the pairs so far say.
        return []
    if record.outcome == "sub-bar":
        return [] if record.verdict == "LANDED" and record.reason else ["a sub-bar landing needs its reason"]
    found = []
    if record.verdict != again.verdict:
        found.append(f"the verdict is {record.verdict} in the record and {again.verdict or 'undecided'} by its samples")
    elif record.outcome != (expected := outcome(again, record.mechanism, record)):
        found.append(f"the outcome is {record.outcome} in the record and {expected} by its samples and mechanism")
    return found


def _analysis(record: RoundRecord) -> list[str]:
    """An analysis-negative round: its arithmetic again."""
    analysis = record.analysis
    assert analysis is not None
    left = analysis.sol if analysis.sol is not None else 1 / analysis.claimed if analysis.claimed else None
    if left is None:
        return ["the analysis names neither a roofline nor a claim"]
    gain = wall_gain(analysis.wall_ms, analysis.class_ms * (1 - left))
    found = []
    if not same(gain, analysis.best_gain):
        found.append(f"the best gain is {_show(analysis.best_gain)} in the record and {_show(gain)} by its arithmetic")
    if gain >= record.bar:
        found.append(f"the best gain {gain:.2%} reaches the bar {record.bar:.1%}, so arithmetic alone decides nothing")
    return found


def same(old: Any, new: Any) -> bool:
    """Equality to TOLERANCE for numbers and sequences of them; None equals None only."""
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(same(a, b) for a, b in zip(old, new, strict=True))
    if old is None or new is None:
        # An interval that nothing bounds is the same as none at all.
        return old is new or (isinstance(old or new, (list, tuple)) and all(v is None for v in old or new))
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        return math.isclose(old, new, rel_tol=TOLERANCE, abs_tol=1e-12)
    return old == new


def _show(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_show(v) for v in value) + "]"
    return f"{value:.9g}" if isinstance(value, float) else "nothing" if value is None else str(value)
