"""Consumers derive a table's figures again: an edited, failed or non-finite one is refused, or marked, in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.attribution.decompose import Decomposition, decompose
from harness.attribution.decomposition import load_decomposition
from harness.attribution.on_paper import ON_PAPER, paper_rate
from harness.attribution.roofline import load_ceilings
from harness.errors import HarnessError
from harness.launches import from_columns


def made(device: str = "NVIDIA H200", *, macs: int = 10**9, **more: Any) -> Decomposition:
    """A real table of two classes, with gap, overlap, GMAC and rates: a GEMM of 4 µs/GMAC."""
    start = np.array([0, 4000, 7000, 12000])
    end = np.array([4000, 8000, 9000, 16000])
    table = from_columns(
        name=["g", "g", "n", "g"], kind=["kernel"] * 4, start_ns=start, end_ns=end, device=[0] * 4,
        macs=[macs, macs, -1, macs], **{"class": ["gemm", "gemm", "norm", "gemm"]},
    )  # fmt: skip
    table["macs"] = table["macs"].where(table["macs"] > 0)
    return decompose(table, wall_ns=17000, device=device, source="nsys", tokens=8, **more)


FIGURES = [
    ("busy_ms", None), ("gap_ms", None), ("traced_wall_ms", None), ("overlap_ms", None), ("launches", None),
    ("sum_ms", 0), ("share", 0), ("us_per_gmac", 0), ("tflop_per_s", 0), ("gmac", 0), ("sum_ms", 1), ("launches", 1),
]  # fmt: skip


def test_a_table_as_made_is_sound() -> None:
    assert made().ok and made().broken() == []


@pytest.mark.parametrize(("key", "row"), FIGURES, ids=[f"{k}-{r}" for k, r in FIGURES])
@given(by=st.one_of(st.floats(1.01, 10), st.floats(0.01, 0.99)))
@settings(deadline=None, max_examples=10)
def test_any_edited_figure_shows(key: str, row: int | None, by: float) -> None:
    data = made().to_dict()
    target = data if row is None else data["classes"][row]
    old = target[key]
    target[key] = type(old)(old * by)
    if target[key] != old:
        assert Decomposition.model_validate(data).broken()


@pytest.mark.parametrize("edit", ['"busy_ms": NaN', '"busy_ms": Infinity', '"busy_ms": -Infinity', '"busy_ms": 1e999', '"created": "soon"',
                                  '"tokens": 0', '"launches": 1' + "0" * 400, '"busy_ms": 1' + "0" * 400])  # fmt: skip
def test_figures_that_are_none_are_one_sentence(in_tmp: Path, harness: Callable, edit: str) -> None:
    key = edit.split(":")[0]
    text = json.dumps(made().to_dict())
    at = text.index(key)
    (in_tmp / "t.json").write_text(text[:at] + edit + text[text.index(",", at) :])
    for command in (("queue", "t.json"), ("diff", "t.json", "t.json")):
        status, out, err = harness(*command)
        assert (status, out) == (1, "") and err.startswith("error: t.json") and err.count("\n") == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "\0", "{}", "[]", "null", "1"])
def test_json_that_is_no_table_is_one_sentence(in_tmp: Path, harness: Callable, text: str) -> None:
    (in_tmp / "t.json").write_text(text)
    status, out, err = harness("queue", "t.json")
    assert (status, out) == (1, "") and err.startswith("error: t.json") and err.count("\n") == 1


@pytest.mark.parametrize("kind", ["failed", "edited", "unchecked"])
def test_queue_and_reference_refuse_and_diff_marks_what_is_unsound(in_tmp: Path, harness: Callable, kind: str) -> None:
    from harness import launches as table_of

    data = made().to_dict()
    if kind == "failed":
        data["checks"][0]["ok"] = False
    elif kind == "edited":
        data["classes"][0]["sum_ms"] /= 2
    else:
        data["checks"] = []
    (in_tmp / "bad.json").write_text(json.dumps(data))
    (in_tmp / "good.json").write_text(json.dumps(made().to_dict()))
    table_of.save(from_columns(name=["g"] * 9, kind=["kernel"] * 9, start_ns=range(0, 90, 10), end_ns=range(5, 95, 10), device=[0] * 9,
                               **{"class": ["gemm"] * 9}), in_tmp / "t.parquet")  # fmt: skip
    for command in (("queue", "bad.json"), ("decompose", "--trace", "t.parquet", "--reference", "bad.json")):
        status, out, err = harness(*command)
        assert (status, out) == (1, "") and "bad.json is not to be built on" in err and err.count("\n") == 1
    assert harness("queue", "good.json")[0] == 0
    assert harness("decompose", "--trace", "t.parquet", "--reference", "good.json")[0] == 0
    status, out, _ = harness("diff", "good.json", "bad.json", "--json", "-")
    assert status == 0 and {u["side"] for u in json.loads(out)["unsound"]} == {"bad.json"}
    assert "bad.json is unsound" in harness("diff", "good.json", "bad.json")[1]


# What is impossible where nobody measured a ceiling


@pytest.mark.parametrize(
    ("gpu", "rate"),
    [
        ("NVIDIA H200", 1979), ("NVIDIA H100 80GB HBM3", 1979), ("NVIDIA H20", 296), ("NVIDIA L40S", 733), ("NVIDIA L4", 242),
        ("NVIDIA L40", 362), ("NVIDIA A100-SXM4-80GB", 1248), ("NVIDIA A10", 500), ("NVIDIA A10G", 500), ("NVIDIA B200", 10000), ("NVIDIA GB200", 10000),
        ("AMD Instinct MI300X", 2615), ("NVIDIA GeForce RTX 4090", 1321), ("Tesla T4", 260),
    ],
)  # fmt: skip
def test_a_gpus_paper_rate_is_found_by_its_name(gpu: str, rate: float) -> None:
    assert paper_rate(gpu)[0] == rate


def test_an_unknown_gpu_is_held_to_the_fastest_there_is() -> None:
    assert paper_rate("Somebody's accelerator")[0] == max(rate for _, rate, _ in ON_PAPER)


@pytest.mark.parametrize(("gpu", "rate"), [("NVIDIA H200", 1979), ("Mystery", max(r for _, r, _ in ON_PAPER))])
def test_a_class_that_beats_paper_fails_and_those_below_pass(gpu: str, rate: float) -> None:
    per_launch = rate * 1e12 / 2 * 4e-6  # MACs of 4 µs at that rate
    assert made(gpu, macs=int(per_launch * 0.99)).check("possibility").ok
    assert made(gpu, macs=int(per_launch * 0.5)).check("possibility").ok
    failed = made(gpu, macs=int(per_launch * 1.01)).check("possibility")
    assert not failed.ok and "faster than any machine" in failed.detail and "on paper" in failed.detail


CEILINGS = {
    "backend": "cuda", "device": "NVIDIA H200", "regime": "burst", "precision": "f16", "tflop_per_s": 783.0, "gb_per_s": 4515.0,
    "cache_gb_per_s": 5342.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrap",
    [
        lambda c: c,
        lambda c: {
            "schema": "doctor/1",
            "findings": [],
            "ceilings": [c, c | {"regime": "sustained", "tflop_per_s": 700.0}],
        },
    ],
)
def test_ceilings_come_from_a_file(tmp_path: Path, wrap: Callable) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps(wrap(CEILINGS)))
    found = load_ceilings(path, "recorded", "NVIDIA H200")
    assert found.tflop_per_s == 783.0
    result = made(ceilings=found)
    row = result.classes[0]
    assert row.bound == "compute" and row.sol == pytest.approx(2e9 / 783e12 / 4e-6)
    assert not made(macs=2 * 10**9, ceilings=found).check("possibility").ok
    with pytest.raises(HarnessError, match="ceilings of NVIDIA H200, and the trace is of NVIDIA L4"):
        load_ceilings(path, "recorded", "NVIDIA L4")


@pytest.mark.parametrize(
    "text", ["{}", "[]", "null", '{"ceilings": []}', '{"ceilings": null}', '{"ceilings": [1]}', '{"tflop_per_s": "x"}',
             json.dumps(CEILINGS | {"tflop_per_s": 0}), json.dumps(CEILINGS | {"gb_per_s": "fast"}), json.dumps(CEILINGS)[:-1] + ', "more": 1}'],
)  # fmt: skip
def test_a_file_without_ceilings_is_one_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(HarnessError, match=r"c\.json holds no ceilings; write them") as why:
        load_ceilings(path, "burst", "")
    assert "\n" not in str(why.value)


# References by role


def test_rows_by_role_compare_with_a_references_roles_only(a_table: Callable) -> None:
    plain = a_table({"gemm": 10.0, "norm": 5.0, "attention": 3.0}, tokens=8)
    roles = a_table({"norm": 2.0, "gate_up": 4.0}, tokens=8)
    mine = from_columns(name=["n", "g"], kind=["kernel"] * 2, start_ns=[0, 4000], end_ns=[4000, 9000], device=[0, 0],
                        **{"class": ["norm", "gate_up"]})  # fmt: skip
    without = decompose(mine, wall_ns=9000, tokens=8, reference=plain)
    assert {r.ratio for r in without.classes} == {None}
    assert any("knows no roles" in n for n in without.notes)
    with_roles = decompose(mine, wall_ns=9000, tokens=8, reference=plain.model_copy(update={"roles": roles.classes}))
    assert {r.cls: r.ratio for r in with_roles.classes} == pytest.approx({"norm": 0.002, "gate_up": 0.00125})


def test_rows_by_family_compare_with_a_references_families_only(a_table: Callable) -> None:
    """A role's "norm" holds residual adds; the family's does not."""
    by_role = a_table({"norm": 2.0, "gate_up": 4.0}, tokens=8)
    mine = from_columns(name=["n", "g"], kind=["kernel"] * 2, start_ns=[0, 4000], end_ns=[4000, 9000], device=[0, 0],
                        **{"class": ["norm", "gemm"]})  # fmt: skip
    alone = decompose(mine, wall_ns=9000, tokens=8, reference=by_role)
    assert {r.ratio for r in alone.classes} == {None}
    assert any("the reference is by role" in n for n in alone.notes)
    both = by_role.model_copy(update={"roles": by_role.classes, "classes": a_table({"norm": 1.0}, tokens=8).classes})
    assert {r.cls: r.ratio for r in decompose(mine, wall_ns=9000, tokens=8, reference=both).classes} == {
        "norm": pytest.approx(0.004), "gemm": None,
    }  # fmt: skip


def test_a_committed_record_is_sound() -> None:
    folder = Path(__file__).parents[2] / "reports" / "h200"
    for name in ("prefill-3325", "prefill-2659"):
        assert load_decomposition(folder / name / "decomposition.json").broken() == []
