"""The landing rule's operating characteristics in full: LANDED share and mean pairs by noise and true gain, and what
goes wrong without the coin, with evidence reset on a retry, with one process per arm, with skewed noise on one arm, or
with medians compared by eye.

    python benchmarks/operating_characteristics.py [--trials 6000]
    python benchmarks/operating_characteristics.py --redraw

writes operating_characteristics.json and .png beside itself; --redraw draws the .png again from the .json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.lines import Line2D

from harness.ab.simulate import LANDED, Noise, Rule, cell, decide, differences, landed_with_retries
from harness.files import to_json, write_atomic
from harness.report.style import MARK, MUTED, Page, look

SDS = (0.002, 0.005, 0.01, 0.02)
GAINS = (0.0, 0.014, 0.015, 0.02, 0.025, 0.035)
RESULT = Path(__file__).parent / "operating_characteristics.json"
FIGURE = RESULT.with_suffix(".png")
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


MARKS = (("#27459F", "o"), ("#45B0EA", "s"), ("#E08A0B", "^"), ("#8C1446", "D"))


def draw(result: dict[str, Any], path: Path) -> None:
    """The share LANDED against the true gain, a curve for each noise, from the JSON's mapping."""
    rule = result["rule"]
    with look():
        page = Page(
            "How often the landing rule lands a lever", [4.0],
            [f"{result['curve_trials']:,} simulated rounds a point; sd: of one run's wall. At the bar and below, at most α = {rule['alpha']:.0%} land."],
        )  # fmt: skip
        axes = page.axes(0, left=0.75, right=1.6, top=0.06, bottom=0.5)
        sds = list(dict.fromkeys(p["sd"] for p in result["curve"]))
        lines = []
        for sd, (shade, shape) in zip(sds, MARKS, strict=False):
            points = [p for p in result["curve"] if p["sd"] == sd]
            axes.plot([100 * p["gain"] for p in points], [100 * p["landed"] for p in points], color=shade, lw=1.6, marker=shape, ms=4.5,
                      mec="white", mew=0.6)  # fmt: skip
            lines.append(Line2D([], [], color=shade, lw=1.6, marker=shape, ms=5, mec="white", label=f"sd {sd:.1%}"))
        axes.axvline(100 * rule["bar"], color=MARK, lw=1.4, ls=(0, (5, 2.5)))
        axes.axhline(100 * rule["alpha"], color=MUTED, lw=1.1, ls=(0, (1, 1.5)))
        lines += [
            Line2D([], [], color=MARK, lw=1.4, ls=(0, (5, 2.5)), label=f"bar {rule['bar']:.1%}"),
            Line2D([], [], color=MUTED, lw=1.1, ls=(0, (1, 1.5)), label=f"α {rule['alpha']:.0%}"),
        ]
        axes.set(
            xlabel="true gain of the wall, %", ylabel="rounds that end LANDED, %", ylim=(-2, 102), xlim=(-0.05, 4.05)
        )
        page.legend(0, lines, columns=1, x=page.width - 1.35, y=0.15, title="Noise of a run")
        page.save(path)


def main() -> None:
    """Simulates, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=6000, help="a cell")
    parser.add_argument("--redraw", action="store_true", help="draw the figure again from the JSON; simulate nothing")
    options = parser.parse_args()
    if options.redraw:
        draw(json.loads(RESULT.read_text(encoding="utf-8")), FIGURE)
        return
    trials = options.trials
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

    curve_trials = min(trials, 2000)
    curve = [
        {"sd": sd, "gain": float(g), "landed": cell(Noise(sd), g, trials=curve_trials, seed=900 + 40 * i + j)[0]}
        for i, sd in enumerate(SDS)
        for j, g in enumerate(CURVE)
    ]
    result = {
        "schema": "operating-characteristics/1",
        "trials": trials,
        "rule": vars(rule),
        "table": table,
        "failures": failures,
        "curve_trials": curve_trials,
        "curve": curve,
    }
    write_atomic(RESULT, to_json(result))
    draw(result, FIGURE)


if __name__ == "__main__":
    main()
