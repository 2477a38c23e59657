"""What a source hands to attribution: the launch table of one window, its wall on the host's clock, and what the source
noticed of the recording itself (`Findings`), which the checks of a recorded trace judge."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    """Several processes whose records carry one device number."""

    device: int
    processes: list[str]
    one_gpu: str  # why it is one GPU; "" where nothing says so


@dataclass
class Findings:
    """What a source noticed of a recording. Empty where it looks at nothing (a launch table that was saved)."""

    records: int = 0  # device records seen, those that were left out included
    left_out: list[LeftOut] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    processes: dict[int, list[int]] = field(default_factory=dict)  # device → the processes that have launches on it
    sharing: list[Sharing] = field(default_factory=list)
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
