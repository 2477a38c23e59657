"""Records: numbering, what verification notices, and what survives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import HarnessError
from harness.rounds.edits import absorb, conditions_of, conditions_text, region
from harness.rounds.record import Outcome, RoundRecord, Sample, Verdict
from harness.rounds.retry import OPS, evaluate
from harness.rounds.store import (
    append_sample,
    file_sha256,
    find_round,
    load_record,
    new_round_dir,
    read_samples,
    save_record,
    slugify,
)
from harness.rounds.verify import verify

Maker = Callable[..., Path]


def test_numbers_are_claimed_once_by_however_many_ask_at_the_same_moment(tmp_path: Path) -> None:
    taken: list[int] = []
    start = threading.Barrier(8)

    def claim(slug: str) -> None:
        start.wait()
        for _ in range(6):
            number, path = new_round_dir(slug, tmp_path)
            assert path.is_dir()
            taken.append(number)

    threads = [threading.Thread(target=claim, args=(f"from-{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 49))
    assert len(list(tmp_path.iterdir())) == 48, "no claim is left behind"


def test_a_directory_that_exists_is_never_reused(tmp_path: Path) -> None:
    (tmp_path / "0007-by-hand").mkdir()
    (tmp_path / "0007-by-hand" / "record.json").write_text("precious")
    number, path = new_round_dir("By hand!", tmp_path)
    assert (number, path.name) == (8, "0008-by-hand")
    assert (tmp_path / "0007-by-hand" / "record.json").read_text() == "precious"


@given(st.text(max_size=200))
def test_any_title_makes_a_directory_name(title: str) -> None:
    slug = slugify(title)
    assert 0 < len(slug) <= 60 and set(slug) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")


def test_a_record_survives_json_and_carries_the_contract(tmp_path: Path, a_round: Maker) -> None:
    path = a_round(tmp_path, "lever", gain=0.03)
    data = json.loads((path / "record.json").read_text())
    assert list(data)[:2] == ["schema", "round"] and data["schema"] == "round/1"
    for key in (
        "verdict",
        "outcome",
        "bar",
        "alpha",
        "pairs",
        "dropped",
        "estimate",
        "interval",
        "confirmed",
        "gates",
        "prediction",
        "regime",
    ):
        assert key in data
    assert data["verdict"] in get_args(Verdict) and data["outcome"] in get_args(Outcome)
    assert set(data["evidence"]) >= {"for", "against"} and len(data["interval"]) == 2
    assert set(data["gates"][0]) >= {"name", "ok", "value", "limit"}
    assert RoundRecord.model_validate(data) == load_record(path)
    sample = json.loads((path / "samples.jsonl").read_text().splitlines()[0])
    assert set(sample) >= {"pair", "order", "arm", "wall_ms", "dropped", "boot", "gpu"}


def test_an_unknown_key_in_a_record_is_one_sentence_naming_it(tmp_path: Path, a_round: Maker) -> None:
    path = a_round(tmp_path, "lever", gain=0.03)
    data = json.loads((path / "record.json").read_text()) | {"vedict": "LANDED"}
    (path / "record.json").write_text(json.dumps(data))
    with pytest.raises(HarnessError, match=r"record\.json: vedict"):
        load_record(path)


@pytest.mark.parametrize("gain", [0.0, 0.03, 0.016, -0.05])
def test_every_figure_of_a_finished_round_recomputes(tmp_path: Path, a_round: Maker, gain: float) -> None:
    assert verify(a_round(tmp_path, "lever", gain=gain, drop=(2,))) == []


@pytest.fixture(scope="module")
def landed(tmp_path_factory: pytest.TempPathFactory, a_round: Maker) -> Path:
    return a_round(tmp_path_factory.mktemp("rounds"), "lever", gain=0.03, drop=(2,))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), factor=st.sampled_from([0.5, 0.999, 1.0001, 1.5, 4.0]), resealed=st.booleans())
def test_one_changed_wall_fails_verification(landed: Path, data: st.DataObject, factor: float, resealed: bool) -> None:
    """Any wall of any half, by however little; a fresh hash in the record hides none that entered a figure."""
    file, record_file = landed / "samples.jsonl", landed / "record.json"
    original, original_record = file.read_bytes(), record_file.read_bytes()
    lines = original.decode().splitlines()
    line = data.draw(st.integers(0, len(lines) - 1))
    sample = json.loads(lines[line])
    counts = sample["phase"] != "discard" and sample["pair"] != 2
    sample["wall_ms"][data.draw(st.integers(0, len(sample["wall_ms"]) - 1))] *= factor
    lines[line] = json.dumps(sample)
    try:
        file.write_text("\n".join(lines) + "\n")
        if resealed and counts:
            record = load_record(landed)
            record.samples_sha256 = file_sha256(file)
            save_record(landed, record)
        found = verify(landed)
        assert found, "the change went unnoticed"
        if counts:
            assert any("by its samples" in f for f in found)
    finally:
        file.write_bytes(original)
        record_file.write_bytes(original_record)
    assert verify(landed) == []


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("bar", 0.001, "preregistered"),
        ("prediction", 0.03, "preregistered"),
        ("verdict", "REVERTED", "verdict"),
        ("outcome", "regression", "outcome"),
        ("estimate", 0.05, "estimate"),
        ("confirmed", None, "confirmed"),
        ("pairs", 99, "pairs"),
        ("dropped", 0, "dropped"),
        ("interval", (0.01, None), "interval"),
    ],
)
def test_an_edited_conclusion_or_preregistration_is_named(
    tmp_path: Path, a_round: Maker, field: str, value: object, named: str
) -> None:
    path = a_round(tmp_path, "lever", gain=0.03, drop=(2,))
    record = load_record(path)
    setattr(record, field, value)
    save_record(path, record)
    assert any(named in f for f in verify(path))


def test_a_missing_half_or_an_exchanged_table_is_noticed(tmp_path: Path, a_round: Maker, a_table: Callable) -> None:
    table = a_table({"attention": 10.0, "gate_up/q4_K": 30.0})
    path = a_round(tmp_path, "lever", gain=0.03, before=table, after=table)
    (path / "after.json").write_text((path / "after.json").read_text().replace("10.0", "9.0"))
    assert any("after.json" in f for f in verify(path))
    lines = (path / "samples.jsonl").read_text().splitlines()
    (path / "samples.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert any("confirmed" in f for f in verify(path))


def test_a_failed_gate_never_lands(tmp_path: Path, a_round: Maker) -> None:
    path = a_round(tmp_path, "lever", gain=0.03)
    record = load_record(path)
    record.gates[0].ok = False
    save_record(path, record)
    assert any("gate parity failed" in f for f in verify(path))


def test_a_line_torn_by_a_power_cut_is_no_sample_and_is_cut_before_the_next(tmp_path: Path) -> None:
    sample = Sample(pair=1, order="AB", arm="A", wall_ms=[60.0])
    append_sample(tmp_path, sample)
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"pair": 1, "order": "AB", "arm"')
    assert read_samples(tmp_path) == [sample]
    append_sample(tmp_path, sample.model_copy(update={"arm": "B"}))
    assert [s.arm for s in read_samples(tmp_path)] == ["A", "B"]


def test_a_line_damaged_in_the_middle_is_one_sentence_with_its_number(tmp_path: Path) -> None:
    append_sample(tmp_path, Sample(pair=1, order="AB", arm="A", wall_ms=[60.0]))
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"pair": 1, "order": "AB", "arm": "B", "wall_ms": [-3]}\n')
    with pytest.raises(HarnessError, match=r"line 2: wall_ms"):
        read_samples(tmp_path)


def test_a_round_is_found_by_number_however_it_is_written(tmp_path: Path, a_round: Maker) -> None:
    path = a_round(tmp_path, "lever", gain=0.0)
    assert {find_round(n, tmp_path) for n in (1, "1", "0001", "0001-lever")} == {path}
    with pytest.raises(HarnessError, match="no round 0009"):
        find_round(9, tmp_path)


# --- editable text -----------------------------------------------------------------------------------------------------

PROSE = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")) | st.just("\n"), max_size=120).map(
    str.strip
)


@given(text=PROSE.filter(lambda t: "<!--" not in t), other=PROSE.filter(lambda t: "<!--" not in t))
def test_text_edited_between_the_comments_flows_into_the_record_and_unedited_text_gives_way(
    tmp_path_factory: pytest.TempPathFactory, text: str, other: str
) -> None:
    readme = tmp_path_factory.mktemp("r") / "README.md"
    record = RoundRecord(round=4, slug="x", lessons=other)
    generated = region("lessons", text, "0004")
    readme.write_text(generated, encoding="utf-8", newline="")
    absorb(record, readme)
    assert record.lessons == other, "nobody edited the page: the record stays"
    readme.write_text(generated.replace(" -->\n", " -->\nedited: ", 1), encoding="utf-8", newline="")
    absorb(record, readme)
    assert record.lessons.startswith("edited: ")


@given(
    st.lists(
        st.text("abc >.0123456789_%", min_size=1).map(str.strip).filter(lambda c: bool(c) and c[0] not in "-* "),
        max_size=4,
    )
)
def test_conditions_survive_their_list(conditions: list[str]) -> None:
    assert conditions_of(conditions_text(conditions)) == conditions


# --- retry conditions --------------------------------------------------------------------------------------------------


@given(op=st.sampled_from(sorted(OPS)), limit=st.floats(0, 1).map(lambda x: round(x, 4)), as_percent=st.booleans())
def test_a_condition_says_what_the_comparison_says(a_table_: object, op: str, limit: float, as_percent: bool) -> None:
    table = a_table_  # attention 20 of 100 ms busy
    number = f"{limit * 100:.2f} %" if as_percent else f"{limit:.4f}"
    value = float(number.rstrip(" %")) / (100 if as_percent else 1)
    answer = evaluate(f"attention.share {op} {number}", table)  # type: ignore[arg-type]
    assert answer.state == ("met" if OPS[op](0.2, value) else "not met")


@pytest.fixture(scope="module")
def a_table_(a_table: Callable) -> object:
    return a_table({"attention": 20.0, "down/q4_K": 50.0, "down/q6_K": 30.0}, ratio={"attention": 2.5}, wall=110.0)


@pytest.mark.parametrize(
    ("condition", "state"),
    [
        ("attention.ratio >= 2.5", "met"),
        ("attention.share > 0.1 and attention.ratio > 3", "not met"),
        ("down.sum_ms > 79", "met"),
        ("down/q6_K.sum_ms < 31", "met"),
        ("wall_ms < 100", "not met"),
        ("wall_ms < 1e3", "met"),
        ("down.ratio > 1", "by hand"),  # no reference: unknown is not false
        ("nothing.share > 0", "not met"),
        ("when the compiler learns wgmma", "by hand"),
        ("attention.share > 0.1 and the driver is new", "by hand"),
        ("attention.colour > 3", "by hand"),
    ],
)
def test_conditions_are_answered_from_a_table_or_left_to_a_person(a_table_: object, condition: str, state: str) -> None:
    assert evaluate(condition, a_table_).state == state  # type: ignore[arg-type]
