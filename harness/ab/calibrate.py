"""How noisy is this machine, and does the whole chain decide as it should? A/A pairs, then planted gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from harness.ab import evidence as ev
from harness.ab.calibration import Calibration, path_of, save
from harness.ab.live import Live
from harness.ab.protocol import LandingProtocol
from harness.ab.runner import Round, now_utc
from harness.ab.simulate import Rule, smallest_decidable_gain
from harness.ab.start import Request, new_round, opened_setup
from harness.ab.verdict import half_wall, pairs_of
from harness.config import ArmConfig, Plant
from harness.rounds.record import Gate, RoundRecord, Sample, Statistic
from harness.rounds.store import read_samples

CHEAPER = 1.1
"""A smaller `inner` is taken while its pair sd is within this factor of the best one's."""
SD_FLOOR = 1e-4
PLANTED = (("0", None), ("bar - 0.5 %", -0.005), ("bar + 0.5 %", 0.005), ("bar + 1 %", 0.01))
SAME_CODE = Gate(name="gates", ok=None, detail="calibration: both arms run the same code")


def pair_sd(d: ev.Array) -> float:
    """Robust sd of A/A differences, whose centre is 0 by symmetry: 1.4826 · median |d|."""
    return max(ev.MAD_TO_SD * float(np.median(np.abs(d))), SD_FLOOR)


def candidates(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Every (inner, statistic) with its pair sd, from the first `inner` forwards of each half; statistics that coincide
    for a small `inner` are listed once."""
    kept = pairs_of(samples, "decide").kept
    most = min(len(s.wall_ms) for pair in kept for s in pair.values())
    found = []
    for inner, statistic in product(range(1, most + 1, 2), get_args(Statistic)):
        if (inner == 1 and statistic != "median") or (inner == 3 and statistic in ("midmean", "lower_quartile")):
            continue
        d = np.array([np.log(half_wall(p["A"].wall_ms[:inner], statistic) / half_wall(p["B"].wall_ms[:inner], statistic)) for p in kept])  # fmt: skip
        found.append({"inner": inner, "statistic": statistic, "pair_sd": pair_sd(d)})
    return found


def choose(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The candidate with the smallest pair sd, or a cheaper one that is as good."""
    best = min(c["pair_sd"] for c in found)
    good = [c for c in found if c["pair_sd"] <= CHEAPER * best]
    inner = min(c["inner"] for c in good)
    return min((c for c in good if c["inner"] == inner), key=lambda c: c["pair_sd"])


def calibrate(
    base: ArmConfig, protocol: LandingProtocol, regime: str, *, name: str, pairs: int, inner: int, planted: bool, boots: int | None,
    seed: int | None, voice: Live,
) -> Calibration:  # fmt: skip
    """A/A pairs of `base` in one regime, what follows from them, and (with `planted`) rounds with known gains."""
    request = Request(
        arms={"A": base, "B": base}, aa=True, regime=regime, inner=inner, statistic="median", s0=protocol.s0, boots=boots, seed=seed,
        title=f"calibration {regime}", with_mechanism=False, protocol=name,
    )  # fmt: skip
    with opened_setup(request, protocol, voice) as setup:
        root = path_of(setup.machine, regime, base.workload_hash()).with_suffix("")
        plan = protocol.model_copy(update={"min_pairs": pairs, "max_pairs": pairs})
        request = replace(request, root=root)

        def play(asked: Request, rules: LandingProtocol) -> tuple[Path, RoundRecord]:
            path, record = new_round(asked, rules, setup.machine)
            record.gates = [SAME_CODE]
            record.warnings = []
            ready = replace(setup, arms=dict(asked.arms), protocol=rules)
            return path, Round(path, record, ready).run()

        voice.say(f"calibrating the {regime} regime: {pairs} A/A pairs of {base.name}")
        path, record = play(request, plan)
        if record.verdict == "INVALID":
            from harness.errors import Exit, HarnessError

            raise HarnessError(f"calibration in the {regime} regime: {record.reason}.", exit_status=Exit.WINDOW_INVALID)
        samples = read_samples(path)
        found = candidates(samples)
        chosen = choose(found)
        s0 = chosen["pair_sd"]
        rule = Rule(
            protocol.bar, protocol.alpha, protocol.beta, protocol.delta, s0, protocol.min_pairs, protocol.max_pairs
        )
        result = Calibration(
            machine=setup.machine, base=base.name, workload_sha256=base.workload_hash(), regime=record.regime, pairs=record.pairs,
            inner=chosen["inner"], statistic=chosen["statistic"], s0=s0, noise_floor=noise_floor(s0, rule),
            smallest_gain=smallest_decidable_gain(s0, rule), bar=protocol.bar, max_pairs=protocol.max_pairs, candidates=found,
            measured=now_utc(),
        )  # fmt: skip
        save(result)
        if planted:
            result.planted = planted_rounds(base, protocol, request, result, play, voice)
            save(result)
    return result


def noise_floor(s0: float, rule: Rule, trials: int = 200) -> float:
    """The median half-width of [L, U] after max_pairs of A/A pairs with this sd: a gain within it is noise."""
    rng = np.random.default_rng(0)
    widths = []
    for d in rng.standard_normal((trials, rule.max_pairs)) * s0:
        low, high = ev.confidence_sequence([d], s0=s0, alpha=rule.alpha, beta=rule.beta)
        if low is not None and high is not None:
            widths.append((high - low) / 2)
    return float(np.median(widths)) if widths else float("inf")


def planted_rounds(
    base: ArmConfig, protocol: LandingProtocol, request: Request, found: Calibration,
    play: Callable[[Request, LandingProtocol], tuple[Path, RoundRecord]], voice: Live,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rounds in which the base spins for a known share of its wall, so that the lever's true gain is known."""
    rows: list[dict[str, Any]] = []
    for label, offset in PLANTED:
        gain = 0.0 if offset is None else protocol.bar + offset
        slower = base.model_copy(update={"plant": Plant(fraction=gain), "name": f"{base.name} + {gain:.1%}"})
        asked = replace(
            request, arms={"A": slower, "B": base}, aa=gain == 0, inner=found.inner, statistic=found.statistic, s0=found.s0,
            title=f"planted {label}", seed=None if request.seed is None else request.seed + len(rows) + 1,
        )  # fmt: skip
        voice.say(f"planted gain {gain:.2%} ({label})")
        _, record = play(asked, protocol)
        rows.append(
            {
                "planted": gain, "label": label, "verdict": record.verdict, "estimate": record.estimate, "interval": record.interval,
                "pairs": record.pairs, "as_it_should": as_it_should(gain, record, protocol, found.smallest_gain), "reason": record.reason,
            }
        )  # fmt: skip
    return rows


def as_it_should(gain: float, record: RoundRecord, protocol: LandingProtocol, smallest: float | None) -> bool | None:
    """Below the bar: never LANDED. From bar + delta on: never REVERTED, and LANDED where the noise allows it.

    None: the window was invalid, which says nothing of the rule. An interval that misses the planted gain is a failure too.
    """
    if record.verdict == "INVALID":
        return None
    low, high = record.interval or (None, None)
    slack = 0.001  # a spin is not the only thing that a longer forward changes
    inside = (low is None or low <= gain + slack) and (high is None or high >= gain - slack)
    if gain <= protocol.bar:
        return inside and record.verdict != "LANDED"
    decidable = smallest is not None and gain >= smallest
    return inside and (record.verdict == "LANDED" or (not decidable and record.verdict == "INCONCLUSIVE"))
