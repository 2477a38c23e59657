"""What a source hands to attribution: the launch table of one window, and its wall on the host's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from harness.launches import Saved


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
