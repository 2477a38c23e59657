"""From the calls that a profiler saw on the host to the launches that they made, and to the calls that made none."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import pandas as pd


class Call(IntEnum):
    """What a runtime or driver call does, as far as attribution asks."""

    OTHER = 0
    LAUNCH = 1  # one kernel
    GRAPH = 2  # a whole graph
    COPY = 3
    WAIT = 4  # the host waits for the device
    BLOCKING_COPY = 5  # both
    BEGIN_CAPTURE = 6
    END_CAPTURE = 7
    LAUNCH_EX = (
        8  # one kernel, by the call that can launch it before its predecessor ends (programmatic dependent launch)
    )


_KINDS = (
    (re.compile(r"^(cuda|cu|hip)GraphLaunch"), Call.GRAPH),
    # cuLaunchHostFunc queues a function of the host's: nothing runs on the device.
    (re.compile(r"^(cuda|cu|hip)LaunchKernelEx"), Call.LAUNCH_EX),
    (re.compile(r"^(cuda|cu|hip)(Ext|Module|ExtModule)?Launch(?!HostFunc)"), Call.LAUNCH),
    (re.compile(r"^(cuda|cu|hip)StreamBeginCapture"), Call.BEGIN_CAPTURE),
    (re.compile(r"^(cuda|cu|hip)StreamEndCapture"), Call.END_CAPTURE),
    (re.compile(r"^(cuda|cu|hip)(Device|Stream|Event|Ctx|Thread)Synchronize"), Call.WAIT),
    (re.compile(r"^(cuda|cu|hip)Mem(cpy|set)\w*Async"), Call.COPY),
    (re.compile(r"^(cuda|cu|hip)Memset"), Call.COPY),
    (re.compile(r"^(cuda|cu|hip)Memcpy"), Call.BLOCKING_COPY),
)


def call_kind(name: str) -> Call:
    """What the call of this name does ("cudaLaunchKernel_v7000", "cuGraphLaunch", "hipMemcpyAsync")."""
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), Call.OTHER)


@dataclass
class Calls:
    """Runtime and driver calls as a profiler recorded them, by start: int64 [n] each, times on one clock with the launches'."""

    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    process: np.ndarray
    correlation: np.ndarray  # unique in its process; −1 unknown
    kind: np.ndarray  # Call
    counted: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # it should have launched something
    active: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # a device record carries its correlation id

    def __post_init__(self) -> None:
        if not (self.start[1:] >= self.start[:-1]).all():
            order = np.argsort(self.start, kind="stable")
            for name in ("start", "end", "thread", "process", "correlation", "kind"):
                setattr(self, name, getattr(self, name)[order])

    def shifted(self, zero: int) -> Calls:
        """The same with times from `zero`."""
        return replace(self, start=self.start - zero, end=self.end - zero)


def match(
    calls: Calls,
    process: np.ndarray,
    correlation: np.ndarray,
    *,
    usable: np.ndarray | None = None,
    whole_graphs: bool = False,
) -> np.ndarray:
    """Position of the call that submitted each launch, −1 where none is known; fills `counted` and `active` of the calls.

    process, correlation: of every device record. usable: which of those are launches of the table, in its order; None: all.
    The first call of a correlation id submitted its work. A call nested in another one of its thread (the driver's in the
    runtime's) and calls while their process captures a stream launch nothing of their own. whole_graphs: graphs were
    recorded as a whole without a correlation id, so that none of their launches can be told from a lost one.
    """
    launching = np.isin(calls.kind, [Call.LAUNCH, Call.LAUNCH_EX, Call.GRAPH])
    submits = launching | np.isin(calls.kind, [Call.COPY, Call.BLOCKING_COPY])
    of_calls, of_records = _keys(calls.process, calls.correlation, process, correlation)
    calls.active = _among(of_calls, of_records[correlation >= 0])
    if whole_graphs:
        calls.active |= calls.kind == Call.GRAPH
    calls.counted = launching & ~_repeated(of_calls)
    idle = calls.counted & ~calls.active
    if idle.any():
        calls.counted &= calls.active | ~(_nested(calls, launching) | _capturing(calls))
    sources = np.flatnonzero(submits & (calls.correlation >= 0))
    of_launches, known = (of_records, correlation) if usable is None else (of_records[usable], correlation[usable])
    return np.where(known >= 0, _first(of_calls[sources], sources, of_launches, -1), -1)


def _keys(*pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One key a row of (process, correlation) of the calls, and of the launches."""
    process, correlation, launch_process, launch_correlation = pairs
    if len(pd.unique(np.concatenate([pd.unique(process), pd.unique(launch_process)]))) <= 1:
        return correlation, launch_correlation
    code, _ = pd.factorize(np.concatenate([process, launch_process]))
    inner, seen = pd.factorize(np.concatenate([correlation, launch_correlation]))
    keys = code.astype(np.int64) * len(seen) + inner
    return keys[: len(process)], keys[len(process) :]


_DENSE = 8
"""A table of all keys is used where they are this dense: at most 8 entries a row."""


def _span(keys: np.ndarray) -> tuple[int, int] | None:
    """(least, number of values) of keys that are dense enough for a table."""
    if len(keys) == 0:
        return None
    low, high = int(keys.min()), int(keys.max())
    return (low, high - low + 1) if high - low < _DENSE * len(keys) + 65_536 else None


def _first(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: int) -> np.ndarray:
    """For each wanted key the value of the first row that has it, else `missing`."""
    span = _span(keys)
    if span:
        low, size = span
        table = np.full(size, missing, np.int64)
        table[(keys - low)[::-1]] = values[::-1]  # the first row is written last
        inside = (wanted >= low) & (wanted < low + size)
        return np.where(inside, table[np.where(inside, wanted - low, 0)], missing)
    if len(keys) == 0:
        return np.full(len(wanted), missing, np.int64)
    unique, first = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(unique, wanted), len(unique) - 1)
    return np.where(unique[at] == wanted, values[first[at]], missing)


def _among(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    span = _span(others)
    if span is None:
        return np.isin(keys, others)
    low, size = span
    table = np.zeros(size, bool)
    table[others - low] = True
    inside = (keys >= low) & (keys < low + size)
    return inside & table[np.where(inside, keys - low, 0)]


def _repeated(keys: np.ndarray) -> np.ndarray:
    """True for every row whose key an earlier row has. Keys in rising order, the usual ones, need no table."""
    if (keys[1:] > keys[:-1]).all():
        return np.zeros(len(keys), bool)
    return pd.Series(keys).duplicated().to_numpy()


def _nested(rows: Calls, submits: np.ndarray) -> np.ndarray:
    """True where a launch call lies inside an earlier launch call of its thread."""
    nested = np.zeros(len(rows.start), bool)
    at = np.flatnonzero(submits)
    if (rows.start[at][1:] >= np.maximum.accumulate(rows.end[at])[:-1]).all():
        return nested
    at = at[np.argsort(rows.thread[at], kind="stable")]  # by thread, then by start
    start, end, thread = rows.start[at], rows.end[at], rows.thread[at]
    for first, last in zip(*_runs(thread), strict=True):
        reach = np.maximum.accumulate(end[first:last])
        nested[at[first + 1 : last]] = (start[first + 1 : last] < reach[:-1]) & (end[first + 1 : last] <= reach[:-1])
    return nested


def _capturing(rows: Calls) -> np.ndarray:
    """True for calls made while their process captures a stream: between the first begin and the matching end.

    Captures are followed by process and not by thread: work forked into the captured stream may be issued by others.
    """
    edges = np.flatnonzero((rows.kind == Call.BEGIN_CAPTURE) | (rows.kind == Call.END_CAPTURE))
    inside = np.zeros(len(rows.start), bool)
    for process in np.unique(rows.process[edges]):
        depth, since = 0, -1
        mine = rows.process == process
        of_process = edges[rows.process[edges] == process]
        if rows.kind[of_process[0]] == Call.END_CAPTURE:  # the recording began inside a capture
            inside[: of_process[0]] |= mine[: of_process[0]]
        for at in of_process:
            if rows.kind[at] == Call.BEGIN_CAPTURE:
                since = at if depth == 0 else since
                depth += 1
            elif depth:
                depth -= 1
                if depth == 0:
                    inside[since:at] |= mine[since:at]
        if depth:  # and ended inside one
            inside[since:] |= mine[since:]
    return inside


def _runs(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(first, past the last) position of every run of equal codes."""
    edges = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    return np.r_[0, edges], np.r_[edges, len(codes)]
