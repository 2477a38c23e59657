"""Simulated rounds: the landing rule's own code on a machine whose noise is known, thousands of rounds at once.

Used to check the rule's error rates, to find the smallest gain that a noise level lets it decide, and by the
operating-characteristics benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.ab import evidence as ev

LANDED, REVERTED, INCONCLUSIVE = 1, -1, 0


@dataclass(frozen=True)
class Rule:
    """The numbers of a protocol that decide; defaults are protocols/landing.yaml's."""

    bar: float = 0.015
    alpha: float = 0.05
    beta: float = 0.05
    delta: float = 0.005
    s0: float = 0.005
    min_pairs: int = 6
    max_pairs: int = 40


@dataclass(frozen=True)
class Noise:
    """What disturbs one run's wall, as fractions of it.

    Half the variance is white and half AR(1); spikes slow a run by a uniform draw; periodic contention slows a quarter
    of each period of `period` runs, at a random phase; drift is per run.
    """

    sd: float
    phi: float = 0.9
    drift: float = 2e-4
    spike_share: float = 0.02
    spike: tuple[float, float] = (0.05, 0.5)
    contention: float = 0.01
    period: tuple[int, int] = (6, 10)

    def log_walls(self, rng: np.random.Generator, trials: int, runs: int) -> ev.Array:
        """ln(wall / undisturbed wall) of consecutive runs, [trials, runs]."""
        each = self.sd / np.sqrt(2)
        innovations = rng.normal(0, each * np.sqrt(1 - self.phi**2), (trials, runs))
        slow = np.empty((trials, runs))
        slow[:, 0] = rng.normal(0, each, trials)
        for i in range(1, runs):
            slow[:, i] = self.phi * slow[:, i - 1] + innovations[:, i]
        run = np.arange(runs)
        spikes = (rng.random((trials, runs)) < self.spike_share) * rng.uniform(*self.spike, (trials, runs))
        period = rng.integers(self.period[0], self.period[1] + 1, (trials, 1))
        position = (run + rng.random((trials, 1)) * period) % period
        slowed = self.contention * (position < period / 4)
        return rng.normal(0, each, (trials, runs)) + slow + self.drift * run + np.log1p(spikes) + np.log1p(slowed)


def differences(rng: np.random.Generator, log_walls: ev.Array, gain: float, *, fixed_abba: bool = False) -> ev.Array:
    """d [trials, pairs] of coin-ordered pairs of one run per half, the lever being faster by `gain`.

    With `fixed_abba` the orders are AB, BA, AB, …: the schedule that this project does not use, to show why.
    """
    first, second = log_walls[:, 0::2], log_walls[:, 1::2]
    a_first = (np.arange(first.shape[1]) % 2 == 0) if fixed_abba else rng.random(first.shape) < 0.5
    return np.where(a_first, first - second, second - first) + np.log1p(gain)


def decide(
    d: ev.Array, rule: Rule, *, before: tuple[ev.Array, ev.Array] | None = None
) -> tuple[np.ndarray, np.ndarray, tuple[ev.Array, ev.Array]]:
    """The rule on every row of d [trials, max_pairs]: decisions, pairs used, and (ln M⁺, ln M⁻) where each stopped.

    `before` is the evidence of earlier windows, which a retry multiplies.
    """
    s, b = ev.scales(d, rule.s0), np.log1p(rule.bar)
    plus, minus = ev.log_for(d, s, b), ev.log_against(d, s, b + rule.delta)
    if before is not None:
        plus, minus = plus + before[0][:, None], minus + before[1][:, None]
    may_stop = np.arange(1, d.shape[1] + 1) >= rule.min_pairs
    lands = (plus >= -np.log(rule.alpha)) & may_stop
    reverts = (minus >= -np.log(rule.beta)) & may_stop & ~lands
    stops = lands | reverts
    stops[:, -1] = True
    at = stops.argmax(axis=1)
    row = np.arange(len(d))
    decisions = np.where(lands[row, at], LANDED, np.where(reverts[row, at], REVERTED, INCONCLUSIVE))
    return decisions, at + 1, (plus[row, at], minus[row, at])


def cell(noise: Noise, gain: float, *, trials: int, seed: int, rule: Rule | None = None, fixed_abba: bool = False) -> tuple[float, float]:  # fmt: skip
    """(share LANDED, mean pairs) of one cell of the operating characteristics."""
    rule = rule or Rule()
    rng = np.random.default_rng(seed)
    walls = noise.log_walls(rng, trials, 2 * rule.max_pairs)
    decisions, pairs, _ = decide(differences(rng, walls, gain, fixed_abba=fixed_abba), rule)
    return float((decisions == LANDED).mean()), float(pairs.mean())


def landed_with_retries(
    noise: Noise, gain: float, *, retries: int, reset: bool, trials: int, seed: int, rule: Rule | None = None
) -> float:
    """Share of trials that land when every window that did not is tried again, `retries` times at most.

    `reset` starts the evidence again at 1 in each window (wrong); otherwise it is multiplied (the rule).
    """
    rule = rule or Rule()
    rng = np.random.default_rng(seed)
    landed = np.zeros(trials, dtype=bool)
    carried = np.zeros(trials), np.zeros(trials)
    for _ in range(retries + 1):
        walls = noise.log_walls(rng, trials, 2 * rule.max_pairs)
        decisions, _, evidence = decide(
            differences(rng, walls, gain), rule, before=None if reset else carried
        )  # fmt: skip
        landed |= decisions == LANDED
        carried = evidence
    return float(landed.mean())


def smallest_decidable_gain(pair_sd: float, rule: Rule, *, power: float = 0.8, trials: int = 400, seed: int = 0) -> float | None:  # fmt: skip
    """The smallest gain that lands with probability `power` within max_pairs, at normal pair noise; None above bar + 20 %."""
    z = np.random.default_rng(seed).standard_normal((trials, rule.max_pairs)) * pair_sd
    low, high = rule.bar, rule.bar + 0.20

    def lands(gain: float) -> bool:
        return bool((decide(z + np.log1p(gain), rule)[0] == LANDED).mean() >= power)

    if not lands(high):
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if lands(middle) else (middle, high)
    return float(high)
