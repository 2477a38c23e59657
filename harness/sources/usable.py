"""Which device records have a time that can be used. One bad record never costs the trace: it is left out and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from harness.sources.trace import LeftOut

EARLIEST_NS, LATEST_NS = -(1 << 61), 3 << 61
"""Times beyond are no times, and differences of times between them fit 64 bits."""
SECOND_NS, HOUR_NS = 1_000_000_000, 3_600_000_000_000


def usable(start: np.ndarray, end: np.ndarray, which: Callable[[int], str]) -> tuple[np.ndarray | None, list[LeftOut]]:
    """(mask of records to keep, or None for all; what is left out and why) of int64 times in ns.

    A record that starts at 0 has no time where all others start further from 0 than they span, and than a second
    (where it has a duration: than ten spans and an hour): profilers write 0 for a timestamp that they lost.
    which: position → how to name that record.
    """
    keep = np.ones(len(start), bool)
    found: list[LeftOut] = []

    def drop(bad: np.ndarray, reason: str) -> None:
        bad &= keep
        if bad.any():
            found.append(LeftOut(reason, int(bad.sum()), which(int(np.flatnonzero(bad)[0]))))
            keep[bad] = False

    drop(
        (start < EARLIEST_NS) | (start >= LATEST_NS) | (end < EARLIEST_NS) | (end >= LATEST_NS),
        "with a time out of range",
    )
    drop(end < start, "that end before they start")
    zero = keep & (start == 0)
    others = keep & (start != 0)
    if zero.any() and others.any():
        first, last = int(start[others].min()), int(end[others].max())
        if first > max(SECOND_NS, last - first):
            far = first > max(HOUR_NS, 10 * (last - first))
            drop(zero if far else zero & (end == 0), "without a time")
    return (None if not found else keep), found


def by_start(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Positions in the order of (start, end), stably. Runs that are in order already, as tables are, cost a merge."""
    order = np.argsort(start, kind="stable")
    first = start[order]
    if (first[1:] == first[:-1]).any():
        return np.lexsort((end, start))
    return order
