"""What a source hands to attribution: the launch table of one window, its wall on the host's clock, and what the source
noticed of the recording itself (`Findings`), which the checks of a recorded trace judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from harness.launches import Saved
from harness.sources.submissions import Calls

if TYPE_CHECKING:
    from harness.sources.ranges import Ranges


@dataclass(frozen=True)
class LeftOut:
    """Device records that a source could not use, all for one reason."""

    reason: str  # "without time", "that end before they start", …
    count: int
    first: str  # which one: its name or its row


@dataclass(frozen=True)
class Diagnostic:
    """A message of the profiler about its own recording."""

    severity: Literal["error", "warning"]
    text: str
    dropped: int = 0  # records that it says it lost


@dataclass(frozen=True)
class Sharing:
    """Several processes (or contexts of which nothing says that they are one process's) whose records carry one device number."""

    device: int
    processes: list[str]
    together: float  # time in which kernels of two of them run at once, of their busy
    one_gpu: str  # why no time is counted twice; "" where nothing says so


TOGETHER_LIMIT = 0.02
"""Of busy: processes that take turns on a GPU do not run at once, short of what clocks and time slices blur."""


def taking_turns(owner: np.ndarray, start: np.ndarray, end: np.ndarray) -> tuple[float, str]:
    """(time in which kernels of two owners run at once, of busy; how they share the device, "" where they run at once).

    owner: a code of every kernel's process; start, end: int64 ns, in any order. Without MPS a GPU runs one process at a time
    (NVIDIA, Multi-Process Service, 2.1), so kernels at once are MPS or another GPU, and no others tell.
    """
    edges: list[np.ndarray] = []  # of the union of each owner's kernels
    spans = []
    for code in np.unique(owner):
        mine = owner == code
        order = np.argsort(start[mine], kind="stable")
        low, reach = start[mine][order], np.maximum.accumulate(end[mine][order])
        first = np.r_[True, low[1:] > reach[:-1]]
        edges.append(np.stack([low[first], reach[np.r_[first[1:], True]]]))
        spans.append((int(low[0]), int(reach[-1])))
    at = np.concatenate([np.concatenate(e) for e in edges])
    step = np.concatenate([np.repeat([1, -1], e.shape[1]) for e in edges])
    order = np.argsort(at, kind="stable")
    running, length = np.cumsum(step[order])[:-1], np.diff(at[order])
    busy = int(length[running >= 1].sum())
    together = int(length[running >= 2].sum()) / busy if busy else 0.0
    spans.sort()
    if all(b <= c for (_, b), (c, _) in pairwise(spans)):
        return 0.0, "they ran one after another"
    return together, "their kernels take turns and no time is counted twice" if together <= TOGETHER_LIMIT else ""


@dataclass
class Findings:
    """What a source noticed of a recording. Empty where it looks at nothing (a launch table that was saved)."""

    records: int = 0  # device records seen, those that were left out included
    left_out: list[LeftOut] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    processes: dict[int, list[int]] = field(default_factory=dict)  # device → the processes that have launches on it
    sharing: list[Sharing] = field(default_factory=list)
    owner: np.ndarray | None = (
        None  # int64, one a launch: a code of its process, where several share a device; −1 unknown
    )
    calls: Calls | None = None  # in the launch table's ns; None where the host's side was not recorded
    call: np.ndarray | None = None  # int64, one a launch of the table: the position of its call; −1 unknown
    ranges: Ranges | None = None  # in the launch table's ns; None where they were not read
    resolution_ns: float = 1.0  # steps in which the file's times are told


@dataclass
class Trace:
    """One traced forward (or one recorded window)."""

    launches: pd.DataFrame
    """A launch table (`harness.launches`), times in ns from the window's start."""
    wall_ns: int
    """The window's length in ns: submit to logits on the host, or first to last activity of a recorded trace."""
    source: str
    """One of host, cupti, nsys, kineto."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know of this trace: dropped records, hidden graphs, clock mapping."""
    gpus: dict[int, str] = field(default_factory=dict)
    """Device → the GPU's name, where the recording tells it."""
    overheads: dict[str, np.ndarray] = field(default_factory=dict)
    """Time that tracer or driver took on the host: name → int64 [n, 2] intervals in the launch table's ns."""
    saved: Saved | None = None
    """What a table that we saved ourselves says of its run."""
    found: Findings = field(default_factory=Findings)
    """What the source noticed of the recording itself."""
