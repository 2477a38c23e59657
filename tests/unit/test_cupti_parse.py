"""CUPTI's records become a launch table with the exact op of every launch: the joins, on plain records, without a GPU."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.geometry import tiny
from engine.levers import Levers
from engine.plan import Plan, build_plan
from harness.attribution.decompose import decompose
from harness.errors import HarnessError
from harness.sources import cupti as source
from harness.sources.cupti import Activity, Records, launch_table
from harness.sources.names import demangled

T0 = 1_700_000_000_000_000_000  # a realistic CUPTI stamp: it must not lose its nanoseconds on the way


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build_plan(tiny("qwen2"), 16)


def kernel(op_start: int, correlation: int, *, name: str = "k", length: int = 900, node: int = 0) -> Activity:
    return Activity(
        "kernel", name, T0 + op_start, T0 + op_start + length, 0, 13, correlation, node, "4,1,1", "128,1,1", 64, 1024
    )


def records_of(plan: Plan) -> Records:
    """One kernel per op, launched through the runtime (even) or the driver API (odd); the copies are copies."""
    records = Records()
    for op in plan:
        correlation = 1000 + 3 * op.index  # API calls in between have correlation ids too
        records.external[correlation] = op.index + 1
        records.external[correlation + 1] = op.index + 1
        if op.kind in ("tokens_in", "logits_out"):
            direction = "HtoD" if op.kind == "tokens_in" else "DtoH"
            at = T0 + 1000 * op.index
            records.activities.append(
                Activity(
                    "memcpy", f"[CUDA memcpy {direction}]", at, at + 500, 0, 13, correlation, 0, bytes=op.bytes_read
                )
            )
        else:
            records.activities.append(kernel(1000 * op.index, correlation + op.index % 2))
    return records


def test_every_launch_gets_its_op_class_and_work(plan: Plan) -> None:
    frame, notes = launch_table(records_of(plan), plan, T0 - 500)
    assert notes == []
    assert frame["op"].tolist() == [op.index for op in plan]
    assert frame["class"].tolist() == [op.cls for op in plan]
    assert frame["macs"].sum() == plan.macs
    assert frame["start_ns"].tolist() == [500 + 1000 * op.index for op in plan]
    assert frame["kind"].tolist()[0] == "memcpy" and frame["kind"].tolist()[-1] == "memcpy"
    assert frame["grid"].tolist()[1] == "4,1,1" and frame["registers"].tolist()[1] == 64
    assert decompose(frame, wall_ns=int(frame["end_ns"].max()) + 500, plan=plan, source="cupti").check("plan").ok


def test_records_in_any_order_and_stale_ones_do_not_disturb(plan: Plan) -> None:
    records = records_of(plan)
    np.random.default_rng(0).shuffle(records.activities)  # type: ignore[arg-type]
    records.activities.append(kernel(-9000, 77, name="before the window"))
    frame, _ = launch_table(records, plan, T0 - 500)
    assert frame["op"].tolist() == [op.index for op in plan]


def test_split_k_books_its_macs_once_and_both_launches_count(plan: Plan) -> None:
    records = records_of(plan)
    gemm = next(op for op in plan if op.kind == "gemm")
    records.activities.append(
        kernel(1000 * gemm.index + 920, 1000 + 3 * gemm.index, name="splitKreduce_kernel", length=50)
    )
    frame, _ = launch_table(records, plan, T0)
    mine = frame[frame["op"] == gemm.index]
    assert mine["name"].tolist() == ["k", "splitKreduce_kernel"]
    assert mine["macs"].tolist() == [gemm.macs, 0]
    assert mine["class"].tolist() == [gemm.cls] * 2


def test_a_launch_outside_every_op_is_other_and_said_so(plan: Plan) -> None:
    records = records_of(plan)
    records.activities.append(kernel(500_000, 999_999, name="stray", length=100_000))
    frame, notes = launch_table(records, plan, T0)
    assert frame["class"].tolist()[-1] == "other"
    assert notes == [f"1 of {len(plan) + 1} launches carry no op: they ran outside the plan and count as `other`"]
    check = decompose(frame, wall_ns=700_000, plan=plan).check("coverage")
    assert not check.ok and "stray" in check.detail


def test_kernels_of_a_graph_are_known_by_their_node(plan: Plan) -> None:
    """All share the graph launch's correlation id; node ids count up in capture order from an arbitrary first."""
    ops = [op.index for op in plan for _ in range(2 if op.kind == "gemm" else 1)]  # a GEMM captured as two nodes
    first = 0x2_0000_0005
    activities = [kernel(1000 * i, 42, node=first + i) for i in range(len(ops))]
    frame, notes = launch_table(Records(activities[::-1], {42: 1}), plan, T0, graph_ops=ops)
    assert notes == []
    assert frame["op"].tolist() == ops
    assert frame["graph_node"].tolist() == [first + i for i in range(len(ops))]


def test_a_table_without_launches_is_one_sentence(plan: Plan) -> None:
    with pytest.raises(HarnessError, match="recorded no kernel"):
        launch_table(Records(), plan, T0)


def test_names_are_read_as_a_person_reads_them() -> None:
    assert demangled("_Z9rope_tileILi128EEvPKfPfi") == "void rope_tile<128>(float const*, float*, int)"
    assert demangled("plain_c_name") == "plain_c_name"
    assert demangled("_Znot a symbol") == "_Znot a symbol"


class FakeKind(enum.IntEnum):
    MEMCPY = 1
    MEMSET = 2
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    EXTERNAL_CORRELATION = 39


class FakeCupti(ModuleType):
    """cupti-python's interface: records are handed over when flushed, and external ids stack per thread."""

    ActivityKind = FakeKind
    ExternalCorrelationKind = enum.IntEnum("ExternalCorrelationKind", {"CUSTOM0": 3})  # type: ignore[misc]
    ActivityMemcpyKind = enum.IntEnum("ActivityMemcpyKind", {"HTOD": 1, "DTOH": 2, "DTOD": 8, "PTOP": 10})  # type: ignore[misc]
    Result = enum.IntEnum("Result", {"ERROR_INSUFFICIENT_PRIVILEGES": 35})  # type: ignore[misc]

    class cuptiError(Exception):
        def __init__(self, status: int) -> None:
            super().__init__(f"status {status}")
            self.status = status

    def __init__(self) -> None:
        super().__init__("cupti.cupti")
        self.enabled: set[int] = set()
        self.stack: list[int] = []
        self.pending: list[Any] = []
        self.clock = T0
        self.calls = 0
        self.refuse = False

    def activity_register_callbacks(self, requested: Any, completed: Any) -> None:
        assert requested()[0] >= 1 << 20
        self.completed = completed

    def activity_enable(self, kind: int) -> None:
        if self.refuse:
            raise self.cuptiError(35)
        self.enabled.add(int(kind))

    def activity_disable(self, kind: int) -> None:
        self.enabled.remove(int(kind))

    def activity_flush_all(self, flag: int) -> None:
        self.completed(self.pending)
        self.pending = []

    def activity_get_num_dropped_records(self, context: int, stream: int, pointer: int) -> None:
        pass

    def activity_push_external_correlation_id(self, kind: int, number: int) -> None:
        self.stack.append(number)

    def activity_pop_external_correlation_id(self, kind: int) -> int:
        return self.stack.pop()

    def get_timestamp(self) -> int:
        self.clock += 10
        return self.clock

    def launch(self, kind: FakeKind, **fields: Any) -> None:
        if int(kind) not in self.enabled:
            return
        self.calls += 1
        self.clock += 1000
        common = {"start": self.clock, "end": self.clock + 800, "device_id": 0, "stream_id": 7, "correlation_id": self.calls,
                  "graph_node_id": 0}  # fmt: skip
        if self.stack and {FakeKind.RUNTIME, FakeKind.DRIVER} <= self.enabled:
            self.pending.append(
                SimpleNamespace(
                    kind=FakeKind.EXTERNAL_CORRELATION, correlation_id=self.calls, external_id=self.stack[-1]
                )
            )
        self.pending.append(SimpleNamespace(kind=kind, **common, **fields))


class FakeEngine:
    """Launches one kernel (or copy) per op through the fake."""

    name = "cuda"

    def __init__(self, cupti: FakeCupti) -> None:
        self.cupti = cupti

    def plan(self, tokens: int) -> Plan:
        return build_plan(tiny("qwen2"), tokens, Levers())

    def prefill(self, ids: np.ndarray, *, hook: Any = None) -> np.ndarray:
        for op in self.plan(len(ids)):
            hook.begin(op)
            if op.cls == "copy":
                self.cupti.launch(FakeKind.MEMCPY, copy_kind=1 if op.kind == "tokens_in" else 2, bytes=op.bytes_read)
            else:
                self.cupti.launch(
                    FakeKind.CONCURRENT_KERNEL, name=f"_Z{len(op.kind)}{op.kind}v", grid_x=1, grid_y=2, grid_z=3, block_x=128, block_y=1,
                    block_z=1, registers_per_thread=32, static_shared_memory=100, dynamic_shared_memory=28,
                )  # fmt: skip
            hook.end(op)
        return np.zeros(4, np.float32)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    monkeypatch.setattr("harness.sources.cupti._touch_the_device", lambda: None)  # needs CuPy
    module, package = FakeCupti(), ModuleType("cupti")
    package.cupti = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cupti", package)
    monkeypatch.setattr(source, "_open", [])
    return module


def test_a_traced_prefill_maps_every_launch_and_leaves_cupti_off(fake: FakeCupti) -> None:
    engine = FakeEngine(fake)
    for _ in range(2):  # the second pass must not see the first one's records
        trace = source.trace_prefill(engine, np.arange(9, dtype=np.int32))  # type: ignore[arg-type]
        plan = engine.plan(9)
        assert trace.launches["op"].tolist() == [op.index for op in plan]
        assert trace.launches["name"].tolist()[0] == "[CUDA memcpy HtoD]"
        assert trace.launches["name"].tolist()[1] == "embed()"
        assert trace.launches["smem_bytes"].dropna().unique().tolist() == [128]
        assert (trace.launches["start_ns"] > 0).all()
        assert trace.source == "cupti" and trace.notes == []
        assert fake.enabled == set() and fake.stack == []


def test_a_refusal_is_one_sentence_that_says_what_to_do(fake: FakeCupti) -> None:
    fake.refuse = True
    with pytest.raises(HarnessError, match=r"ERROR_INSUFFICIENT_PRIVILEGES.*--source nsys"):
        source.trace_prefill(FakeEngine(fake), np.arange(9, dtype=np.int32))  # type: ignore[arg-type]


def test_without_cupti_the_sentence_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupti", None)
    monkeypatch.setattr(source, "_open", [])
    with pytest.raises(HarnessError, match=r"pip install (-e )?'.*\[cuda\]'"):
        source.trace_prefill(FakeEngine(FakeCupti()), np.arange(9, dtype=np.int32))  # type: ignore[arg-type]
