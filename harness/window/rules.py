"""What makes a window quiet, and which pairs are dropped: rules that look at telemetry, never at an arm or a wall."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from harness.config import Strict
from harness.window.sentinel import throttle_names

DROPPING_BITS = {"hw_thermal", "hw_slowdown", "hw_power_brake"}
"""The software power cap is not among them: a big GPU running GEMMs lives under it. It is recorded."""


class QuietWindow(Strict):
    """protocols/quiet-window.yaml."""

    host_foreign: float = Field(ge=0, le=1)
    """Share of all cores that other processes may use."""
    gpu_utilization: float = Field(ge=0, le=1)
    """Busy share of the GPU that is tolerated before the first run."""
    clock_tolerance: float = Field(gt=0)
    """A half whose mean SM clock lies further than this from the running median of its own arm is dropped."""


def disturbances(snapshot: dict[str, Any], rules: QuietWindow, *, idle: bool) -> list[str]:
    """What in a sentinel's snapshot breaks the quiet, in words; `idle`: nothing of ours is running on the GPU."""
    found = []
    if (foreign := snapshot["host"]["foreign"]) > rules.host_foreign:
        found.append(f"other processes use {foreign:.0%} of the host's cores (limit {rules.host_foreign:.0%})")
    gpu = snapshot.get("gpu")
    if gpu:
        if gpu["foreign"]:
            found.append(f"foreign compute processes on the GPU: {', '.join(map(str, gpu['foreign']))}")
        if idle and (gpu["utilization"] or 0) > rules.gpu_utilization:
            found.append(f"the GPU is {gpu['utilization']:.0%} busy before the first run")
        if bad := DROPPING_BITS & set(throttle_names(gpu["throttle"])):
            found.append(f"the GPU reports {', '.join(sorted(bad))}")
    return found


def drop_reason(
    forwards: Sequence[dict[str, Any]], foreign: Sequence[int], earlier_clocks: Sequence[float], rules: QuietWindow
) -> str | None:
    """Why a half's pair must be dropped, or None.

    forwards: the telemetry of each timed forward; earlier_clocks: mean SM clock of the earlier halves of the *same* arm,
    since a clock difference between arms is an effect of the lever.
    """
    if foreign:
        return f"foreign compute process {', '.join(map(str, foreign))}"
    bad = {name for f in forwards for name in throttle_names(f.get("throttle"))} & DROPPING_BITS
    if bad:
        return f"throttled: {', '.join(sorted(bad))}"
    clock = mean_clock(forwards)
    if clock is not None and len(earlier_clocks) >= 3:
        usual = float(np.median(earlier_clocks))
        if abs(clock / usual - 1) > rules.clock_tolerance:
            return f"mean SM clock {clock:.0f} MHz, {clock / usual - 1:+.1%} from this arm's running median {usual:.0f} MHz"
    return None


def mean_clock(forwards: Sequence[dict[str, Any]]) -> float | None:
    """Mean SM clock over a half's forwards in MHz; None where it was not seen."""
    clocks = [f["sm_mhz"] for f in forwards if f.get("sm_mhz")]
    return float(np.mean(clocks)) if clocks else None
