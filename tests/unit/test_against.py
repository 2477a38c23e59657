"""Ours against another engine, role by role: ratios, marks, refusals, and a page that comes back from its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.attribution.against import against, by_role
from harness.attribution.decomposition import ClassRow, Decomposition
from harness.errors import HarnessError
from harness.report.against import conclusion, table, to_markdown
from harness.report.saved import render_saved

ROOT = Path(__file__).parents[2]


def row(cls: str, ms: float, gmac: float | None = None, weights: str = "-") -> ClassRow:
    return ClassRow(cls=cls, weight_type=weights, launches=1, sum_ms=ms, union_ms=ms, share=0.1, gmac=gmac)


def engine(*rows: ClassRow, roles: tuple[ClassRow, ...] = (), gap: float = 1.0, **about: object) -> Decomposition:
    busy = sum(r.sum_ms for r in rows)
    about = {"tokens": 100, "model": "m", "device": "d", "created": "2026-01-01T10:00:00+00:00"} | about
    return Decomposition(
        wall_ms=busy + gap, traced_wall_ms=busy + gap, busy_ms=busy, gap_ms=gap, overlap_ms=0.0, launches=len(rows),
        classes=list(rows), roles=list(roles), checks=[], **about,
    )  # fmt: skip


OURS = engine(row("down", 4.0, 20.0, "q4_K"), row("down", 6.0, 20.0, "q6_K"), row("swiglu", 2.0))
THEIRS = engine(
    row("gemm", 30.0, 60.0), row("elementwise", 8.0), row("convert", 5.0), gap=7.0, regime="recorded",
    roles=(row("down", 30.0, 60.0, "f16"), row("swiglu", 8.0), row("convert", 5.0)),
)  # fmt: skip


def test_roles_compare_by_work_where_there_is_work_and_by_time_where_there_is_none() -> None:
    record = against(("ours", OURS), [("theirs", THEIRS)], across_windows=True)
    (held,) = record["references"]
    found = {r["role"]: r for r in held["roles"]}
    assert found["down"]["ours_ms"] == 10.0 and found["down"]["ratio"] == pytest.approx((10 / 40) / (30 / 60))
    assert found["swiglu"]["ratio"] == pytest.approx(2 / 8)
    assert found["convert"]["ratio"] is None and found["convert"]["ours_ms"] is None
    assert held["busy_ratio"] == pytest.approx(12 / 43) and held["wall_ratio"] == pytest.approx(13 / 50)
    assert [r.cls for r in by_role(THEIRS)] == ["down", "swiglu", "convert"], "roles, not kernels' classes"
    (said,) = conclusion(record)
    assert "busy for 12.00 ms where it takes 43.00 ms (0.28×~;" in said and "Most of those 31.0 ms: down 20.0, swiglu 6.0, convert 5.0" in said  # fmt: skip


def test_a_slower_ours_names_where_it_loses() -> None:
    record = against(("ours", THEIRS.model_copy(update={"regime": "burst"})), [("theirs", OURS)])
    (said,) = conclusion(record)
    assert "3.58×;" in said and "Most of those 31.0 ms: down 20.0" in said, "of one window, so nothing is marked"


def test_another_window_is_declared_and_other_work_is_refused() -> None:
    with pytest.raises(HarnessError, match=r"another window than ours.*--across-windows"):
        against(("ours", OURS), [("theirs", THEIRS)])
    later = engine(row("down", 9.0, 9.0), created="2026-01-01T12:00:00+00:00")
    with pytest.raises(HarnessError, match="another window"):
        against(("ours", OURS), [("theirs", later)])
    with pytest.raises(HarnessError, match="theirs prefilled 99 tokens and ours 100"):
        against(("ours", OURS), [("theirs", THEIRS.model_copy(update={"tokens": 99}))], across_windows=True)
    with pytest.raises(HarnessError, match="does not say how many tokens"):
        against(("ours", OURS.model_copy(update={"tokens": None})), [("theirs", THEIRS)])


def test_the_command_writes_a_page_that_its_record_gives_back(in_tmp: Path, harness: Callable) -> None:
    for name, made in (("ours", OURS), ("b", THEIRS)):
        Path(f"{name}.json").write_text(json.dumps(made.to_dict()))
    status, out, _ = harness("reference", "compare", "ours.json", f"the other={Path('b.json').resolve()}", "--across-windows", "--save", "reports/pair")  # fmt: skip
    assert status == 0 and "the other, ms" in out and "0.50×~" in out
    page, plot = Path("reports/pair/README.md"), Path("reports/pair/against.png")
    first = page.read_bytes(), plot.read_bytes()
    assert b"--save reports/pair" in first[0] and str(Path.cwd()).encode() not in first[0], "no path of this machine"
    plot.unlink()
    page.write_text("stale")
    assert render_saved(Path("reports")) == [page]
    assert (page.read_bytes(), plot.read_bytes()) == first
    status, _, err = harness("reference", "compare", "ours.json", "b.json")
    assert status == 1 and "--across-windows" in err


def test_a_narrow_terminal_gets_a_table_for_each_engine(
    in_tmp: Path, harness: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, made in (("ours", OURS), ("b", THEIRS)):
        Path(f"{name}.json").write_text(json.dumps(made.to_dict()))
    arguments = (
        "reference",
        "compare",
        "ours.json",
        "the first engine=b.json",
        "the second engine=b.json",
        "--across-windows",
    )
    for columns, tables in ((60, 2), (200, 1)):
        monkeypatch.setenv("COLUMNS", str(columns))
        status, out, _ = harness(*arguments)
        assert status == 0 and max(map(len, out.splitlines())) <= columns
        assert out.count("swiglu") - out.count("swiglu 6.0") == tables, "the role is in every table"


def test_the_committed_page_is_its_records_rendering_and_its_tables_comparison() -> None:
    folder = ROOT / "reports" / "h200" / "against-llama-cpp"
    record = json.loads((folder / "against.json").read_text())
    assert (folder / "README.md").read_text() == to_markdown(record, "against.png")
    tables = [record["ours"], *record["references"]]
    loaded = [Decomposition.model_validate_json((ROOT / t["file"]).read_text()) for t in tables]
    again = against(
        ("ours", loaded[0]), [(t["name"], made) for t, made in zip(tables[1:], loaded[1:], strict=True)], across_windows=True
    )  # fmt: skip
    assert table(again) == table(record)
    assert all(made.ok for made in loaded), "every check of the tables passed"
