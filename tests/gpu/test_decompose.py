"""Decomposition on a GPU: CUPTI gives every launch its op, nothing is lost, nothing is charged twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from engine.geometry import PRESETS
from engine.levers import Levers
from engine.open import gpu_available, open_engine
from engine.synth import SynthModel
from harness import launches as table
from harness.attribution.decompose import decompose, load_decomposition
from harness.attribution.embedded import decompose_engine
from harness.attribution.measure import DecomposeProtocol
from harness.attribution.roofline import ceilings_for
from harness.config import load_protocol

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_available(), reason="no NVIDIA GPU")]

TOKENS = 257


@pytest.fixture(scope="module")
def model() -> SynthModel:
    return SynthModel(PRESETS["tiny-qwen2"]())


@pytest.fixture(scope="module")
def engine(model: SynthModel) -> Iterator[object]:
    with open_engine(model, Levers(), backend="cuda") as engine:
        engine.prefill(np.arange(TOKENS, dtype=np.int32) % 512)
        yield engine


@pytest.fixture(scope="module")
def trace(engine):
    from harness.sources.cupti import trace_prefill

    trace_prefill(engine, np.arange(TOKENS, dtype=np.int32) % 512)
    return trace_prefill(engine, (np.arange(TOKENS, dtype=np.int32) * 7) % 512)


def test_every_launch_has_its_op_and_every_op_a_launch(engine, trace) -> None:
    plan, frame = engine.plan(TOKENS), table.check(trace.launches)
    assert frame["op"].notna().all(), frame[frame["op"].isna()]["name"].tolist()
    assert set(frame["op"]) == {op.index for op in plan}
    assert frame["op"].is_monotonic_increasing  # one stream: launches run in plan order
    assert frame["macs"].sum() == plan.macs
    assert trace.notes == []


def test_copies_are_in_the_table_with_their_bytes(engine, trace) -> None:
    frame = trace.launches
    copies = frame[frame["kind"] == "memcpy"]
    assert {"[CUDA memcpy HtoD]", "[CUDA memcpy DtoH]"} <= set(copies["name"])
    plan = engine.plan(TOKENS)
    for kind, name in (("tokens_in", "[CUDA memcpy HtoD]"), ("logits_out", "[CUDA memcpy DtoH]")):
        (op,) = [op for op in plan if op.kind == kind]
        assert name in set(frame.loc[frame["op"] == op.index, "name"])


def test_kernels_carry_their_launch_shape(trace) -> None:
    kernels = trace.launches[trace.launches["kind"] == "kernel"]
    assert kernels["registers"].gt(0).all() and kernels["smem_bytes"].ge(0).all()
    assert kernels["grid"].str.fullmatch(r"\d+,\d+,\d+").all() and kernels["block"].str.fullmatch(r"\d+,\d+,\d+").all()
    assert not kernels["name"].str.startswith("_Z").any()


def test_times_lie_inside_the_hosts_wall_and_sum_up(engine, trace) -> None:
    frame = trace.launches
    assert frame["start_ns"].min() > 0
    d = decompose(frame, wall_ns=trace.wall_ns, plan=engine.plan(TOKENS), source="cupti")
    for name in ("conservation", "plan", "coverage"):
        assert d.check(name).ok, d.check(name).detail
    assert sum(r.sum_ms for r in d.classes) == pytest.approx(d.busy_ms + d.overlap_ms, rel=1e-6)
    assert d.busy_ms + d.gap_ms == pytest.approx(d.traced_wall_ms, rel=1e-9)
    assert d.gap_ms >= 0


def test_a_lost_op_and_a_doubled_launch_fail(engine, trace) -> None:
    plan, frame = engine.plan(TOKENS), trace.launches
    lost = decompose(frame[frame["op"] != 9].reset_index(drop=True), wall_ns=trace.wall_ns, plan=plan)
    assert not lost.check("plan").ok and plan.ops[9].name in lost.check("plan").detail
    doubled = (
        pd.concat([frame, frame.iloc[[4]]]).sort_values(["start_ns", "end_ns"], ignore_index=True).astype(table.COLUMNS)
    )
    assert not decompose(doubled, wall_ns=trace.wall_ns, plan=plan).check("conservation").ok


def test_the_whole_measurement_reports_its_overhead_and_its_provenance(engine, model, tmp_path: Path) -> None:
    protocol = load_protocol("decompose", DecomposeProtocol)
    d = decompose_engine(engine, model, TOKENS, protocol).decomposition
    assert len(d.walls_ms) == 7 and len(d.passes) >= 3 and sum(p.table for p in d.passes) == 1
    assert d.trace_overhead is not None and "tracing" in d.check("reconciliation").detail
    print(f"tracing {d.trace_overhead:+.1%} of a wall of {d.wall_ms:.3f} ms")
    assert {"gpu", "driver", "clocks", "commit", "model_sha256", "protocol"} <= d.provenance.keys()
    for name in ("conservation", "plan", "coverage", "provenance", "passes", "results"):
        assert d.check(name).ok, d.check(name).detail
    assert all(r.sol is not None for r in d.classes if r.gmac)


def test_the_command_writes_a_decomposition(tmp_path: Path) -> None:
    from harness.cli import main

    with pytest.raises(SystemExit) as stop:
        main(
            [
                "decompose",
                "--model",
                "tiny-qwen2",
                "--tokens",
                "129",
                "--backend",
                "cuda",
                "--json",
                str(tmp_path / "d.json"),
            ]
        )
    d = load_decomposition(tmp_path / "d.json")
    assert d.source == "cupti" and stop.value.code == (0 if d.ok else 6)


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_ceilings_are_a_gpus(regime: str) -> None:
    c = ceilings_for("cuda", regime, fresh=True)
    assert c.tflop_per_s > 5 and c.cache_gb_per_s >= c.gb_per_s > 50
    assert c.precision == "f16" and c.key["driver"]
