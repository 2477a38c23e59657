"""Diffs: what is normalised by what, what is refused, and the recorded pair that a window's length misreads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.attribution.decomposition import Outlier, Pass
from harness.attribution.diff import diff, short_name, side_of_decomposition, side_of_launches
from harness.errors import HarnessError
from harness.launches import from_columns

CLASSES = st.dictionaries(
    st.sampled_from(["attention", "gate_up/q4_K", "down/q4_K", "down/q6_K", "norm", "swiglu"]),
    st.floats(0.01, 100),
    min_size=1,
)


def trace(kernels: dict[str, tuple[int, int]], *, device: int = 0) -> pd.DataFrame:
    """A launch table of name → (launches, ns each), back to back."""
    names = [n for n, (count, _) in kernels.items() for _ in range(count)]
    ends = np.cumsum([ns for count, ns in kernels.values() for _ in range(count)])
    starts = np.r_[0, ends[:-1]]
    return from_columns(
        name=names, kind=["kernel"] * len(names), start_ns=starts, end_ns=ends, device=[device] * len(names),
        **{"class": ["attention" if n == "flash" else "gemm" for n in names]},
    )  # fmt: skip


@given(before=CLASSES, after=CLASSES)
def test_direct_gain_and_hidden_tax_are_the_net_and_the_net_is_busy(
    a_table: Callable, before: dict, after: dict
) -> None:
    found = diff(side_of_decomposition(a_table(before), "a"), side_of_decomposition(a_table(after), "b"))
    assert found.direct_ms <= 0 <= found.tax_ms
    assert found.net_ms == pytest.approx(sum(after.values()) - sum(before.values()), abs=1e-9)
    data = found.to_json()
    assert data["schema"] == "diff/1" and data["net_ms"] == pytest.approx(data["direct_ms"] + data["tax_ms"])
    for row in data["classes"]:
        assert row["delta_ms"] == pytest.approx(row["after_ms"] - row["before_ms"], abs=1e-9)
    json.dumps(data, allow_nan=False)


@given(before=CLASSES)
def test_a_table_against_itself_moved_nothing(a_table: Callable, before: dict) -> None:
    side = side_of_decomposition(a_table(before), "a")
    found = diff(side, side)
    assert found.net_ms == found.tax_ms == 0
    assert found.sentence() == "no class moved by 2% or more"


def test_a_tax_is_booked_beside_its_gain(a_table: Callable) -> None:
    before = a_table({"down/q6_K": 1094.0, "quantize": 86.0, "gate_up/q4_K": 598.0})
    after = a_table({"down/q6_K": 196.0, "quantize": 118.0, "gate_up/q4_K": 598.0})
    found = diff(side_of_decomposition(before, "a"), side_of_decomposition(after, "b"))
    assert (found.direct_ms, found.tax_ms, found.net_ms) == (-898.0, 32.0, -866.0)
    assert found.sentence() == "improved: down -82.1% (-898.00 ms); grew: quantize +37.2% (+32.00 ms)"


def passes_of(*each: dict[str, float], outlier_in: tuple[int, ...] = ()) -> list[Pass]:
    """Traced passes of class → ms; those numbered in `outlier_in` hold an outlier launch."""
    odd = Outlier(cls="norm", name="norm", ms=9.0, median_ms=0.1, start_ms=1.0)
    return [
        Pass(wall_ms=sum(ms.values()) + 1, busy_ms=sum(ms.values()), launches=4, class_ms=ms, outliers=[odd] * (i in outlier_in))
        for i, ms in enumerate(each)
    ]  # fmt: skip


def test_a_change_is_told_only_beyond_what_both_sides_passes_span(a_table: Callable) -> None:
    before = a_table(
        {"attention": 9.0, "down/q4_K": 6.0, "down/q6_K": 4.0},
        passes=passes_of({"attention": 9.0, "down": 10.0}, {"attention": 9.2, "down": 10.4}, {"attention": 9.1, "down": 10.2}),
    )  # fmt: skip
    after = a_table(
        {"attention": 8.0, "down/q4_K": 5.8, "down/q6_K": 3.9},
        passes=passes_of({"attention": 8.0, "down": 9.9}, {"attention": 8.3, "down": 9.7}, {"attention": 8.1, "down": 9.6}),
    )  # fmt: skip
    found = diff(side_of_decomposition(before, "a"), side_of_decomposition(after, "b"))
    rows = {r.key[0]: r for r in found.classes}
    assert rows["attention"].before.ms == pytest.approx(9.1), "the median of the passes, not the table's own pass"
    assert rows["down"].after.ms == pytest.approx(9.7)
    assert rows["attention"].noise_ms == pytest.approx(0.2 + 0.3) and not rows["attention"].within_noise
    assert rows["down"].noise_ms == pytest.approx(0.4 + 0.3) and rows["down"].within_noise
    assert (found.direct_ms, found.tax_ms, found.net_ms) == pytest.approx((-1.0, 0.0, -1.0))
    assert found.noise_ms == pytest.approx(-0.5)
    assert found.sentence() == "improved: attention -11.0% (-1.00 ms)"
    data = {row["class"]: row for row in found.to_json()["classes"]}
    assert data["down"]["within_noise"] and not data["attention"]["within_noise"]


def test_a_pass_with_an_outlier_launch_widens_no_noise(a_table: Callable) -> None:
    rows = {"attention": 9.0}
    quiet = passes_of({"attention": 9.0}, {"attention": 9.1}, {"attention": 19.0}, outlier_in=(2,))
    side = side_of_decomposition(a_table(rows, passes=quiet), "a")
    assert side.spread is not None and side.spread.class_ms == {"attention": pytest.approx(0.1)}


def test_without_times_per_class_busys_span_may_be_any_classs(a_table: Callable) -> None:
    """... but never so much that a class that went away would be noise."""
    busy = [Pass(wall_ms=b + 1, busy_ms=b, launches=4) for b in (40.0, 41.0, 42.0)]
    before = a_table({"gate_up": 33.0, "attention": 5.6, "k_v": 1.1}, passes=busy)
    after = a_table({"gate_up": 31.5, "attention": 5.1, "k_v": 0.1}, passes=busy)
    found = diff(side_of_decomposition(before, "a"), side_of_decomposition(after, "b"))
    assert [r.key[0] for r in found.classes if r.within_noise] == ["gate_up", "attention"]
    assert found.direct_ms == pytest.approx(-1.0)
    assert found.spread_text() == "passes of one side span 4.9% (a) and 4.9% (b) of busy"


@given(
    times=st.lists(st.floats(5, 10), min_size=6, max_size=10), other=st.lists(st.floats(5, 10), min_size=6, max_size=10)
)
def test_sides_whose_passes_overlap_differ_by_noise(a_table: Callable, times: list[float], other: list[float]) -> None:
    sides = [
        side_of_decomposition(a_table({"attention": t[0]}, passes=passes_of(*({"attention": x} for x in t))), "x")
        for t in (times, other)
    ]
    (row,) = diff(*sides).classes
    overlap = min(times) <= max(other) and min(other) <= max(times)
    assert not (overlap and row.told_ms)


@settings(deadline=None, max_examples=40)
@given(repeats=st.integers(20, 60), fewer=st.floats(0.5, 1.0), slower=st.floats(1.05, 2.0))
def test_a_shorter_window_improves_nothing(repeats: int, fewer: float, slower: float) -> None:
    """Fewer launches fit when one kernel got slower: only that kernel moved."""
    count = max(1, round(repeats * fewer))
    before = trace({"flash": (repeats, 4000), "gemm": (repeats * 3, 900)})
    after = trace({"flash": (count, round(4000 * slower)), "gemm": (count * 3, 900)})
    found = diff(side_of_launches(before, "a", source="nsys"), side_of_launches(after, "b", source="nsys"))
    assert found.normalised_by == "launches"
    assert found.direct_ms == pytest.approx(0, abs=1e-9)
    assert found.sentence().startswith("no kernel improved; flash per launch +")
    assert found.tax_ms == pytest.approx(repeats * 4e-3 * (round(4000 * slower) / 4000 - 1), rel=1e-6)


LAYER = (
    ("norm", 10, 64),
    ("gemm", 100, 132),
    ("flash", 50, 32),
    ("gemm", 80, 132),
    ("swiglu", 12, 256),
    ("gemm", 150, 132),
)
"""(class, µs, blocks) of the launches of a layer of 64 rows; the GEMMs are persistent: as many blocks as SMs."""


def prefill(layers: int = 6, *, chunks: int = 1, prefills: int = 1, slower: float = 1.0, rows: float = 1.0, merged: bool = False,
            scales: bool = True) -> pd.DataFrame:  # fmt: skip
    """A synthetic trace: every layer in `chunks` micro-batches, with grids that grow with the rows, or not (`scales`)."""
    found = []
    layer = [LAYER[0], ("gemm", 180, 132), LAYER[2], *LAYER[4:]] if merged else list(LAYER)
    for _ in range(prefills * layers):
        for cls, us, blocks in layer:
            for _ in range(chunks):
                grows = scales and cls != "gemm"
                found.append((cls, us * slower * rows / chunks, round(blocks * rows / chunks) if grows else blocks))
    ends = np.cumsum([round(us * 1000) for _, us, _ in found])
    classes = {"flash": "attention"}
    return from_columns(
        name=[f"{c}_kernel" for c, _, _ in found], kind=["kernel"] * len(found), start_ns=np.r_[0, ends[:-1]], end_ns=ends,
        device=[0] * len(found), grid=[f"{b},1,1" for *_, b in found], block=["128,1,1"] * len(found),
        **{"class": [classes.get(c, c) for c, _, _ in found]},
    )  # fmt: skip


def sides(*tables: pd.DataFrame, **more: Any) -> list[Any]:
    return [side_of_launches(t, f"{i}.sqlite", source="nsys", **more) for i, t in enumerate(tables)]


@pytest.mark.parametrize("slower", [1.0, 0.8, 1.5])
def test_a_merged_gemm_is_charged_its_time_whatever_its_launches(slower: float) -> None:
    """Two GEMMs a layer became one: the norms that stayed say that the work did."""
    found = diff(*sides(prefill(), prefill(merged=True, slower=slower)))
    gemm = next(r for r in found.classes if r.key == ("gemm",))
    assert (gemm.before.launches, gemm.after.launches) == (18, 12)
    assert gemm.change == pytest.approx(slower - 1, abs=1e-12) and found.work.known
    assert "norm, swiglu" in found.work.detail
    assert found.to_json()["work"]["known"] is True


@given(chunks=st.sampled_from([2, 4, 8]), prefills=st.integers(1, 3), slower=st.floats(0.5, 2.0))
@settings(deadline=None, max_examples=20)
def test_two_micro_batch_sizes_differ_by_their_totals(chunks: int, prefills: int, slower: float) -> None:
    """However the prefill is cut, as many rows go through the norms in all."""
    before, after = prefill(chunks=chunks, prefills=prefills), prefill(prefills=prefills, slower=slower)
    found = diff(*sides(before, after))
    total = [float((t["end_ns"] - t["start_ns"]).sum()) / 1e6 for t in (before, after)]
    assert found.work.known and found.work_factor == 1
    assert found.net_ms == pytest.approx(total[1] - total[0], abs=1e-9)


def test_micro_batches_that_no_grid_tells_are_totals_of_unknown_work() -> None:
    found = diff(*sides(prefill(chunks=4, scales=False), prefill(scales=False)))
    assert not found.work.known and found.normalised_by == "totals"
    assert found.net_ms == pytest.approx(0, abs=1e-9)
    assert any("work unknown" in n and "--tokens" in n and "--equal-work" in n for n in found.notes)
    declared = diff(*sides(prefill(chunks=4, scales=False), prefill(scales=False)), equal_work=True)
    assert declared.work.known and declared.normalised_by == "declared"


def test_more_rows_in_the_same_launches_are_not_equal_work() -> None:
    """Persistent GEMMs keep their grids when the prompt doubles; norms do not."""
    found = diff(*sides(prefill(), prefill(rows=2.0)))
    assert not found.work.known and not found.work.per_launch
    assert found.net_ms == pytest.approx(6 * 0.402)


def rows_of(
    rows: int, *, chunks: int = 1, prefills: int = 1, layers: int = 6, gemm_us: float = 100.0, cut: int = 0
) -> pd.DataFrame:
    """Prefills of a vLLM-like engine whose norms launch a block a row; GEMMs and the swiglu are persistent and as long
    for any rows, as where weights bound them."""
    norm, add = (
        "void vllm::rms_norm_kernel<c10::Half>(c10::Half*)",
        "void vllm::fused_add_rms_norm_kernel<c10::Half, 8>(int)",
    )
    gather, rope = (
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
        "void vllm::rotary_embedding_kernel<c10::Half>(int)",
    )
    n, found = rows // chunks, []
    for _ in range(prefills):
        for i in range(chunks):
            found.append((gather, "embedding", f"{n},2,1", 2.0))
            for layer in range(layers):
                found += [(add if layer else norm, "norm", f"{n},1,1", n / 100), ("nvjet_qkv", "gemm", "132,1,1", gemm_us), (rope, "rope", f"{n},1,1", n / 200),
                          ("flash", "attention", "132,1,1", n / 10 * (1 + 2 * i)), ("nvjet_o", "gemm", "132,1,1", gemm_us), (add, "norm", f"{n},1,1", n / 100),
                          ("nvjet_gate_up", "gemm", "132,1,1", 4 * gemm_us), ("void vllm::act_and_mul_kernel<c10::Half>(int)", "swiglu", "264,1,1", 60.0),
                          ("nvjet_down", "gemm", "132,1,1", 2 * gemm_us)]  # fmt: skip
            found.append((add, "norm", f"{n},1,1", n / 100))
            if i == chunks - 1:
                found.append(("nvjet_head", "gemm", "66,1,1", 50.0))
    found = found[: len(found) - cut]
    ends = np.cumsum([round(us * 1000) for *_, us in found])
    return from_columns(
        name=[f[0] for f in found], kind=["kernel"] * len(found), start_ns=np.r_[0, ends[:-1]], end_ns=ends, device=[0] * len(found),
        grid=[f[2] for f in found], block=["128,1,1"] * len(found), **{"class": [f[1] for f in found]},
    )  # fmt: skip


@given(rows=st.integers(1, 40), more=st.integers(1, 40), gemm=st.sampled_from([5.0, 100.0, 1000.0]))
@settings(deadline=None, max_examples=25)
def test_persistent_products_are_no_evidence_of_equal_work(rows: int, more: int, gemm: float) -> None:
    """Prefills of two lengths whose products and swiglu neither move in grid nor in time."""
    tables = rows_of(rows * 64, gemm_us=gemm), rows_of((rows + more) * 64, gemm_us=gemm)
    found = diff(*sides(*tables))
    if more / rows > 0.1:
        assert not found.work.known and found.work_factor == 1
        assert f"{(rows + more) / rows:.3g} × the rows" in found.work.detail
    assert diff(*sides(tables[0], tables[0])).work.known


def test_families_that_move_together_withdraw_equal_work_and_one_alone_does_not() -> None:
    """Of no block-a-row kernel: norm and rope double their grids, a long persistent swiglu does not."""
    hidden = {"rms_norm_kernel": "my_norm", "fused_add_my_norm": "my_add_norm", "vectorized_gather_kernel": "my_gather"}

    def blind(table: pd.DataFrame) -> pd.DataFrame:
        names = table["name"]
        for old, new in hidden.items():
            names = names.str.replace(old, new)
        return table.assign(name=names)

    one, two = blind(rows_of(512)), blind(rows_of(1024))
    assert not diff(*sides(one, two)).work.known
    vectorised = one.assign(grid=one["grid"].where(one["class"] != "rope", "256,1,1"))
    assert diff(*sides(one, vectorised)).work.known, "one family with fewer blocks is a new kernel, not fewer rows"


@given(chunks=st.sampled_from([2, 4, 8]), prefills=st.integers(1, 3))
@settings(deadline=None, max_examples=8)
def test_equal_work_says_what_is_equal_of_micro_batches(chunks: int, prefills: int) -> None:
    found = diff(*sides(rows_of(2048, chunks=chunks, prefills=prefills), rows_of(2048, prefills=prefills)))
    assert found.work.known and found.work_factor == 1
    assert re.search(r"as many threads in \d+ and \d+ launches", found.work.detail) and "stay" not in found.work.detail


def test_tokens_that_grids_contradict_are_refused_in_one_sentence() -> None:
    a, b = rows_of(512), rows_of(1024)
    assert diff(*(side_of_launches(t, "x", source="nsys", tokens=n) for t, n in ((a, 512), (b, 1024)))).work_factor == 2
    with pytest.raises(HarnessError, match=r"x is not of 1024 tokens: .* 512 rows, not 1024") as why:
        side_of_launches(a, "x", source="nsys", tokens=1024)
    assert "\n" not in str(why.value)
    table = prefill(), prefill(rows=2.0)  # no kernel with a block a row: the families that move together tell
    with pytest.raises(HarnessError, match=r"hold 2 × the rows of 0\.sqlite's, not 512 and 512 tokens"):
        diff(*sides(*table, tokens=512, prefills=1))


def test_a_cut_side_is_said() -> None:
    whole, torn = rows_of(512, prefills=3), rows_of(512, prefills=3, cut=30)
    assert not any("inside a forward" in n for n in diff(*sides(whole, whole)).notes)
    assert any("1.sqlite ends inside a forward" in n for n in diff(*sides(whole, torn), equal_work=True).notes)
    assert not any("inside a forward" in n for n in diff(*sides(rows_of(512), rows_of(512))).notes)


@given(times=st.integers(2, 6))
@settings(deadline=None, max_examples=5)
def test_more_of_the_same_launches_are_compared_per_launch(times: int) -> None:
    found = diff(*sides(prefill(), prefill(prefills=times)))
    assert found.work.per_launch and found.work_factor == times
    assert found.net_ms == pytest.approx(0, abs=1e-9)


def test_one_forward_against_several_others_is_refused() -> None:
    """Nothing is shared but the shape of a recording: several prefills here, one there."""
    one, other = prefill(), prefill(prefills=3, slower=0.5, rows=4.0)
    first, second = sides(one, other)
    first.prefills, second.prefills = 1, 3
    with pytest.raises(
        HarnessError, match=r"0\.sqlite holds 1 prefill and 1\.sqlite 3, and one prefill is not compared"
    ) as why:
        diff(first, second)
    assert "--occurrence" in str(why.value) and str(why.value).count("\n") == 0


@given(order=st.permutations(range(36)), slower=st.floats(0.5, 2.0))
@settings(deadline=None, max_examples=10)
def test_the_order_of_launches_changes_no_diff(order: list[int], slower: float) -> None:
    before, after = prefill(), prefill(slower=slower)
    ns = (after["end_ns"] - after["start_ns"]).to_numpy()[order]
    shuffled = after.iloc[order].reset_index(drop=True)
    shuffled = shuffled.assign(start_ns=np.cumsum(ns) - ns, end_ns=np.cumsum(ns))
    assert diff(*sides(before, shuffled)).net_ms == pytest.approx(diff(*sides(before, after)).net_ms)
    assert diff(*sides(shuffled, shuffled)).net_ms == 0 == diff(*sides(shuffled, shuffled)).tax_ms


def test_removing_launches_of_equal_work_is_their_time() -> None:
    """A last layer without its FFN: two launches of eighteen are no window's edge."""
    whole = prefill()
    found = diff(*sides(whole, whole.iloc[:-1].reset_index(drop=True)))
    assert found.work.known and found.net_ms == pytest.approx(-0.150)


def test_a_decomposition_and_a_trace_of_another_window_are_refused(a_table: Callable) -> None:
    table = side_of_decomposition(a_table({"gemm": 9.0, "norm": 1.0}).model_copy(update={"tokens": None}), "d.json")
    (trace_side,) = sides(prefill())
    for pair in ((table, trace_side), (trace_side, table)):
        with pytest.raises(HarnessError, match=r"d\.json is a decomposition and 0\.sqlite a trace of another window"):
            diff(*pair)
        assert diff(*pair, equal_work=True).normalised_by == "declared"


def test_one_prefills_table_and_a_recordings_are_refused(a_table: Callable) -> None:
    rows = {"attention": 10.0, "norm": 1.0}
    one = side_of_decomposition(a_table(rows, tokens=100), "one")
    four = side_of_decomposition(a_table({k: 4 * v for k, v in rows.items()}, tokens=400, prefills=4), "four")
    with pytest.raises(HarnessError, match="one holds 1 prefill and four 4"):
        diff(one, four)
    again = side_of_decomposition(a_table(rows, tokens=400, prefills=4), "again")
    assert diff(four, again).normalised_by == "tokens", "as many on both sides compare"


def test_both_by_role_compare_by_role_and_one_alone_is_folded(a_table: Callable) -> None:
    ours = a_table({"gate_up/q4_K": 30.0, "q_o/q4_K": 6.0, "attention": 5.0, "norm": 2.0})
    theirs = a_table({"gemm/q4_K": 90.0, "attention": 20.0, "elementwise": 5.0})
    roles = a_table({"gate_up/q4_K": 75.0, "q_o/q4_K": 15.0, "attention": 20.0, "norm": 5.0}).classes
    by_role = theirs.model_copy(update={"roles": roles})
    found = diff(side_of_decomposition(by_role, "llama"), side_of_decomposition(ours, "ours"))
    assert {r.key[0]: r.delta_ms for r in found.classes} == pytest.approx(
        {"gate_up": -45.0, "attention": -15.0, "q_o": -9.0, "norm": -3.0}
    )
    assert "gone" not in found.sentence() and found.to_json()["by_role"] is True
    folded = diff(side_of_decomposition(theirs, "llama"), side_of_decomposition(ours, "ours"))
    assert {r.key[0]: r.delta_ms for r in folded.classes} == pytest.approx(
        {"products": -54.0, "attention": -15.0, "between products": -3.0}
    )
    assert any("--gguf" in n for n in folded.notes)


def test_an_unsound_side_is_marked(a_table: Callable) -> None:
    table = a_table({"attention": 10.0, "norm": 1.0})
    bent = table.model_copy(update={"busy_ms": 12.0})
    found = diff(side_of_decomposition(table, "a"), side_of_decomposition(bent, "b"))
    assert any("b is unsound" in n for n in found.notes)
    assert {u["side"] for u in found.to_json()["unsound"]} == {"b"}


def test_declarations_on_the_command_line(in_tmp: Path, harness: Callable) -> None:
    from harness import launches as table_of

    for name, table in (("a", prefill(chunks=4, scales=False)), ("b", prefill(scales=False))):
        table_of.save(table, in_tmp / f"{name}.parquet")
    status, out, _ = harness("diff", "a.parquet", "b.parquet", "--markdown", "d.md", "--json", "d.json")
    assert status == 0 and "work unknown" in out
    assert "work unknown" in (in_tmp / "d.md").read_text()
    assert json.loads((in_tmp / "d.json").read_text())["work"] == {
        "known": False, "how": "totals", "detail": "no launches tell that both sides computed the same",
    }  # fmt: skip
    status, out, _ = harness("diff", "a.parquet", "b.parquet", "--tokens", "512", "--json", "-")
    assert json.loads(out)["normalised_by"] == "tokens"
    status, out, _ = harness("diff", "a.parquet", "b.parquet", "--tokens", "512:256", "--json", "-")
    assert json.loads(out)["work_factor"] == 0.5
    status, out, _ = harness("diff", "a.parquet", "b.parquet", "--equal-work", "--json", "-")
    assert json.loads(out)["normalised_by"] == "declared"
    for wrong in ("0", "x", "1:", ":1", "1:2:3", "-1", "٣"):
        assert harness("diff", "a.parquet", "b.parquet", "--tokens", wrong)[0] == 64


def test_micro_batches_of_the_case(shared_data: Path, harness: Callable) -> None:
    cases = shared_data.parent / "cases" / "traces"
    if not cases.is_dir():
        pytest.skip(f"no cases at {cases}")
    _, out, _ = harness("diff", str(cases / "d_base.json"), str(cases / "d_merged_gemm.json"), "--json", "-")
    data = json.loads(out)
    assert {c["class"]: c["delta_ms"] for c in data["classes"]} == pytest.approx(
        dict.fromkeys(("gemm", "attention", "swiglu", "norm"), 0.0), abs=1e-9
    )
    assert data["work"]["known"]
    _, out, _ = harness("diff", str(cases / "d_chunks4.json"), str(cases / "d_base.json"), "--json", "-")
    assert json.loads(out)["net_ms"] == pytest.approx(0, abs=1e-9) and not json.loads(out)["work"]["known"]


def test_two_builds_of_llama_cpp_differ_by_what_each_decomposes_to(shared_data: Path, harness: Callable) -> None:
    pair = [str(shared_data / "traces" / f"nsys_h200_llama_cpp_{build}_ub4096.sqlite") for build in ("mmq", "cublas")]
    _, out, _ = harness("diff", *pair, "--json", "-")
    data = json.loads(out)
    assert data["net_ms"] == pytest.approx(1108.200220 - 1754.942152, abs=1e-6) and data["work"]["known"]
    _, out, _ = harness("diff", *pair, "--occurrence", "2:3", "--json", "-")
    data = json.loads(out)
    assert data["net_ms"] == pytest.approx(126.97 - 283.00, abs=0.01) and data["work_factor"] == 1


def test_launches_that_vanish_are_a_gain_and_new_ones_a_tax() -> None:
    before = trace({"flash": (100, 4000), "k": (100, 500), "v": (100, 500)})
    after = trace({"flash": (100, 4000), "kv": (100, 700)})
    found = diff(side_of_launches(before, "a", source="nsys"), side_of_launches(after, "b", source="nsys"))
    assert found.work_factor == 1
    assert found.net_ms == pytest.approx(100 * (700 - 1000) / 1e6)
    assert {r.key[1]: r.after.launches for r in found.kernels} == {"flash": 100, "k": 0, "v": 0, "kv": 100}


def test_a_mix_of_long_and_short_launches_in_a_class_imitates_no_change() -> None:
    """The window's edge cuts one long launch off: the class's mean falls, no kernel changed."""
    before = trace({"long": (20, 50_000), "short": (200, 1000)})
    after = trace({"long": (19, 50_000), "short": (200, 1000)})
    found = diff(side_of_launches(before, "a", source="nsys"), side_of_launches(after, "b", source="nsys"))
    assert found.net_ms == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"regime": "sustained"}, "regime"),
        ({"device": "NVIDIA H100"}, "device"),
        ({"created": "2026-01-05T14:00:00+00:00"}, "window"),
        ({"model": "other"}, "model"),
        ({"provenance": {"window": "tuesday"}}, "window"),
    ],
)
def test_absolute_times_of_two_windows_are_not_subtracted_unless_declared(
    a_table: Callable, change: dict, named: str
) -> None:
    rows = {"attention": 10.0, "norm": 1.0}
    first = side_of_decomposition(a_table(rows, provenance={"window": "monday"}), "a.json")
    second = side_of_decomposition(a_table(rows, **({"provenance": {"window": "monday"}} | change)), "b.json")
    if named == "window" and "created" in change:
        first.window = second.window = ""
    with pytest.raises(HarnessError, match=f"differ in {named}.*--across-windows"):
        diff(first, second)
    assert any("declared comparable" in n for n in diff(first, second, across_windows=True).notes)


def test_different_token_counts_scale_by_tokens_and_say_what_that_flatters(a_table: Callable) -> None:
    first = side_of_decomposition(a_table({"attention": 10.0, "norm": 2.0}, tokens=1000), "a")
    second = side_of_decomposition(a_table({"attention": 40.0, "norm": 4.0}, tokens=2000), "b")
    found = diff(first, second)
    assert found.work_factor == 2
    assert {r.key[0]: r.delta_ms for r in found.classes} == {"attention": 10.0, "norm": 0.0}
    assert "quadratic" in found.notes[0]


def test_an_empty_side_is_refused(a_table: Callable) -> None:
    side = side_of_decomposition(a_table({"attention": 1.0}), "a")
    empty = side_of_launches(trace({"flash": (1, 1)}).iloc[:0], "nothing.sqlite", source="nsys")
    with pytest.raises(HarnessError, match=r"nothing\.sqlite holds no device time"):
        diff(side, empty)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<(int)128>, (bool)0>(flash::Params)", "flash_fwd_kernel"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)", "SendRecv"),
        ("void at::native::<unnamed>::CatArrayBatchedCopy<float>(float *)", "CatArrayBatchedCopy"),
        ("[CUDA memcpy DtoD]", "[CUDA memcpy DtoD]"),
        ("nvjet_tst_192x192_64x4", "nvjet_tst_192x192_64x4"),
    ],
)
def test_kernel_names_are_shortened_to_what_is_said_aloud(name: str, short: str) -> None:
    assert short_name(name) == short


def test_the_recorded_pair_reads_as_one_slower_kernel(shared_data: Path, harness: Callable, tmp_path: Path) -> None:
    """Two 300 ms windows: by length several kernels "improve"; per launch only the exchange between the GPUs moved."""
    folder = shared_data / "traces"
    pair = [str(folder / f"nsys_2026.2.1_2gpu_{side}.sqlite") for side in ("before", "after")]
    status, out, err = harness("diff", *pair, "--json", "-", "--plot", str(tmp_path / "bridge.png"))
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["sentence"] == "no kernel improved; SendRecv per launch +41%"
    assert data["normalised_by"] == "launches"
    kernels = {short_name(k["name"]): k for k in data["kernels"]}
    exchange, flash = kernels["SendRecv"], kernels["flash_fwd_kernel"]
    assert exchange["us_per_launch_after"] / exchange["us_per_launch_before"] - 1 == pytest.approx(0.414, abs=5e-4)
    assert flash["us_per_launch_after"] / flash["us_per_launch_before"] - 1 == pytest.approx(0.002, abs=5e-4)
    assert (exchange["launches_before"], exchange["launches_after"]) == (66, 62)
    grown = [c["class"] for c in data["classes"] if c["delta_ms"] > 0.02 * c["before_ms"]]
    assert grown == ["communication"]
    assert any("device 0 -38%, device 1 +207%" in n for n in data["notes"])
    assert (tmp_path / "bridge.png").read_bytes().startswith(b"\x89PNG")


def test_the_printed_diff_fits_eighty_columns(
    shared_data: Path, harness: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = shared_data / "traces"
    status, out, _ = harness(
        "diff", *(str(folder / f"nsys_2026.2.1_2gpu_{side}.sqlite") for side in ("before", "after"))
    )
    assert status == 0
    kernels = [line for line in out.splitlines() if "operator ()()" in line or "flash_fwd_kernel<" in line]
    assert kernels, "a pipe has the names whole"
    assert max(len(line) for line in out[: out.index("kernel\n")].splitlines()) <= 80
    assert "no kernel improved; SendRecv per launch +41%" in out


@pytest.mark.parametrize("content", [b"", b"not json", b'{"schema": "round/1"}', b"[1, 2"])
def test_a_file_that_is_neither_is_one_sentence(in_tmp: Path, harness: Callable, content: bytes) -> None:
    (in_tmp / "a.json").write_bytes(content)
    status, out, err = harness("diff", "a.json", "a.json")
    assert (status, out) == (1, "")
    assert err.startswith("error: a.json") and err.count("\n") == 1
