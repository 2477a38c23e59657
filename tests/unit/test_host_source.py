"""Traces of the CPU backend: one span per op, on one clock with the wall."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.cpu.run import CpuEngine
from engine.geometry import tiny
from engine.levers import Levers
from engine.synth import SynthModel
from harness import launches
from harness.sources.host import trace_prefill
from harness.sources.trace import Trace

TOKENS = 65


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    with CpuEngine(SynthModel(tiny("qwen2")), Levers(cpu_threads=2)) as engine:
        yield engine


@pytest.fixture(scope="module")
def trace(engine: CpuEngine) -> Trace:
    return trace_prefill(engine, np.arange(TOKENS, dtype=np.int32))


def test_every_op_has_one_span_charged_as_the_plan_says(engine: CpuEngine, trace: Trace) -> None:
    plan, table = engine.plan(TOKENS), launches.check(trace.launches)
    assert trace.source == "host"
    assert table["op"].tolist() == [op.index for op in plan]
    assert table["name"].tolist() == [op.name for op in plan]
    assert table["class"].tolist() == [op.cls for op in plan]
    assert table["weight_type"].tolist() == [op.weight_type for op in plan]
    assert table["layer"].fillna(-1).tolist() == [op.layer for op in plan]
    assert table["macs"].sum() == plan.macs
    assert table["bytes"].tolist() == [op.bytes for op in plan]
    assert set(table["kind"]) == {"host"}
    assert set(table["device"]) == {-1}


def test_spans_follow_one_another_inside_the_wall(trace: Trace) -> None:
    table = trace.launches
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    assert start[0] > 0
    assert (end >= start).all()
    assert (start[1:] >= end[:-1]).all()
    assert end[-1] <= trace.wall_ns


def test_busy_and_gap_make_the_wall(trace: Trace) -> None:
    busy = launches.union_ns(trace.launches["start_ns"], trace.launches["end_ns"])
    assert busy == (trace.launches["end_ns"] - trace.launches["start_ns"]).sum()
    assert 0 < trace.wall_ns - busy < trace.wall_ns / 2
