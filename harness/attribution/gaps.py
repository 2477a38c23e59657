"""Where the device waits, and for what: idle intervals, the kernels on either side, and the cause that the calls tell.

A gap's time is split by precedence:

    profiler overhead  the tracer (or the driver on its behalf) was at work on the host
    synchronisation    the next launch's call began after the device was done, and the host was then waiting for it
    launch-bound       it began after the device was done, and the host was not waiting: it was late
    unknown            the call was there in time (the work waited for another stream, a copy, memory), or is not known
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from harness.attribution.decomposition import Idle
from harness.sources.submissions import Call, Calls

CAUSES = ("profiler overhead", "synchronisation", "launch-bound", "unknown")
SHOWN = 5


def idle_intervals(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(position of the launch after it, begin, end) of every interval in which no launch runs. Launches by start, in ns."""
    if len(start) < 2:
        return (np.empty(0, np.int64),) * 3
    reach = np.maximum.accumulate(end)[:-1]
    at = np.flatnonzero(start[1:] > reach)
    return at + 1, reach[at], start[1:][at]


def largest(launches: pd.DataFrame, cause: np.ndarray | None = None) -> list[Idle]:
    """The five longest idle intervals of a window's launches, the longest first, with the launches on either side.

    cause: one of CAUSES by index for every interval, in order of time.
    """
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    after, low, high = idle_intervals(start, end)
    order = np.argsort(low - high, kind="stable")[:SHOWN]
    names = launches["name"].to_numpy(object)
    found = []
    for i in order:
        before = int(np.argmax(end[: after[i]] == low[i]))
        found.append(
            Idle(
                ms=float(high[i] - low[i]) / 1e6,
                start_ms=float(low[i]) / 1e6,
                before=str(names[before]),
                after=str(names[after[i]]),
                cause=CAUSES[cause[i]] if cause is not None else "",
            )
        )
    return found


def attribute(
    start: np.ndarray,
    end: np.ndarray,
    call: np.ndarray,
    calls: Calls,
    overheads: dict[str, np.ndarray],
    spans: Sequence[tuple[int, int]],
) -> tuple[dict[str, float], np.ndarray]:
    """(cause → ms of the gap, chief cause of every idle interval) of a window's launches by start, in the trace's ns.

    call: position in `calls` of each launch's call, −1 unknown. spans: of the window; what lies between two is no gap.
    """
    after, low, high = idle_intervals(start, end)
    if len(spans) > 1:
        within = ~np.isin(low, [last for _, last in spans])
        after, low, high = after[within], low[within], high[within]
    length = (high - low).astype(np.float64)
    known = call[after] >= 0
    begun = np.where(known, calls.start[np.maximum(call[after], 0)], 0)
    late = known & (begun >= low)
    waiting = (calls.kind == Call.WAIT) | (calls.kind == Call.BLOCKING_COPY)
    waiting &= np.isin(calls.process, np.unique(calls.process[call[call >= 0]]))
    in_wait = _covered(calls.start[waiting], calls.end[waiting], low)
    cause = np.where(late, np.where(in_wait, 1, 2), 3)
    tracer = np.zeros(len(low))
    if overheads:
        at_work = np.concatenate([np.asarray(o).reshape(-1, 2) for o in overheads.values()])
        tracer = np.minimum(_overlap(at_work, low, high), length)
    parts = {CAUSES[0]: float(tracer.sum()) / 1e6}
    rest = length - tracer
    for i in (1, 2, 3):
        parts[CAUSES[i]] = float(rest[cause == i].sum()) / 1e6
    return parts, np.where(tracer > length / 2, 0, cause)


def _covered(start: np.ndarray, end: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Whether each moment lies inside one of the intervals [start, end), which are ordered by start."""
    if len(start) == 0:
        return np.zeros(len(at), bool)
    reach = np.maximum.accumulate(end)
    before = np.searchsorted(start, at, side="right") - 1
    return (before >= 0) & (at < reach[np.maximum(before, 0)])


def _overlap(spans: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Length of the union of `spans` inside each interval [low, high); the intervals are ordered and disjoint."""
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    begin = np.maximum(spans[:, 0], np.r_[np.iinfo(np.int64).min, reach[:-1]])
    length = np.clip(spans[:, 1] - begin, 0, None)  # what each adds to the union
    keep = length > 0
    begin, length = begin[keep], length[keep]
    total = np.r_[0, np.cumsum(length)]

    def covered(until: np.ndarray) -> np.ndarray:
        """Length of the union before a moment."""
        at = np.searchsorted(begin, until, side="right")
        last = np.maximum(at - 1, 0)
        beyond = np.where(at > 0, np.clip(begin[last] + length[last] - until, 0, None), 0) if len(begin) else 0
        return total[at] - beyond

    return covered(high) - covered(low)
