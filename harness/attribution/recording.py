"""The checks of a recording: what a source noticed of it (`harness.sources.trace.Findings`) judged for one window.

Pure functions. They fail where the launches are not the work that ran (records lost, made twice, of two GPUs added up),
and name the cause; what is only worth knowing is a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from harness.attribution.classify import short_name
from harness.attribution.decomposition import Check, is_hole
from harness.attribution.gaps import idle_intervals
from harness.launches import union_ns
from harness.sources.submissions import Call
from harness.sources.trace import Findings, Trace

LEFT_OUT_LIMIT = 0.01
"""Device records that could not be used, of all: one alone never fails a recording."""
LOST_LIMIT = 0.01
"""Launch calls without device activity, of the window's."""
OVERLAP_LIMIT = 0.02
"""Of busy: how far launches of one stream may overlap."""
IN_ORDER_LIMIT = 0.25
"""The same for launches that end in the order of their start, where no call tells whether they may overlap (programmatic
dependent launch: the next kernel is resident while the one before it drains)."""
AT_THE_END = 0.02
"""Calls may be in flight when a recording stops: where the host still launched in the last 2 % of the window."""
TWIN_START, TWIN_LENGTH = 0.1, 0.01
"""A near-duplicate starts within 10 % of a launch's duration after it and is as long to 1 %."""


@dataclass(frozen=True)
class Seen:
    """One window of a trace on one device."""

    trace: Trace
    device: int
    spans: Sequence[tuple[int, int]]  # of the window, in the trace's ns
    whole: bool  # the window is all that the device did

    @cached_property
    def rows(self) -> np.ndarray:
        """Positions of the device's launches that start inside the window."""
        table = self.trace.launches
        start = table["start_ns"].to_numpy()
        first, last = np.array(self.spans, np.int64).T
        at = np.searchsorted(first, start, side="right") - 1
        return np.flatnonzero(
            (at >= 0) & (start <= last[np.maximum(at, 0)]) & (table["device"].to_numpy() == self.device)
        )


def checks_of(seen: Seen) -> list[Check]:
    """Every check that this recording allows; a saved launch table tells of its streams alone."""
    found = seen.trace.found
    made = [records(found), processes(found, seen.device)] if found.records else []
    made.append(streams(seen))
    if found.records:
        made.append(activity(seen))
    return made


def notes_of(found: Findings) -> list[str]:
    """The profiler's warnings, which fail nothing."""
    return [f"the profiler says: {d.text}" for d in found.diagnostics if d.severity == "warning" and not d.dropped]


def records(found: Findings) -> Check:
    """Were records left out for want of a usable time, or does the profiler itself say that it lost some?"""
    lost = sum(bad.count for bad in found.left_out)
    share = lost / found.records if found.records else 0.0
    errors = [d for d in found.diagnostics if d.severity == "error" or d.dropped]
    said = [
        f"{bad.count:,} of {found.records:,} device records {bad.reason} {'was' if bad.count == 1 else 'were'} left out, first {bad.first}"
        for bad in found.left_out
    ]
    said += [f"the profiler says: {d.text}" for d in errors[:4]]
    if len(errors) > 4:
        said.append(f"and {len(errors) - 4} more such messages")
    ok = not errors and (lost <= 1 or share <= LEFT_OUT_LIMIT)
    return Check(
        name="records", ok=ok, value=share, limit=LEFT_OUT_LIMIT,
        detail="; ".join(said) or f"all {found.records:,} device records have a time; the profiler reports no loss",
    )  # fmt: skip


def processes(found: Findings, device: int) -> Check:
    """Is one device number one GPU?"""
    shared = next((s for s in found.sharing if s.device == device), None)
    if shared is None:
        return Check(name="processes", ok=True, value=1.0, detail=f"device {device} is one process's")
    listed = ", ".join(shared.processes[:4]) + (", …" if len(shared.processes) > 4 else "")
    who = f"{len(shared.processes)} processes ({listed}) call a GPU device {device}"
    if shared.one_gpu:
        detail = f"{who}: one GPU, as {shared.one_gpu}"
    else:
        detail = f"{who}, and nothing tells whether it is the same one: their launches may be of several GPUs added up; record each process into a file of its own"
    return Check(name="processes", ok=bool(shared.one_gpu), value=float(len(shared.processes)), detail=detail)


def streams(seen: Seen) -> Check:
    """Launches of one stream run one after another, short of programmatic dependent launch, and none is there twice."""
    table = seen.trace.launches
    rows = seen.rows
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    busy = union_ns(table["start_ns"].iloc[rows], table["end_ns"].iloc[rows])
    # Nodes of a graph run as its edges say, whatever stream they are booked on; a whole graph likewise.
    plain = table["graph_node"].isna().to_numpy() & (table["kind"] != "graph").to_numpy()
    rows = rows[plain[rows]]
    rows = rows[np.argsort(table["stream"].to_numpy()[rows], kind="stable")]  # by stream, then by start
    stream = table["stream"].to_numpy()[rows]
    start, end = start[rows], end[rows]
    reach = _reach_before(stream, end)
    over = np.clip(np.minimum(end, reach) - start, 0, None)
    over[reach == _NOTHING] = 0
    total = int(over.sum())
    if total == 0 or busy == 0:
        return Check(
            name="streams", ok=True, value=0.0, limit=OVERLAP_LIMIT, detail="launches of one stream follow one another"
        )
    pairs = np.flatnonzero(over)
    twins = _twins(table, rows, pairs, start, end)
    in_order = (end[pairs] >= reach[pairs]) & ~twins
    may = _may_overlap(seen.trace.found, rows[pairs])
    programmatic = in_order & (may > 0)
    untold = in_order & (may < 0)
    if over[pairs][untold].sum() <= IN_ORDER_LIMIT * busy:
        programmatic |= untold
    unsound = int(over[pairs][~programmatic].sum())
    share = unsound / busy
    if share <= OVERLAP_LIMIT:
        detail = f"launches of one stream overlap by {total / busy:.2%} of busy"
        if programmatic.any():
            detail += ", each ending after the one before it, as under programmatic dependent launch"
        return Check(name="streams", ok=True, value=share, limit=OVERLAP_LIMIT, detail=detail)
    first = rows[pairs[~programmatic][0]]
    names = table["name"].to_numpy(object)
    detail = f"launches of one stream overlap by {share:.1%} of busy, first {short_name(names[first], None)} at {table['start_ns'].iloc[first] / 1e6:.3f} ms: "
    count = int(twins.sum())
    if count > 0.5 * len(pairs):
        detail += f"{count} are the launch before them once more, moved by a little: the trace holds its records twice"
    else:
        detail += "a stream runs one launch at a time, so several processes or recordings are mixed"
    return Check(name="streams", ok=False, value=share, limit=OVERLAP_LIMIT, detail=detail)


def activity(seen: Seen) -> Check:
    """Does every launch call of the window have device activity? A gap over lost records is no idle time."""
    found = seen.trace.found
    calls, call = found.calls, found.call
    if calls is None or call is None:
        return Check(
            name="activity",
            ok=True,
            detail="the host's calls were not recorded: nothing tells whether launches were lost",
        )
    mine = np.isin(calls.process, found.processes.get(seen.device, [])) & calls.counted
    at = np.flatnonzero(mine)
    low, high = seen.spans[0][0], seen.spans[-1][1]
    if seen.whole:
        inside = at[calls.active[at] | ((calls.start[at] >= low) & (calls.start[at] <= high))]
        inside = inside[~_in_flight(calls.start, calls.active, at, inside, low, high)]
    else:
        of_window = call[seen.rows]
        of_window = of_window[of_window >= 0]
        inside = at[(at >= of_window.min()) & (at <= of_window.max())] if len(of_window) else at[:0]
    lost = inside[~calls.active[inside]]
    total, share = len(inside), len(lost) / len(inside) if len(inside) else 0.0
    if not len(lost):
        detail = (
            f"all {total:,} launch calls of the window have device activity"
            if total
            else "no launch call lies in the window"
        )
        return Check(name="activity", ok=True, value=0.0, limit=LOST_LIMIT, detail=detail)
    detail = f"{_parts(calls.kind, inside, lost)} have no device activity"
    hole = hole_of(seen)
    in_hole = int(((calls.start[lost] >= hole[0] - 1_000_000) & (calls.start[lost] < hole[1])).sum()) if hole else 0
    if share <= LOST_LIMIT and not in_hole:
        return Check(name="activity", ok=True, value=share, limit=LOST_LIMIT, detail=detail)
    detail += (
        ": records were lost, and this gap is not idle time; record a shorter window, or with larger profiler buffers"
    )
    return Check(name="activity", ok=False, value=share, limit=LOST_LIMIT, detail=detail)


def hole_of(seen: Seen) -> tuple[int, int] | None:
    """The one idle interval that is more than half the window and ten times the next, in the trace's ns."""
    table = seen.trace.launches
    rows = seen.rows
    _, low, high = idle_intervals(table["start_ns"].to_numpy()[rows], table["end_ns"].to_numpy()[rows])
    lengths = high - low
    wall = sum(b - a for a, b in seen.spans)
    longest = np.sort(lengths)[::-1][:2].tolist()
    if not longest or not is_hole(longest[0], longest[1] if len(longest) > 1 else 0, wall):
        return None
    at = int(np.argmax(lengths))
    return int(low[at]), int(high[at])


def _parts(kind: np.ndarray, inside: np.ndarray, lost: np.ndarray) -> str:
    """ "19 of 20 graph launches and 2 of 40 kernel launches", those without loss unsaid."""
    said = []
    for name, graphs in (("graph launches", True), ("kernel launches", False)):
        of, without = (int(((kind[rows] == Call.GRAPH) == graphs).sum()) for rows in (inside, lost))
        if without:
            said.append(f"{without:,} of {of:,} {name}")
    return " and ".join(said)


def _in_flight(
    start: np.ndarray, active: np.ndarray, at: np.ndarray, inside: np.ndarray, low: int, high: int
) -> np.ndarray:
    """True for calls after the last one with activity, where the host launched on until the recording stopped."""
    worked = at[active[at]]
    if len(worked) == 0 or start[at[-1]] < high - AT_THE_END * (high - low):
        return np.zeros(len(inside), bool)
    return inside > worked[-1]


_NOTHING = np.iinfo(np.int64).min


def _reach_before(stream: np.ndarray, end: np.ndarray) -> np.ndarray:
    """For rows by stream, then by start: the latest end of the rows before in the same stream; _NOTHING for its first."""
    reach = np.full(len(end), _NOTHING, np.int64)
    edges = np.flatnonzero(stream[1:] != stream[:-1]) + 1
    for first, last in zip([0, *edges], [*edges, len(end)], strict=True):
        if last > first:
            reach[first + 1 : last] = np.maximum.accumulate(end[first : last - 1])
    return reach


def _twins(table: pd.DataFrame, rows: np.ndarray, pairs: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """True for overlapping launches that are the one before them in their stream once more: name, grid and duration the
    same, the start moved by a little. pairs: their positions in `rows`."""
    before, length = pairs - 1, end - start
    same = (start[pairs] - start[before] < TWIN_START * np.maximum(length[pairs], 1)) & (
        np.abs(length[pairs] - length[before]) <= TWIN_LENGTH * length[pairs]
    )
    for column in ("name", "grid"):
        values = table[column].to_numpy(object)
        same &= values[rows[pairs]] == values[rows[before]]
    return same


def _may_overlap(found: Findings, rows: np.ndarray) -> np.ndarray:
    """Per launch 1 where its call can launch it before its predecessor ended, 0 where it cannot, −1 where no call is known."""
    if found.calls is None or found.call is None:
        return np.full(len(rows), -1)
    call = found.call[rows]
    return np.where(call >= 0, (found.calls.kind[np.maximum(call, 0)] == Call.LAUNCH_EX).astype(int), -1)
