"""The mechanism's half of a round: traced passes of one arm, and what each op of its plan cost in them."""

from __future__ import annotations

from typing import Any, cast

from harness.ab.engines import EmbeddedArm
from harness.attribution.embedded import decompose_engine
from harness.attribution.measure import DecomposeProtocol, Regime
from harness.config import load_protocol

CPU_PASSES = 3
"""Traced passes of a CPU arm, at most."""


def trace_arm(target: EmbeddedArm, tokens: int, *, passes: int, regime: str, idle_s: float, load_s: float) -> dict[str, Any]:  # fmt: skip
    """A decomposition of the arm, and per traced pass the busy ms of each op (summed over the layers).

    "ops": op's name without its layer → {"class", "count", "kernels": names of its launches, "busy_ms": one per pass};
    "missing": ops of the plan with MACs but without a launch.
    """
    protocol = load_protocol("decompose", DecomposeProtocol).model_copy(update={"idle_s": idle_s, "load_s": load_s})
    name = target.engine.name
    few = {"passes": passes, "runs": 3} if name == "cuda" else {"passes": min(passes, CPU_PASSES), "runs": 1}
    part = protocol.of(name).model_copy(update=few)
    protocol = protocol.model_copy(update={name: part})
    result = decompose_engine(target.engine, target.model, tokens, protocol, regime=cast(Regime, regime))

    plan = target.engine.plan(tokens)
    ops: dict[str, dict[str, Any]] = {}
    for op in plan:
        entry = ops.setdefault(op_name(op.name), {"class": op.cls, "count": 0, "kernels": [], "busy_ms": []})
        entry["count"] += 1
    for trace in result.measurement.traces:
        launches = trace.launches[trace.launches["op"].notna()]
        duration = (launches["end_ns"] - launches["start_ns"]).groupby(launches["op"]).sum()
        busy = dict.fromkeys(ops, 0.0)
        for index, ns in duration.items():
            busy[op_name(plan.ops[int(cast(int, index))].name)] += float(ns) / 1e6
        for op_key, ms in busy.items():
            ops[op_key]["busy_ms"].append(ms)
    table = result.launches[result.launches["op"].notna()]
    for index, names in table.groupby("op")["name"].unique().items():
        entry = ops[op_name(plan.ops[int(cast(int, index))].name)]
        entry["kernels"] = sorted({*entry["kernels"], *map(str, names)})
    launched = set(table["op"].astype(int))
    return {
        "there": True,
        "decomposition": result.decomposition.to_dict(),
        "ops": ops,
        "missing": [op.name for op in plan if op.macs and op.index not in launched],
    }


def op_name(name: str) -> str:
    """An op's name without its layer: "L03 gate" → "gate"."""
    return name.split(" ", 1)[1] if name.startswith("L") and " " in name else name
