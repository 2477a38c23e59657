"""What a source hands to attribution: the launch table of one window, and its wall on the host's clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd


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
