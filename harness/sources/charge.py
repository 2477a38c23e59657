"""Charging: a launch's op index → class, weight type, layer, MACs and bytes, from the plan and from nothing else."""

from __future__ import annotations

import numpy as np
import pandas as pd

from engine.plan import Plan
from harness import launches as table


def charge(launches: pd.DataFrame, plan: Plan) -> pd.DataFrame:
    """A copy of a launch table whose `op` column is filled, with the plan's columns filled in.

    An op of several launches (a split-k GEMM and its reduction) books its MACs and bytes once, on its longest launch,
    and 0 on the others; its time stays where it was spent. A launch without an op becomes class "other", and keeps
    the bytes that its source knew.
    """
    out = launches.copy()
    ops = out["op"].to_numpy(dtype=np.int64, na_value=-1)
    known = (ops >= 0) & (ops < len(plan))
    index = np.where(known, ops, 0)
    duration = (out["end_ns"] - out["start_ns"]).to_numpy()

    # The longest launch of every op: sort by (op, duration), take the last row of each run.
    order = np.lexsort((duration, ops))
    last = np.r_[ops[order][1:] != ops[order][:-1], True] if len(out) else np.zeros(0, bool)
    carries = np.zeros(len(out), bool)
    carries[order[last]] = True
    carries &= known

    def column(values: list[object], dtype: str) -> pd.Series:
        return pd.Series(pd.array(values, dtype=dtype)).take(index).reset_index(drop=True)  # type: ignore[call-overload]

    out["class"] = column([op.cls for op in plan], "string").where(known, "other")
    out["weight_type"] = column([op.weight_type for op in plan], "string").where(known, "-")
    layers = column([op.layer if op.layer >= 0 else pd.NA for op in plan], "Int32")
    out["layer"] = layers.where(known, pd.NA).astype("Int32")
    for name, values in (("macs", [op.macs for op in plan]), ("bytes", [op.bytes for op in plan])):
        booked = column(values, "Int64").where(carries, 0)  # type: ignore[arg-type]
        out[name] = booked.where(known, out[name]).astype("Int64")
    return table.check(out)
