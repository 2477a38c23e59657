"""The launch table: its schema, its union, and what a damaged one says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import launches
from harness.errors import HarnessError

INTERVALS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60)), max_size=60)


@given(INTERVALS)
def test_union_is_the_number_of_nanoseconds_covered(intervals: list[tuple[int, int]]) -> None:
    start = np.array([s for s, _ in intervals], np.int64)
    end = start + np.array([d for _, d in intervals], np.int64)
    covered = {ns for s, e in zip(start, end, strict=True) for ns in range(s, e)}
    assert launches.union_ns(pd.Series(start), pd.Series(end)) == len(covered)


@given(INTERVALS.filter(bool))
def test_rows_come_out_in_start_order_with_every_column(intervals: list[tuple[int, int]]) -> None:
    start = [s for s, _ in intervals]
    table = launches.from_columns(
        name="k", kind="kernel", start_ns=start, end_ns=[s + d for s, d in intervals], device=0
    )
    assert table["start_ns"].is_monotonic_increasing
    assert {name: str(table[name].dtype) for name in table} == launches.COLUMNS


def test_a_table_survives_parquet(tmp_path: Path) -> None:
    table = launches.from_columns(
        name=["a", "b"], kind=["kernel", "memcpy"], start_ns=[0, 5], end_ns=[3, 9], device=[0, 0], macs=pd.array([7, None], "Int64")
    )  # fmt: skip
    launches.save(table, tmp_path / "t.parquet")
    pd.testing.assert_frame_equal(launches.load(tmp_path / "t.parquet"), table)
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_what_a_table_describes_is_kept_in_its_file_and_an_old_file_has_none(tmp_path: Path) -> None:
    table = launches.from_columns(name=["a", "b"], kind="kernel", start_ns=[0, 5], end_ns=[3, 9], device=0)
    about = launches.Saved(tokens=512, model="m", device="a GPU", levers={"concat": "on"}, wall_ns=10, walls_ns=[9, 11])
    launches.save(table, tmp_path / "t.parquet", about)
    read, found = launches.load_saved(tmp_path / "t.parquet")
    assert found == about and read.attrs == {}
    table.to_parquet(tmp_path / "old.parquet", index=False)
    assert launches.load_saved(tmp_path / "old.parquet")[1] is None
    table.attrs = {"harness": {"tokens": "many"}}
    table.to_parquet(tmp_path / "damaged.parquet", index=False)
    with pytest.raises(HarnessError, match=r"damaged\.parquet: its description is damaged \(tokens: "):
        launches.load(tmp_path / "damaged.parquet")


def test_a_launch_that_ends_before_it_starts_is_named() -> None:
    with pytest.raises(HarnessError, match=r"'bad' at 10 ns ends before it starts"):
        launches.from_columns(name=["good", "bad"], kind="kernel", start_ns=[0, 10], end_ns=[1, 9], device=0)


@pytest.mark.parametrize("content", [b"", b"PAR1 and then nothing of the kind", b"\x00" * 64])
def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content)
    with pytest.raises(HarnessError, match=r"x\.parquet is not a readable Parquet launch table"):
        launches.load(path)


@given(st.lists(st.sampled_from(["gemm", "gemm ", "", "norm", None]), max_size=40))
def test_text_codes_are_a_factorisation_whatever_objects_hold_the_texts(texts: list[str | None]) -> None:
    # A str made anew for every row: the address differs where the text does not.
    column = pd.Series([None if t is None else "".join(list(t)) for t in texts], dtype=pd.StringDtype("python"))
    codes, distinct = launches.text_codes(column, empty="other")
    assert [distinct[c] for c in codes] == [t or "other" for t in texts]
    assert len(set(distinct)) == len(distinct)


@pytest.mark.parametrize("storage", ["python", "pyarrow"])
def test_codes_of_texts_are_the_same_however_the_column_is_stored(storage: str) -> None:
    if storage == "pyarrow":
        pytest.importorskip("pyarrow")
    texts = ["b", "", None, "a", "b", "" + "".join(["a"])]
    codes, found = launches.text_codes(pd.Series(texts, dtype=pd.StringDtype(storage)), empty="other")
    assert codes.tolist() == [0, 1, 1, 2, 0, 2] and list(found) == ["b", "other", "a"]
    kinds, names = launches.text_codes(pd.Series(pd.Categorical(["memcpy", "kernel", "memcpy"])))
    assert kinds.tolist() == [0, 1, 0] and list(names) == ["memcpy", "kernel"]


def test_a_table_saved_before_products_had_dimensions_is_read(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    table = launches.from_columns(name=["k"], start_ns=[0], end_ns=[5])
    table.drop(columns="shape").to_parquet(tmp_path / "old.parquet", index=False)
    pd.testing.assert_frame_equal(launches.load(tmp_path / "old.parquet"), table)
