"""Decomposition: sums that must hold for any trace, and every way of cheating that a check must catch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.geometry import tiny
from engine.plan import Plan, build_plan
from harness import launches as table
from harness.attribution.checks import find_outliers
from harness.attribution.decompose import Decomposition, decompose, headline, load_decomposition
from harness.attribution.decomposition import Pass
from harness.attribution.roofline import Ceilings
from harness.errors import HarnessError
from harness.sources.charge import charge

ROOF = Ceilings("cuda", "test GPU", "burst", "f16", tflop_per_s=100.0, gb_per_s=1000.0, cache_gb_per_s=2000.0)
KINDS = ["gemm", "attention", "norm", "other", ""]


@st.composite
def traces(draw: st.DrawFn) -> pd.DataFrame:
    rows = draw(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from(KINDS), st.sampled_from(["-", "q4_K"])),
                         min_size=1, max_size=80))  # fmt: skip
    return table.from_columns(
        name=[f"k{i}" for i in range(len(rows))], kind="kernel", start_ns=[r[0] for r in rows], end_ns=[r[0] + r[1] for r in rows],
        device=0, stream=[i % 3 for i in range(len(rows))], **{"class": [r[2] for r in rows]}, weight_type=[r[3] for r in rows],
    )  # fmt: skip


@given(traces())
@settings(max_examples=60, deadline=None)
def test_classes_sum_to_busy_plus_overlap_and_busy_plus_gap_is_the_wall(launches: pd.DataFrame) -> None:
    wall = int(launches["end_ns"].max()) + 100
    d = decompose(launches, wall_ns=wall)
    covered = np.zeros(wall, bool)
    for s, e in zip(launches["start_ns"], launches["end_ns"], strict=True):
        covered[s:e] = True
    assert d.busy_ms == pytest.approx(covered.sum() / 1e6, rel=1e-9)
    assert sum(r.sum_ms for r in d.classes) == pytest.approx(d.busy_ms + d.overlap_ms, rel=1e-6)
    assert d.busy_ms + d.gap_ms == pytest.approx(d.traced_wall_ms, rel=1e-9)
    assert sum(r.launches for r in d.classes) == d.launches == len(launches)
    for row in d.classes:
        mine = launches[
            launches["class"].replace("", "other").eq(row.cls) & launches["weight_type"].eq(row.weight_type)
        ]
        covered[:] = False
        for s, e in zip(mine["start_ns"], mine["end_ns"], strict=True):
            covered[s:e] = True
        assert row.union_ms == pytest.approx(covered.sum() / 1e6, rel=1e-9)
        assert row.union_ms <= row.sum_ms + 1e-12
    assert d.check("conservation").ok
    assert len({(r.cls, r.weight_type) for r in d.classes}) == len(d.classes)


def executed(plan: Plan, *, us: float = 20.0, drop: tuple[int, ...] = ()) -> pd.DataFrame:
    """A trace in which every op of the plan runs one launch of `us` after another, 1 µs apart."""
    ops = [op.index for op in plan if op.index not in drop]
    start = np.arange(len(ops)) * round(us * 1e3 + 1000)
    frame = table.from_columns(
        name=[plan.ops[i].name for i in ops],
        kind="kernel",
        start_ns=start,
        end_ns=start + round(us * 1e3),
        device=0,
        op=ops,
    )
    return charge(frame, plan)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return build_plan(tiny("qwen2"), 64)


def end_of(launches: pd.DataFrame) -> int:
    return int(launches["end_ns"].max()) + 1000


def test_an_honest_trace_passes_every_check(plan: Plan) -> None:
    launches = executed(plan)
    d = decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=ROOF)
    assert d.ok, [c for c in d.checks if not c.ok]
    assert sum(r.gmac or 0 for r in d.classes) == pytest.approx(plan.macs / 1e9, rel=1e-12)
    assert d.tokens == 64 and d.levers == plan.levers.to_dict()
    for row in d.classes:
        assert row.sol is not None and 0 < row.sol < 1
        assert row.budget_ms == pytest.approx(row.sum_ms * (1 - row.sol))


def test_a_launch_charged_twice_is_caught_and_named(plan: Plan) -> None:
    launches = executed(plan)
    twice = launches.iloc[[5]].assign(**{"class": "down"})
    doubled = pd.concat([launches, twice]).sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    check = decompose(doubled.astype(table.COLUMNS), wall_ns=end_of(launches)).check("conservation")
    assert not check.ok
    assert "charged twice" in check.detail and launches["name"].iloc[5] in check.detail


def test_two_launches_side_by_side_are_no_double_charge() -> None:
    both = table.from_columns(
        name="k", kind="kernel", start_ns=[0, 0], end_ns=[9, 9], device=0, stream=[1, 2], **{"class": "gemm"}
    )
    d = decompose(both, wall_ns=10)
    assert d.check("conservation").ok
    assert d.overlap_ms == pytest.approx(9e-6)
    assert "overlap" in d.check("reconciliation").detail


def test_a_launch_in_a_class_that_is_not_its_ops_is_caught(plan: Plan) -> None:
    launches = executed(plan)
    launches.loc[4, "class"] = "copy"
    check = decompose(launches, wall_ns=end_of(launches), plan=plan).check("conservation")
    assert not check.ok and "not their op's" in check.detail


def test_an_op_without_a_launch_is_an_error_that_names_it(plan: Plan) -> None:
    launches = executed(plan, drop=(7,))
    check = decompose(launches, wall_ns=end_of(launches), plan=plan).check("plan")
    assert not check.ok and plan.ops[7].name in check.detail


def test_work_booked_twice_is_caught(plan: Plan) -> None:
    launches = executed(plan)
    gemm = launches.index[launches["macs"] > 0][0]
    launches.loc[gemm, "macs"] *= 2
    assert not decompose(launches, wall_ns=end_of(launches), plan=plan).check("plan").ok


@pytest.mark.parametrize(("share", "ok"), [(0.0199, True), (0.0201, False)])
def test_more_than_two_percent_unclassified_fails_and_names_the_biggest(share: float, ok: bool) -> None:
    rest = 1 - share
    ns = [round(rest * 1e6), round(share * 0.75e6), round(share * 0.25e6)]
    ends = np.cumsum(ns)
    launches = table.from_columns(
        name=["gemm", "mystery", "small"],
        kind="kernel",
        start_ns=ends - ns,
        end_ns=ends,
        device=0,
        **{"class": ["gemm", "", "other"]},
    )
    check = decompose(launches, wall_ns=int(ends[-1])).check("coverage")
    assert check.ok is ok
    assert check.detail.index("mystery") < check.detail.index("small")
    assert check.value == pytest.approx(share, rel=1e-3)


def test_a_class_faster_than_the_machine_is_named(plan: Plan) -> None:
    launches = executed(plan, us=0.2)
    slow = Ceilings("cuda", "toy", "burst", "f16", tflop_per_s=1.0, gb_per_s=1.0, cache_gb_per_s=2.0)
    check = decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=slow).check("possibility")
    assert not check.ok and "gate_up q4_K is faster than the machine" in check.detail


def test_a_launch_far_above_its_kinds_median_is_named_and_fails() -> None:
    ns = np.full(50, 10_000)
    ns[17] = 250_000
    ends = np.cumsum(ns)
    launches = table.from_columns(
        name="mul_mat", kind="kernel", start_ns=ends - ns, end_ns=ends, device=0, **{"class": "gemm"}
    )
    check = decompose(launches, wall_ns=int(ends[-1])).check("possibility")
    assert not check.ok and "25 × its median" in check.detail


def test_shapes_of_different_sizes_are_no_outliers(plan: Plan) -> None:
    launches = executed(plan)
    long = launches["name"].str.contains("gate")
    launches.loc[long, "end_ns"] = launches.loc[long, "start_ns"] + 20_900
    assert find_outliers(launches, plan) == []


def test_waiting_for_another_device_is_no_outlier() -> None:
    ns = np.full(20, 1000)
    ns[3] = 90_000
    ends = np.cumsum(ns)
    launches = table.from_columns(name="ncclSendRecv", kind="kernel", start_ns=ends - ns, end_ns=ends, device=0,
                                  **{"class": "communication"})  # fmt: skip
    assert find_outliers(launches) == []


def test_a_traced_wall_far_from_the_untraced_ones_does_not_reconcile(plan: Plan) -> None:
    launches = executed(plan)
    wall = end_of(launches)
    near = decompose(launches, wall_ns=wall, plan=plan, untraced_wall_ns=[round(wall * f) for f in (0.99, 0.985, 1.0)])
    far = decompose(launches, wall_ns=wall, plan=plan, untraced_wall_ns=[round(wall * f) for f in (0.90, 0.905, 0.91)])
    assert near.check("reconciliation").ok and near.trace_overhead == pytest.approx(1 / 0.99 - 1, rel=1e-3)
    assert not far.check("reconciliation").ok and "tracing +10.5%" in far.check("reconciliation").detail
    assert near.wall_ms == pytest.approx(wall * 0.99 / 1e6) and near.tok_per_s == pytest.approx(64 / near.wall_ms * 1e3)


def test_launches_beyond_the_window_do_not_reconcile(plan: Plan) -> None:
    launches = executed(plan)
    assert not decompose(launches, wall_ns=end_of(launches) // 2, plan=plan).check("reconciliation").ok


def test_an_unquiet_window_fails_where_the_protocol_requires_it(plan: Plan) -> None:
    launches = executed(plan)
    for required in (True, False):
        verdict = {"quiet": False, "required": required, "detail": "foreign compute process 4711"}
        check = decompose(launches, wall_ns=end_of(launches), plan=plan, window=verdict).check("window")
        assert check.ok is not required and "4711" in check.detail


def test_too_few_passes_and_missing_provenance_fail(plan: Plan) -> None:
    launches = executed(plan)
    d = decompose(launches, wall_ns=end_of(launches), plan=plan, source="cupti", provenance={"gpu": "x"}, min_passes=3,
                  passes=[Pass(wall_ms=1, busy_ms=1, launches=1)])  # fmt: skip
    assert not d.check("passes").ok
    assert not d.check("provenance").ok and "model_sha256" in d.check("provenance").detail


def test_a_reference_gives_ratio_and_budget_and_parity_has_none(plan: Plan) -> None:
    launches = executed(plan)
    ours = decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=ROOF)
    reference = ours.model_copy(deep=True)
    for row in reference.classes:
        row.sum_ms /= {"gate_up": 2.0, "attention": 1.05, "norm": 4.0}.get(row.cls, 1.0)
    d = decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=ROOF, reference=reference)
    rows = {r.cls: r for r in d.classes if r.cls in ("gate_up", "attention", "norm")}
    assert rows["gate_up"].ratio == pytest.approx(2) and rows["gate_up"].budget_ms == pytest.approx(
        rows["gate_up"].sum_ms / 2
    )
    assert rows["attention"].ratio == pytest.approx(1.05) and rows["attention"].budget_ms == 0
    assert rows["norm"].ratio == pytest.approx(4) and rows["norm"].ref_us_per_gmac is None
    assert d.vs_reference == pytest.approx(1)


def test_an_op_of_several_launches_books_its_work_once_on_the_longest(plan: Plan) -> None:
    gemm = next(op for op in plan if op.macs)
    frame = table.from_columns(name=["splitk", "reduce", "stray"], kind="kernel", start_ns=[0, 50, 70], end_ns=[40, 60, 75], device=0,
                               op=pd.array([gemm.index, gemm.index, None], "Int32"))  # fmt: skip
    out = charge(frame, plan)
    assert out["macs"].tolist()[:2] == [gemm.macs, 0] and out["bytes"].tolist()[:2] == [gemm.bytes, 0]
    assert out["class"].tolist() == [gemm.cls, gemm.cls, "other"]
    assert out["macs"].isna().tolist() == [False, False, True]


def test_several_devices_and_empty_tables_are_one_sentence() -> None:
    two = table.from_columns(
        name="k", kind="kernel", start_ns=[0, 1], end_ns=[1, 2], device=[0, 3], **{"class": "gemm"}
    )
    with pytest.raises(HarnessError, match=r"2 devices \(0, 3\); choose one with --device"):
        decompose(two, wall_ns=10)
    with pytest.raises(HarnessError, match="holds no launch"):
        decompose(two.iloc[:0], wall_ns=10)


def test_json_has_the_contracts_fields_and_comes_back_the_same(plan: Plan, tmp_path: Path) -> None:
    launches = executed(plan)
    d = decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=ROOF, untraced_wall_ns=[end_of(launches)] * 3)
    data = json.loads(json.dumps(d.to_dict(), allow_nan=False))
    assert {"schema", "tokens", "model", "source", "device", "regime", "levers", "wall_ms", "traced_wall_ms", "busy_ms", "gap_ms",
            "overlap_ms", "tok_per_s", "band_tok_per_s", "launches", "classes", "checks", "provenance"} <= data.keys()  # fmt: skip
    assert {"class", "weight_type", "launches", "sum_ms", "union_ms", "share", "gmac", "us_per_gmac", "tflop_per_s", "gb_per_s",
            "bound", "sol", "ref_us_per_gmac", "ratio", "budget_ms"} <= data["classes"][0].keys()  # fmt: skip
    assert {"name", "ok", "value", "limit", "detail"} == data["checks"][0].keys()
    path = tmp_path / "d.json"
    path.write_text(json.dumps(data))
    assert load_decomposition(path) == Decomposition.model_validate(data) == d


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "not readable JSON"), ('{"schema": "diff/1"}', "has schema 'diff/1'"), ("[]", "has schema None"),
     ('{"schema": "decomposition/1"}', "is no decomposition: wall_ms")],
)  # fmt: skip
def test_a_file_that_is_no_decomposition_is_one_sentence(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(content)
    with pytest.raises(HarnessError, match=says):
        load_decomposition(path)


def test_the_headline_names_what_dominates(plan: Plan) -> None:
    launches = executed(plan)
    assert "dominates" in headline(decompose(launches, wall_ns=end_of(launches), plan=plan, ceilings=ROOF))
    assert headline(decompose(launches, wall_ns=50 * end_of(launches), plan=plan)).startswith("The gap dominates")


def test_a_million_launches_take_seconds_at_most() -> None:
    rng = np.random.default_rng(0)
    n = 1_000_000
    ns = rng.integers(500, 20_000, n)
    ends = np.cumsum(ns + 200)
    code = rng.integers(0, 8, n)
    launches = table.from_columns(
        name=np.array([f"kernel_{i}" for i in range(8)])[code], kind="kernel", start_ns=ends - ns, end_ns=ends, device=0, stream=7,
        **{"class": np.array(["gemm", "attention", "norm", "rope", "swiglu", "convert", "copy", "other"])[code]},
    )  # fmt: skip
    start = time.process_time()
    d = decompose(launches, wall_ns=int(ends[-1]))
    assert time.process_time() - start < 3.0
    assert d.launches == n
