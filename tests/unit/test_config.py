"""Configs: extends, exact errors, the diff of two arms, identity by content."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.config import ArmConfig, diff_arms, load_arm
from harness.errors import HarnessError


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_extends_overrides_key_by_key_and_keeps_the_rest(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "tokens: 519\nlevers: {concat: off, cpu_threads: 2}\n")
    arm = load_arm(write(tmp_path, "lever.yaml", "extends: base.yaml\nlevers: {concat: on}\nhypothesis: fewer GEMMs\n"))
    assert (arm.name, arm.tokens, arm.levers) == ("lever", 519, {"concat": "on", "cpu_threads": 2})


def test_on_and_off_are_lever_values_not_booleans(tmp_path: Path) -> None:
    assert load_arm(write(tmp_path, "a.yaml", "levers: {concat: on}")).levers == {"concat": "on"}


def test_an_engine_of_another_kind_replaces_the_whole_engine(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "engine: {kind: embedded, backend: cpu}\n")
    arm = load_arm(
        write(tmp_path, "c.yaml", "extends: base.yaml\nengine: {kind: command, argv: [llama-bench, -p, 3325]}\n")
    )
    assert arm.engine.kind == "command" and arm.engine.metric == "wall"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tokns: 5\n", ["a.yaml:1", "'tokns'", "'tokens'"]),
        ("tokens: 5\nengine:\n  kind: embedded\n  bakend: cpu\n", ["a.yaml:4", "'engine.bakend'", "'backend'"]),
        ("engine:\n  kind: command\n  argv: [x]\n  metric: {json: a.b, unti: ns}\n", ["a.yaml:4", "metric.unti", "'unit'"]),
        ("engine:\n  kind: command\n  argv: [x]\n  metric: {json: a.b, unit: parsecs}\n", ["a.yaml:4", "engine.metric.unit"]),
        ("engine:\n  kind: command\n  argv: [x]\n  gates:\n    greedy: {argv: [y], comapre: stdout}\n",
         ["a.yaml:5", "engine.gates.greedy.comapre", "'compare'"]),
        ("engine: {kind: rocket}\n", ["a.yaml:1", "engine", "rocket"]),
        ("levers:\n  conact: on\n", ["a.yaml", "conact", "concat"]),
        ("levers:\n  concat: maybe\n", ["a.yaml", "maybe", "off, on"]),
        ("tokens: 0\n", ["a.yaml:1", "'tokens'", "greater than 0"]),
        ("tokens: 1\ntokens: 2\n", ["a.yaml:2", "given twice"]),
        ("- a\n", ["a.yaml:1", "mapping"]),
        ("a: [1\n", ["a.yaml:2", "not YAML"]),
        ("extends: a.yaml\n", ["circle"]),
        ("extends: nowhere.yaml\n", ["nowhere.yaml does not exist"]),
        ("source: /x\n", ["a.yaml:1", "source"]),
        ("engine:\n  kind: command\n  argv: [x]\n  metric: {regex: 'time [0-9]+', unit: ms}\n", ["one group"]),
        ("plant: {}\n", ["exactly one of `spin_us` and `fraction`"]),
    ],
)  # fmt: skip
def test_every_mistake_is_one_sentence_with_file_line_and_the_nearest_key(
    tmp_path: Path, text: str, expected: list[str]
) -> None:
    with pytest.raises(HarnessError) as error:
        load_arm(write(tmp_path, "a.yaml", text))
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_an_error_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "\ntokns: 5\n")
    with pytest.raises(HarnessError, match=r"base\.yaml:2"):
        load_arm(write(tmp_path, "a.yaml", "extends: base.yaml\n"))


def test_identity_is_by_content_not_by_prose_or_defaults() -> None:
    plain, spelled = ArmConfig(name="a"), ArmConfig(name="b", levers={"concat": "off"}, hypothesis="same thing")
    assert plain.hash() == spelled.hash() and diff_arms(plain, spelled) == {}
    changed = ArmConfig(name="c", levers={"concat": "on"})
    assert changed.hash() != plain.hash() and diff_arms(plain, changed) == {"levers.concat": ("off", "on")}


def test_every_experiment_in_the_repository_loads_and_predicts_before_it_runs() -> None:
    room = Path(__file__).parents[2] / "experiments"
    levers = sorted((room / "levers").glob("*.yaml"))
    assert levers
    for path in sorted(room.glob("*.yaml")):
        load_arm(path)
    for path in levers:
        arm = load_arm(path)
        assert arm.hypothesis and arm.mechanism and arm.predicted_gain is not None, path


def test_a_lever_that_only_one_arm_sets_is_one_line_of_the_diff() -> None:
    engine = {"kind": "python", "call": "module:forward"}
    base = ArmConfig.model_validate({"name": "base", "engine": engine})
    lever = ArmConfig.model_validate({"name": "lever", "engine": engine, "levers": {"a": 1}})
    assert diff_arms(base, lever) == {"levers.a": (None, 1)}
