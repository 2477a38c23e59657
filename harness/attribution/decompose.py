"""Where did the wall go? A launch table becomes rows per class, and the checks that make the rows believable.

Everything is vectorised over launches (a million take well under a second). Definitions:

    busy     union of all launch intervals on the device
    overlap  Σ durations − busy            (two launches at once; reported, never hidden)
    gap      traced wall − busy            (the device waits)
    floor    Σ over launches of max(2 · MACs / compute ceiling, bytes / memory ceiling)
    SOL      floor / Σ durations
    budget   ms × (1 − 1/ratio) where a reference exists (0 at ratio ≤ 1.10), else ms × (1 − SOL)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.attribution import checks, gaps
from harness.attribution.classify import short_name
from harness.attribution.decomposition import (
    ROLES_ALONE,
    Check,
    ClassRow,
    Decomposition,
    Idle,
    Pass,
    load_decomposition,
    sound,
)
from harness.errors import HarnessError
from harness.launches import sums_by, text_codes, union_ns

if TYPE_CHECKING:
    from engine.plan import Plan
    from harness.attribution.roofline import Ceilings

__all__ = ["PARITY", "ClassRow", "Decomposition", "decompose", "load_decomposition", "sound"]

SHARES_REST_ON = ("processes", "streams", "activity", "records", "conservation")
"""Checks whose failure makes the shares meaningless, the cause before what follows from it."""
PARITY = 1.10
"""A class within 10 % of its reference has no budget, however large its share."""


def decompose(
    launches: pd.DataFrame,
    *,
    wall_ns: int,
    plan: Plan | None = None,
    untraced_wall_ns: Sequence[int] | None = None,
    reference: Decomposition | Mapping[str, float] | None = None,
    ceilings: Ceilings | None = None,
    window: Mapping[str, Any] | None = None,
    passes: Sequence[Pass] | None = None,
    min_passes: int = 1,
    provenance: Mapping[str, Any] | None = None,
    tokens: int | None = None,
    model: str = "",
    source: str = "",
    device: str = "",
    regime: str = "recorded",
    levers: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    more_checks: Sequence[Check] = (),
    gap_parts_ms: Mapping[str, float] | None = None,
    gap_causes_ms: Mapping[str, float] | None = None,
    idle: Sequence[Idle] | None = None,
    roles: pd.DataFrame | None = None,
    one_window: bool = True,
    structure: str = "",
    prefills: int | None = None,
    prefill_walls_ns: Sequence[int] | None = None,
) -> Decomposition:
    """Attributes a traced window of `wall_ns` to classes.

    launches: a launch table with `class`, `weight_type`, and where known `macs` and `bytes`, on one device.
    plan: the ops that ran; then every op must own a launch and MACs must equal the plan's.
    untraced_wall_ns: walls of runs without tracing; their median is the wall. Without any, the traced wall is.
    reference: another engine's decomposition, or class → µs/GMAC.
    window: {"quiet": bool, "required": bool, "detail": str} from the sentinel; None where nobody watched.
    passes: every traced pass, this one included.
    more_checks: what the caller checked itself (results' hashes), put beside ours.
    gap_parts_ms: name → ms of the gap that tracer or driver took, not the host.
    gap_causes_ms: the gap by cause (`gaps.CAUSES`). idle: the longest waits with their causes; None: without.
    roles: the same launches classed by role (a foreign trace); a second view, with ratios of its own.
    structure: what the graph holds, where no plan says it.
    one_window: the reference was measured in this window; where it was not, its ratios are marked.
    prefills: how many prefills `tokens` are of; None: one, or nobody knows.
    prefill_walls_ns: of each prefill in a recorded window; empty where nothing tells what one is: then there is no tok/s.

    Raises HarnessError for an empty table, several devices, or a wall that is not positive. A check that fails does
    not raise: it is in the result.
    """
    if len(launches) == 0:
        raise HarnessError("the trace holds no launch on this device; record a window in which the forward runs.")
    devices = sorted(launches["device"].unique().tolist())
    if len(devices) > 1:
        raise HarnessError(
            f"the trace holds {len(devices)} devices ({', '.join(map(str, devices))}); choose one with --device."
        )
    if wall_ns <= 0:
        raise HarnessError(f"a wall of {wall_ns} ns cannot be decomposed; give the window's length.")

    if not launches["start_ns"].is_monotonic_increasing:  # a table that was put together by hand
        launches = launches.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    duration = end - start
    total_ns, busy_ns = int(duration.sum()), union_ns(launches["start_ns"], launches["end_ns"])
    rows = _rows(launches, start, end, busy_ns, ceilings)
    walls = list(untraced_wall_ns or [])
    wall = median(walls) if walls else wall_ns
    if plan is not None:
        tokens = plan.tokens if tokens is None else tokens
        levers = plan.levers.to_dict() if levers is None else levers
    role_rows = _rows(roles, start, end, busy_ns, ceilings) if roles is not None else []
    if reference is not None:
        ours_by_role = plan is not None or any(r.cls in ROLES_ALONE for r in rows)
        compare(rows, _of_one_view(reference, roles=ours_by_role), tokens)
        compare(role_rows, _of_one_view(reference, roles=True), tokens)
    for row in [*rows, *role_rows]:
        row.budget_ms = budget_ms(row.sum_ms, row.ratio, row.sol)

    result = Decomposition(
        tokens=tokens,
        model=model,
        source=source,
        device=device,
        regime=regime,
        levers=dict(levers or {}),
        wall_ms=wall / 1e6,
        traced_wall_ms=wall_ns / 1e6,
        busy_ms=busy_ns / 1e6,
        gap_ms=(wall_ns - busy_ns) / 1e6,
        overlap_ms=(total_ns - busy_ns) / 1e6,
        tok_per_s=_tok_per_s(tokens, prefills or 1, wall, None if walls else prefill_walls_ns),
        prefills=prefills,
        band_tok_per_s=[tokens / max(walls) * 1e9, tokens / min(walls) * 1e9] if tokens and walls else None,
        launches=len(launches),
        classes=rows,
        checks=[],
        provenance=dict(provenance or {}),
        walls_ms=[w / 1e6 for w in walls],
        trace_overhead=wall_ns / wall - 1 if walls else None,
        passes=list(passes or []),
        floor_ms=sum(r.floor_ms or 0.0 for r in rows) if ceilings else None,
        ceilings=ceilings.to_dict() if ceilings else None,
        structure=plan.structure() if plan is not None else structure,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=list(notes),
        gap_parts_ms=dict(gap_parts_ms or {}),
        gap_causes_ms=dict(gap_causes_ms or {}),
        idle=list(idle) if idle is not None else gaps.largest(launches),
        roles=role_rows,
    )
    if isinstance(reference, Decomposition):
        result.reference = {
            "model": reference.model, "source": reference.source, "device": reference.device, "wall_ms": reference.wall_ms,
            "tokens": reference.tokens, "created": reference.created, "one_window": one_window,
        }  # fmt: skip
        if not one_window:
            result.notes.append(
                f"~ the reference is of another window ({reference.created or 'undated'}, {reference.device or 'unknown device'}): "
                "a ratio may be the machine's, not the code's"
            )
        if (result.roles or ours_by_role) and not reference.by_role:
            result.notes.append(
                "the reference knows no roles, and rows by role are compared with none of its classes: make it with --gguf"
            )
        if not result.roles and not ours_by_role and reference.by_role is reference.classes:
            result.notes.append(
                "the reference is by role, and kernels' classes are compared with none of its rows: give this trace's model with --gguf"
            )
        if tokens and reference.tokens == tokens and (reference.prefills or 1) == (prefills or 1):
            result.vs_reference = reference.wall_ms / result.wall_ms
    result.config_hash = config_hash(result)
    outliers = checks.find_outliers(launches, plan)
    result.checks = [
        checks.conservation(result, launches, plan),
        checks.reconciliation(result, launches),
        checks.coverage(result, launches),
        checks.possibility(result, launches, ceilings, outliers),
        checks.window(window, outliers),
        checks.passes(result, min_passes),
        checks.provenance(result),
    ]
    if plan is not None:
        result.checks.insert(1, checks.plan_executed(launches, plan))
    result.checks.extend(more_checks)
    return result


def _tok_per_s(tokens: int | None, prefills: int, wall_ns: float, each_ns: Sequence[int] | None) -> float | None:
    """Of one prefill: the median one of a window that holds several; None where nobody knows what one is."""
    if not tokens:
        return None
    if each_ns is None:
        return tokens / wall_ns * 1e9 if prefills == 1 else None
    return tokens / prefills / median(each_ns) * 1e9 if each_ns else None


def _rows(
    launches: pd.DataFrame, start: np.ndarray, end: np.ndarray, busy_ns: int, ceilings: Ceilings | None
) -> list[ClassRow]:
    """One row per (class, weight type), the longest first and "other" last."""
    cls_code, classes = text_codes(launches["class"], empty="other")
    type_code, types = text_codes(launches["weight_type"], empty="-")
    code = cls_code * len(types) + type_code
    code, keys = pd.factorize(code)
    count, sum_ns, union_ns_ = sums_by(code, start, end)
    macs, bytes_ = known(launches["macs"]), known(launches["bytes"])
    macs_sum, macs_seen = np.bincount(code, np.nan_to_num(macs)), np.bincount(code, ~np.isnan(macs))
    bytes_sum, bytes_seen = np.bincount(code, np.nan_to_num(bytes_)), np.bincount(code, ~np.isnan(bytes_))
    if ceilings:
        compute_s, memory_s = ceilings.floor_seconds(macs, bytes_)
        floor_s = np.bincount(code, np.maximum(compute_s, memory_s))
        compute_sum, memory_sum = np.bincount(code, compute_s), np.bincount(code, memory_s)

    rows = []
    for i, key in enumerate(keys):
        ns = float(sum_ns[i])
        gmac = macs_sum[i] / 1e9 if macs_seen[i] else None
        gbytes = bytes_sum[i] / 1e9 if bytes_seen[i] else None
        row = ClassRow(
            cls=str(classes[key // len(types)]),
            weight_type=str(types[key % len(types)]),
            launches=int(count[i]),
            sum_ms=ns / 1e6,
            union_ms=float(union_ns_[i]) / 1e6,
            share=ns / busy_ns if busy_ns else 0.0,
            gmac=gmac,
            gbytes=gbytes,
        )
        if gmac and ns:
            row.us_per_gmac = ns / 1e3 / gmac
            row.tflop_per_s = 2 * gmac * 1e9 / ns / 1e3
        if gbytes and ns and bytes_seen[i] == count[i]:  # a rate over launches of which some are unknown says nothing
            row.gb_per_s = gbytes * 1e9 / ns
        if ceilings and floor_s[i] > 0:
            row.bound = "compute" if compute_sum[i] >= memory_sum[i] else "memory"
            row.floor_ms = floor_s[i] * 1e3
            row.sol = floor_s[i] * 1e9 / ns if ns else None
        rows.append(row)
    return sorted(rows, key=lambda r: (r.cls == "other", -r.sum_ms))


def known(column: pd.Series) -> np.ndarray:
    """A nullable integer column as float64 with NaN where unknown (exact below 2⁵³)."""
    return column.to_numpy(dtype=np.float64, na_value=np.nan)


def compare(rows: list[ClassRow], reference: Decomposition | Mapping[str, float], tokens: int | None) -> None:
    """Fills the reference's µs/GMAC and the ratio. A weight type that the reference lacks compares by class: the two
    engines may hold the same weights in different formats."""
    if not isinstance(reference, Decomposition):
        for row in rows:
            row.ref_us_per_gmac = reference.get(row.cls)
            if row.ref_us_per_gmac and row.us_per_gmac:
                row.ratio = row.us_per_gmac / row.ref_us_per_gmac
        return
    same_work = tokens is not None and reference.tokens == tokens
    for row in rows:
        exact = [r for r in reference.classes if (r.cls, r.weight_type) == (row.cls, row.weight_type)]
        theirs = exact or [r for r in reference.classes if r.cls == row.cls]
        if not theirs:
            continue
        ref_ms, ref_gmac = sum(r.sum_ms for r in theirs), sum(r.gmac or 0.0 for r in theirs)
        if row.us_per_gmac and ref_gmac:
            row.ref_us_per_gmac = ref_ms * 1e3 / ref_gmac
            row.ratio = row.us_per_gmac / row.ref_us_per_gmac
        elif same_work and ref_ms and not row.gmac:
            ours = row.sum_ms if exact else sum(r.sum_ms for r in rows if r.cls == row.cls)
            row.ref_ms, row.ratio = ref_ms, ours / ref_ms


def _of_one_view(reference: Decomposition | Mapping[str, float], *, roles: bool) -> Decomposition | Mapping[str, float]:
    """The reference's rows by role, or those by family: rows of one view are compared with that view's and with nothing
    else (the role "norm" holds residual adds that the family "norm" does not)."""
    if not isinstance(reference, Decomposition):
        return reference
    by_family = [] if reference.by_role is reference.classes else reference.classes
    return reference.model_copy(update={"classes": reference.by_role if roles else by_family})


def budget_ms(ms: float, ratio: float | None, sol: float | None) -> float | None:
    """What closing the gap to the reference, else to the roofline, would give back; None where neither is known."""
    if ratio is not None:
        return ms * (1 - 1 / ratio) if ratio > PARITY else 0.0
    return ms * max(0.0, 1 - sol) if sol is not None else None


def config_hash(result: Decomposition) -> str:
    """Identity of the configuration that a table describes; a table with another one is about something else."""
    p = result.provenance
    identity = {
        "model": p.get("model_sha256") or result.model, "tokens": result.tokens, "levers": result.levers,
        "backend": p.get("backend", ""), "device": result.device, "regime": result.regime,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def headline(result: Decomposition) -> str:
    """One line: what dominates, and how far from the roofline it is; or the check that failed, where its failure makes the
    shares meaningless."""
    for name in SHARES_REST_ON:
        if broken := next((c for c in result.checks if c.name == name and not c.ok), None):
            return f"{broken.detail[:1].upper()}{broken.detail[1:].rstrip('.')}."
    top_class = next(iter(result.by_class()))
    top = [r for r in result.classes if r.cls == top_class]
    ms = sum(r.sum_ms for r in top)
    if hole := result.hole:
        return (
            f"A hole of {_ms(hole.ms)} in {_ms(result.traced_wall_ms)}, between {short_name(hole.before)} and {short_name(hole.after)}: nothing was "
            f"recorded in it. Outside of it {top_class} dominates with {_ms(ms)}, {_of_busy(ms, result.busy_ms)}; choose a window without it."
        )
    if result.gap_ms > ms:
        return (
            f"The gap dominates: the device waits for {_ms(result.gap_ms)} of {_ms(result.traced_wall_ms)} "
            f"({result.gap_ms / result.traced_wall_ms:.1%}); {top_class} is next with {_ms(ms)}."
        )
    line = f"{top_class} dominates: {_ms(ms)}, {_of_busy(ms, result.busy_ms)}"
    floors = [r.floor_ms for r in top if r.floor_ms is not None]
    if len(floors) == len(top) and sum(floors) > 0:
        sol = sum(floors) / ms
        bound = max(top, key=lambda r: r.sum_ms).bound
        line += f", at {sol:.0%} of its {bound} roofline ({1 / sol:.2f}× its floor of {_ms(sum(floors))})"
    if result.floor_ms:
        line += f"; the whole wall is {result.wall_ms / result.floor_ms:.2f}× its floor of {_ms(result.floor_ms)}"
    return line + "."


def _of_busy(ms: float, busy_ms: float) -> str:
    """A class's share in words; launches that run at once sum to more than busy, of which no share is above 100 %."""
    return f"{ms / busy_ms:.1%} of busy" if ms <= busy_ms else f"several at once in {_ms(busy_ms)} of busy"


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.2f} ms"
