"""Every reader of `benchmarks/fuzz_readers.py`, on a few dozen hostile files each; and the kinds that were met before."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness import launches
from harness.ab.start import basket
from harness.attribution.decomposition import load_decomposition
from harness.config import ArmConfig, load_arm
from harness.errors import HarnessError

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_readers.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_readers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


fuzz_readers = _script()


@pytest.mark.parametrize("name", fuzz_readers.READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_hostile_file_is_read_or_refused_by_one_sentence(name: str, tmp_path: Path, data: st.DataObject) -> None:
    reader = fuzz_readers.READERS[name]
    assert fuzz_readers.check(reader, data.draw(reader.contents()), tmp_path) in ("read", "refused")


def test_the_checker_itself_tells_a_traceback_and_a_sentence_of_two_lines(tmp_path: Path) -> None:
    def two_lines(path: Path) -> None:
        raise HarnessError("one\ntwo")

    def breaks(path: Path) -> None:
        raise KeyError("x")

    for read, error in ((two_lines, AssertionError), (breaks, KeyError)):
        with pytest.raises(error):
            fuzz_readers.check(fuzz_readers.Reader("f", lambda: st.just(b""), read), b"", tmp_path)


YAML = {
    "a control character": ("name: a\x07b\n", "U+0007"),
    "an escaped NUL": ('model: "a\\0b"\n', ":1: a text holds the character U+0000"),
    "NUL in extends": ('name: x\nextends: "base\\0.yaml"\n', ":2: a text holds the character U+0000"),
    "a lone surrogate": ('name: "\\ud800"\n', "U+D800"),
    "an alias of itself": ("levers: &a\n  x: *a\n", ":1: an alias (*name) stands inside the value"),
    "aliases of aliases": ("a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 10)}]\n" for p, c in zip("abcdefg", "bcdefgh", strict=True)), "more than 100000 values"),
    "depth": ("levers: " + "[" * 200 + "]" * 200, "deeper than 64 levels"),
    "great depth": ("levers: " + "[" * 20000, "nested deeper than 64 levels"),
    "a date that is none": ("tokens: 2001-99-99\n", "cannot be read"),
    "a tag that runs code": ("name: !!python/object/apply:os.system [ls]\n", "not YAML"),
    "no finite number": ("plant: {fraction: .nan}\n", ":1: '.nan' is no finite number"),
    "an infinite timeout": ("engine: {kind: command, argv: [x], timeout_s: .inf}\n", "no finite number"),
    "extends a folder": ("extends: .\n", "cannot be read"),
    "extends itself": ("extends: arm.yaml\n", "circle"),
}  # fmt: skip


@pytest.mark.parametrize("kind", YAML)
def test_a_hostile_config_is_one_sentence_with_file_and_reason(kind: str, tmp_path: Path) -> None:
    text, says = YAML[kind]
    path = tmp_path / "arm.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(HarnessError) as refused:
        load_arm(path)
    assert says in str(refused.value) and "\n" not in str(refused.value) and str(path.parent) in str(refused.value)


def test_an_alias_that_is_no_loop_is_read(tmp_path: Path) -> None:
    path = tmp_path / "arm.yaml"
    path.write_text("engine: {kind: command, argv: &x [a, b], gates: {parity: {argv: *x}}}\n", encoding="utf-8")
    engine = load_arm(path).engine
    assert engine.kind == "command" and engine.gates["parity"].argv == engine.argv == ("a", "b")


def table() -> object:
    return launches.from_columns(name=["a", "b"], kind=["kernel"] * 2, start_ns=[0, 5], end_ns=[4, 8], device=[0, 0], stream=[7, 7])  # fmt: skip


@pytest.mark.parametrize(
    ("column", "values", "says"),
    [
        ("name", ["a", None], "row 1 has no 'name'"),
        ("class", ["gemm", "no such class"], "'no such class' is no class"),
        ("kind", ["kernel", None], "row 1 has no 'kind'"),
        ("weight_type", [None, "-"], "row 0 has no 'weight_type'"),
    ],
)
def test_a_launch_table_with_a_text_or_class_that_is_none_is_refused(column, values, says, tmp_path: Path) -> None:
    import pandas as pd

    frame = table()
    frame[column] = pd.Categorical(values, categories=list(launches.KINDS)) if column == "kind" else pd.array(values, dtype=frame[column].dtype)  # fmt: skip
    frame.to_parquet(tmp_path / "l.parquet", index=False)
    with pytest.raises(HarnessError, match=says):
        launches.load(tmp_path / "l.parquet")


def test_text_that_is_not_utf_8_and_a_cut_file_are_one_line(tmp_path: Path) -> None:
    whole = fuzz_readers._other_column(0, 9)  # names of the bytes ff, fe, fd
    for raw in (whole, fuzz_readers.launches_parquet()[:-40], b"PAR1"):
        (tmp_path / "l.parquet").write_bytes(raw)
        with pytest.raises(HarnessError, match="not a readable Parquet launch table") as refused:
            launches.load(tmp_path / "l.parquet")
        assert "\n" not in str(refused.value)


def test_a_sound_launch_table_comes_back_as_it_was(tmp_path: Path) -> None:
    launches.save(table(), tmp_path / "l.parquet")
    assert launches.load(tmp_path / "l.parquet").equals(table())


@pytest.mark.parametrize("odd", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize("key", ["wall_ms", "provenance"])
def test_a_record_with_a_number_that_json_has_not_is_refused(odd: str, key: str, tmp_path: Path) -> None:
    value = fuzz_readers.decomposition_json() | {key: "HERE"}
    (tmp_path / "d.json").write_text(json.dumps(value).replace('"HERE"', odd), encoding="utf-8")
    with pytest.raises(HarnessError, match=r"d\.json is not readable JSON \(.*(no JSON number|range of a double)"):
        load_decomposition(tmp_path / "d.json")


def command(**engine: object) -> ArmConfig:
    return ArmConfig.model_validate({"name": str(engine["name"]), "engine": {"kind": "command", "argv": ["x"], **{k: v for k, v in engine.items() if k != "name"}}})  # fmt: skip


def test_a_basket_of_a_lever_that_leaves_out_a_key_of_the_base() -> None:
    base = command(name="base", env={"A": "1", "B": "1", "dotted.name": "1"}, timeout_s=5)
    without = command(name="without", env={"B": "1", "dotted.name": "1"}, timeout_s=5)
    other = command(name="other", env={"A": "1", "B": "2", "dotted.name": "2"}, timeout_s=5)
    both = basket(base, without, other)["B"].engine
    assert both.kind == "command" and both.env == {"B": "2", "dotted.name": "2"} and both.timeout_s == 5


def test_a_basket_of_levers_that_contradict_each_other_is_one_sentence() -> None:
    base = command(name="base", env={"A": "1"})
    with pytest.raises(
        HarnessError, match=r"both levers set 'engine\.env\.A', to nothing and '2'; they cannot be combined\."
    ) as refused:
        basket(base, command(name="a", env={}), command(name="b", env={"A": "2"}))
    assert "\n" not in str(refused.value)
    with pytest.raises(HarnessError, match=r"both levers set 'engine\.argv', to \['y'\] and nothing"):  # another engine
        basket(base, command(name="a", argv=["y"], env={"A": "1"}), ArmConfig(name="b"))


def test_numbers_of_a_launch_table_stay_whole(tmp_path: Path) -> None:
    big = launches.from_columns(
        name=["a"], kind=["kernel"], start_ns=[2**62], end_ns=[2**62 + 1], device=[0], stream=[2**63 - 1]
    )
    launches.save(big, tmp_path / "l.parquet")
    back = launches.load(tmp_path / "l.parquet")
    assert back["stream"].iat[0] == 2**63 - 1 and back["start_ns"].dtype == np.int64
