"""Traces our own engine with Nsight Systems: a process of its own, every op in an NVTX range, launches mapped by range.

The independent witness of the in-process CUPTI source: other tool, other process, same configuration.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from engine.levers import Levers
from engine.plan import Plan
from harness.errors import HarnessError
from harness.sources.charge import charge
from harness.sources.nsys import read_nsys
from harness.sources.nsys_driver import record
from harness.sources.profiled_child import check_report, spec_of
from harness.sources.ranges import Range, select
from harness.sources.trace import Trace


def trace_passes(model: str | None, levers: Levers, plan: Plan, *, warmup: int, passes: int, idle_s: float, seed: int,
                 keep: Path | None = None) -> list[Trace]:  # fmt: skip
    """Traced prefills of `plan.tokens` fresh random tokens, one Trace per pass, in order.

    warmup: forwards before the first pass, at the same pace: a GPU's clock follows what it did in the last second.
    keep: where the SQLite export is left (it still holds environment variables and host names: scrub it). Raises
    HarnessError when nsys is missing, the child fails, or it did not run the levers that were asked for.
    """
    with tempfile.TemporaryDirectory(prefix="harness-nsys-") as folder:
        report, spec_file = Path(folder) / "child.json", Path(folder) / "spec.json"
        spec = spec_of(model, levers, plan.tokens, warmup=warmup, passes=passes, seed=seed, idle_s=idle_s)
        spec_file.write_text(json.dumps(spec | {"report": str(report)}))
        exported = keep or Path(folder) / "trace.sqlite"
        record([sys.executable, "-m", "harness.sources.profiled_child", str(spec_file)], exported)
        check_report(json.loads(report.read_text()), levers, plan, "nsys")
        return split_passes(exported, plan)


def split_passes(exported: Path, plan: Plan) -> list[Trace]:
    """One Trace per range "prefill K" of an export made by `harness.sources.profiled_child`, in order of K.

    The wall is the range's own length on the host; a launch belongs to the op whose range submitted it.
    """
    trace = read_nsys(exported, ranges=True)
    table, prefills, ops = trace.launches, select(trace, "prefill *", exported), select(trace, "op *", exported)
    owner = np.full(len(table), -1)
    for marked, rows in ops:
        if marked.text.startswith("op "):
            owner[rows] = int(marked.text.split()[1])
    prefills = [pair for pair in prefills if pair[0].text.startswith("prefill ")]  # not the ops nested in them
    if not prefills:
        raise HarnessError(f"{exported.name} holds no NVTX range 'prefill K'; nsys must trace nvtx (-t cuda,nvtx).")
    traces = []
    for marked, rows in sorted(prefills, key=lambda pair: int(pair[0].text.split()[1])):
        traces.append(_one_pass(table.iloc[rows], owner[rows], marked, plan))
    return traces


def _one_pass(rows: pd.DataFrame, owner: np.ndarray, marked: Range, plan: Plan) -> Trace:
    launches = rows.copy()
    launches["start_ns"] -= marked.start
    launches["end_ns"] -= marked.start
    launches["op"] = pd.Series(owner, index=launches.index).where(owner >= 0).astype("Int32")
    launches = charge(launches.sort_values(["start_ns", "end_ns"], ignore_index=True), plan)
    return Trace(launches, marked.end - marked.start, "nsys", [])
