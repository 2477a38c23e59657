"""Pages: what a round's README says, and that rebuilding changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.attribution.decomposition import Decomposition, Pass
from harness.report.index import campaign, wall_after
from harness.report.pages import PAGE
from harness.report.rounds import pair_points, rebuild
from harness.rounds import make
from harness.rounds.record import Basket, Effect, Mechanism
from harness.rounds.store import load_record, read_samples, round_dirs, save_record

ROUNDS = Path("reports/rounds")
BEFORE = {"gate_up/q4_K": 33.0, "down/q4_K": 17.0, "attention": 9.5, "swiglu": 3.0}
AFTER = {"gate_up/q4_K": 31.0, "down/q4_K": 17.0, "attention": 9.5, "swiglu": 3.4}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, a_round: Callable, a_table: Callable) -> Path:
    """A table, a landing with tables of both arms, and a lever that did nothing."""
    folder = tmp_path_factory.mktemp("campaign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make.measured_round(a_table(BEFORE, ratio={"attention": 2.6}), "First table")
        mechanism = Mechanism(
            before_ms=[33.0, 33.1, 33.0], after_ms=[31.0, 31.0, 31.1], estimate=0.065, found="positive"
        )
        a_round(
            ROUNDS, "concat", gain=0.026, drop=(2,), before=a_table(BEFORE), after=a_table(AFTER), vs_reference={"llama.cpp": 2.4},
            mechanism=mechanism, background="The widest GEMM leads the table.",
        )  # fmt: skip
        a_round(
            ROUNDS, "nothing", gain=0.0, wall=58.5, retry_conditions=["attention.share > 0.10", "gate_up.share > 0.99"]
        )
        rebuild()
    return folder


@pytest.fixture
def three_rounds(in_tmp: Path, built: Path) -> Path:
    """Those rounds and their pages, to be changed at will."""
    shutil.copytree(built, in_tmp, dirs_exist_ok=True)
    return in_tmp


def test_a_page_holds_the_whole_round(three_rounds: Path) -> None:
    text = (ROUNDS / "0002-concat" / "README.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == [
        "Where the time went",
        "Background",
        "Principle and prediction",
        "The change",
        "Verification",
        "Lessons and retry conditions",
        "Provenance",
    ]
    for part in (
        "**LANDED: ", "against a bar of +1.5%", "device memory 9.80 GB → 9.90 GB",  # the result line
        "The last table, of [round 0001](../0001-first-table/README.md)", "The widest GEMM leads the table.",
        "Predicted, before the first pair: +2.00%", "| `levers.concat` | `off` | `on` |", "| gate_up | gate_up | added | 28 |",
        "| parity | passed |", "| greedy | not applicable |", "1 dropped for telemetry", "could not see",
        "(pairs.png)", "(walls.png)", "(bridge.png)", "| gate_up | 33.00 | 31.00 | -2.00 | direct gain |", "| swiglu | 3.00 | 3.40 | +0.40 | hidden tax |",
        "net -1.60 ms", "predicted +2.00%, the wall gave", "the changed ops went from 33.00 to 31.00 ms", "harness round verify 0002",
        "[← 0001](../0001-first-table/README.md)", "[0003 →](../0003-nothing/README.md)",
    ):  # fmt: skip
        assert part in text, part
    for image in re.findall(r"\((\w+\.png)\)", text):
        assert (ROUNDS / "0002-concat" / image).read_bytes().startswith(b"\x89PNG")
    assert not re.search(r"[^\n|]\n\|[^\n]*\|\n\|[:-]", text), "a table needs a blank line before it"
    assert "\n\n\n" not in text and "None" not in text


def test_a_page_opens_with_verdict_plot_and_result(three_rounds: Path) -> None:
    text = (ROUNDS / "0002-concat" / "README.md").read_text()
    parts = ("**LANDED: ", "(pairs.png)", "| arm | forwards |", "<details>", "| parity | passed |", "</details>", "## ")
    places = [text.index(part) for part in parts]
    assert places == sorted(places), dict(zip(parts, places, strict=True))


def test_gates_are_folded_away_unless_one_failed(three_rounds: Path) -> None:
    path = ROUNDS / "0002-concat"
    record = load_record(path)
    passed, absent = sum(g.ok is True for g in record.gates), sum(g.ok is None for g in record.gates)
    assert passed and absent, "the made-up round has gates of both kinds"
    summary = f"{passed} gate{'s' * (passed != 1)} passed, {absent} n/a"
    assert f"<details>\n<summary>{summary}</summary>\n\n| gate |" in (path / "README.md").read_text()
    next(g for g in record.gates if g.ok).ok = False
    save_record(path, record)
    rebuild(figures=False)
    failed = next(g for g in record.gates if g.ok is False).name
    assert f"<details open>\n<summary>failed: {failed}, {passed - 1} gate" in (path / "README.md").read_text()


def test_every_link_of_every_page_leads_somewhere(three_rounds: Path) -> None:
    pages = [Path("reports/INDEX.md"), *ROUNDS.glob("*/README.md")]
    assert len(pages) == 4
    for file in pages:
        for target in re.findall(r"\]\(([^)#]+)\)", file.read_text()):
            assert (file.parent / target).is_file(), f"{file}: {target}"


def test_rebuilding_changes_no_byte(three_rounds: Path) -> None:
    def everything() -> dict[Path, bytes]:
        return {p: p.read_bytes() for p in sorted(Path("reports").rglob("*")) if p.is_file()}

    first = everything()
    rebuild()
    assert everything() == first


def test_pages_come_back_from_the_json_alone(three_rounds: Path, harness: Callable) -> None:
    kept = {p: p.read_bytes() for p in Path("reports").rglob("*") if p.suffix in (".md", ".png")}
    for p in kept:
        p.unlink()
    status, out, _ = harness("report")
    assert status == 0 and "3 rounds rebuilt" in out
    assert {p: p.read_bytes() for p in Path("reports").rglob("*") if p.suffix in (".md", ".png")} == kept


def test_the_committed_pages_are_their_records_renderings(in_tmp: Path) -> None:
    committed = Path(__file__).parents[2] / "reports"
    if not committed.is_dir():
        pytest.skip("installed without its reports")
    shutil.copytree(committed, "reports")
    rebuild(figures=False)
    pages = sorted(committed.rglob("*.md"))
    assert len(pages) > 8
    stale = [p for p in pages if p.read_bytes() != (Path("reports") / p.relative_to(committed)).read_bytes()]
    assert not stale, "run `harness report --no-figures`"


def test_what_a_person_wrote_survives_and_reaches_the_record(three_rounds: Path) -> None:
    file = ROUNDS / "0003-nothing" / "README.md"
    text = file.read_text()
    hint = re.search(r"<!-- edit:lessons \w+ -->\n(.*)\n", text)
    assert hint is not None
    mine = "Two lines,\n  * with | odd `marks`\n\n\nand a gap."
    file.write_text(text.replace(hint[1], mine))
    rebuild(figures=False)
    assert mine in file.read_text()
    assert load_record(ROUNDS / "0003-nothing").lessons == mine
    again = file.read_bytes()
    rebuild(figures=False)
    assert file.read_bytes() == again


def test_the_index_counts_links_and_tells_what_is_worth_another_look(three_rounds: Path) -> None:
    text = Path("reports/INDEX.md").read_text()
    assert "3 rounds: 2 levers: 1 LANDED, 1 REVERTED; 1 without a lever." in text and "(campaign.png)" in text
    assert [m for m in re.findall(r"\[(\d{4})\]\(rounds/", text)][:3] == ["0001", "0002", "0003"]
    look = text.split("## Worth another look")[1]
    assert "`attention.share > 0.10`" in look and "gate_up.share" not in look


def test_the_campaign_tells_gains_with_their_bars_and_the_wall_that_the_base_has(three_rounds: Path) -> None:
    paths = round_dirs()
    records = [load_record(p) for p in paths]
    table, landed, reverted = campaign(records, paths)
    assert [o.verdict for o in (table, landed, reverted)] == ["MEAS-ONLY", "LANDED", "REVERTED"]
    assert (table.gain, table.bar) == (None, None), "a table gains nothing and is held against no bar"
    assert landed.gain == records[1].confirmed and landed.bar == 0.015 and landed.interval == records[1].interval
    assert reverted.gain == records[2].estimate
    assert float(landed.wall) == pytest.approx(60, rel=0.01), "a landing alone leaves the base as it was"
    assert float(reverted.wall) == pytest.approx(58.5, rel=0.01), "after a revert it is the base's"
    assert (landed.reference, reverted.reference) == ("2.40×", "")
    assert landed.anchor == ("3325 tokens", "burst", "NVIDIA H200") and not landed.promoted


def test_the_campaign_knows_what_tests_the_method_and_leaves_out_what_was_corrected(three_rounds: Path) -> None:
    paths = round_dirs()
    records = [load_record(p) for p in paths]
    records[1].arms["A"].config["plant"] = {"fraction": 0.026}
    records[2].aa = True
    assert [o.control for o in campaign(records, paths)] == ["", "planted", "A/A"]
    records[1].superseded_by = 3
    assert [o.name[:4] for o in campaign(records, paths)] == ["0001", "0003"]


def test_a_promotion_moves_the_wall_of_the_base_and_a_plant_does_not(three_rounds: Path) -> None:
    path = ROUNDS / "0002-concat"
    record = load_record(path)
    record.promoted = "2026-01-06T11:00:00+00:00"
    assert wall_after(record, path) == pytest.approx(60 / 1.026, rel=0.01)
    record.promoted, record.arms["A"].config["plant"] = "", {"fraction": 0.026}
    assert wall_after(record, path) == pytest.approx(60 / 1.026, rel=0.01), "the arm that spins is not the base"


def test_arms_that_run_the_same_kernels_gain_nothing_by_class(
    in_tmp: Path, a_round: Callable, a_table: Callable
) -> None:
    """Passes of an H200 round whose arms differed by a spin on the host alone."""

    def table(rows: dict, busy: list[float]) -> Decomposition:
        return a_table(rows, passes=[Pass(wall_ms=b + 1.3, busy_ms=b, launches=4) for b in busy])

    before = table({"gate_up": 31.47, "q_o": 6.3, "attention": 5.55, "swiglu": 2.49}, [64.60, 65.86, 66.00])
    after = table({"gate_up": 30.45, "q_o": 5.96, "attention": 5.03, "swiglu": 2.49}, [63.80, 63.80, 64.93])
    none = Mechanism(before_ms=[64.60, 65.86, 66.00], after_ms=[63.80, 63.80, 64.93], estimate=0.032, found="none")
    path = a_round(ROUNDS, "planted", gain=0.025, before=before, after=after, mechanism=none)
    rebuild()
    text = (path / "README.md").read_text()
    assert "| attention | 5.55 | 5.03 | -0.52 | within noise |" in text
    assert "direct gain +0.00 ms, hidden tax +0.00 ms, net +0.00 ms; within noise -1.88 ms" in text
    assert "passes of one side span 2.1% (arm A) and 1.8% (arm B) of busy" in text
    assert "mechanism: none" in text and "cashed" not in text and "improved" not in text


def test_the_pair_plot_shows_what_the_verdict_used(in_tmp: Path, a_round: Callable) -> None:
    path = a_round(ROUNDS, "concat", gain=0.026, drop=(2,))
    record = load_record(path)
    decide, confirm, band, _ = pair_points(record, [s for s in read_samples(path) if s.pair])
    assert sum(kept for *_, kept in decide) == record.pairs and sum(not kept for *_, kept in decide) == 1
    assert len(confirm) == record.confirm_pairs
    low, high = band[-1][1:]
    assert record.interval is not None and low is not None and high is not None
    assert (2.718281828459045**low - 1, 2.718281828459045**high - 1) == pytest.approx(record.interval)


def test_a_basket_shows_its_interaction(in_tmp: Path, a_round: Callable) -> None:
    path = a_round(ROUNDS, "both", gain=0.05)
    record = load_record(path)

    def effect(x: float) -> Effect:
        return Effect(estimate=x, interval=(x - 0.01, x + 0.01))

    record.basket = Basket(a=effect(0.0), b=effect(0.002), both=effect(0.05), interaction=effect(0.048))
    save_record(path, record)
    rebuild()
    assert "| interaction | +4.80% | [+3.80%, +5.80%] |" in (path / "README.md").read_text()
    assert (path / "basket.png").is_file()


def test_a_round_that_a_gate_ended_has_a_page(in_tmp: Path, a_round: Callable) -> None:
    path = a_round(ROUNDS, "wrong", gain=0.03)
    record = load_record(path)
    (path / "samples.jsonl").unlink()
    record.gates[0].ok, record.verdict, record.outcome, record.reason = (
        False,
        "REVERTED",
        "gate-failed",
        "gate parity failed",
    )
    record.estimate = record.confirmed = record.interval = record.evidence = None
    record.pairs, record.samples_sha256 = 0, ""
    for arm in record.arms.values():
        arm.wall = None
    save_record(path, record)
    rebuild()
    text = (path / "README.md").read_text()
    assert (
        "**REVERTED (gate-failed): gate parity failed" in text
        and "| parity | **failed** |" in text
        and "pairs.png" not in text
    )


def test_no_round_at_all_has_an_index_too(in_tmp: Path) -> None:
    rebuild()
    assert "No round was run yet" in Path("reports/INDEX.md").read_text()


def test_the_page_of_the_command_line_is_what_help_says() -> None:
    if not PAGE.parent.is_dir():
        pytest.skip("installed without its docs")
    # In a process of its own: click keeps the help option of whoever asked a command first, as another test may have.
    made = subprocess.run(
        [sys.executable, "-c", "from harness.report.pages import page; print(page(), end='')"],
        capture_output=True, text=True, check=True, env=os.environ | {"PYTHONIOENCODING": "utf-8"},
    ).stdout  # fmt: skip
    assert PAGE.read_text(encoding="utf-8") == made, "docs/cli.md is stale: run `python -m harness.report.pages`"
