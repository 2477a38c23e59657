"""Rounds that no A/B makes: a table (MEAS-ONLY), a verdict by arithmetic (analysis-negative), a correction."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

from harness.ab.verdict import conclude, outcome
from harness.attribution.decomposition import Decomposition
from harness.attribution.queue import priced_wall, wall_gain
from harness.errors import HarnessError
from harness.report.words import ms, percent
from harness.rounds.record import Analysis, Evidence, Frozen, Regime, RoundRecord, Sample
from harness.rounds.store import (
    SAMPLES,
    attach,
    file_sha256,
    find_round,
    load_record,
    new_round_dir,
    now,
    read_samples,
    save_record,
    slugify,
)
from harness.rounds.tables import TABLE


def _described(table: Decomposition, number: int, title: str) -> RoundRecord:
    """A record that describes what a table describes."""
    regime: Regime = "sustained" if table.regime == "sustained" else "burst"
    reference = (table.reference or {}).get("model") or "reference"
    return RoundRecord(
        round=number, slug=slugify(title), title=title, status="finished", started=table.created or now(), finished=now(), regime=regime,
        tokens=table.tokens, model=table.model, device=table.device, provenance=dict(table.provenance) | {"levers": table.levers},
        vs_reference={str(reference): table.vs_reference} if table.vs_reference else {},
    )  # fmt: skip


def measured_round(table: Decomposition, title: str) -> Path:
    """A MEAS-ONLY round that holds one decomposition. Returns its directory."""
    number, path = new_round_dir(title)
    record = _described(table, number, title)
    record.kind, record.verdict, record.outcome = "MEAS-ONLY", "MEAS-ONLY", "measured"
    record.reason = f"wall {ms(table.wall_ms)} ms" + (f", {table.tok_per_s:,.0f} tok/s" if table.tok_per_s else "")
    record.frozen_hash = record.frozen_sha256()
    attach(path, record, TABLE, table.to_dict())
    save_record(path, record)
    return path


def analysis_negative(
    table: Decomposition,
    table_name: str,
    cls: str,
    title: str,
    *,
    bar: float,
    claimed: float | None = None,
    hypothesis: str = "",
) -> Path:
    """A round that a roofline (or a claimed speed-up) of one class decides, with the sum written out.

    Raises HarnessError when the class or its roofline is not in the table, or when the best case reaches the bar: then
    arithmetic decides nothing and the lever needs an A/B.
    """
    rows = [r for r in table.classes if r.cls == cls]
    if not rows:
        raise HarnessError(f"{table_name} has no class {cls!r}; it has {', '.join(table.by_class())}.")
    class_ms = sum(r.sum_ms for r in rows)
    sol: float | None = None
    if claimed is None:
        floors = [r.least_ms for r in rows]
        if None in floors:
            raise HarnessError(
                f"{table_name} has no roofline for {cls!r}; decompose with ceilings, or give the best case with --claim."
            )
        sol = min(1.0, sum(f for f in floors if f is not None) / class_ms)
    elif claimed <= 1:
        raise HarnessError(f"a claim of {claimed:g}× is no speed-up; give a factor above 1.")
    wall = priced_wall(table)
    left = sol if sol is not None else 1 / claimed  # type: ignore[operator]
    saved = class_ms * (1 - left)
    gain = wall_gain(wall, saved)
    if gain >= bar:
        raise HarnessError(
            f"{cls} could give {percent(gain)} of the wall, which reaches the bar of {percent(bar, 1)}: arithmetic alone decides nothing, run `harness ab`."
        )
    reach = f"at {sol:.1%} of its roofline" if sol is not None else f"claimed to become {claimed:g}× faster"
    arithmetic = (
        f"{cls} takes {ms(class_ms, 3)} ms of a {ms(wall, 3)} ms wall, {reach}. The most that it can give back is "
        f"{ms(class_ms, 3)} × (1 − {left:.4f}) = {ms(saved, 3)} ms, and {ms(wall, 3)} / ({ms(wall, 3)} − {ms(saved, 3)}) − 1 = "
        f"{percent(gain)} of the wall, below the bar of {percent(bar, 1)}."
    )
    number, path = new_round_dir(title)
    record = _described(table, number, title)
    record.bar, record.verdict, record.outcome = bar, "REVERTED", "analysis-negative"
    record.hypothesis, record.reason = hypothesis, "arithmetic decides it: no code was written"
    record.analysis = Analysis(
        **{"class": cls},
        class_ms=class_ms,
        wall_ms=wall,
        sol=sol,
        claimed=claimed,
        best_gain=gain,
        arithmetic=arithmetic,
        table=table_name,
    )
    record.frozen_at = now()
    record.frozen_hash = record.frozen_sha256()
    attach(path, record, TABLE, table.to_dict())
    save_record(path, record)
    return path


def conclude_into(record: RoundRecord, samples: list[Sample], frozen: Frozen) -> None:
    """Writes what the samples say into a record: figures, verdict, outcome."""
    again = conclude(samples, frozen)
    record.pairs, record.dropped = again.pairs, again.dropped
    record.estimate, record.interval = again.estimate, again.interval
    record.confirmed, record.p95_gain_interval, record.basket = again.confirmed, again.p95_interval, again.basket
    record.evidence = Evidence(
        **{"for": _e_value(again.log_for)},
        against=_e_value(again.log_against),
        log_for=again.log_for,
        log_against=again.log_against,
    )
    for letter, wall in again.walls.items():
        if letter in record.arms:
            record.arms[letter].wall = wall
    record.verdict, record.reason = again.verdict, again.reason
    record.next_step, record.warnings = again.next_step, again.warnings
    if again.verdict is not None:
        record.outcome = outcome(again, record.mechanism, frozen)


def _e_value(log: float) -> float:
    """exp, held below the largest double so that JSON can carry it; the logarithm beside it is exact."""
    return math.exp(min(log, 700.0))


def correct_by(number: str, by: str, why: str) -> tuple[Path, Path]:
    """A later round takes over an earlier one's figure. Returns both directories. Raises HarnessError for a bad pair."""
    old_path, new_path = find_round(number), find_round(by)
    old, new = load_record(old_path), load_record(new_path)
    if new.round <= old.round:
        raise HarnessError(f"round {new.number} is not later than round {old.number}; a correction is a newer round.")
    if old.superseded_by and old.superseded_by != new.round:
        raise HarnessError(
            f"round {old.number} is already superseded by round {old.superseded_by:04d}; correct that one."
        )
    if new.verdict is None:
        raise HarnessError(f"round {new.number} is still open; finish it before it corrects another.")
    old.superseded_by, new.supersedes, new.correction = new.round, old.round, why
    save_record(new_path, new)
    save_record(old_path, old)
    return old_path, new_path


def recompute(number: str, why: str) -> tuple[Path, Path]:
    """A new round from an old one's samples, by the rule as it stands. Raises HarnessError where that changes nothing."""
    old_path = find_round(number)
    old = load_record(old_path)
    samples = read_samples(old_path)
    if not samples:
        raise HarnessError(f"round {old.number} holds no samples to compute from; measure again and give --by.")
    copy = old.model_copy(deep=True)
    conclude_into(copy, samples, old)
    figures = ("verdict", "estimate", "interval", "confirmed", "pairs", "dropped")
    if all(getattr(copy, f) == getattr(old, f) for f in figures):
        raise HarnessError(
            f"the samples of round {old.number} still say what it says; measure again with `harness ab` and give --by."
        )
    copy.round, new_path = new_round_dir(f"{old.slug}-corrected")
    copy.slug, copy.title = new_path.name.split("-", 1)[1], f"{old.title or old.slug} (corrected)"
    copy.supersedes, copy.correction, copy.finished = old.round, why, now()
    copy.frozen_hash = copy.frozen_sha256()
    for file in old_path.iterdir():
        if file.name == SAMPLES or file.name in old.attachments:
            shutil.copyfile(file, new_path / file.name)
    copy.samples_sha256 = file_sha256(new_path / SAMPLES)
    save_record(new_path, copy)
    old.superseded_by = copy.round
    save_record(old_path, old)
    return old_path, new_path


def keep_below_bar(record: RoundRecord, reason: str) -> None:
    """A landing below the bar, which only a written reason makes. Raises HarnessError where no reason is enough."""
    if record.outcome in ("landed", "sub-bar") or record.kind != "AB" or record.analysis is not None or record.aa:
        raise HarnessError(
            f"round {record.number} ({record.outcome or 'open'}) is not a lever that missed the bar; nothing to keep."
        )
    if any(g.ok is False for g in record.gates):
        raise HarnessError(f"round {record.number} failed a gate; no reason lands it.")
    if record.estimate is None or record.estimate <= 0:
        raise HarnessError(
            f"round {record.number} shows no gain ({percent(record.estimate)}); a sub-bar landing keeps a gain below the bar."
        )
    record.verdict, record.outcome, record.reason = "LANDED", "sub-bar", reason
