"""The K-th prefill of a trace, found by its repeating launch sequence.

A trace of a benchmark holds what came before (a model's upload), and then the same forward several times. Layers repeat
too, but their repetition breaks at every forward's end, so only the forward's own period holds from its first launch to
its last one. Names and grids are compared, never times.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd

MIN_LAUNCHES = 4
"""Shorter repetitions are loops of one operator, not forwards."""


def find_occurrences(launches: pd.DataFrame) -> list[np.ndarray]:
    """Row positions of every repetition, in order: kernels, and the copies and memsets that go with them.

    `launches` is one device's table, ordered by start. Empty where nothing repeats at least twice.
    """
    kernels = np.flatnonzero(launches["kind"].isin(["kernel", "graph"]).to_numpy())
    if len(kernels) < 2 * MIN_LAUNCHES:
        return []
    name, _ = pd.factorize(launches["name"].to_numpy(object)[kernels])
    grid, _ = pd.factorize(launches["grid"].to_numpy(object)[kernels])
    exact = np.unique(name * (grid.max() + 1) + grid, return_inverse=True)[1]
    # Grids first: the chunks of one prefill have the same names and differ in their grids.
    keys = exact
    found = repeating_run(exact)
    if found is None:
        keys, found = name, repeating_run(name)
    if found is None:
        return []
    first, period, count = found
    end = _extended(keys, first, first + (count - 1) * period, period)[1]
    first += _phase(launches, kernels, first, period, count, end)
    bounds = [kernels[first + i * period] for i in range(count)]
    last = kernels[first + count * period - 1]
    return _with_copies(launches, bounds, last)


def repeating_run(keys: np.ndarray) -> tuple[int, int, int] | None:
    """(first, period, count) of the longest stretch keys[first : first + count · period] that repeats, count ≥ 2.

    The period is anchored on a key whose every two neighbouring occurrences enclose the same sequence: keys of a layer
    do not qualify once a forward ends between them. Among such anchors the widest stretch wins, then the most rows that
    one repetition explains.
    """
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    best: tuple[int, int, int] | None = None
    seen: set[tuple[int, int]] = set()
    # Rare keys first: an anchor that occurs once a forward is settled by one comparison.
    for rows in sorted(np.split(order, bounds), key=len):
        if len(rows) < 2:
            continue
        gaps = np.diff(rows)
        period = int(gaps[0])
        if period < MIN_LAUNCHES or (gaps != period).any() or (period, int(rows[0]) % period) in seen:
            continue
        seen.add((period, int(rows[0]) % period))
        low, high = int(rows[0]), int(rows[-1])
        if not np.array_equal(keys[low : high - period], keys[low + period : high]):
            continue
        low, end = _extended(keys, low, high, period)
        count = (end - low) // period
        if count >= 2 and (best is None or count * period > best[1] * best[2]):
            best = (low, period, count)
    return best


def _extended(keys: np.ndarray, low: int, high: int, period: int) -> tuple[int, int]:
    """The widest [low, end) around a periodic stretch in which keys[i] == keys[i + period]."""
    same = keys[:-period] == keys[period:]
    before = np.flatnonzero(~same[:low])
    low = int(before[-1]) + 1 if len(before) else 0
    start = high - period
    after = np.flatnonzero(~same[start:])
    return low, (start + int(after[0]) if len(after) else len(same)) + period


def _phase(launches: pd.DataFrame, kernels: np.ndarray, first: int, period: int, count: int, end: int) -> int:
    """Where in the spare rows a repetition starts: after the device's longest wait, which separates two forwards."""
    spare = end - first - count * period
    if spare <= 0:
        return 0
    start = launches["start_ns"].to_numpy()[kernels]
    reach = np.maximum.accumulate(launches["end_ns"].to_numpy()[kernels])
    waits = []
    for offset in range(spare + 1):
        at = first + offset + np.arange(count) * period
        at = at[at > 0]
        waits.append(float(np.median(start[at] - reach[at - 1])) if len(at) else -np.inf)
    return int(np.argmax(waits))


def _with_copies(launches: pd.DataFrame, bounds: list[int], last: int) -> list[np.ndarray]:
    """Adds the copies around each repetition's kernels: cut where the device waits longest between two repetitions."""
    start = launches["start_ns"].to_numpy()
    reach = np.maximum.accumulate(launches["end_ns"].to_numpy())
    cuts = []
    kinds = launches["kind"].to_numpy(object)
    for row in bounds[1:]:
        low = row
        while low > 0 and kinds[low - 1] not in ("kernel", "graph"):
            low -= 1
        between = np.arange(low, row + 1)
        cuts.append(int(between[np.argmax(start[between] - reach[between - 1])]))
    # The first repetition takes as many copies ahead of it as the second one has, if they are the same ones.
    ahead = bounds[1] - cuts[0]
    lead = bounds[0] - ahead
    same = lead >= 0 and _alike(launches, lead, cuts[0], ahead)
    tail = last + 1
    while tail < len(launches) and kinds[tail] not in ("kernel", "graph"):
        tail += 1
    # And the last one as many after it as lie between the one before it and its cut.
    before = launches.iloc[bounds[-2] : cuts[-1]]
    behind = len(before) - int(np.flatnonzero(before["kind"].isin(["kernel", "graph"]).to_numpy())[-1]) - 1
    edges = [lead if same else bounds[0], *cuts, min(tail, last + 1 + behind)]
    return [np.arange(a, b) for a, b in pairwise(edges)]


def _alike(launches: pd.DataFrame, a: int, b: int, count: int) -> bool:
    columns = ["name", "bytes"]
    left = launches[columns].iloc[a : a + count].reset_index(drop=True)
    return left.equals(launches[columns].iloc[b : b + count].reset_index(drop=True))
