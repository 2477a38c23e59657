"""The cross-check names disagreements between counters and ledger, and picks the launch that stands for a class."""

from dataclasses import replace

import pytest

from engine.geometry import tiny
from engine.plan import build_plan
from harness import launches
from harness.errors import HarnessError
from harness.sol.crosscheck import check, match, representatives
from harness.sol.ncu import Counters

PLAN = build_plan(tiny(), 128)


def counters(**changes: object) -> Counters:
    base = Counters(
        kernel="gemm", duration_ns=1000.0, memory_sol=0.3, sm_sol=0.9, dram_sol=0.2, tensor_sol=0.9, achieved_occupancy=0.6,
        theoretical_occupancy=0.75, registers=64, smem_bytes=1024, blocks_per_sm=3, limited_by=("registers",), grid="1,1,1",
        block="128,1,1", waves=1.0, stalls=(("long scoreboard", 2.0),), warp_instructions=5e6, dram_bytes=None, l2_bytes=None,
        shared_wavefronts=None,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def table(durations: dict[int, list[int]]) -> object:
    rows = [(op, ns) for op, parts in durations.items() for ns in parts]
    starts = [i * 10_000 for i in range(len(rows))]
    return launches.from_columns(
        name=[f"void k{op}<int>(float*)" for op, _ in rows], kind=["kernel"] * len(rows), start_ns=starts,
        end_ns=[s + ns for s, (_, ns) in zip(starts, rows, strict=True)], op=[op for op, _ in rows],
    )  # fmt: skip


def gemms(cls: str) -> list[int]:
    return [op.index for op in PLAN if op.kind == "gemm" and op.cls == cls]


def test_the_representative_is_the_median_of_the_shape_that_takes_most_time() -> None:
    ops = [o.index for o in PLAN if o.name.split()[-1] in ("gate", "up") and o.cls == "gate_up"]
    q, o = [next(op.index for op in PLAN if op.name == f"L00 {n}") for n in ("q", "o")]
    chosen = representatives(table({ops[0]: [100], ops[1]: [300], q: [10], o: [20, 5]}), PLAN)  # type: ignore[arg-type]
    by_class = {r.cls: r for r in chosen}
    assert by_class["gate_up"].op == ops[1] and by_class["gate_up"].traced_ns == 300
    assert chosen[0].cls == "gate_up", "biggest class first"
    assert by_class["q_o"].traced_ns == 25 and by_class["q_o"].op == o, "launches of one op are summed"


def test_a_profiled_process_on_another_path_is_an_error() -> None:
    chosen = representatives(table({gemms("gate_up")[0]: [100]}), PLAN)  # type: ignore[arg-type]
    op = chosen[0].op
    assert match(chosen, [counters(kernel=f"k{op}")])[op][0].kernel == f"k{op}"
    with pytest.raises(HarnessError, match="took another path"):
        match(chosen, [counters(kernel="old_path")])
    with pytest.raises(HarnessError, match="took another path"):
        match(chosen, [])


def test_findings_name_extra_bytes_latency_and_impossible_speed() -> None:
    op = PLAN.ops[gemms("gate_up")[0]]
    fair = check(op, counters(), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000)
    assert fair.computed_bound == "compute" and fair.findings == ()
    assert fair.per_gmac["warp_instructions"] == pytest.approx(5e6 / (op.macs / 1e9))
    extra = check(op, counters(dram_bytes=op.bytes * 1.8), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000)
    assert any("+80%" in f for f in extra.findings)
    slow = check(op, counters(memory_sol=0.2, sm_sol=0.3), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000)
    assert any("neither" in f and "long scoreboard" in f for f in slow.findings)
    skipped = check(op, counters(duration_ns=100.0), traced_ns=100, compute_tflop_s=60, copy_gb_s=4000)
    assert any("check that it does all its work" in f for f in skipped.findings)
    held = check(
        op, counters(theoretical_occupancy=0.125, blocks_per_sm=1), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000
    )
    assert any("1 block/SM" in f and "registers" in f for f in held.findings)
    other = check(op, counters(duration_ns=2000.0), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000)
    assert any("under ncu" in f for f in other.findings)
    disagree = check(op, counters(memory_sol=0.95), traced_ns=1000, compute_tflop_s=60, copy_gb_s=4000)
    assert any("memory-bound" in f for f in disagree.findings)


def test_gmac_that_is_no_number_is_wrong_usage() -> None:
    from click.testing import CliRunner

    from harness.cli import group

    for value in ("nan", "inf", "0", "-1"):
        assert CliRunner().invoke(group, ["sol", "--ncu-rep", "x.ncu-rep", "--gmac", value]).exit_code == 2, value
