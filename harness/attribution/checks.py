"""The checks of a decomposition. Each returns its verdict with the figures that it rests on; none raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.attribution.decomposition import Check, ClassRow, Decomposition, Outlier
from harness.attribution.on_paper import paper_rate
from harness.launches import text_codes

if TYPE_CHECKING:
    from engine.plan import Plan
    from harness.attribution.roofline import Ceilings

SUM_LIMIT = 1e-6
"""Classes sum to busy + overlap, relative."""
OTHER_LIMIT = 0.02
"""Unclassified time, of busy."""
OVERHEAD_LIMIT = {"host": 0.25}
OVERHEAD_LIMIT_ELSEWHERE = 0.05
"""Traced wall against the untraced ones: how far beyond their band it may lie. On the CPU backend tracing is two clock
reads an op, so what differs is the machine's mood, which the band of three runs shows only in part."""
CEILING_SLACK = 0.05
"""How far a measured ceiling may be beaten before the figure is called impossible: the ceiling is measured too."""
OUTLIER_TIMES = 20
OUTLIER_SHARE = 0.005
"""A launch above 20 × its kind's median is named; with more than 0.5 % of busy it moves the table, and fails."""
HOST_OUTLIER_NS = 20_000_000
"""On the CPU backend a span below 20 ms is never an outlier: the scheduler alone can do that to it."""
REQUIRED_PROVENANCE = {
    "host": ("cpu", "commit", "model_sha256", "protocol"),
    "cupti": ("gpu", "driver", "clocks", "commit", "model_sha256", "protocol"),
}
"""What must be known of a window that we recorded ourselves; a foreign trace needs its file's name and hash only."""


def conservation(result: Decomposition, launches: pd.DataFrame, plan: Plan | None) -> Check:
    """Classes sum to busy + overlap, and no launch is charged twice or to a class that is not its op's."""
    expected = result.busy_ms + result.overlap_ms
    error = abs(sum(r.sum_ms for r in result.classes) - expected) / expected if expected else 0.0
    detail = f"classes sum to busy{' + overlap' if result.overlap_ms else ''} = {expected:.3f} ms"
    twice = charged_twice(launches)
    if twice:
        detail = f"{len(twice)} launches are charged twice, first {twice[0]}"
    astray = _astray(launches, plan) if plan is not None else []
    if astray:
        detail = f"{len(astray)} launches are in a class that is not their op's, first {astray[0]}"
    return Check(
        name="conservation", ok=error <= SUM_LIMIT and not twice and not astray, value=error, limit=SUM_LIMIT, detail=detail
    )  # fmt: skip


def charged_twice(launches: pd.DataFrame) -> list[str]:
    """Launches that stand in the table more than once: same name, stream, graph node, start and end (longer than 0 ns).

    No device runs one kernel twice over the very same nanoseconds of one stream; a join that matched twice does.
    """
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    # Only rows that share their start and end with a neighbour (the table is ordered by both) can be such twins.
    same = (start[1:] == start[:-1]) & (end[1:] == end[:-1]) & (end[1:] > start[1:])
    if not same.any():
        return []
    suspects = launches[np.r_[same, False] | np.r_[False, same]]
    twins = suspects[suspects.duplicated(["name", "device", "stream", "graph_node", "start_ns", "end_ns"])]
    return [f"{name!r} at {at} ns" for name, at in zip(twins["name"].tolist(), twins["start_ns"].tolist(), strict=True)]


def _astray(launches: pd.DataFrame, plan: Plan) -> list[str]:
    ops = launches["op"].to_numpy(dtype=np.int64, na_value=-1)
    owned = np.flatnonzero((ops >= 0) & (ops < len(plan)))
    classes = np.array([op.cls for op in plan], dtype=object)
    wrong = owned[launches["class"].to_numpy(dtype=object)[owned] != classes[ops[owned]]]
    return [
        f"{launches['name'].iloc[i]!r} ({launches['class'].iloc[i]}, its op {plan.ops[ops[i]].name!r} is {plan.ops[ops[i]].cls})"
        for i in wrong
    ]


def plan_executed(launches: pd.DataFrame, plan: Plan) -> Check:
    """Every op owns a launch, and the MACs booked are the plan's to the last one: no work was skipped or booked twice."""
    ops = launches["op"].to_numpy(dtype=np.int64, na_value=-1)
    seen = np.zeros(len(plan), bool)
    seen[ops[(ops >= 0) & (ops < len(plan))]] = True
    missing = [plan.ops[i].name for i in np.flatnonzero(~seen)]
    stray = sorted({int(i) for i in ops[ops >= len(plan)]})
    booked = int(launches["macs"].fillna(0).sum())
    if missing:
        detail = f"{len(missing)} of {len(plan)} ops have no launch: {', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}"
    elif stray:
        detail = f"launches name ops that the plan lacks: {stray[:4]}"
    elif booked != plan.macs:
        detail = f"launches book {booked / 1e9:.6f} GMAC, the plan has {plan.macs / 1e9:.6f}"
    else:
        detail = f"all {len(plan)} ops have launches, {plan.macs / 1e9:.3f} GMAC booked once"
    ok = not missing and not stray and booked == plan.macs
    return Check(name="plan", ok=ok, value=len(missing), limit=0, detail=detail)


def reconciliation(result: Decomposition, launches: pd.DataFrame) -> Check:
    """busy + gap = traced wall with gap ≥ 0, launches lie inside the window, and tracing did not change the wall."""
    text = f"busy {result.busy_ms:.3f} + gap {result.gap_ms:.3f} = traced wall {result.traced_wall_ms:.3f} ms"
    if result.overlap_ms:
        text += f"; launches overlap by {result.overlap_ms:.{3 if result.overlap_ms >= 5e-4 else 6}f} ms"
    # Device and host clocks are aligned to microseconds, not to the nanosecond.
    slack = max(0.02, result.traced_wall_ms * 1e-3)
    first, last = launches["start_ns"].min() / 1e6, launches["end_ns"].max() / 1e6
    inside = first >= -slack and last <= result.traced_wall_ms + slack and result.gap_ms >= 0
    if not inside:
        text += f"; launches span {first:.3f} to {last:.3f} ms, beyond the window"
    overhead, limit = result.trace_overhead, None
    if overhead is not None:
        limit = overhead_limit(result.walls_ms, result.source)
        text += f"; untraced {result.wall_ms:.3f} ms, tracing {overhead:+.1%}"
        own = OVERHEAD_LIMIT.get(result.source, OVERHEAD_LIMIT_ELSEWHERE)
        if own < abs(overhead) <= limit:
            text += (
                f": beyond {own:.0%}, but the untraced runs themselves lie up to {limit - own:.0%} from their median, "
                "so take the shares and not the walls"
            )
    ok = inside and (overhead is None or limit is None or abs(overhead) <= limit)
    return Check(name="reconciliation", ok=ok, value=overhead, limit=limit, detail=text)


def overhead_limit(walls_ms: Sequence[float], source: str) -> float:
    """How far a traced wall may lie from the untraced median: 5 % (host: 25 %) beyond the untraced runs' own band."""
    middle = median(walls_ms)
    return OVERHEAD_LIMIT.get(source, OVERHEAD_LIMIT_ELSEWHERE) + max(abs(w / middle - 1) for w in walls_ms)


def coverage(result: Decomposition, launches: pd.DataFrame) -> Check:
    """At most 2 % of busy is unclassified; the biggest unclassified names are named whatever their share."""
    other = sum(r.share for r in result.classes if r.cls == "other")
    detail = f"{1 - other:.2%} of busy is classified"
    if other:
        rest = launches[launches["class"].isin(["other", ""])]
        ms = (rest["end_ns"] - rest["start_ns"]).groupby(rest["name"]).sum().nlargest(5) / 1e6
        named = ", ".join(f"{name} ({value:.3f} ms)" for name, value in ms.items())
        detail = f"{other:.2%} of busy is unclassified: {named}"
    return Check(name="coverage", ok=bool(other <= OTHER_LIMIT), value=float(other), limit=OTHER_LIMIT, detail=detail)


def possibility(
    result: Decomposition, launches: pd.DataFrame, ceilings: Ceilings | None, outliers: Sequence[Outlier]
) -> Check:
    """No class beats the machine's measured ceilings (its caches' where bytes bound it), or, where nobody measured any, the
    fastest matrix rate that its GPU has on paper; no launch stands far out."""
    found: list[str] = []
    worst = 0.0
    rate, whose = paper_rate(result.device)
    rows = [*result.classes, *result.roles]
    if ceilings:
        for row in rows:
            # The fastest that this machine could do it: every byte from cache.
            least_ms = _least_ms(row.gmac, row.gbytes, ceilings)
            if row.sum_ms > 0:
                worst = max(worst, least_ms / row.sum_ms if least_ms > 1e-3 * result.busy_ms else 0.0)
            if least_ms - row.sum_ms > max(CEILING_SLACK * least_ms, 1e-3 * result.busy_ms):
                found.append(f"{row.cls} {row.weight_type} is faster than the machine ({_rate(row, ceilings)})")
    else:
        fast = [r for r in rows if r.tflop_per_s and r.tflop_per_s > rate]
        found += [
            f"{r.cls} {r.weight_type} is faster than any machine ({r.tflop_per_s:,.0f} TFLOP/s, {whose}: {rate:,.0f})"
            for r in fast
        ]
    moves = [o for o in outliers if o.ms - o.median_ms > OUTLIER_SHARE * result.busy_ms]
    ok = not found and not moves
    found += [_describe(o) for o in outliers[:3]]
    if len(outliers) > 3:
        found.append(f"{len(outliers) - 3} more such launches")
    if not found:
        against = (
            f"no class beats its ceiling by more than {CEILING_SLACK:.0%}" if ceilings
            else f"no class beats {rate:,.0f} TFLOP/s, {whose}" if any(r.gmac for r in rows)
            else "no ceilings to compare with"
        )  # fmt: skip
        found = [f"{against}; no launch is longer than {OUTLIER_TIMES} × its kind's median"]
    return Check(
        name="possibility", ok=ok, value=worst if ceilings else None, limit=1 + CEILING_SLACK if ceilings else None,
        detail="; ".join(found),
    )  # fmt: skip


def _rate(row: ClassRow, ceilings: Ceilings) -> str:
    if row.tflop_per_s and row.tflop_per_s > ceilings.tflop_per_s:
        return f"{row.tflop_per_s:.4g} TFLOP/s, ceiling {ceilings.tflop_per_s:.4g}"
    return f"{row.gb_per_s or 0:.4g} GB/s, ceiling {ceilings.cache_gb_per_s:.4g}"


def _least_ms(gmac: float | None, gbytes: float | None, ceilings: Ceilings) -> float:
    return max(2 * (gmac or 0) / ceilings.tflop_per_s, (gbytes or 0) / ceilings.cache_gb_per_s * 1e3)


def _describe(o: Outlier) -> str:
    return f"{o.name} at {o.start_ms:.3f} ms took {o.ms:.3f} ms, {o.ms / o.median_ms:.0f} × its median"


def find_outliers(launches: pd.DataFrame, plan: Plan | None = None, times: float = OUTLIER_TIMES) -> list[Outlier]:
    """Launches longer than `times` × the median of their own kind, the longest first.

    A kind is one class and one amount of work: with a plan, the same kernel for an op of the same shape; without, the
    same name and grid (copies: the same bytes). A kind of fewer than three launches is judged by its class, unless
    it is a copy. Time spent waiting for other devices (class "communication") is no outlier.
    """
    if len(launches) < 3:
        return []
    duration = (launches["end_ns"] - launches["start_ns"]).to_numpy()
    cls, classes = text_codes(launches["class"])
    name, _ = text_codes(launches["name"])
    ops = launches["op"].to_numpy(dtype=np.int64, na_value=-1)
    planned = (ops >= 0) & (ops < len(plan) if plan is not None else False)
    if plan is not None:
        shapes: dict[tuple[str, int, int, int], int] = {}
        shape_of = np.array([shapes.setdefault((op.kind, op.m, op.n, op.k), len(shapes)) for op in plan])
        work = np.where(planned, shape_of[np.where(planned, ops, 0)], -1)
        # On the host a span is named after its op ("L03 gate"), which would make every kind unique.
        name = np.where(planned & (launches["kind"] == "host").to_numpy(), -1, name)
    else:
        work, _ = text_codes(launches["grid"])
    is_copy = launches["kind"].isin(["memcpy", "memset"]).to_numpy()
    if is_copy.any():
        amount = launches["bytes"].to_numpy(dtype=np.int64, na_value=-1)
        work = np.where(is_copy, -2 - amount, work)
    kind = _codes(cls, name, work)
    typical, count = _median_by(kind, duration)
    lonely = (count < 3) & ~is_copy
    if plan is None and lonely.any():
        by_class, class_count = _median_by(cls, duration)
        typical, count = np.where(lonely, by_class, typical), np.where(lonely, class_count, count)
    waits = (classes == "communication")[cls]
    floor = np.where((launches["kind"] == "host").to_numpy(), HOST_OUTLIER_NS, 0)
    far = np.flatnonzero((duration > times * typical) & (typical > 0) & (count >= 3) & ~waits & (duration > floor))
    far = far[np.argsort(-duration[far], kind="stable")]
    return [
        Outlier(
            name=str(launches["name"].iloc[i]),
            cls=str(launches["class"].iloc[i]),
            ms=duration[i] / 1e6,
            median_ms=float(typical[i]) / 1e6,
            start_ms=launches["start_ns"].iloc[i] / 1e6,
        )
        for i in far
    ]


def _codes(*columns: np.ndarray) -> np.ndarray:
    """One code from 0 for every combination of the columns' values."""
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        inner, seen = pd.factorize(column)
        code, _ = pd.factorize(code * len(seen) + inner)
    return code


def _median_by(group: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every element, its group's (lower) median and its group's size. group: codes from 0; values: 0 ≤ v < 2⁴⁰ ns."""
    count = np.bincount(group)
    # One sort of (group, value) packed into 64 bits is several times faster than sorting by two keys.
    packed = np.sort((group.astype(np.int64) << 40) | np.clip(values, 0, (1 << 40) - 1))
    first = np.cumsum(count) - count
    middle = packed[np.minimum(first + np.maximum(count - 1, 0) // 2, len(packed) - 1)] & ((1 << 40) - 1)
    return middle[group], count[group]


def window(verdict: Mapping[str, Any] | None, outliers: Sequence[Outlier]) -> Check:
    """Was the machine quiet? The protocol says whether an unquiet one fails (GPU) or is only reported (CPU)."""
    if verdict is None:
        return Check(name="window", ok=True, detail="recorded elsewhere: nobody watched the machine")
    quiet, required = bool(verdict.get("quiet", True)), bool(verdict.get("required", True))
    detail = str(verdict.get("detail") or ("quiet" if quiet else "not quiet"))
    if not quiet and not required:
        detail += " (reported only: the protocol does not require a quiet window on this backend)"
    return Check(
        name="window", ok=quiet or not required, value=float(len(outliers)), detail=detail + _outlier_note(outliers)
    )


def _outlier_note(outliers: Sequence[Outlier]) -> str:
    return f"; {len(outliers)} outlier launches in the table's pass" if outliers else ""


def passes(result: Decomposition, least: int) -> Check:
    """Enough traced passes were made, and the table is the one of median wall."""
    count = len(result.passes) or 1
    detail = f"{count} traced pass{'es' if count > 1 else ''}"
    if count > 1:
        detail += f", walls {', '.join(f'{p.wall_ms:.2f}' for p in result.passes)} ms; the table is the median wall of those without outliers that reconcile"
    repeated = [p for p in result.passes if p.outliers]
    if repeated:
        detail += (
            f"; {len(repeated)} held outlier launches and were repeated, first {_describe(repeated[0].outliers[0])}"
        )
    return Check(name="passes", ok=count >= least, value=float(count), limit=float(least), detail=detail)


def provenance(result: Decomposition) -> Check:
    """What it was measured on is written down."""
    required = REQUIRED_PROVENANCE.get(result.source, ())
    missing = [key for key in required if result.provenance.get(key) in (None, "", {})]
    detail = (
        f"missing: {', '.join(missing)}" if missing else f"{len(result.provenance)} facts, configuration {result.config_hash}"
    )  # fmt: skip
    return Check(name="provenance", ok=not missing, value=float(len(missing)), limit=0.0, detail=detail)
