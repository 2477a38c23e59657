"""Do two arms compute the same? Relative L2, top-1 and KL divergence of last-token logits."""

from __future__ import annotations

import numpy as np

from harness.rounds.record import Gate


def rel_l2(base: np.ndarray, other: np.ndarray) -> float:
    """‖other − base‖ / ‖base‖ in float64; infinite where either is not finite, shapes differ or base is 0."""
    if base.shape != other.shape or not (np.isfinite(base).all() and np.isfinite(other).all()):
        return float("inf")
    a, b = base.astype(np.float64).ravel(), other.astype(np.float64).ravel()
    norm = float(np.linalg.norm(a))
    return float(np.linalg.norm(b - a)) / norm if norm else float("inf")


def kl_divergence(base: np.ndarray, other: np.ndarray) -> float:
    """KL(softmax(base) ‖ softmax(other)) in nats."""

    def log_softmax(x: np.ndarray) -> np.ndarray:
        shifted = x.astype(np.float64) - x.max()
        return shifted - np.log(np.exp(shifted).sum())

    p, q = log_softmax(base), log_softmax(other)
    return float(max(np.sum(np.exp(p) * (p - q)), 0.0))


def parity(
    base: np.ndarray,
    other: np.ndarray,
    *,
    against: str,
    limit_l2: float,
    limit_kl: float,
    near_tie: float,
    top1: bool = True,
) -> list[Gate]:
    """Three gates on float32 [vocab] logits. `against` names the other side and the shape: "base, 3325 tokens"."""
    l2 = rel_l2(base, other)
    gates = [Gate(name=f"parity rel L2 vs {against}", ok=l2 <= limit_l2, value=_finite(l2), limit=limit_l2)]
    if not np.isfinite(l2):
        gates[0].detail = "not finite, of another shape, or all zero"
        return gates
    divergence = kl_divergence(base, other)
    gates.append(
        Gate(name=f"parity KL vs {against}", ok=divergence <= limit_kl, value=divergence, limit=limit_kl, detail="nats")
    )
    if top1:
        first, now = int(base.argmax()), int(other.argmax())
        margin = float(base[first] - base[now])
        worst = float(np.abs(base - other).max())
        tie = first != now and margin < near_tie * worst
        detail = f"token {first}"
        if first != now:
            detail = f"token {first} became {now}; margin {margin:.3g}, max |Δlogit| {worst:.3g}" + (
                ": a near-tie" if tie else ""
            )
        gates.append(Gate(name=f"parity top-1 vs {against}", ok=first == now or tie, value=str(now), limit=str(first), detail=detail))  # fmt: skip
    return gates


def _finite(value: float) -> float | str:
    return value if np.isfinite(value) else "not finite"
