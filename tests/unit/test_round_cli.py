"""`harness round`: the ledger from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.config import load_arm
from harness.rounds.store import load_record, save_record

ROUNDS = Path("reports/rounds")
BASE = """\
# The base arm.
engine: {kind: embedded}   # CUDA where there is a GPU
tokens: 3325
levers:
  # off until it lands
  concat: off   # one GEMM for gate and up
  tail: last_row
"""


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures themselves are test_report's business; here each is an empty file."""
    monkeypatch.setattr("harness.report.style.Page.save", lambda page, path: path.write_bytes(b""))


def write(table: object, name: str = "t.json") -> str:
    Path(name).write_text(json.dumps(table.to_dict()))  # type: ignore[attr-defined]
    return name


def test_list_show_and_json(
    in_tmp: Path, harness: Callable, a_round: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert harness("round", "list")[:2] == (
        0,
        "No round was run yet: `harness ab base.yaml lever.yaml` makes the first.\n",
    )
    a_round(ROUNDS, "concat", gain=0.03)
    a_round(ROUNDS, "nothing", gain=0.0)
    status, out, _ = harness("round", "list")
    assert status == 0 and "LANDED" in out and "REVERTED" in out and max(map(len, out.splitlines())) <= 80
    status, out, _ = harness("round", "show", "1")
    assert status == 0 and "confirmed" in out and "levers.concat" in out and "9.80 GB → 9.90 GB" in out
    assert json.loads(harness("round", "show", "2", "--json", "-")[1])["verdict"] == "REVERTED"
    assert [r["round"] for r in json.loads(harness("round", "list", "--json", "-")[1])["rounds"]] == [1, 2]


def test_verify_passes_whole_and_exits_6_for_one_changed_wall(
    in_tmp: Path, harness: Callable, a_round: Callable
) -> None:
    a_round(ROUNDS, "nothing", gain=0.0)
    path = a_round(ROUNDS, "concat", gain=0.03)
    status, out, err = harness("round", "verify")
    assert (status, err) == (0, "") and out.count("every figure agrees") == 2
    lines = (path / "samples.jsonl").read_text().splitlines()
    sample = json.loads(lines[5])
    sample["wall_ms"][0] += 0.001
    lines[5] = json.dumps(sample)
    (path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    status, out, err = harness("round", "verify", "2")
    assert status == 6 and err.count("\n") == 1 and "round 0002-concat: " in err and "by its samples" in err
    status, out, _ = harness("round", "verify", "--json", "-")
    assert status == 6 and [r["ok"] for r in json.loads(out)["rounds"]] == [True, False]


def test_an_open_round_cannot_be_verified_or_closed(in_tmp: Path, harness: Callable, a_round: Callable) -> None:
    path = a_round(ROUNDS, "concat", gain=0.03)
    record = load_record(path)
    record.verdict, record.status = None, "open"
    save_record(path, record)
    assert harness("round", "verify", "1")[0] == 6
    assert "no verdict yet" in harness("round", "close", "1", "--lessons", "x")[2]


def test_a_measurement_only_round_holds_a_table(in_tmp: Path, harness: Callable, a_table: Callable) -> None:
    table = a_table({"attention": 10.0, "gate_up/q4_K": 40.0}, ratio={"attention": 2.0})
    status, out, err = harness("round", "new", "--meas-only", "--from", write(table), "--title", "After concat")
    assert (status, err) == (0, "") and "MEAS-ONLY" in out
    record = load_record(ROUNDS / "0001-after-concat")
    assert (record.kind, record.verdict, record.outcome, record.tokens) == ("MEAS-ONLY", "MEAS-ONLY", "measured", 3325)
    readme = (ROUNDS / "0001-after-concat" / "README.md").read_text()
    assert "| gate_up | q4_K |" in readme and "Checks passed: conservation" in readme
    assert harness("round", "verify", "1")[0] == 0
    status, out, _ = harness("queue", "--json", "-")
    assert json.loads(out)["decomposition"] == "reports/rounds/0001-after-concat/decomposition.json"


def test_a_table_with_a_failed_check_is_kept_and_exits_6(in_tmp: Path, harness: Callable, a_table: Callable) -> None:
    table = a_table({"attention": 10.0})
    table.checks[0].ok, table.checks[0].detail = False, "classes miss 2 ms"
    assert harness("round", "new", "--meas-only", "--from", write(table))[0] == 6
    assert "**Check failed: conservation.** classes miss 2 ms" in next(ROUNDS.glob("0001-*/README.md")).read_text()


def test_arithmetic_alone_decides_a_class_close_to_its_roof(in_tmp: Path, harness: Callable, a_table: Callable) -> None:
    table = write(
        a_table({"swiglu": 8.0, "gate_up/q4_K": 150.0}, wall=190.0, sol={"swiglu": 0.89, "gate_up/q4_K": 0.5})
    )
    status, out, _ = harness("round", "new", "--analysis-negative", "--from", table, "--class", "swiglu")
    assert status == 0 and "analysis-negative" in out
    record = load_record(next(ROUNDS.glob("0001-*")))
    assert record.outcome == "analysis-negative" and record.analysis is not None
    assert record.analysis.best_gain == pytest.approx(190 / (190 - 8 * 0.11) - 1)
    assert "8.000 × (1 − 0.8900) = 0.880 ms" in record.analysis.arithmetic
    assert harness("round", "verify")[0] == 0
    record.analysis.best_gain = 0.001
    save_record(next(ROUNDS.glob("0001-*")), record)
    assert harness("round", "verify")[0] == 6
    status, _, err = harness("round", "new", "--analysis-negative", "--from", table, "--class", "gate_up")
    assert status == 1 and "run `harness ab`" in err


def test_new_wants_exactly_one_kind(in_tmp: Path, harness: Callable) -> None:
    assert harness("round", "new")[0] == 64
    assert harness("round", "new", "--meas-only", "--analysis-negative")[0] == 64


def test_close_writes_lessons_and_conditions_into_record_and_page(
    in_tmp: Path, harness: Callable, a_round: Callable
) -> None:
    path = a_round(ROUNDS, "nothing", gain=0.0)
    status, _, err = harness("round", "close", "1")
    assert status == 1 and "--lessons" in err
    assert (
        harness("round", "close", "1", "--lessons", "The tile was not the limit.", "--retry", "attention.share > 0.10")[
            0
        ]
        == 0
    )
    record = load_record(path)
    assert (record.status, record.lessons, record.retry_conditions) == (
        "closed",
        "The tile was not the limit.",
        ["attention.share > 0.10"],
    )
    readme = (path / "README.md").read_text()
    assert "The tile was not the limit." in readme and "- attention.share > 0.10" in readme
    assert harness("round", "close", "1", "--lessons", "It was the barrier.")[0] == 0
    assert "It was the barrier." in (path / "README.md").read_text() and "tile" not in load_record(path).lessons


def test_below_the_bar_lands_only_a_gain_and_only_for_a_reason(
    in_tmp: Path, harness: Callable, a_round: Callable
) -> None:
    path = a_round(ROUNDS, "small", gain=0.01)
    a_round(ROUNDS, "worse", gain=-0.02)
    assert harness("round", "close", "1", "--lessons", "Small.", "--keep-below-bar", " ")[0] == 1
    assert harness("round", "close", "1", "--lessons", "Small.", "--keep-below-bar", "It frees 2 GB.")[0] == 0
    record = load_record(path)
    assert (record.verdict, record.outcome, record.reason) == ("LANDED", "sub-bar", "It frees 2 GB.")
    assert "Kept below the bar: It frees 2 GB." in (path / "README.md").read_text()
    assert harness("round", "verify", "1")[0] == 0
    status, _, err = harness("round", "close", "2", "--lessons", "No.", "--keep-below-bar", "I like it.")
    assert status == 1 and "shows no gain" in err


def test_a_correction_supersedes_and_the_old_figure_stays_struck_through(
    in_tmp: Path, harness: Callable, a_round: Callable
) -> None:
    old = a_round(ROUNDS, "stale base", gain=0.262)
    new = a_round(ROUNDS, "fresh base", gain=0.111, seed=2)
    before = load_record(old).estimate
    assert harness("round", "correct", "2", "--by", "1", "--why", "x")[0] == 1
    assert harness("round", "correct", "1", "--by", "2", "--why", "The base binary was a stale build.")[0] == 0
    assert load_record(old).superseded_by == 2 and load_record(old).estimate == before
    assert load_record(new).supersedes == 1 and "stale build" in (new / "README.md").read_text()
    assert "Superseded by [round 0002](../0002-fresh-base/README.md)" in (old / "README.md").read_text()
    row = next(line for line in Path("reports/INDEX.md").read_text().splitlines() if "[0001](" in line)
    assert "~~stale base~~" in row and "~~+26" in row
    assert harness("round", "verify")[0] == 0


def test_a_record_that_contradicts_its_samples_is_corrected_from_them(
    in_tmp: Path, harness: Callable, a_round: Callable
) -> None:
    path = a_round(ROUNDS, "concat", gain=0.03)
    status, _, err = harness("round", "correct", "1", "--why", "doubt")
    assert status == 1 and "still say what it says" in err
    record = load_record(path)
    record.confirmed = 0.26
    save_record(path, record)
    assert harness("round", "correct", "1", "--why", "The confirmed gain was booked wrongly.")[0] == 0
    corrected = load_record(ROUNDS / "0002-concat-corrected")
    assert corrected.supersedes == 1 and corrected.confirmed == pytest.approx(0.03, abs=0.005)
    assert harness("round", "verify", "2")[0] == 0


# --- promotion ---------------------------------------------------------------------------------------------------------


def base(text: str = BASE) -> Path:
    path = Path("experiments/base.yaml")
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_promotion_rewrites_one_value_and_keeps_every_other_byte(
    in_tmp: Path, harness: Callable, a_round: Callable, a_table: Callable
) -> None:
    file, path = base(), a_round(ROUNDS, "concat", gain=0.03, wall=60.0)
    table = write(a_table({"attention": 57.0}, wall=58.3, created="2026-01-06T12:00:00+00:00"))
    assert harness("queue", table)[0] == 0
    status, out, err = harness("round", "promote", "1")
    assert (status, err) == (0, "") and "concat: off → on" in out
    assert file.read_text() == BASE.replace("concat: off", "concat: on")
    assert load_arm(file).levers["concat"] == "on"
    assert load_record(path).promoted
    status, _, err = harness("queue", table)
    assert status == 1 and "another configuration the base" in err
    assert harness("round", "verify")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "# nothing yet\ntokens: 512\n",
        "tokens: 512\nlevers: {}\n",
        "tokens: 512\nlevers: {tail: full}\n",
        "tokens: 512\nlevers:\n    tail: full  # four spaces\n",
        'tokens: 512\nlevers:\n  "concat": "off"\n',
    ],
)
def test_promotion_fits_any_shape_of_the_file(in_tmp: Path, harness: Callable, a_round: Callable, text: str) -> None:
    file = base(text)
    a_round(ROUNDS, "concat", gain=0.03)
    before = load_arm(file).what_runs()
    assert harness("round", "promote", "1")[0] == 0
    after = load_arm(file).what_runs()
    assert after == before | {"levers": before["levers"] | {"concat": "on"}}
    assert all(comment in file.read_text() for comment in ("# nothing yet", "# four spaces") if comment in text)


def test_only_a_landed_lever_of_the_own_engine_is_promoted(in_tmp: Path, harness: Callable, a_round: Callable) -> None:
    file = base()
    a_round(ROUNDS, "nothing", gain=0.0)
    path = a_round(ROUNDS, "command", gain=0.03)
    record = load_record(path)
    record.arms["B"].config["engine"] = {"kind": "command"}
    save_record(path, record)
    assert "only a landed configuration" in harness("round", "promote", "1")[2]
    assert "ran a command engine" in harness("round", "promote", "2")[2]
    assert file.read_text() == BASE
