"""Greedy identity: the same tokens from the same prompt, and where not, which token, by what margin, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from harness.rounds.record import Gate


def greedy(
    base: Sequence[int],
    other: Sequence[int],
    *,
    margins: Sequence[float],
    base_logits: np.ndarray,
    other_logits: np.ndarray,
    near_tie: float,
    claimed: bool,
) -> Gate:
    """One gate on two greedy continuations of the same prompt.

    margins: the base's top-two gap at each token. logits: float32 [vocab] of the prompt's last token in both arms,
    whose max |Δ| says how far the arms differ where they still had the same context. A flip at a margin below
    `near_tie` times that is reported, not failed; later tokens follow from it and are not compared.
    """
    name, count = f"greedy {len(base)} tokens", len(base)
    flip = next((i for i, (a, b) in enumerate(zip(base, other, strict=False)) if a != b), None)
    if flip is None:
        same = len(base) == len(other)
        return Gate(
            name=name, ok=same, value=str(len(other)), limit=str(count), detail="identical" if same else "shorter"
        )
    worst = float(np.abs(base_logits - other_logits).max())
    tie = margins[flip] < near_tie * worst
    detail = (
        f"token {flip + 1} of {count} became {other[flip]} instead of {base[flip]}; top-two margin there {margins[flip]:.3g}, "
        f"max |Δlogit| {worst:.3g}" + (": a near-tie" if tie else "")
    )
    if not claimed:
        return Gate(
            name=name, ok=None, value=str(flip), limit=str(count), detail=f"not claimed by this lever; {detail}"
        )
    return Gate(name=name, ok=tie, value=str(flip), limit=str(count), detail=detail)
