"""What every backend does around its forwards: check the caller's token ids, and decode greedily."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.backend import Greedy
from engine.errors import EngineError


def checked_ids(ids: np.ndarray, vocab: int, model_name: str) -> np.ndarray:
    """The caller's ids as int32 [T]. Raises EngineError for none, for what is no list of integers, and for an id outside
    the vocabulary."""
    ids = np.asarray(ids)
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise EngineError(f"token ids must be a list of 1 or more integers, not {ids.dtype} of shape {ids.shape}.")
    bad = np.flatnonzero((ids < 0) | (ids >= vocab))
    if bad.size:
        raise EngineError(
            f"token id {ids[bad[0]]} at position {bad[0]} is outside the vocabulary of {vocab} "
            f"of {model_name}; give ids of this model."
        )
    return ids.astype(np.int32)


def positions_of(prompt: int, count: int) -> int:
    """Positions that a prompt and `count` generated tokens take in the KV cache: the last token is never read back."""
    return prompt + max(count - 1, 0)


def continue_greedily(
    ids: np.ndarray, prefill_logits: np.ndarray, count: int, forward: Callable[[np.ndarray, int], np.ndarray]
) -> Greedy:
    """`count` greedy tokens after int32 ids [T], whose last row's logits, float32 [vocab], are `prefill_logits`.

    forward: (int32 [1], its position) → float32 [vocab].
    """
    logits = prefill_logits
    generated: list[int] = []
    margins: list[float] = []
    for step in range(count):
        if step:
            logits = forward(np.array(generated[-1:], np.int32), len(ids) + step - 1)
        generated.append(int(logits.argmax()))
        second, first = np.partition(logits, -2)[-2:]
        margins.append(float(first - second))
    return Greedy(ids.tolist(), generated, margins, prefill_logits)
