"""Engines that cheat are caught; engines that are merely noisy are never called faster than themselves."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.rounds.record import RoundRecord
from harness.rounds.store import find_round, read_samples
from harness.rounds.verify import verify

Run = Callable[..., RoundRecord]


@pytest.mark.parametrize(
    ("cheat", "gate"),
    [
        ("result reused", "repeats the logits"),
        ("work skipped", "parity rel L2"),
        ("work skipped when timed", "timed logits"),
        ("zeros", "parity rel L2"),
        ("other stream, result late", "timed logits"),
        ("other stream, result right", "left running"),
        ("not a number", "parity rel L2"),
        ("not deterministic", "determinism of B"),
    ],
)
def test_a_lever_that_cheats_fails_a_gate_however_fast_it_is(run_round: Run, cheat: str, gate: str) -> None:
    record = run_round({}, {"cheat": cheat})
    assert (record.verdict, record.outcome) == ("REVERTED", "gate-failed")
    assert gate in record.reason
    assert verify(find_round(1)) == []


def test_a_base_that_cheats_makes_the_round_invalid(run_round: Run) -> None:
    record = run_round({"cheat": "result reused"}, {"gain": 0.1})
    assert (record.verdict, record.outcome) == ("INVALID", "invalid-window")
    assert "base arm's timed results are wrong" in record.reason


def test_a_true_gain_lands_is_confirmed_and_a_loss_is_a_regression(run_round: Run) -> None:
    record = run_round({"sd": 0.005}, {"sd": 0.005, "gain": 0.05})
    assert (record.verdict, record.outcome) == ("LANDED", "landed")
    assert record.confirmed == pytest.approx(0.05, abs=0.01)
    assert record.interval is not None and record.interval[0] is not None and record.interval[0] > 0.015
    assert verify(find_round(1)) == []
    worse = run_round({"sd": 0.005}, {"sd": 0.005, "gain": -0.05})
    assert (worse.verdict, worse.outcome) == ("REVERTED", "regression")
    assert verify(find_round(2)) == []


def test_an_a_a_never_lands_in_a_hundred_repetitions(run_round: Run) -> None:
    verdicts = [run_round({"sd": 0.01}, {"sd": 0.01}, aa=True, seed=seed, alone=True).verdict for seed in range(100)]
    assert verdicts.count("LANDED") == 0
    assert verdicts.count("REVERTED") >= 90


@pytest.mark.parametrize("sd", [0.0, 0.003])
@pytest.mark.parametrize("inner", [1, 5])
def test_an_engine_that_is_slower_every_second_call_never_lands_against_itself(
    run_round: Run, sd: float, inner: int
) -> None:
    args = {"cheat": "every second call 5 % slower", "sd": sd}
    for seed in range(10):
        assert run_round(args, args, aa=True, seed=seed, request={"inner": inner}, alone=True).verdict != "LANDED"


def test_a_gain_below_the_bar_lands_only_with_a_reason(run_round: Run) -> None:
    assert run_round({}, {"gain": 0.01}).verdict == "REVERTED"
    record = run_round({}, {"gain": 0.01}, land_sub_bar="frees 1.5 GB")
    assert (record.verdict, record.outcome) == ("LANDED", "sub-bar") and "frees 1.5 GB" in record.reason
    assert verify(find_round(2)) == []
    slower = run_round({}, {"gain": -0.01}, land_sub_bar="we like it")
    assert slower.verdict == "REVERTED" and any("not even a gain above 0" in w for w in slower.warnings)


def test_a_base_off_its_anchor_stops_the_round_with_both_figures(
    run_round: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import simulated

    run_round({}, {"gain": 0.1})
    original = simulated.CLOCK.pass_ms
    monkeypatch.setattr(simulated.CLOCK, "pass_ms", lambda ms: original(1.125 * ms))  # the machine got slower
    record = run_round({}, {"gain": 0.2})
    assert (
        record.verdict == "INVALID" and "22.5" in record.reason and "20.0" in record.reason and "0001" in record.reason
    )
    accepted = run_round({}, {"gain": 0.2}, no_anchor="the power limit was lowered")
    assert accepted.verdict == "LANDED" and any("power limit" in w for w in accepted.warnings)


class Throttled:
    """A sentinel that sees the GPU throttle in the forwards that it is told to."""

    unseen: tuple[str, ...] = ()

    def __init__(self, bad_halves: set[int]) -> None:
        self.bad, self.calls = bad_halves, 0

    def snapshot(self) -> dict:
        return {"host": {"foreign": 0.0, "own": 0.0, "load_1min": 0.0}}

    def host_load(self) -> dict:
        self.calls += 1
        return {}

    def during(self, start_ns: int, end_ns: int) -> dict:
        return {"sm_mhz": 1965, "power_w": 500.0, "temp_c": 50, "throttle": 0x40 if self.calls in self.bad else 0x4}

    def peak_memory_bytes(self) -> int | None:
        return None

    def foreign_pids(self) -> list[int]:
        return []


def test_hardware_throttling_drops_the_whole_pair_and_the_power_cap_does_not(run_round: Run) -> None:
    record = run_round({}, {"gain": 0.1}, sentinel=Throttled({4}))
    assert (record.verdict, record.dropped) == ("LANDED", 1)
    assert any("hw_thermal" in d for d in record.windows[0].disturbed_by)


def test_more_than_a_fifth_of_the_pairs_dropped_is_an_invalid_window(run_round: Run) -> None:
    record = run_round({}, {"gain": 0.1}, sentinel=Throttled({3, 7, 11}))
    assert (record.verdict, record.outcome) == ("INVALID", "invalid-window")
    assert verify(find_round(1)) == []


def test_a_wall_beyond_the_measured_ceiling_is_not_believed(run_round: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that names its model cannot be faster than the model's MACs at this machine's ceiling."""
    import conftest

    floors = iter([12.0, 12.5])
    monkeypatch.setattr(
        conftest.Session, "floor", lambda self, regime, fresh=False: {"there": True, "floor_ms": next(floors)}
    )
    record = run_round({}, {"gain": 1.5})
    assert (record.verdict, record.outcome) == ("REVERTED", "gate-failed")
    assert "8.000 ms, but its MACs need 12.500 ms" in record.reason and "work is missing" in record.reason


def test_a_ceiling_that_was_measured_too_low_is_measured_again_before_it_accuses(
    run_round: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import conftest

    floors = iter([30.0, 15.0])
    monkeypatch.setattr(
        conftest.Session, "floor", lambda self, regime, fresh=False: {"there": True, "floor_ms": next(floors)}
    )
    assert run_round({}, {"gain": 0.1}).verdict == "LANDED"


def test_a_calibration_finds_the_noise_and_judges_planted_gains_rightly(
    run_round: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import contextlib

    import conftest

    from harness.ab import calibrate as room
    from harness.ab import calibration
    from harness.ab.protocol import LandingProtocol
    from harness.config import load_protocol

    base = conftest.simulated_arm("base", sd=0.004)
    monkeypatch.setattr(
        room, "opened_setup", lambda request, protocol, voice: contextlib.nullcontext(conftest.make_setup(request.arms))
    )
    found = room.calibrate(
        base, load_protocol("landing", LandingProtocol), "burst", name="landing", pairs=20, inner=7, planted=True, boots=None,
        seed=4, voice=conftest.Quiet(),  # type: ignore[arg-type]
    )  # fmt: skip
    assert 0.0002 < found.s0 < 0.006 and found.inner % 2 == 1
    assert found.smallest_gain is not None and 0.015 < found.smallest_gain < 0.03
    assert 0 < found.noise_floor < 0.01
    assert [row["planted"] for row in found.planted] == pytest.approx([0.0, 0.01, 0.02, 0.025])
    assert all(row["as_it_should"] for row in found.planted)
    assert found.planted[0]["verdict"] == "REVERTED" and found.planted[3]["verdict"] == "LANDED"
    kept = calibration.load(conftest.MACHINE_NAME, "burst", base.workload_hash())
    assert kept is not None and kept.s0 == found.s0 and len(kept.planted) == 4


def test_a_few_boots_serve_many_pairs_and_the_record_warns(run_round: Run) -> None:
    record = run_round({}, {"gain": 0.1}, request={"boots": 2, "max_pairs": 8})
    samples = read_samples(find_round(1))
    timed = {arm: {s.boot for s in samples if s.arm == arm and s.phase == "decide"} for arm in "AB"}
    assert record.verdict == "LANDED" and all(len(boots) == 2 for boots in timed.values())
    assert any("--boots" in w for w in record.warnings)
    fresh = run_round({}, {"gain": 0.1})
    assert len({s.boot for s in read_samples(find_round(fresh.round))}) == len(read_samples(find_round(fresh.round)))


def test_two_levers_that_only_help_together_land_as_a_basket(run_round: Run) -> None:
    import conftest

    gains = {"A": 0.0, "B": 0.05, "C": 0.0, "D": 0.0}
    arms = {
        letter: conftest.simulated_arm(letter, gain=gain, wall_ms=20.0 + 0.001 * ord(letter))
        for letter, gain in gains.items()
    }
    setup = conftest.make_setup(arms)
    path, record = conftest.new_round(conftest.Request(arms=arms, seed=3), setup.protocol, conftest.MACHINE_NAME)
    record = conftest.Round(path, record, setup).run()
    assert record.verdict == "LANDED" and record.basket is not None
    assert record.basket.interaction.estimate == pytest.approx(0.05, abs=0.003)
    orders = {s.order for s in read_samples(path) if s.pair > 0}
    assert all(sorted(order) == list("ABCD") for order in orders) and len(orders) > 4
    assert verify(path) == []


def test_a_basket_refuses_levers_that_contradict_each_other() -> None:
    from harness.ab.start import basket
    from harness.config import ArmConfig
    from harness.errors import HarnessError

    base = ArmConfig(name="base")
    a, b = ArmConfig(name="a", levers={"concat": "on"}), ArmConfig(name="b", levers={"tail": "full"})
    both = basket(base, a, b)["B"]
    assert both.name == "a+b" and both.levers["concat"] == "on" and both.levers["tail"] == "full"
    with pytest.raises(HarnessError, match=r"levers\.tail.*cannot be combined"):
        basket(base, ArmConfig(name="c", levers={"tail": "ffn_last_row"}), b)
    with pytest.raises(HarnessError, match="runs the same as the base"):
        basket(base, base, b)
