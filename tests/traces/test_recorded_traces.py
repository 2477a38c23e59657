"""Real traces against values computed independently of this project (shared/data/README.md and llama_cpp_h200.md)."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from harness import launches
from harness.attribution.decompose import Decomposition, decompose
from harness.attribution.recorded import Recorded, classified_launches, load_recorded, read_trace
from harness.cli import group
from harness.errors import HarnessError

MMQ, CUBLAS = "nsys_h200_llama_cpp_mmq_ub4096.sqlite", "nsys_h200_llama_cpp_cublas_ub4096.sqlite"
PAIR = ("nsys_2026.2.1_2gpu_before.sqlite", "nsys_2026.2.1_2gpu_after.sqlite")
QWEN = "qwen2.5-7b-q4_k_m"

# file, device, kernels, kernel sum, kernel union, all activity: sum, union, span (ns)
ROWS = [
    ("nsys_2022.2.1_saxpy_mpi.sqlite", 0, 5, 88573480, 88573480, 373273080, 373273080, 1097327843),
    ("nsys_2025.3.2_h200_gemm_nvtx.sqlite", 0, 25, 4095037, 4095037, 4111965, 4111965, 1293378756),
    ("nsys_2025.5.2_graph_mode.sqlite", 0, 3, 3840, 3840, 7808, 7808, 186815),
    (PAIR[0], 0, 1993, 270875926, 270863484, 273830229, 273817787, 299848812),
    (PAIR[0], 1, 2017, 264324724, 264324724, 267275916, 267275916, 298661551),
    (PAIR[1], 0, 1793, 237473368, 237473368, 240108749, 240108749, 299251215),
    (PAIR[1], 1, 1794, 251362038, 251362038, 254000754, 254000754, 299269422),
    ("kineto_h100_qwen1.5_0.5b.json.gz", 0, 1465, 45432698, 45432698, 45647300, 45647300, 49652832),
    ("kineto_vllm_prefill_decode_graph.json.gz", 2, 413, 156008506, 156008394, 156085905, 156085793, 156466417),
    (MMQ, 0, 3364, 1129712974, 1129182703, 1754942152, 1754411881, 2314339365),
    (CUBLAS, 0, 4684, 502379238, 501778984, 1108200220, 1107599966, 1774598153),
]

# class → ms of one prefill of 3325 tokens (mean of four), default build and cuBLAS build
TABLE = {
    MMQ: {
        ("gemm", "q4_K"): 191.54, ("gemm", "q6_K"): 42.63, ("gemm_fixup", None): 0.59, ("quantize", None): 6.26,
        ("attention", None): 20.85, ("swiglu", None): 8.08, ("elementwise", None): 5.16, ("rope", None): 3.64, ("norm", None): 3.04,
    },
    CUBLAS: {
        ("gemm", None): 56.65, ("dequantize", None): 15.10, ("convert", None): 12.31, ("attention", None): 20.91,
        ("swiglu", None): 8.11, ("elementwise", None): 5.18, ("rope", None): 3.64, ("norm", None): 3.05,
    },
}  # fmt: skip
LAUNCHES = {
    ("gemm", "q4_K"): 166, ("gemm", "q6_K"): 27, ("gemm_fixup", None): 56, ("attention", None): 84, ("swiglu", None): 27,
    ("elementwise", None): 139, ("rope", None): 56, ("norm", None): 57,
}  # fmt: skip


def decomposed(recorded: Recorded) -> Decomposition:
    return decompose(recorded.launches, wall_ns=recorded.wall_ns, roles=recorded.roles, **recorded.about)


def of(result: Decomposition, cls: str, weight_type: str | None) -> tuple[float, int, float]:
    """(ms, launches, GMAC) of a class, over its weight types where none is named."""
    rows = [r for r in result.classes if r.cls == cls and weight_type in (None, r.weight_type)]
    return sum(r.sum_ms for r in rows), sum(r.launches for r in rows), sum(r.gmac or 0 for r in rows)


@pytest.mark.parametrize("row", ROWS, ids=[f"{r[0]}-{r[1]}" for r in ROWS])
def test_sums_unions_and_spans_are_exact_to_the_nanosecond(traces: Path, row: tuple) -> None:
    name, device, count, kernel_sum, kernel_union, total, union, span = row
    found = load_recorded(traces / name, device=device)
    table = found.launches
    kernels = table[table["kind"] == "kernel"]
    assert len(kernels) == count
    assert (kernels["end_ns"] - kernels["start_ns"]).sum() == kernel_sum
    assert launches.union_ns(kernels["start_ns"], kernels["end_ns"]) == kernel_union
    assert (table["end_ns"] - table["start_ns"]).sum() == total
    assert launches.union_ns(table["start_ns"], table["end_ns"]) == union
    assert table["start_ns"].min() == 0 and table["end_ns"].max() == span == found.wall_ns


def test_whole_graphs_are_counted_and_said_to_hide_kernels(traces: Path) -> None:
    found = load_recorded(traces / "nsys_2025.5.2_graph_mode.sqlite")
    graphs = found.launches[found.launches["kind"] == "graph"]
    assert len(graphs) == 2 and (graphs["end_ns"] - graphs["start_ns"]).sum() == 3104
    assert set(graphs["class"]) == {"graph"}
    assert any("--cuda-graph-trace=node" in note for note in found.notes)


def test_lazy_loading_is_named_and_taken_out_of_the_hosts_gap(traces: Path) -> None:
    found = load_recorded(traces / "nsys_2025.5.2_graph_mode.sqlite")
    result = decomposed(found)
    assert 0 < result.gap_parts_ms["Lazy Function Loading"] <= 0.011205
    assert any("Lazy Function Loading" in note and "not the host's" in note for note in found.notes)
    assert sum(result.gap_parts_ms.values()) <= result.gap_ms


def test_several_devices_are_listed_and_one_must_be_chosen(traces: Path) -> None:
    with pytest.raises(
        HarnessError, match=r"2 devices: 0 \(2636 launches\), 1 \(2663 launches\); choose one with --device"
    ):
        load_recorded(traces / PAIR[0])
    with pytest.raises(HarnessError, match="no device 7; it has 0, 1"):
        load_recorded(traces / PAIR[0], device=7)


@pytest.mark.parametrize("name", [r[0] for r in ROWS])
def test_real_engines_leave_nothing_unclassified(traces: Path, name: str) -> None:
    if "saxpy" in name or "graph_mode" in name:
        pytest.skip("a program of one hand-written kernel: unclassified is right")
    table, _, _ = classified_launches(traces / name)
    assert set(table["class"]) <= set(launches.FAMILIES) - {"other"}


def test_hand_written_kernels_are_unclassified_and_fail_coverage(traces: Path) -> None:
    result = decomposed(load_recorded(traces / "nsys_2022.2.1_saxpy_mpi.sqlite"))
    assert {r.cls for r in result.classes} == {"copy", "other"}
    assert not result.check("coverage").ok and "saxpy" in result.check("coverage").detail


@pytest.mark.parametrize("name", [MMQ, CUBLAS])
def test_whole_llama_cpp_trace_is_four_times_the_class_table(traces: Path, name: str) -> None:
    result = decomposed(load_recorded(traces / name, gguf=QWEN))
    for (cls, weight_type), ms in TABLE[name].items():
        found, count, _ = of(result, cls, weight_type)
        # 1 % of the class, and half a digit of the table's own rounding.
        assert found / 4 == pytest.approx(ms, rel=0.01, abs=0.005), (cls, weight_type)
        if name == MMQ and (cls, weight_type) in LAUNCHES:
            assert count == 4 * LAUNCHES[cls, weight_type]
    rest = sum(of(result, cls, None)[0] for cls in ("kv_store", "gemv", "embedding"))
    assert rest / 4 == pytest.approx(0.6, abs=0.05)
    assert "other" not in {r.cls for r in result.classes}
    assert result.ok and result.tokens == 4 * 3325


@pytest.mark.parametrize("name", [MMQ, CUBLAS])
@pytest.mark.parametrize("k", [2, 3, 4])
def test_each_timed_prefill_of_llama_cpp_is_the_class_table(traces: Path, name: str, k: int) -> None:
    result = decomposed(load_recorded(traces / name, gguf=QWEN, occurrence=k))
    for (cls, weight_type), ms in TABLE[name].items():
        assert of(result, cls, weight_type)[0] == pytest.approx(ms, rel=0.05), (cls, weight_type)
    kernels = result.launches - of(result, "copy", None)[1] - of(result, "memset", None)[1]
    assert kernels == {MMQ: 841, CUBLAS: 1171}[name]
    assert result.busy_ms == pytest.approx({MMQ: 282.4, CUBLAS: 125.6}[name], rel=0.05)
    assert result.ok and result.tokens == 3325


def test_gmac_are_the_ledgers_of_llama_cpps_graph(traces: Path) -> None:
    result = decomposed(load_recorded(traces / MMQ, gguf=QWEN, occurrence=3))
    assert of(result, "gemm", "q4_K")[2] == pytest.approx(17999.1, abs=0.05)
    assert of(result, "gemm", "q6_K")[2] == pytest.approx(3020.3, abs=0.15)
    assert of(result, "attention", None)[2] == pytest.approx(28 * 39.6353, abs=0.05)
    row = next(r for r in result.classes if (r.cls, r.weight_type) == ("gemm", "q4_K"))
    assert row.us_per_gmac == pytest.approx(10.64, rel=0.05)
    both = decomposed(load_recorded(traces / CUBLAS, gguf=QWEN, occurrence=3))
    row = next(r for r in both.classes if r.cls == "gemm")
    assert row.us_per_gmac == pytest.approx(2.70, rel=0.05)


@pytest.mark.parametrize("name", [MMQ, CUBLAS])
def test_roles_are_the_ledgers_work_and_both_views_sum_to_the_same(traces: Path, name: str) -> None:
    found = load_recorded(traces / name, gguf=QWEN, occurrence=2)
    result = decomposed(found)
    gmac: dict[str, float] = {}
    for row in result.roles:
        gmac[row.cls] = gmac.get(row.cls, 0.0) + (row.gmac or 0)
    t, h, f, kv = 3325, 3584, 18944, 512
    assert gmac["gate_up"] == pytest.approx(27 * 2 * t * h * f / 1e9, rel=1e-9)
    assert gmac["down"] == pytest.approx(27 * t * h * f / 1e9, rel=1e-9)
    assert gmac["q_o"] == pytest.approx(28 * 2 * t * h * h / 1e9, rel=1e-9)
    assert gmac["k_v"] == pytest.approx(28 * 2 * t * h * kv / 1e9, rel=1e-9)
    assert gmac["tail"] == pytest.approx(3 * h * f / 1e9, rel=1e-9)
    assert gmac["lm_head"] == pytest.approx(h * 152064 / 1e9, rel=1e-9)
    assert sum(r.sum_ms for r in result.roles) == pytest.approx(sum(r.sum_ms for r in result.classes), rel=1e-12)
    assert sum(r.gmac or 0 for r in result.roles) == pytest.approx(sum(r.gmac or 0 for r in result.classes), rel=1e-12)
    assert "other" not in gmac
    # The file's types, whatever the kernels computed in: down is q6_K in 13 of the 27 full layers.
    down = {r.weight_type: r.launches for r in result.roles if r.cls == "down"}
    assert set(down) == {"q4_K", "q6_K"}
    if name == MMQ:
        assert down == {"q4_K": 14, "q6_K": 13}


def test_llama_cpp_at_f16_beats_its_int8_path_by_role(traces: Path) -> None:
    """cuBLAS on dequantised weights against MMQ: formats differ, so they compare by role."""
    ours = load_recorded(traces / MMQ, gguf=QWEN, occurrence=3)
    reference = decomposed(load_recorded(traces / CUBLAS, gguf=QWEN, occurrence=3))
    result = decompose(ours.launches, wall_ns=ours.wall_ns, roles=ours.roles, reference=reference, **ours.about)
    ratio = {(r.cls, r.weight_type): r.ratio for r in result.roles}
    assert ratio["gate_up", "q4_K"] == pytest.approx(10.6 / 2.7, rel=0.2)
    assert ratio["attention", "-"] == pytest.approx(1.0, abs=0.02)
    assert result.vs_reference == pytest.approx(reference.wall_ms / result.wall_ms)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tokens": 2659}, "have 3325 tokens, not 2659"),
        ({"tail": "last_row"}, "attn_q of the last layer ran for every row"),
        ({"tail": "full"}, "of the last layer ran for one row"),
        ({"gguf": "smollm2-135m-q4_1"}, "112 attention launches are no multiple of the 30 layers"),
    ],
)
def test_what_the_trace_contradicts_fails_the_plan_and_charges_nothing(traces: Path, given: dict, why: str) -> None:
    found = load_recorded(traces / MMQ, **({"gguf": QWEN} | given))
    assert found.roles is None and any("no roles and no GMAC" in note for note in found.notes)
    result = decomposed(found)
    assert not result.check("plan").ok and why in result.check("plan").detail
    assert {r.gmac for r in result.classes} == {None} and result.tok_per_s is None
    assert result.busy_ms == pytest.approx(1754.411881), "the table itself is whole"


def test_occurrences_beyond_the_last_and_without_repetition_say_so(traces: Path) -> None:
    with pytest.raises(HarnessError, match="repeats 4 times; give --occurrence 1 to 4"):
        load_recorded(traces / MMQ, occurrence=5)
    with pytest.raises(HarnessError, match="no launch sequence repeats"):
        load_recorded(traces / "nsys_2022.2.1_saxpy_mpi.sqlite", occurrence=1)


def test_nvtx_ranges_project_through_the_launches_inside(traces: Path) -> None:
    path = traces / "nsys_2025.3.2_h200_gemm_nvtx.sqlite"
    one = load_recorded(path, range_="layer7")
    gemms = one.launches[one.launches["class"] == "gemm"]
    assert len(gemms) == 1 and one.wall_ns == one.launches["end_ns"].max()
    every = load_recorded(path, range_="layer*")
    gemm = every.launches[every.launches["class"] == "gemm"]
    assert len(gemm) == 20 and (gemm["end_ns"] - gemm["start_ns"]).sum() == 3500862
    assert decomposed(every).ok
    third = load_recorded(path, range_="layer*", occurrence=8)
    assert third.wall_ns == one.wall_ns
    with pytest.raises(HarnessError, match=r"no NVTX range 'prefill'; it has 'layer0'"):
        load_recorded(path, range_="prefill")


def test_kineto_annotations_are_ranges(traces: Path) -> None:
    found = load_recorded(traces / "kineto_h100_qwen1.5_0.5b.json.gz", range_="ProfilerStep#6")
    assert 0 < len(found.launches) <= 1707 and decomposed(found).ok


def test_only_sendrecv_moved_in_the_two_gpu_pair(traces: Path) -> None:
    """Per launch, not per window: fewer launches fit in the second window of 300 ms."""
    per_launch = []
    for name in PAIR:
        table, source, unsound = classified_launches(traces / name)
        assert not unsound
        assert source == "nsys"
        duration = (table["end_ns"] - table["start_ns"]).groupby(table["class"]).agg(["sum", "count"])
        per_launch.append(duration["sum"] / duration["count"])
    change = per_launch[1] / per_launch[0] - 1
    assert change["communication"] == pytest.approx(0.414, abs=0.001)
    assert change["attention"] == pytest.approx(0.002, abs=0.001)
    assert (change.drop("communication").abs() < 0.03).all()


def test_decompose_writes_the_contracts_json(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    done = CliRunner().invoke(
        group,
        ["decompose", "--trace", str(traces / MMQ), "--gguf", QWEN, "--occurrence", "3", "--json", str(out)],
        standalone_mode=False,
    )
    assert done.exception is None and done.return_value == 0
    data = json.loads(out.read_text())
    assert data["schema"] == "decomposition/1" and data["source"] == "nsys" and data["device"] == "NVIDIA H200"
    assert {r["class"] for r in data["roles"]} >= {"gate_up", "down", "q_o", "k_v", "attention", "tail", "lm_head"}
    assert all(c["ok"] for c in data["checks"])


def test_trace_info_prints_the_readmes_row(traces: Path) -> None:
    done = CliRunner().invoke(group, ["trace", "info", str(traces / MMQ), "--json", "-"], standalone_mode=False)
    device = json.loads(done.output)["devices"][0]
    assert device["kernel_sum_ns"] == 1129712974 and device["activity_union_ns"] == 1754411881


def test_trace_classify_shows_name_class_and_rule(traces: Path, tmp_path: Path) -> None:
    rules = tmp_path / "mine.yaml"
    rules.write_text('rules:\n  - {pattern: "mul_mat_q<", class: gemv, weight_type: mine}\n')
    done = CliRunner().invoke(
        group, ["trace", "classify", str(traces / MMQ), "--rules", str(rules), "--json", "-"], standalone_mode=False
    )
    rows = json.loads(done.output)["names"]
    first = rows[0]
    assert (first["class"], first["weight_type"], first["launches"]) == ("gemv", "mine", 664)
    assert first["rule"].endswith("mine.yaml rule 1") and first["ms"] == pytest.approx(766.145680)


def test_a_launch_table_that_we_saved_decomposes_to_the_same(traces: Path, tmp_path: Path) -> None:
    found = load_recorded(traces / MMQ, gguf=QWEN, occurrence=2)
    launches.save(found.launches, tmp_path / "launches.parquet")
    again = load_recorded(tmp_path / "launches.parquet")
    assert decomposed(again).by_class() == decomposed(found).by_class()
    assert again.wall_ns == found.wall_ns


def test_every_device_is_read_whole(traces: Path) -> None:
    table = read_trace(traces / PAIR[0]).launches
    assert isinstance(table, pd.DataFrame) and len(table) == 2636 + 2663
