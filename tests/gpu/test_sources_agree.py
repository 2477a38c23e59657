"""Two witnesses of one configuration: CUPTI in this process and Nsight Systems in another charge each class the same time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from engine.levers import Levers
from engine.models import resolve
from engine.open import gpu_available, open_engine
from harness.attribution.measure import DecomposeProtocol
from harness.config import load_protocol
from harness.errors import HarnessError
from harness.sources.nsys_driver import find_nsys
from harness.sources.trace import Trace

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_available(), reason="no NVIDIA GPU")]

TOKENS, PASSES, WARMUP = 3325, 11, 8
RELATIVE, ABSOLUTE_MS = 0.01, 0.005
"""1 %, or 5 µs where a whole class takes less than half a millisecond: clock steps alone move such a class by more."""


def class_medians(traces: list[Trace]) -> dict[str, float]:
    """Class → ms, the median over passes: a single pass's clock differs from the next one's by up to 3 %."""
    sums = [(t.launches["end_ns"] - t.launches["start_ns"]).groupby(t.launches["class"]).sum() / 1e6 for t in traces]
    return {str(cls): median(float(s[cls]) for s in sums) for cls in sums[0].index}


def test_nsys_and_cupti_agree_per_class() -> None:
    try:
        find_nsys()
    except HarnessError as missing:
        pytest.skip(str(missing))
    import time

    from harness.sources.cupti import trace_prefill
    from harness.sources.nsys_prefill import trace_passes

    protocol = load_protocol("decompose", DecomposeProtocol)
    random = np.random.default_rng(5)
    with open_engine(resolve(None, gpu=True), Levers(), backend="cuda") as engine:
        plan = engine.plan(TOKENS)
        cupti = []
        for _ in range(WARMUP + PASSES):
            ids = random.integers(0, plan.geometry.vocab, TOKENS, dtype=np.int32)
            time.sleep(protocol.idle_s)
            cupti.append(trace_prefill(engine, ids))
    nsys = trace_passes(None, Levers(), plan, warmup=WARMUP, passes=PASSES, idle_s=protocol.idle_s, seed=5)
    a, b = class_medians(cupti[WARMUP:]), class_medians(nsys)
    if report := os.environ.get("HARNESS_SOURCES_REPORT"):
        rows = [
            {"class": c, "cupti_ms": a[c], "nsys_ms": b[c], "difference": b[c] / a[c] - 1}
            for c in sorted(a, key=a.get, reverse=True)
        ]  # type: ignore[arg-type]
        Path(report).write_text(json.dumps({"tokens": TOKENS, "passes": PASSES, "classes": rows}, indent=2) + "\n")
    assert a.keys() == b.keys()
    apart = {c: (a[c], b[c]) for c in a if abs(b[c] - a[c]) > max(RELATIVE * a[c], ABSOLUTE_MS)}
    assert not apart, apart
    assert [len(t.launches) for t in nsys] == [len(cupti[-1].launches)] * PASSES
