"""From samples to a verdict: statistics of a half, dropped pairs, windows, p95, spreads, outcomes, baskets."""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.ab import schedule
from harness.ab.mechanism import compare, gates
from harness.ab.verdict import conclude, half_wall, outcome
from harness.config import ArmConfig
from harness.rounds.record import Frozen, Mechanism, Sample


def make(
    gains: list[float], *, sd: float = 0.001, inner: int = 5, window: int = 1, first: int = 1, phase: str = "decide",
    seed: int = 0, dropped: dict[int, str] | None = None, arms: str = "AB", extra: dict[str, float] | None = None,
) -> list[Sample]:  # fmt: skip
    """Samples of pairs in which each other arm is faster than A by the pair's gain (C and D: by `extra`)."""
    rng, samples = np.random.default_rng(seed), []
    for i, gain in enumerate(gains):
        pair = first + i
        order = schedule.order(0, pair, arms)
        for arm in order:
            faster = 0.0 if arm == "A" else (extra or {}).get(arm, gain)
            walls = 100.0 / (1 + faster) * np.exp(rng.normal(0, sd, inner))
            samples.append(
                Sample(pair=pair, order=order, arm=arm, wall_ms=walls.tolist(), window=window, phase=phase,  # type: ignore[arg-type]
                       dropped=(dropped or {}).get(pair) if arm == order[0] else None)
            )  # fmt: skip
    return samples


def test_each_statistic_of_a_half() -> None:
    walls = [5.0, 1.0, 9.0, 2.0, 3.0]
    assert half_wall(walls, "median") == 3.0
    assert half_wall(walls, "minimum") == 1.0
    assert half_wall(walls, "lower_quartile") == 2.0
    assert half_wall(walls, "midmean") == pytest.approx((2 + 3 + 5) / 3)
    assert {half_wall([4.0], s) for s in ("median", "minimum", "lower_quartile", "midmean")} == {4.0}  # type: ignore[arg-type]


def test_a_clear_gain_lands_at_the_first_pair_that_may_stop() -> None:
    frozen = Frozen()
    assert conclude(make([0.05] * 5), frozen).verdict is None
    found = conclude(make([0.05] * 6), frozen)
    assert (found.verdict, found.pairs) == ("LANDED", 6)
    assert found.estimate == pytest.approx(0.05, abs=0.002)
    low, high = found.interval
    assert low is not None and high is not None and 0.015 < low < 0.05 < high


def test_nothing_is_shown_before_min_pairs() -> None:
    assert conclude(make([0.05] * 5), Frozen()).interval == (None, None)


def test_a_clear_loss_reverts_and_a_gain_at_the_bar_stays_open_to_the_end() -> None:
    assert conclude(make([0.0] * 6), Frozen()).verdict == "REVERTED"
    at_bar = conclude(make([0.0175] * 40, sd=0.02), Frozen())
    assert at_bar.verdict == "INCONCLUSIVE" and at_bar.next_step


def test_a_dropped_pair_goes_whole_and_does_not_count() -> None:
    samples = make([0.05] * 3 + [-0.9] + [0.05] * 3, dropped={4: "hw_thermal"})
    found = conclude(samples, Frozen())
    assert (found.verdict, found.pairs, found.dropped) == ("LANDED", 6, 1)


def test_more_than_a_fifth_dropped_is_invalid_whatever_the_evidence() -> None:
    found = conclude(make([0.05] * 8, dropped={2: "x", 5: "x"}), Frozen())
    assert found.verdict == "INVALID" and "2 of 8" in found.reason


def test_a_pair_that_was_cut_off_is_not_a_pair() -> None:
    found = conclude(make([0.05] * 7)[:-1], Frozen())
    assert found.pairs == 6 and any("cut off" in w for w in found.warnings)


def test_a_retry_needs_its_own_min_pairs_and_multiplies() -> None:
    one = make([0.017] * 40, sd=0.01, seed=1)
    two = make([0.03] * 5, window=2, first=41, seed=2)
    assert conclude(one + two, Frozen()).verdict is None
    three = make([0.03] * 6, window=2, first=41, seed=2)
    both, alone = conclude(one + three, Frozen()), conclude(three, Frozen())
    assert both.log_for == pytest.approx(conclude(one, Frozen()).log_for + alone.log_for)


def test_an_invalid_window_does_not_enter_a_retrys_evidence() -> None:
    bad = make([0.05] * 8, dropped={2: "x", 5: "x"})
    good = make([0.0] * 6, window=2, first=9)
    assert conclude(bad + good, Frozen()).log_for == pytest.approx(conclude(good, Frozen()).log_for)


def test_the_confirmed_gain_comes_from_fresh_pairs_only() -> None:
    samples = make([0.08] * 6) + make([0.03] * 8, phase="confirm", first=7, seed=3)
    found = conclude(samples, Frozen())
    assert found.verdict == "LANDED" and found.pairs == 6
    assert found.confirmed == pytest.approx(0.03, abs=0.002)
    assert conclude(samples[:-2], Frozen()).confirmed is None


def slow_tail(samples: list[Sample]) -> list[Sample]:
    """Arm B's slowest forward of each half takes 1.4 times as long."""
    for s in samples:
        if s.arm == "B":
            s.wall_ms[-1] *= 1.4
    return samples


def test_a_worse_p95_withholds_a_landing_from_a_hundred_forwards_and_warns_below() -> None:
    few = conclude(slow_tail(make([0.05] * 6)), Frozen())
    assert few.verdict == "LANDED" and few.p95_interval is None and any("p95" in w for w in few.warnings)
    many = conclude(slow_tail(make([0.05] * 6, inner=21)), Frozen())
    assert many.verdict == "LANDED", "one forward in 21 lies beyond the 95th percentile only"
    samples = make([0.05] * 6, inner=21)
    for s in samples:
        if s.arm == "B":
            s.wall_ms[-3:] = [w * 1.4 for w in s.wall_ms[-3:]]
    withheld = conclude(samples, Frozen())
    assert withheld.verdict == "INCONCLUSIVE" and "p95" in withheld.reason
    assert withheld.p95_interval is not None and withheld.p95_interval[0] > math.log1p(0.015)


def test_spreads_that_differ_by_more_than_two_are_a_warning() -> None:
    samples = make([0.05] * 40)
    rng = np.random.default_rng(0)
    for s in samples:
        if s.arm == "B":
            s.wall_ms[:] = [w * f for w, f in zip(s.wall_ms, [math.exp(rng.exponential(0.02))] * 5, strict=True)]
    assert any("spreads differ" in w for w in conclude(samples, Frozen()).warnings)


def test_a_basket_is_decided_on_both_levers_and_shows_their_interaction() -> None:
    # Each lever alone is neutral; together they gain 5 %.
    found = conclude(make([0.05] * 8, arms="ABCD", extra={"C": 0.0, "D": 0.0}), Frozen())
    assert found.verdict == "LANDED" and found.basket is not None
    assert found.basket.both.estimate == pytest.approx(0.05, abs=0.003)
    assert abs(found.basket.a.estimate) < 0.003 and abs(found.basket.b.estimate) < 0.003
    assert found.basket.interaction.interval[0] > 0.03
    assert set(found.walls) == set("ABCD")


@pytest.mark.parametrize(
    ("gain", "before", "after", "expected"),
    [
        (0.05, 50.0, 45.0, "landed"),
        (0.0, 50.0, 50.0, "no-effect"),
        (-0.05, 50.0, 55.0, "regression"),
        (0.0, 50.0, 45.0, "mechanism-positive/wall-negative"),
        (-0.01, 50.0, 45.0, "mechanism-positive/wall-negative"),
        (0.003, 1.0, 0.7, "share-not-yet"),
    ],
)
def test_the_outcome_is_the_wall_and_the_mechanism_together(
    gain: float, before: float, after: float, expected: str
) -> None:
    found = conclude(make([gain] * 8), Frozen())
    state = "positive" if after < before else "none" if after == before else "negative"
    mechanism = Mechanism(before_ms=[before] * 3, after_ms=[after] * 3, found=state)  # type: ignore[arg-type]
    assert outcome(found, mechanism, Frozen()) == expected


def table(ops: dict[str, tuple[str, list[str], list[float]]]) -> dict:
    return {
        "there": True,
        "missing": [],
        "ops": {op: {"class": c, "count": 1, "kernels": k, "busy_ms": ms} for op, (c, k, ms) in ops.items()},
    }


def test_the_mechanism_counts_the_ops_that_changed_and_no_others() -> None:
    a = table(
        {
            "q": ("q_o", ["nvjet_a"], [2.0, 2.1, 2.2]),
            "k": ("k_v", ["nvjet_a"], [1.0] * 3),
            "norm": ("norm", ["n"], [9.0] * 3),
        }
    )
    b = table({"qk": ("q_o", ["nvjet_b"], [2.5, 2.6, 2.7]), "norm": ("norm", ["n"], [9.0, 5.0, 9.0])})
    found = compare(a, b, ArmConfig(name="x"))
    assert found.before_ms == pytest.approx([3.0, 3.1, 3.2]) and found.after_ms == pytest.approx([2.5, 2.6, 2.7])
    assert found.found == "positive" and found.estimate == pytest.approx(3.1 / 2.6 - 1)
    overlapping = compare(a, table({"q": ("q_o", ["x"], [2.05] * 3), "k": ("k_v", ["x"], [1.0] * 3), "norm": ("norm", ["n"], [9.0] * 3)}), ArmConfig(name="x"))  # fmt: skip
    assert overlapping.found == "none"


def test_a_lever_that_is_on_but_not_live_fails() -> None:
    a = table({"attention": ("attention", ["flash_ours"], [1.0])})
    lever = ArmConfig(name="cudnn", kernels=("cudnn.*sdpa",))
    assert [g.ok for g in gates(a, a, ArmConfig(name="base"), lever)][-1] is False
    live = table({"attention": ("attention", ["cudnn_fused_sdpa"], [1.0])})
    assert all(g.ok for g in gates(a, live, ArmConfig(name="base"), lever))
    stray = gates(live, live, ArmConfig(name="base"), lever)[-1]
    assert stray.ok is False and "base" in stray.detail


def test_an_op_without_a_launch_fails_and_an_arm_without_a_trace_is_not_applicable() -> None:
    a = table({"q": ("q_o", ["k"], [1.0])})
    broken = a | {"missing": ["L03 gate"]}
    found = {g.name: g for g in gates(a, broken, ArmConfig(name="a"), ArmConfig(name="b"))}
    assert found["every op launched, arm B"].ok is False and "L03 gate" in found["every op launched, arm B"].detail
    absent = {"there": False, "why": "a command has no plan"}
    assert all(g.ok is None and g.detail for g in gates(absent, absent, ArmConfig(name="a"), ArmConfig(name="b")))
