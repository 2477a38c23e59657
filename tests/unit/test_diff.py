"""Diffs: what is normalised by what, what is refused, and the recorded pair that a window's length misreads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

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
