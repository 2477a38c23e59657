"""The CPU backend's trace: one span per op on the host's clock, announced by the engine's own hook."""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np

from engine.backend import Engine
from engine.plan import Op
from harness import launches
from harness.sources.charge import charge
from harness.sources.trace import Trace


class _Spans:
    """An `engine.backend.OpHook` that records when each op began and ended, in ns of `perf_counter_ns`."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.starts: list[int] = []
        self.ends: list[int] = []

    def begin(self, op: Op) -> None:
        self.ops.append(op)
        self.starts.append(perf_counter_ns())

    def end(self, op: Op) -> None:
        self.ends.append(perf_counter_ns())


def trace_prefill(engine: Engine, ids: np.ndarray) -> Trace:
    """One traced prefill of int32 [T]; times in ns from submit, the wall from submit to logits on the same clock.

    An op's span is everything between its begin and its end, all threads of it: spans never overlap, and what lies
    between them (planning, dispatch) is the gap. Raises EngineError as `Engine.prefill`.
    """
    spans = _Spans()
    start = perf_counter_ns()
    engine.prefill(ids, hook=spans)
    wall_ns = perf_counter_ns() - start
    table = launches.from_columns(
        name=[op.name for op in spans.ops],
        kind="host",
        start_ns=np.array(spans.starts, np.int64) - start,
        end_ns=np.array(spans.ends, np.int64) - start,
        device=-1,
        op=[op.index for op in spans.ops],
    )
    return Trace(charge(table, engine.plan(len(ids))), wall_ns, "host")
