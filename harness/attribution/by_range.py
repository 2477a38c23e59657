"""Which named range submitted which time: the class table of every range, one group-by for all of them.

A range's row holds what it submitted itself, without what the ranges inside it did, so that the rows of all ranges,
of what lies outside and of what no call tells add up to the classes of the whole table, to the nanosecond.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from harness.attribution.decomposition import RangeRow, Spent
from harness.errors import HarnessError
from harness.launches import sums_by, text_codes
from harness.sources.ranges import Ranges, folded, submitted
from harness.sources.trace import Trace

OUTSIDE, NO_CALL = -1, -2
"""In place of a range: none was open; which one was is unknown, as the launch's call was not recorded."""


@dataclass(frozen=True)
class Charged:
    """The range that each launch of a window is charged to."""

    range: np.ndarray  # int64 [launches]: one number a range, OUTSIDE or NO_CALL
    path: np.ndarray  # int64 [launches]: position in `paths`, OUTSIDE or NO_CALL
    paths: list[tuple[str, ...]]
    notes: list[str]


def charge(trace: Trace, rows: np.ndarray, path: Path) -> Charged:
    """The innermost range of every launch of a window, whose positions in the trace's table are `rows`.

    Ranges whose names differ only by what emit_nvtx numbers have one path. Raises HarnessError, saying what to record,
    where the trace has no ranges, or no calls by which a launch could be told to be in one.
    """
    ranges = trace.found.ranges
    assert ranges is not None, "read without ranges"
    if len(ranges) == 0:
        raise HarnessError(f"{path}: {ranges.none()}.")
    known, at, thread, process = (values[rows] for values in submitted(trace))
    if not known.any():
        how = "record with `-t cuda,nvtx`" if trace.source == "nsys" else "profile the CPU's activity, too"
        raise HarnessError(
            f"{path} has ranges, and no call of the launches, by which they are told to be inside: {how}."
        )
    found = np.full(len(rows), NO_CALL, np.int64)
    mine = np.flatnonzero(known)
    found[mine] = ranges.innermost(at[mine], thread[mine], process[mine])
    code, paths = ranges.paths([folded(label) for label in ranges.labels])
    coded = np.where(found >= 0, code[np.maximum(found, 0)], found)
    table = trace.launches
    duration = (table["end_ns"].to_numpy() - table["start_ns"].to_numpy())[rows]
    return Charged(found, coded, paths, _notes(ranges, found, at, thread, process, duration))


def _notes(
    ranges: Ranges, found: np.ndarray, at: np.ndarray, thread: np.ndarray, process: np.ndarray, duration: np.ndarray
) -> list[str]:
    notes = []
    if ranges.launched_on is not None:
        notes.append(
            "the annotations are the device's alone: a launch belongs to the one in which it starts on its stream"
        )
    if (lost := found == NO_CALL).any():
        notes.append(
            f"the call of {_amount(lost, duration)} was not recorded: which range submitted them is unknown, not that none did"
        )
    opened = np.unique(found[found >= 0])
    if len(never := opened[~ranges.ended[opened]]):
        names = ", ".join(sorted({repr(ranges.labels[i][:60]) for i in ranges.text[never]})[:4])
        notes.append(f"ranges that never ended are open until the end of the recording: {len(never)} ({names})")
    outside = np.flatnonzero(found == OUTSIDE)
    elsewhere = np.zeros(len(found), bool)
    if ranges.launched_on is None:
        for key in np.unique(process[outside]):
            own = np.flatnonzero((ranges.process == key) & ~ranges.shared)
            asked = outside[process[outside] == key]
            if len(own):
                reach = np.maximum.accumulate(ranges.end[own])
                before = np.searchsorted(ranges.start[own], at[asked], side="right") - 1
                elsewhere[asked] = (before >= 0) & (at[asked] <= reach[np.maximum(before, 0)])
    for number in np.unique(thread[elsewhere])[:4].tolist():
        of = elsewhere & (thread == number)
        notes.append(
            f"{_amount(of, duration)} of thread {ranges.called(number)} are outside any range: no range of that thread was open, only "
            "ranges of others (autograd's backward runs on threads of its own)"
        )
    return notes


def _amount(rows: np.ndarray, duration: np.ndarray) -> str:
    count = int(rows.sum())
    return f"{count:,} launch{'es' if count > 1 else ''} ({duration[rows].sum() / 1e6:,.3f} ms)"


def range_rows(launches: pd.DataFrame, charged: Charged, busy_ms: float) -> list[RangeRow]:
    """One row per path, the longest first, then what is outside and what no call tells.

    launches: the window's table by start, with classes, row for row with `charged`.
    """
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    row, keys = pd.factorize(charged.path)
    cls, classes = text_codes(launches["class"], empty="other")
    kind, types = text_codes(launches["weight_type"], empty="-")
    part, parts = pd.factorize((row * len(classes) + cls) * len(types) + kind)
    held: list[list[Spent]] = [[] for _ in keys]
    for key, launched, ns, union in zip(parts.tolist(), *(v.tolist() for v in sums_by(part, start, end)), strict=True):
        owner, which = divmod(key, len(classes) * len(types))
        held[owner].append(
            Spent(
                cls=str(classes[which // len(types)]), weight_type=str(types[which % len(types)]), launches=launched,
                sum_ms=ns / 1e6, union_ms=union / 1e6, share=ns / 1e6 / busy_ms if busy_ms else 0.0,
            )
        )  # fmt: skip
    ranges = charged.range[charged.range >= 0]
    first = np.unique(ranges, return_index=True)[1]
    instances = np.bincount(row[charged.range >= 0][first], minlength=len(keys))
    rows = []
    for i, (launched, ns, union) in enumerate(zip(*(v.tolist() for v in sums_by(row, start, end)), strict=True)):
        key = int(keys[i])
        rows.append(
            RangeRow(
                kind="range" if key >= 0 else "outside" if key == OUTSIDE else "no_call",
                path=list(charged.paths[key]) if key >= 0 else [], instances=int(instances[i]), launches=launched,
                sum_ms=ns / 1e6, union_ms=union / 1e6, share=ns / 1e6 / busy_ms if busy_ms else 0.0,
                classes=sorted(held[i], key=lambda s: (s.cls == "other", -s.sum_ms)),
            )
        )  # fmt: skip
    return sorted(rows, key=lambda r: (("range", "outside", "no_call").index(r.kind), -r.sum_ms))
