"""The queue: budgets, what clears a bar, prices of claims, and tables that no longer steer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.attribution.decompose import PARITY
from harness.attribution.queue import build_queue, needed_speed_up, price, wall_gain
from harness.errors import HarnessError
from harness.rounds.store import load_record, save_record

BARS = {"landing": 0.015, "landing-strict": 0.03}
ROWS = {"gate_up/q4_K": 598.0, "attention": 126.0, "down/q6_K": 196.0, "quantize": 118.0, "swiglu": 60.0}
RATIO = {"gate_up/q4_K": 1.06, "attention": 5.7, "down/q6_K": 1.13}


def test_share_and_ratio_rank_together(a_table: Callable) -> None:
    queue = build_queue(a_table(ROWS, wall=1274.0, ratio=RATIO, sol={"swiglu": 0.89}), BARS)
    found = {c.cls: c for c in queue.candidates}
    assert [c.cls for c in queue.candidates][:2] == ["attention", "down"]
    assert found["attention"].budget_ms == pytest.approx(126 * (1 - 1 / 5.7))
    assert found["gate_up"].budget_ms == 0, "the largest slice is at parity"
    assert found["swiglu"].budget_ms == pytest.approx(60 * 0.11) and "roofline" in found["swiglu"].note
    assert found["quantize"].budget_ms is None and queue.candidates[-1].cls == "quantize"
    assert found["attention"].clears == {"landing": True, "landing-strict": True}
    assert found["swiglu"].clears == {"landing": False, "landing-strict": False}


@given(ms=st.floats(0.1, 90), ratio=st.floats(0.3, 20))
def test_a_budget_never_exceeds_its_class_and_parity_has_none(a_table: Callable, ms: float, ratio: float) -> None:
    found = build_queue(a_table({"attention": ms, "norm": 10.0}, ratio={"attention": ratio}), BARS)
    budget = next(c.budget_ms for c in found.candidates if c.cls == "attention")
    assert budget is not None and 0 <= budget < ms
    assert (budget == 0) == (ratio <= PARITY)


@given(
    wall=st.floats(1, 1e4), share=st.floats(0.001, 0.99), speed=st.floats(1.01, 50), bar=st.sampled_from([0.015, 0.03])
)
def test_a_claim_clears_a_bar_exactly_when_it_reaches_the_speed_up_that_it_takes(
    a_table: Callable, wall: float, share: float, speed: float, bar: float
) -> None:
    table = a_table({"attention": wall * share, "norm": wall * (1 - share) * 0.99}, wall=wall)
    claim = price(table, f"attention={speed!r}", {"bar": bar})
    assert claim.gain == pytest.approx(wall / (wall - wall * share * (1 - 1 / speed)) - 1)
    needed = claim.needed["bar"]
    if needed is None or not np.isclose(speed, needed):
        assert claim.clears["bar"] == (needed is not None and speed >= needed)
    if needed is not None and needed < 1e6:
        assert wall_gain(wall, wall * share * (1 - 1 / needed)) == pytest.approx(bar, rel=1e-6)


def test_a_fast_kernel_of_a_small_class_clears_nothing(a_table: Callable) -> None:
    """A kernel 11 % faster in 3 % of the wall is worth a third of a percent, before a line is written."""
    claim = price(a_table({"attention": 3.0, "gate_up/q4_K": 90.0}, wall=100.0), "attention=1.124", BARS)
    assert claim.gain == pytest.approx(0.0033, abs=1e-4)
    assert not any(claim.clears.values())
    assert needed_speed_up(100.0, 3.0, 0.03) == pytest.approx(34.3, abs=0.1)
    assert needed_speed_up(100.0, 1.0, 0.015) is None


def test_a_claim_beyond_the_roofline_says_so(a_table: Callable) -> None:
    table = a_table({"attention": 30.0, "norm": 10.0}, sol={"attention": 0.6})
    assert price(table, "attention=2", BARS).beyond_roof
    assert not price(table, "attention=1.5", BARS).beyond_roof


@pytest.mark.parametrize(
    "claim", ["attention", "attention=", "attention=0", "attention=-2", "attention=fast", "norm=nan"]
)
def test_a_claim_that_is_none_is_one_sentence(a_table: Callable, claim: str) -> None:
    with pytest.raises(HarnessError, match=r"not CLASS=FACTOR"):
        price(a_table({"attention": 3.0, "norm": 1.0}), claim, BARS)


def test_a_claim_on_an_unknown_class_lists_the_known(a_table: Callable) -> None:
    with pytest.raises(HarnessError, match=r"no class 'fa'; it has attention, norm"):
        price(a_table({"attention": 3.0, "norm": 1.0}), "fa=2", BARS)


def test_one_weight_type_of_a_class_can_be_claimed(a_table: Callable) -> None:
    table = a_table({"down/q4_K": 10.0, "down/q6_K": 20.0}, wall=100.0)
    assert price(table, "down/q6_K=2", BARS).saved_ms == 10
    assert price(table, "down=2", BARS).saved_ms == 15


def test_a_ratio_read_at_another_shape_warns(a_table: Callable) -> None:
    table = a_table(ROWS, ratio=RATIO, tokens=3325, reference={"model": "llama.cpp", "tokens": 511})
    assert any("511 tokens" in w and "3325" in w for w in build_queue(table, BARS).warnings)
    table.reference = {"model": "llama.cpp", "tokens": 3325}
    assert build_queue(table, BARS).warnings == []


def test_a_decomposition_keeps_the_shape_of_its_reference(a_table: Callable) -> None:
    from harness.attribution.decompose import decompose
    from harness.launches import from_columns

    launches = from_columns(
        name=["flash"],
        kind=["kernel"],
        start_ns=[0],
        end_ns=[2_000_000],
        device=[0],
        macs=[10**9],
        **{"class": ["attention"]},
    )
    reference = a_table({"attention": 1.0}, tokens=511)
    reference.classes[0].gmac = 1.0
    table = decompose(launches, wall_ns=2_100_000, tokens=3325, reference=reference)
    assert table.classes[0].ratio == pytest.approx(2.0)
    assert any("511 tokens" in w for w in build_queue(table, BARS).warnings)


# --- the command -------------------------------------------------------------------------------------------------------


def write(table: object, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table.to_dict()))  # type: ignore[attr-defined]
    return path


def test_without_a_file_the_newest_table_under_reports_is_read(
    in_tmp: Path, harness: Callable, a_table: Callable
) -> None:
    write(a_table(ROWS, ratio=RATIO, created="2026-01-01T00:00:00+00:00"), in_tmp / "reports" / "old.json")
    write(a_table(ROWS, ratio=RATIO, created="2026-02-01T00:00:00+00:00"), in_tmp / "reports" / "deep" / "new.json")
    status, out, err = harness("queue", "--json", "-", "--claim", "attention=2.0", "--plot", "q.png")
    assert (status, err) == (0, "")
    data = json.loads(out)
    assert data["decomposition"] == "reports/deep/new.json" and data["schema"] == "queue/1"
    assert data["bars"] == BARS
    assert data["claims"][0]["gain"] == pytest.approx(wall_gain(data["wall_ms"], 63.0))
    assert (in_tmp / "q.png").read_bytes().startswith(b"\x89PNG")


def test_no_table_at_all_says_how_to_make_one(in_tmp: Path, harness: Callable) -> None:
    status, _, err = harness("queue")
    assert status == 1 and "harness decompose --json" in err and err.count("\n") == 1


def test_a_landing_expires_older_tables_but_not_the_one_of_what_landed(
    in_tmp: Path, harness: Callable, a_table: Callable, a_round: Callable
) -> None:
    table = write(a_table(ROWS, wall=62.0, created="2026-01-01T00:00:00+00:00"), in_tmp / "t.json")
    assert harness("queue", str(table))[0] == 0
    path = a_round(in_tmp / "reports" / "rounds", "concat", gain=0.03, wall=62.0)
    status, _, err = harness("queue", str(table))
    assert status == 1 and "round 0001 (concat) landed after it was made" in err and "--stale-ok" in err
    status, out, _ = harness("queue", str(table), "--stale-ok")
    assert status == 0 and "expired" in out
    landed = load_record(path).arms["B"].config["levers"]
    assert harness("queue", str(write(a_table(ROWS, wall=60.2, levers=landed), in_tmp / "after.json")))[0] == 0
    newer = a_table(ROWS, wall=60.2, created="2026-01-07T00:00:00+00:00")
    assert harness("queue", str(write(newer, in_tmp / "newer.json")))[0] == 0


def test_a_wall_that_moved_expires_a_table_and_a_reverted_lever_does_not(
    in_tmp: Path, harness: Callable, a_table: Callable, a_round: Callable
) -> None:
    a_round(in_tmp / "reports" / "rounds", "nothing", gain=0.0, wall=60.0)
    near = write(a_table(ROWS, wall=61.0, created="2026-01-01T00:00:00+00:00"), in_tmp / "near.json")
    far = write(a_table(ROWS, wall=70.0, created="2026-01-01T00:00:00+00:00"), in_tmp / "far.json")
    other = write(
        a_table(ROWS, wall=70.0, created="2026-01-01T00:00:00+00:00", regime="sustained"), in_tmp / "other.json"
    )
    assert harness("queue", str(near))[0] == 0
    assert harness("queue", str(other))[0] == 0, "another regime's wall says nothing of this one"
    status, _, err = harness("queue", str(far))
    assert status == 1 and "the wall moved from 70.00 to" in err


def test_the_table_of_a_lever_that_did_not_land_is_not_the_newest(
    in_tmp: Path, harness: Callable, a_table: Callable, a_round: Callable
) -> None:
    before = a_table(ROWS, wall=60.0, created="2026-01-06T10:10:00+00:00")
    after = a_table(ROWS, wall=60.0, created="2026-01-06T10:11:00+00:00", levers={"concat": "on"})
    a_round(in_tmp / "reports" / "rounds", "nothing", gain=0.0, wall=60.0, before=before, after=after)
    status, out, _ = harness("queue", "--json", "-")
    assert status == 0 and json.loads(out)["decomposition"].endswith("0001-nothing/before.json")


def test_a_table_under_sustained_load_is_taken_only_where_there_is_no_other(
    in_tmp: Path, harness: Callable, a_table: Callable
) -> None:
    reports = in_tmp / "reports"
    reports.mkdir()
    write(a_table(ROWS, wall=75.0, created="2026-01-06T12:00:00+00:00", regime="sustained"), reports / "load.json")
    assert json.loads(harness("queue", "--json", "-")[1])["decomposition"].endswith("load.json")
    write(a_table(ROWS, wall=68.0, created="2026-01-06T11:00:00+00:00"), reports / "burst.json")
    assert json.loads(harness("queue", "--json", "-")[1])["decomposition"].endswith("burst.json")


def test_another_engines_saved_trace_never_goes_before_a_table_of_ours(
    in_tmp: Path, harness: Callable, a_table: Callable
) -> None:
    reports = in_tmp / "reports"
    reports.mkdir()
    write(a_table(ROWS, wall=310.0, created="2026-01-06T13:00:00+00:00", regime="recorded"), reports / "theirs.json")
    assert json.loads(harness("queue", "--json", "-")[1])["decomposition"].endswith("theirs.json")
    write(a_table(ROWS, wall=75.0, created="2026-01-06T12:00:00+00:00", regime="sustained"), reports / "load.json")
    assert json.loads(harness("queue", "--json", "-")[1])["decomposition"].endswith("load.json")
    write(a_table(ROWS, wall=68.0, created="2026-01-06T11:00:00+00:00"), reports / "burst.json")
    assert json.loads(harness("queue", "--json", "-")[1])["decomposition"].endswith("burst.json")


def test_retry_conditions_of_earlier_rounds_are_answered(
    in_tmp: Path, harness: Callable, a_table: Callable, a_round: Callable
) -> None:
    path = a_round(in_tmp / "reports" / "rounds", "nothing", gain=0.0, wall=60.0)
    record = load_record(path)
    record.retry_conditions = ["attention.share > 10 %", "attention.share > 90 %", "when someone asks"]
    save_record(path, record)
    table = write(a_table(ROWS, wall=60.0), in_tmp / "t.json")
    _, out, _ = harness("queue", str(table), "--json", "-")
    assert [r["state"] for r in json.loads(out)["retries"]] == ["met", "not met", "by hand"]


def test_the_printed_queue_fits_eighty_columns(
    in_tmp: Path, harness: Callable, a_table: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    table = write(a_table(ROWS, wall=1274.0, ratio=RATIO, sol={"swiglu": 0.89}), in_tmp / "t.json")
    status, out, _ = harness("queue", str(table), "--claim", "attention=2.0")
    assert status == 0 and max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "the wall +5.20%" in out


def test_a_bar_of_ones_own(in_tmp: Path, harness: Callable, a_table: Callable) -> None:
    table = write(a_table(ROWS, ratio=RATIO), in_tmp / "t.json")
    _, out, _ = harness("queue", str(table), "--bar", "0.2", "--json", "-")
    data = json.loads(out)
    assert data["bars"] == {"asked": 0.2} and data["classes"][0]["clears"] == {"asked": False}
