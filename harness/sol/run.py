"""Cross-checks every class of a prefill: trace once, profile one op per class, compare with the ledger."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.errors import HarnessError
from harness.sol import crosscheck, ncu
from harness.sources.profiled_child import check_report, spec_of

if TYPE_CHECKING:
    from engine.levers import Levers
    from harness.attribution.roofline import Ceilings

Report = Callable[[str, int, int], None]


def cross_check(
    model: str | None,
    levers: Levers,
    tokens: int,
    *,
    report_path: Path,
    classes: Collection[str] = (),
    regime: str = "burst",
    progress: Report | None = None,
) -> tuple[list[crosscheck.SolRow], Ceilings, dict[str, object]]:
    """One row per class of the traced prefill, the ceilings used, and what the profiled process said of itself.

    The engine that traces is closed before ncu starts its own: two never share the GPU. The `.ncu-rep` stays at
    `report_path`. Raises HarnessError: no GPU, no ncu, a class that the prefill lacks, a process on another path.
    """
    from engine.models import resolve
    from engine.open import open_engine
    from harness.attribution.roofline import ceilings_for
    from harness.sources.cupti import trace_prefill

    ncu.find_ncu()  # before minutes are spent
    ncu.reader()
    loaded = resolve(model, gpu=True, progress=progress)
    with open_engine(loaded, levers, backend="cuda", progress=progress) as engine:
        plan = engine.plan(tokens)
        ceilings = ceilings_for("cuda", regime, plan=plan, report=progress)
        random = np.random.default_rng(1)
        for _ in range(3):  # the first pass allocates the tracer's buffers
            trace = trace_prefill(engine, random.integers(0, plan.geometry.vocab, tokens, dtype=np.int32))
    chosen = crosscheck.representatives(trace.launches, plan)
    if classes:
        known = {r.cls for r in chosen}
        if unknown := sorted(set(classes) - known):
            raise HarnessError(f"this prefill has no class {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
        chosen = [r for r in chosen if r.cls in classes]
    if progress:
        progress("profiling with ncu", 0, 1)
    spec = spec_of(model, levers, tokens, passes=1, profile_ops=[r.op for r in chosen])
    child = ncu.profile(spec, report_path) | {"model": loaded.name}
    check_report(child, levers, plan, "ncu")
    if progress:
        progress("profiling with ncu", 1, 1)
    found = crosscheck.match(chosen, ncu.read_report(report_path))
    rows = [
        crosscheck.check(plan.ops[r.op], ncu.combine(found[r.op]), traced_ns=r.traced_ns,
                         compute_tflop_s=ceilings.tflop_per_s, copy_gb_s=ceilings.gb_per_s)
        for r in chosen
    ]  # fmt: skip
    return rows, ceilings, child
