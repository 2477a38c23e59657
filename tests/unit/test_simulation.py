"""The landing rule's error rates, by simulation through the rule's own code.

The expected figures were computed independently (6,000 trials a cell) when the rule was chosen among ten.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from harness.ab.simulate import Noise, Rule, cell, landed_with_retries, smallest_decidable_gain

GAINS = (0.0, 0.014, 0.015, 0.02, 0.025, 0.035)  # 0, bar − 0.1, bar, bar + 0.5, bar + 1, bar + 2 (percent)
EXPECTED = {  # sd of a run → (LANDED %, mean pairs) at each gain
    0.002: ((0.0, 6.4), (0.4, 11.6), (2.2, 13.5), (93.2, 13.6), (100, 7.7), (100, 6.4)),
    0.005: ((0.0, 6.5), (1.1, 15.3), (3.3, 18.4), (85.6, 18.8), (100, 8.9), (100, 6.5)),
    0.01: ((0.0, 7.5), (2.0, 25.5), (3.2, 28.8), (48.8, 28.8), (96.5, 15.1), (100, 7.5)),
    0.02: ((0.0, 13.6), (2.9, 34.0), (3.9, 34.9), (18.3, 34.8), (52.0, 29.0), (98.1, 14.0)),
}
TRIALS = 3000
ERROR = math.sqrt(1 / TRIALS + 1 / 6000)  # of a difference of two independent simulations, per unit sd


def close(share: float, expected: float, trials: int = TRIALS) -> bool:
    """Within four binomial standard errors of a figure that was itself simulated and rounded to 0.1 %."""
    p = min(max(expected, 0.002), 0.998)
    return abs(share - expected) <= 4 * math.sqrt(p * (1 - p) * (1 / trials + 1 / 6000)) + 0.0005


@pytest.mark.parametrize("sd", EXPECTED)
def test_landed_share_and_mean_pairs_are_the_published_ones(sd: float) -> None:
    for i, (gain, (landed, pairs)) in enumerate(zip(GAINS, EXPECTED[sd], strict=True)):
        share, mean_pairs = cell(Noise(sd), gain, trials=TRIALS, seed=round(1e5 * sd) + i)
        assert close(share, landed / 100), (sd, gain, share, landed)
        # The number of pairs spreads about as far as its mean lies above min_pairs, and by 12 at most.
        assert abs(mean_pairs - pairs) <= 4 * ERROR * (min(pairs - 6, 12) + 0.5) + 0.05, (sd, gain, mean_pairs, pairs)


def test_the_strict_protocol_keeps_its_own_bound() -> None:
    strict = Rule(bar=0.03, alpha=0.01, min_pairs=8, max_pairs=60)
    share, _ = cell(Noise(0.005), 0.03, trials=800, seed=5, rule=strict)
    assert share <= 0.01 + 4 * math.sqrt(0.01 * 0.99 / 800)


def test_a_fixed_abba_order_lands_falsely_under_periodic_contention_and_the_coin_does_not() -> None:
    noise = Noise(0.01, contention=0.03, period=(4, 4))
    fixed, _ = cell(noise, 0.015, trials=TRIALS, seed=11, fixed_abba=True)
    coin, _ = cell(noise, 0.015, trials=TRIALS, seed=12)
    assert close(fixed, 0.49)
    assert close(coin, 0.035)


def test_resetting_evidence_on_a_retry_lands_falsely_and_multiplying_it_does_not() -> None:
    """Five windows at a gain of exactly the bar."""
    arguments = {"retries": 4, "trials": 1000}
    reset = landed_with_retries(Noise(0.01), 0.015, reset=True, seed=21, **arguments)
    multiplied = landed_with_retries(Noise(0.01), 0.015, reset=False, seed=22, **arguments)
    assert close(reset, 0.175, 1000)
    assert close(multiplied, 0.043, 1000)
    assert multiplied <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / 1000)


def test_reverting_a_gain_of_bar_plus_delta_or_more_is_bounded_by_beta() -> None:
    rng = np.random.default_rng(3)
    from harness.ab.simulate import REVERTED, decide, differences

    rule, noise = Rule(), Noise(0.005)
    gain = math.expm1(math.log1p(rule.bar) + rule.delta)
    decisions, _, _ = decide(differences(rng, noise.log_walls(rng, TRIALS, 80), gain), rule)
    assert (decisions == REVERTED).mean() <= rule.beta + 4 * math.sqrt(0.05 * 0.95 / TRIALS)


def test_the_smallest_decidable_gain_grows_with_the_noise() -> None:
    quiet, usual, noisy = (smallest_decidable_gain(sd, Rule(), trials=200) for sd in (0.001, 0.005, 0.02))
    assert quiet is not None and usual is not None and noisy is not None
    assert 0.015 < quiet < usual < noisy
    assert smallest_decidable_gain(0.5, Rule(), trials=200) is None
