"""Who runs when, and on which tokens: all of it from one seed, so that a resumed round continues the same schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_ORDER, _TOKENS, _GATES = 1, 2, 3  # separate streams of the one seed


def order(seed: int, pair: int, arms: Sequence[str] = ("A", "B")) -> str:
    """The arms of one pair (or block of a basket) in the order they run: a uniformly random permutation.

    For two arms that is a fair coin, independent of every other pair's: fixed orders (ABBA among them) are fooled by
    contention with a period. `pair` is 1-based; 0 is the discarded run.
    """
    return "".join(np.random.default_rng((_ORDER, seed, pair)).permutation(list(arms)))


def tokens_seed(seed: int, pair: int, forward: int = 0) -> int:
    """Seed of one forward's random tokens: fresh for every forward, the same in every arm."""
    return int(np.random.SeedSequence((_TOKENS, seed, pair, forward)).generate_state(1)[0])


def gate_seed(seed: int, number: int) -> int:
    """Seed of the tokens of one gate run, apart from every timed one."""
    return int(np.random.SeedSequence((_GATES, seed, number)).generate_state(1)[0])


def token_ids(seed: int, tokens: int, vocab: int) -> np.ndarray:
    """int32 [tokens], uniform in [0, vocab)."""
    return np.random.default_rng(seed).integers(0, vocab, tokens, dtype=np.int32)


def boot_of(pair: int, *, boots: int | None, max_pairs: int) -> int:
    """Which process of an arm serves a pair: its own by default, else one of `boots` that share the pairs evenly.

    1-based like `pair`; pairs beyond max_pairs (confirmation) go on with the last one.
    """
    if boots is None:
        return pair
    return min(boots, 1 + (max(pair, 1) - 1) * boots // max_pairs)
