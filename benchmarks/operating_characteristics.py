"""The landing rule's operating characteristics in full: LANDED share and mean pairs by noise and true gain, and what
goes wrong without the coin, with evidence reset on a retry, with one process per arm, with skewed noise on one arm, or
with medians compared by eye.

    python benchmarks/operating_characteristics.py [--trials 6000]

writes operating_characteristics.json and .png beside itself.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from harness.ab.simulate import LANDED, Noise, Rule, cell, decide, differences, landed_with_retries
from harness.files import to_json, write_atomic

SDS = (0.002, 0.005, 0.01, 0.02)
GAINS = (0.0, 0.014, 0.015, 0.02, 0.025, 0.035)
CURVE = tuple(np.round(np.arange(0.0, 0.0401, 0.0025), 4))


def medians_of_five(noise: Noise, gain: float, *, trials: int, seed: int) -> float:
    """Share that "lands" when five interleaved runs an arm are compared by their medians, with no interval."""
    walls = noise.log_walls(np.random.default_rng(seed), trials, 10)
    lead = np.median(walls[:, 0::2], axis=1) - np.median(walls[:, 1::2], axis=1) + np.log1p(gain)
    return float((lead >= np.log1p(0.015)).mean())


def one_process_per_arm(noise: Noise, boot: float, *, trials: int, seed: int) -> float:
    """Share LANDED at a gain of exactly the bar when each arm keeps one process, whose wall is off by N(0, boot)."""
    rng = np.random.default_rng(seed)
    d = differences(rng, noise.log_walls(rng, trials, 2 * Rule().max_pairs), Rule().bar)
    offset = rng.normal(0, boot, (trials, 1)) - rng.normal(0, boot, (trials, 1))
    return float((decide(d + offset, Rule())[0] == LANDED).mean())


def skewed_arm(noise: Noise, tail: float, *, trials: int, seed: int) -> float:
    """Share LANDED when the lever's mean gain is the bar, and an exponential delay of mean `tail` disturbs its arm alone."""
    rng = np.random.default_rng(seed)
    d = differences(rng, noise.log_walls(rng, trials, 2 * Rule().max_pairs), Rule().bar)
    return float((decide(d - (rng.exponential(tail, d.shape) - tail), Rule())[0] == LANDED).mean())


def main() -> None:
    """Simulates, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=6000, help="a cell")
    trials = parser.parse_args().trials
    rule = Rule()

    table = []
    print(
        f"LANDED % / mean pairs, {trials} trials a cell, bar {rule.bar:.1%}\nsd of a run "
        + "".join(f"{g:>13.1%}" for g in GAINS)
    )
    for i, sd in enumerate(SDS):
        row = [cell(Noise(sd), gain, trials=trials, seed=100 * i + j) for j, gain in enumerate(GAINS)]
        print(f"{sd:>11.1%} " + "".join(f"{100 * landed:>6.1f} /{pairs:>5.1f}" for landed, pairs in row))
        table += [
            {"sd": sd, "gain": gain, "landed": landed, "mean_pairs": pairs}
            for gain, (landed, pairs) in zip(GAINS, row, strict=True)
        ]

    contended = Noise(0.01, contention=0.03, period=(4, 4))
    failures = {
        "fixed_abba_order_at_bar": cell(contended, 0.015, trials=trials, seed=1, fixed_abba=True)[0],
        "coin_order_at_bar": cell(contended, 0.015, trials=trials, seed=2)[0],
        "reset_on_retry_five_windows_at_bar": landed_with_retries(Noise(0.01), 0.015, retries=4, reset=True, trials=trials, seed=3),
        "multiply_on_retry_five_windows_at_bar": landed_with_retries(Noise(0.01), 0.015, retries=4, reset=False, trials=trials, seed=4),
        "one_process_per_arm_at_bar": {
            f"sd {sd}, boot {boot}": one_process_per_arm(Noise(sd), boot, trials=trials, seed=6)
            for sd in SDS[:3] for boot in (0.003, 0.005)
        },
        "exponential_tail_on_one_arm_at_bar": {
            f"sd 0.005, tail {tail}": skewed_arm(Noise(0.005), tail, trials=trials, seed=7) for tail in (0.005, 0.01, 0.02)
        },
        "medians_of_five_without_interval_at_bar_minus_0.1": {
            str(sd): medians_of_five(Noise(sd), 0.014, trials=trials, seed=5) for sd in SDS
        },
    }  # fmt: skip
    for name, share in failures.items():
        print(name, share)

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for i, sd in enumerate(SDS):
        landed = [cell(Noise(sd), g, trials=min(trials, 2000), seed=900 + 40 * i + j)[0] for j, g in enumerate(CURVE)]
        axes.plot([100 * g for g in CURVE], [100 * p for p in landed], marker="o", ms=3, label=f"sd of a run {sd:.1%}")
    axes.axvline(100 * rule.bar, color="black", lw=1, ls="--", label=f"bar {rule.bar:.1%}")
    axes.axhline(100 * rule.alpha, color="grey", lw=1, ls=":", label=f"alpha {rule.alpha:.0%}")
    axes.set(xlabel="true gain of the wall, %", ylabel="LANDED, %", title="How often the landing rule lands a lever")
    axes.legend()
    here = Path(__file__).parent
    figure.savefig(here / "operating_characteristics.png", dpi=110)
    result = {
        "schema": "operating-characteristics/1",
        "trials": trials,
        "rule": vars(rule),
        "table": table,
        "failures": failures,
    }
    write_atomic(here / "operating_characteristics.json", to_json(result))


if __name__ == "__main__":
    main()
