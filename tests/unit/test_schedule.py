"""The schedule: a fair, independent, reproducible coin, and fresh tokens that both arms share."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from harness.ab import schedule


def test_the_coin_is_fair_and_independent_of_the_previous_pair() -> None:
    orders = [schedule.order(7, pair) for pair in range(1, 4001)]
    assert set(orders) == {"AB", "BA"}
    assert abs(orders.count("AB") / 4000 - 0.5) < 4 * 0.5 / 4000**0.5
    repeats = sum(a == b for a, b in pairwise(orders)) / 3999
    assert abs(repeats - 0.5) < 4 * 0.5 / 3999**0.5


def test_a_block_of_four_arms_comes_in_every_order_equally_often() -> None:
    counts = Counter(schedule.order(3, block, "ABCD") for block in range(1, 4801))
    assert len(counts) == 24
    assert max(abs(n - 200) for n in counts.values()) < 5 * 200**0.5


def test_a_resumed_round_meets_the_same_orders_and_another_seed_others() -> None:
    def sequence(seed: int) -> list[str]:
        return [schedule.order(seed, pair) for pair in range(1, 41)]

    assert sequence(1) == sequence(1) != sequence(2)


def test_tokens_are_fresh_for_every_forward_and_gate() -> None:
    seeds = {schedule.tokens_seed(0, pair, forward) for pair in range(50) for forward in range(7)}
    seeds |= {schedule.gate_seed(0, number) for number in range(10)}
    assert len(seeds) == 360
    ids = schedule.token_ids(schedule.tokens_seed(0, 1, 0), 519, 1000)
    assert ids.dtype == np.int32 and ids.shape == (519,) and ids.min() >= 0 and ids.max() < 1000
    assert np.array_equal(ids, schedule.token_ids(schedule.tokens_seed(0, 1, 0), 519, 1000))


def test_boots_are_shared_evenly_and_fresh_by_default() -> None:
    assert [schedule.boot_of(p, boots=None, max_pairs=40) for p in (1, 2, 48)] == [1, 2, 48]
    counts = Counter(schedule.boot_of(p, boots=4, max_pairs=40) for p in range(1, 41))
    assert set(counts.values()) == {10} and set(counts) == {1, 2, 3, 4}
    assert schedule.boot_of(45, boots=4, max_pairs=40) == 4
