"""The classes of a prefill as CUPTI sees them in the process that this runs in: a module that a new process can import."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from engine.levers import Levers
from engine.models import resolve
from engine.open import open_engine
from harness.attribution.measure import DecomposeProtocol
from harness.config import load_protocol
from harness.sources.cupti import trace_prefill
from harness.sources.trace import Trace

TOKENS, PASSES, WARMUP = 3325, 7, 6


def class_medians(traces: list[Trace]) -> dict[str, float]:
    """Class → ms, the median over passes: a single pass's clock differs from the next one's by up to 3 %."""
    sums = [(t.launches["end_ns"] - t.launches["start_ns"]).groupby(t.launches["class"]).sum() / 1e6 for t in traces]
    return {str(cls): median(float(s[cls]) for s in sums) for cls in sums[0].index}


def by_cupti(seed: int) -> tuple[dict[str, float], set[int]]:
    """(class → ms, launches of a pass) as CUPTI sees them in the process that this runs in."""
    idle_s = load_protocol("decompose", DecomposeProtocol).idle_s
    random = np.random.default_rng(seed)
    with open_engine(resolve(None, gpu=True), Levers(), backend="cuda") as engine:
        plan = engine.plan(TOKENS)
        traces = []
        for _ in range(WARMUP + PASSES):
            ids = random.integers(0, plan.geometry.vocab, TOKENS, dtype=np.int32)
            time.sleep(idle_s)
            traces.append(trace_prefill(engine, ids))
    return class_medians(traces[WARMUP:]), {len(t.launches) for t in traces[WARMUP:]}
