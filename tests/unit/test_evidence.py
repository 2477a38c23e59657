"""The landing rule's code against its formulas, written out plainly here."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.ab import evidence as ev

B, DELTA, S0 = math.log1p(0.015), 0.005, 0.005
ds = st.lists(st.floats(-0.3, 0.3), min_size=1, max_size=40)


def by_the_book(d: list[float], b: float) -> tuple[float, float]:
    """M⁺ and M⁻ as the rule states them: products, scalars, one pair after another."""
    plus = minus = 1.0
    for i, d_i in enumerate(d):
        if i < 4:
            s = S0
        else:
            centre = statistics.median(d[:i])
            s = max(1.4826 * statistics.median(abs(x - centre) for x in d[:i]), S0 / 5)
        plus *= 1 + 0.8 * math.tanh((d_i - b) / s)
        minus *= 1 + 0.8 * math.tanh((b + DELTA - d_i) / s)
    return plus, minus


@given(ds)
@settings(deadline=None, max_examples=60)
def test_evidence_is_the_product_that_the_rule_states(d: list[float]) -> None:
    plus, minus = ev.log_evidence([np.array(d)], bar=0.015, delta=DELTA, s0=S0)
    expected_plus, expected_minus = by_the_book(d, B)
    assert math.isclose(plus, math.log(expected_plus), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(minus, math.log(expected_minus), rel_tol=1e-9, abs_tol=1e-9)


@given(ds)
@settings(deadline=None, max_examples=60)
def test_the_interval_holds_exactly_the_gains_that_neither_test_rejects(d: list[float]) -> None:
    array = np.array(d)
    low, high = ev.confidence_sequence([array], s0=S0, alpha=0.05, beta=0.05)
    for bound, step in ((low, -1e-7), (high, 1e-7)):
        if bound is None:
            continue
        outside, inside = bound + step, bound - step
        if step < 0:
            m = [float(ev.log_for(array, ev.scales(array, S0), t)[-1]) for t in (outside, inside)]
        else:
            m = [float(ev.log_against(array, ev.scales(array, S0), t)[-1]) for t in (outside, inside)]
        assert m[0] >= math.log(20) > m[1] - 1e-2


@given(ds)
@settings(deadline=None, max_examples=60)
def test_landing_is_the_same_as_the_interval_lying_above_the_bar(d: list[float]) -> None:
    array = [np.array(d)]
    low, _ = ev.confidence_sequence(array, s0=S0, alpha=0.05, beta=0.05)
    plus, _ = ev.log_evidence(array, bar=0.015, delta=DELTA, s0=S0)
    if low is None or abs(low - B) > 1e-9:
        assert (plus >= math.log(20)) == (low is not None and low >= B)


def test_five_pairs_can_never_bound_a_gain_and_six_can() -> None:
    for n, bounded in ((5, False), (6, True)):
        low, high = ev.confidence_sequence([np.full(n, 0.1)], s0=S0, alpha=0.05, beta=0.05)
        assert (low is not None, high is not None) == (bounded, bounded)


def test_one_spike_costs_at_most_a_factor_of_five() -> None:
    d = np.full(10, 0.03)
    spiked = d.copy()
    spiked[5] = -3.0
    clean, _ = ev.log_evidence([d], bar=0.015, delta=DELTA, s0=S0)
    hit, _ = ev.log_evidence([spiked], bar=0.015, delta=DELTA, s0=S0)
    assert clean - hit <= math.log(1.8 / 0.2) + 1e-9


def test_windows_multiply_their_evidence() -> None:
    rng = np.random.default_rng(0)
    one, two = rng.normal(0.02, 0.004, 7), rng.normal(0.02, 0.004, 9)
    alone = [ev.log_evidence([w], bar=0.015, delta=DELTA, s0=S0) for w in (one, two)]
    both = ev.log_evidence([one, two], bar=0.015, delta=DELTA, s0=S0)
    assert both == pytest.approx((alone[0][0] + alone[1][0], alone[0][1] + alone[1][1]))


def test_the_scale_never_looks_at_its_own_pair_or_a_later_one() -> None:
    d = np.random.default_rng(1).normal(0, 0.01, 20)
    before = ev.scales(d, S0)
    for i in range(20):
        changed = d.copy()
        changed[i:] += 1.0
        assert np.array_equal(ev.scales(changed, S0)[: i + 1], before[: i + 1])


def test_hodges_lehmann_shrugs_off_a_spike() -> None:
    assert ev.hodges_lehmann(np.array([0.02, 0.021, 0.019, 0.02, 0.9])) == pytest.approx(0.0205, abs=1e-3)
    assert ev.hodges_lehmann(np.array([0.5])) == 0.5
