"""The cross-check names disagreements between counters and ledger, and picks the launch that stands for a class."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from engine.geometry import tiny
from engine.plan import build_plan
from harness import launches
from harness.errors import HarnessError
from harness.report.saved import render_saved
from harness.report.sol import conclusion, to_markdown
from harness.sol.crosscheck import SolRow, check, match, representatives
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


def row(**changes: object) -> SolRow:
    base = SolRow(
        "gate_up", "q4_K", "L00 up", "8 × 8 × 8", 100.0, 1.0, 1000, "compute", 0.95, counters(dram_bytes=1100.0),
        dict.fromkeys(("warp_instructions", "dram_bytes", "l2_bytes", "shared_wavefronts"), 1.0), (),
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def test_the_page_opens_with_what_its_rows_say() -> None:
    far = row(
        cls="norm", weight_type="-", computed_bound="memory", computed_sol=0.9,
        counted=counters(memory_sol=0.5, dram_bytes=4000.0),
    )  # fmt: skip
    said = conclusion([row(), far])
    assert said.startswith(
        "gate_up q4_K stands at 95.0% of its compute roof and the counters agree: ncu counts 90.0% of the SM peak."
    )
    assert (
        "Of 2 kernels 1 agree within 10 points; the largest disagreement is norm, 90.0% computed and 50.0% counted."
        in said
    )
    assert said.endswith("In bytes it is norm: DRAM moved 0.0 MB where the ledger counts 0.0 (+300%).")
    assert "the counters differ by 40 points" in conclusion([far])
    bare = row(counted=counters(sm_sol=None))
    assert conclusion([bare]) == "gate_up q4_K stands at 95.0% of its compute roof.", (
        "nothing counted, nothing compared"
    )


def test_a_page_comes_back_from_its_record_alone(tmp_path: Path) -> None:
    about = {
        "model": "m",
        "tokens": 8,
        "device": "d",
        "regime": "burst",
        "ceilings": {"tflop_per_s": 1.0, "gb_per_s": 2.0},
        "provenance": {},
    }
    record = tmp_path / "sol.json"
    record.write_text(json.dumps({"schema": "sol/1", **about, "classes": [row().to_dict()]}))
    assert render_saved(tmp_path) == [], "a record without its page stays without"
    page = record.with_suffix(".md")
    page.write_text("stale")
    assert render_saved(tmp_path) == [page]
    assert page.read_text() == to_markdown([row()], about)
    record.write_text(json.dumps({"schema": "sol/1", **about, "classes": [{"class": "gate_up"}]}))
    with pytest.raises(HarnessError, match=r"sol\.json is no cross-check"):
        render_saved(tmp_path)
    assert "gate_up q4_K" in page.read_text(), "a bad record loses no page"


def test_the_committed_page_is_its_records_rendering() -> None:
    record = Path(__file__).parents[2] / "reports" / "h200" / "sol.json"
    about = json.loads(record.read_text())
    rows = [SolRow.from_dict(r) for r in about["classes"]]
    assert record.with_suffix(".md").read_text() == to_markdown(rows, about), "run `harness report --no-figures`"
    assert json.loads(json.dumps([r.to_dict() for r in rows])) == about["classes"]
