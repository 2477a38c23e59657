"""From samples to a verdict: the landing rule's numbers for a round, and what to call the result.

`conclude` is a pure function of the samples and of what was frozen before the first pair. The live line, the record
and `harness round verify` all call it, so a record can be recomputed from its two files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from harness.ab import evidence as ev
from harness.rounds.record import ArmWall, Basket, Effect, Frozen, Mechanism, Outcome, Sample, Statistic, Verdict

MAX_DROPPED = 0.2
"""More than this share of pairs dropped for telemetry: the window is invalid."""
P95_FORWARDS = 100
"""Forwards an arm from which a worse p95 can withhold a landing; below, it is a warning."""
SPREAD_RATIO = 2.0
"""Arms whose spreads differ by more break the rule's assumption of arm-independent or symmetric noise."""
BOOTSTRAPS = 2000


def half_wall(wall_ms: Sequence[float], statistic: Statistic) -> float:
    """A half's wall in ms: one statistic of its forwards.

    midmean: mean of the middle half (each tail drops ⌊n/4⌋); lower_quartile: the ⌊n/4⌋-th smallest, from 0.
    """
    walls = np.sort(np.asarray(wall_ms, dtype=np.float64))
    quarter = len(walls) // 4
    match statistic:
        case "median":
            return float(np.median(walls))
        case "midmean":
            return float(walls[quarter : len(walls) - quarter].mean())
        case "lower_quartile":
            return float(walls[quarter])
        case "minimum":
            return float(walls[0])


@dataclass(frozen=True)
class Pairs:
    """Complete, undropped pairs (or blocks) of one phase, window by window."""

    windows: list[list[dict[str, Sample]]] = field(default_factory=list)
    dropped: int = 0
    last_dropped: int = 0  # of the last window
    interrupted: int = 0  # pairs with a half missing: a kill came between

    @property
    def kept(self) -> list[dict[str, Sample]]:
        """All kept pairs in order."""
        return [pair for window in self.windows for pair in window]

    def log_ratios(self, statistic: Statistic, over: str, under: str) -> list[ev.Array]:
        """ln(Π over / Π under) of half walls per window; ("A", "B") gives d. Letters are arms."""

        def one(pair: dict[str, Sample]) -> float:
            walls = {arm: half_wall(sample.wall_ms, statistic) for arm, sample in pair.items()}
            return float(sum(np.log(walls[a]) for a in over) - sum(np.log(walls[a]) for a in under))

        return [np.array([one(pair) for pair in window]) for window in self.windows]


def pairs_of(samples: Sequence[Sample], phase: str) -> Pairs:
    """Groups samples into pairs. A pair goes whole when either half was dropped, a window whole when it was invalid.

    The last window is always there: whether it is valid is for `conclude` to say.
    """
    # A window counts from its discarded run on, so that a retry starts with no pairs of its own.
    windows: dict[int, dict[int, dict[str, Sample]]] = {s.window: {} for s in samples}
    for sample in samples:
        if sample.phase == phase:
            windows[sample.window].setdefault(sample.pair, {})[sample.arm] = sample
    kept: list[list[dict[str, Sample]]] = []
    dropped = interrupted = last_dropped = 0
    for number in sorted(windows):
        complete = [p for p in windows[number].values() if len(p) == len(next(iter(p.values())).order)]
        good = [p for p in complete if not any(s.dropped for s in p.values())]
        interrupted += len(windows[number]) - len(complete)
        last_dropped = len(complete) - len(good)
        dropped += last_dropped
        if number == max(windows) or not invalid_share(last_dropped, len(complete)):
            kept.append(good)
    return Pairs(kept, dropped, last_dropped, interrupted)


def invalid_share(dropped: int, complete: int) -> bool:
    """True where more than 20 % of a window's pairs were dropped."""
    return dropped > MAX_DROPPED * complete


@dataclass(frozen=True)
class Conclusion:
    """Everything that samples alone say. Gains are fractions; `interval` holds None where a side is not bounded yet."""

    verdict: Verdict | None  # None: go on measuring
    pairs: int
    dropped: int
    estimate: float | None
    interval: tuple[float | None, float | None]
    log_for: float
    log_against: float
    confirmed: float | None
    walls: dict[str, ArmWall]
    p95_interval: tuple[float, float] | None
    basket: Basket | None
    reason: str
    next_step: str
    warnings: list[str]


def conclude(samples: Sequence[Sample], frozen: Frozen) -> Conclusion:
    """Applies the landing rule to the samples of one round, so far or finished."""
    deciding = pairs_of(samples, "decide")
    windows = deciding.log_ratios(frozen.statistic, "A", "B")
    n_window = len(windows[-1]) if windows else 0
    log_plus, log_minus = ev.log_evidence(windows, bar=frozen.bar, delta=frozen.delta, s0=frozen.s0)
    d = np.concatenate(windows) if windows else np.array([])
    shown = n_window >= frozen.min_pairs or any(len(window) for window in windows[:-1])
    low, high = (
        ev.confidence_sequence(windows, s0=frozen.s0, alpha=frozen.alpha, beta=frozen.beta) if shown else (None, None)
    )

    verdict: Verdict | None = None
    if n_window >= frozen.min_pairs:
        verdict = ev.decide(log_plus, log_minus, alpha=frozen.alpha, beta=frozen.beta)
    if verdict is None and n_window >= frozen.max_pairs:
        verdict = "INCONCLUSIVE"
    reason, next_step = _reason(verdict, frozen)
    if verdict == "INCONCLUSIVE":
        next_step = _next_step(d, frozen)
    hopeless = deciding.last_dropped > MAX_DROPPED / (1 - MAX_DROPPED) * frozen.max_pairs
    if hopeless or (verdict is not None and invalid_share(deciding.last_dropped, n_window + deciding.last_dropped)):
        verdict = "INVALID"
        reason = f"{deciding.last_dropped} of {n_window + deciding.last_dropped} pairs of the window were dropped, above {MAX_DROPPED:.0%}"
        next_step = "find what disturbed the window (it is named in the record), then retry with --resume"

    confirming = pairs_of(samples, "confirm")
    confirm_d = np.concatenate(confirming.log_ratios(frozen.statistic, "A", "B") or [np.array([])])
    confirmed = _gain(ev.hodges_lehmann(confirm_d)) if len(confirm_d) >= frozen.confirm_pairs else None

    kept = deciding.kept + confirming.kept
    walls = arm_walls(kept, frozen.statistic)
    warnings, p95_interval = [], None
    if deciding.interrupted + confirming.interrupted:
        warnings.append(f"{deciding.interrupted + confirming.interrupted} pair(s) were cut off half-way and not used")
    if verdict is not None and len(kept) >= 2:
        warnings += _spread_warning(walls)
        p95_interval, p95_warning = p95_check(kept, frozen)
        warnings += p95_warning
        if verdict == "LANDED" and p95_interval is not None and p95_interval[0] > np.log1p(frozen.bar):
            verdict = "INCONCLUSIVE"
            reason = f"the typical run gained, but the lever's p95 is worse by at least {_gain(p95_interval[0]):.2%}"
            next_step = "look at the slow forwards in samples.jsonl before landing this"
    return Conclusion(
        verdict=verdict,
        pairs=len(d),
        dropped=deciding.dropped,
        estimate=_gain(ev.hodges_lehmann(d)) if len(d) else None,
        interval=(None if low is None else _gain(low), None if high is None else _gain(high)),
        log_for=log_plus,
        log_against=log_minus,
        confirmed=confirmed,
        walls=walls,
        p95_interval=p95_interval,
        basket=_basket(deciding, frozen) if shown and kept and "C" in kept[0] else None,
        reason=reason,
        next_step=next_step,
        warnings=warnings,
    )


def _gain(log_ratio: float) -> float:
    return float(np.expm1(log_ratio))


def _reason(verdict: Verdict | None, frozen: Frozen) -> tuple[str, str]:
    bar = f"{frozen.bar:.1%}"
    match verdict:
        case "LANDED":
            return f"evidence for a gain above {bar} reached 1/alpha = {1 / frozen.alpha:g}", ""
        case "REVERTED":
            refuted = np.expm1(
                np.log1p(frozen.bar) + frozen.delta
            )  # the null of M⁻; between bar and this nothing is promised
            return (
                f"evidence against a gain of {refuted:.1%} (bar + delta) or more reached 1/beta = {1 / frozen.beta:g}",
                "",
            )
        case "INCONCLUSIVE":
            return f"neither evidence reached its bound in {frozen.max_pairs} pairs", ""
    return "", ""


def _next_step(d: ev.Array, frozen: Frozen) -> str:
    """For INCONCLUSIVE: a gain close to the bar needs more pairs; noise far above s0 needs a better window."""
    sd = ev.MAD_TO_SD * float(np.median(np.abs(d - np.median(d))))
    if sd > 2 * frozen.s0:
        return f"the pair noise ({sd:.2%}) is {sd / frozen.s0:.1f} × the s0 of {frozen.s0:.2%} that the round was planned with: find a quieter window, then --resume"
    if sd > frozen.delta:
        return f"the pair noise is {sd:.2%}: raise --inner or the token count in a new round, or retry with --resume"
    return "the gain lies too close to the bar to tell: --resume adds pairs and multiplies the evidence"


def arm_walls(kept: Sequence[dict[str, Sample]], statistic: Statistic) -> dict[str, ArmWall]:
    """Median, mean and p95 of each arm's kept forwards, and the sd of ln(half wall)."""
    walls: dict[str, ArmWall] = {}
    for arm in kept[0] if kept else ():
        forwards = np.concatenate([pair[arm].wall_ms for pair in kept])
        halves = np.log([half_wall(pair[arm].wall_ms, statistic) for pair in kept])
        walls[arm] = ArmWall(
            forwards=len(forwards),
            median_ms=float(np.median(forwards)),
            mean_ms=float(forwards.mean()),
            p95_ms=float(np.quantile(forwards, 0.95)),
            spread=float(halves.std(ddof=1)) if len(halves) > 1 else 0.0,
        )
    return dict(sorted(walls.items()))


def _spread_warning(walls: dict[str, ArmWall]) -> list[str]:
    small, large = sorted((walls["A"].spread, walls["B"].spread))
    if large <= SPREAD_RATIO * small:
        return []
    return [
        f"the arms' spreads differ by more than {SPREAD_RATIO:g} x (A {walls['A'].spread:.2%}, B {walls['B'].spread:.2%}): right-skewed "
        "noise on one arm alone can land falsely (up to 16 % at the bar in simulation), so look at the distribution plot"
    ]


def p95_check(kept: Sequence[dict[str, Sample]], frozen: Frozen) -> tuple[tuple[float, float] | None, list[str]]:
    """Paired bootstrap over pairs of ln(p95_B / p95_A): its 95 % interval from 100 forwards an arm, else a warning."""
    most = max(len(pair[arm].wall_ms) for pair in kept for arm in "AB")
    walls = np.full((2, len(kept), most), np.nan)  # arm, pair, forward; a command may give pairs of unequal length
    for i, pair in enumerate(kept):
        for arm, letter in enumerate("AB"):
            walls[arm, i, : len(pair[letter].wall_ms)] = pair[letter].wall_ms
    quantile = np.nanquantile if np.isnan(walls).any() else np.quantile

    def log_ratio(index: np.ndarray) -> np.ndarray:
        """index: pairs drawn, [draws, pairs] → ln(p95_B / p95_A), [draws]."""
        tail_a, tail_b = (quantile(arm[index].reshape(len(index), -1), 0.95, axis=1) for arm in walls)
        return np.log(tail_b / tail_a)

    worse = float(log_ratio(np.arange(len(kept))[None])[0])
    warning = [f"the lever's p95 is {_gain(worse):.1%} worse than the base's"] if worse > np.log1p(frozen.bar) else []
    if np.isfinite(walls).sum(axis=(1, 2)).min() < P95_FORWARDS:
        return None, warning
    draws = np.random.default_rng(frozen.seed).integers(0, len(kept), (BOOTSTRAPS, len(kept)))
    low, high = np.quantile(log_ratio(draws), [0.05, 0.95])
    return (float(low), float(high)), warning


def _basket(deciding: Pairs, frozen: Frozen) -> Basket | None:
    """The 2 × 2 of a basket. Interaction: ln(C · D / (A · B)), both levers' gain beyond the product of each alone."""

    def effect(over: str, under: str) -> Effect | None:
        d = deciding.log_ratios(frozen.statistic, over, under)
        low, high = ev.confidence_sequence(d, s0=frozen.s0, alpha=frozen.alpha, beta=frozen.beta)
        if low is None or high is None:
            return None
        return Effect(estimate=_gain(ev.hodges_lehmann(np.concatenate(d))), interval=(_gain(low), _gain(high)))

    effects = effect("A", "C"), effect("A", "D"), effect("A", "B"), effect("CD", "AB")
    if any(e is None for e in effects):
        return None
    a, b, both, interaction = effects
    assert a and b and both and interaction
    return Basket(a=a, b=b, both=both, interaction=interaction)


def outcome(conclusion: Conclusion, mechanism: Mechanism, frozen: Frozen) -> Outcome:
    """What a verdict by timing means, given the second question of the mechanism.

    share-not-yet: the changed ops got faster, but even cashed in full that is below the bar; mechanism-positive/
    wall-negative: it would have cleared the bar, and the wall did not show it (or got worse).
    """
    match conclusion.verdict:
        case "LANDED":
            return "landed"
        case "INCONCLUSIVE":
            return "inconclusive"
        case "REVERTED":
            worse = conclusion.interval[1] is not None and conclusion.interval[1] < 0
            if mechanism.found == "positive":
                saved = float(np.median(mechanism.before_ms) - np.median(mechanism.after_ms))
                wall = conclusion.walls["A"].median_ms
                small = saved < frozen.bar * wall / (1 + frozen.bar)
                return "share-not-yet" if small and not worse else "mechanism-positive/wall-negative"
            return "regression" if worse else "no-effect"
    return "invalid-window"
