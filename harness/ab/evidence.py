"""The landing rule: how much the pairs so far say for "the gain exceeds the bar" and against it, at any stopping time.

Pair i runs both arms back to back in a coin-tossed order; d_i = ln(wall_A / wall_B), positive when the lever is faster.

    scale        s_i = s0 for i ≤ 4, then max(1.4826 · MAD(d_1 … d_{i−1}), s0 / 5)
    for          M⁺ ← M⁺ · (1 + 0.8 · tanh((d_i − b) / s_i))
    against      M⁻ ← M⁻ · (1 + 0.8 · tanh((b + δ − d_i) / s_i))
    decision     from min_pairs on: LANDED if M⁺ ≥ 1/α, else REVERTED if M⁻ ≥ 1/β; at max_pairs INCONCLUSIVE

The coin makes d_i − θ symmetric given the past, so for θ ≤ b each factor of M⁺ has conditional mean ≤ 1, and Ville's
inequality bounds P(ever LANDED | gain ≤ bar) by α: symmetry e-tests, Vovk & Wang, arXiv 2208.08925.

Arrays of d have pairs on the last axis, so that a simulation runs thousands of rounds through this very code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Decision = Literal["LANDED", "REVERTED", "INCONCLUSIVE"]

CAP = 0.8
"""The most that one pair can multiply evidence by is 1.8, and the least 0.2: one spike cannot veto a landing for good."""
FIXED_SCALE_PAIRS = 4
MAD_TO_SD = 1.4826


def scales(d: Array, s0: float) -> Array:
    """s_i for every pair of d [..., n], each from earlier pairs only."""
    s = np.full(d.shape, s0)
    for i in range(FIXED_SCALE_PAIRS, d.shape[-1]):
        past = d[..., :i]
        mad = np.median(np.abs(past - np.median(past, axis=-1, keepdims=True)), axis=-1)
        s[..., i] = np.maximum(MAD_TO_SD * mad, s0 / 5)
    return s


def log_for(d: Array, s: Array, b: float) -> Array:
    """ln M⁺ after each pair of d [..., n], against the null "gain ≤ b" (logarithms)."""
    return np.cumsum(np.log1p(CAP * np.tanh((d - b) / s)), axis=-1)


def log_against(d: Array, s: Array, b_plus_delta: float) -> Array:
    """ln M⁻ after each pair of d [..., n], against the null "gain ≥ b + δ" (logarithms)."""
    return np.cumsum(np.log1p(CAP * np.tanh((b_plus_delta - d) / s)), axis=-1)


def log_evidence(windows: Sequence[Array], *, bar: float, delta: float, s0: float) -> tuple[float, float]:
    """(ln M⁺, ln M⁻) over one or more windows of the same round: a retry multiplies the evidence, it never resets it.

    windows: each the d of its pairs in order, [n]. The scale starts again at s0 in each, since noise belongs to a window.
    """
    b, plus, minus = np.log1p(bar), 0.0, 0.0
    for d in windows:
        if len(d):
            s = scales(d, s0)
            plus += float(log_for(d, s, b)[-1])
            minus += float(log_against(d, s, b + delta)[-1])
    return plus, minus


def decide(log_plus: float, log_minus: float, *, alpha: float, beta: float) -> Decision | None:
    """The decision after a pair at which stopping is allowed, or None to go on."""
    if log_plus >= -np.log(alpha):
        return "LANDED"
    if log_minus >= -np.log(beta):
        return "REVERTED"
    return None


def confidence_sequence(
    windows: Sequence[Array], *, s0: float, alpha: float, beta: float
) -> tuple[float | None, float | None]:
    """[L, U] in logarithms: the gains θ that neither test rejects; None on a side that the pairs do not bound yet.

    L is the θ at which M⁺ with b := θ reaches 1/α, U the θ at which M⁻ with b + δ := θ reaches 1/β. Both evidences are
    monotone in θ, so each is one root, found by bisection. Valid at any stopping time: 1 − α and 1 − β each side.
    """
    windows = [d for d in windows if len(d)]
    if not windows:
        return None, None
    d = np.concatenate(windows)
    s = np.concatenate([scales(window, s0) for window in windows])

    def root(threshold: float, sign: int) -> float | None:
        # f falls as θ moves in the direction `sign` (+1 for L's test, −1 for U's); beyond ±20 scales tanh is flat.
        def f(theta: float) -> float:
            return float(np.log1p(CAP * np.tanh(sign * (d - theta) / s)).sum()) - threshold

        reach = 20 * float(s.max())
        inside, outside = (d.min() - reach, d.max() + reach)[::sign]
        if f(inside) < 0:
            return None
        for _ in range(80):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if f(middle) >= 0 else (inside, middle)
        return float(inside)

    return root(-np.log(alpha), +1), root(-np.log(beta), -1)


def hodges_lehmann(d: Array) -> float:
    """The median of all pairwise means (d_i + d_j) / 2, i ≤ j: the estimate of the gain in logarithms. d: [n ≥ 1]."""
    i, j = np.triu_indices(len(d))
    return float(np.median((d[i] + d[j]) / 2))
