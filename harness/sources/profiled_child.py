"""The process that a profiler (nsys, ncu) runs: our engine, warmed up, then prefills with every op in an NVTX range.

`python -m harness.sources.profiled_child SPEC.json`. The spec is a JSON object:

    {"model": str | null, "backend": "cuda", "levers": {…}, "tokens": 3325, "seed": 1, "warmup": 1, "passes": 3, "idle_s": 0.2,
     "profile_ops": [12, 45] | null, "report": "out.json"}

Each pass is the NVTX range "prefill K" (K from 0), each op in it the range "op INDEX". With `profile_ops`, the profiler
runs during those ops of the last pass only. `report` receives what the process really ran: its levers, plan and kernels,
so that a profiler that dropped our settings is noticed, and each pass's wall in ns.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.backend import Engine
from engine.extras import require
from engine.levers import Levers
from engine.plan import Op, Plan
from harness.errors import HarnessError
from harness.files import to_json, write_atomic


def _nvtx() -> Any:
    return require("nvtx", "cuda", "a prefill under a profiler")


class RangeHook:
    """Marks each op as an NVTX range and lets the profiler run inside the chosen ones."""

    def __init__(self, profile_ops: frozenset[int] = frozenset()) -> None:
        self.profile_ops = profile_ops
        self.nvtx = _nvtx()

    def begin(self, op: Op) -> None:
        if op.index in self.profile_ops:
            from engine.cuda import profiler

            profiler.start()
        self.nvtx.push_range(f"op {op.index}")

    def end(self, op: Op) -> None:
        self.nvtx.pop_range()
        if op.index in self.profile_ops:
            from engine.cuda import profiler

            profiler.stop()


def spec_of(engine_model: str | None, levers: Levers, tokens: int, *, warmup: int = 1, passes: int = 3, seed: int = 1,
            idle_s: float = 0.2, backend: str = "cuda",
            profile_ops: list[int] | None = None) -> dict[str, Any]:  # fmt: skip
    """The spec of a child that runs this configuration (without its `report`).

    Raises EngineError where NVTX, which that child marks its ops with, is not installed.
    """
    _nvtx()
    return {"model": engine_model, "backend": backend, "levers": levers.to_dict(), "tokens": tokens, "seed": seed,
            "warmup": warmup, "passes": passes, "idle_s": idle_s, "profile_ops": profile_ops}  # fmt: skip


def check_report(report: dict[str, Any], levers: Levers, plan: Plan, profiler: str) -> None:
    """Raises HarnessError where the child ran other levers or other work than was asked for: a profiler may drop settings."""
    if report["levers"] != levers.to_dict() or report["macs"] != plan.macs:
        raise HarnessError(
            f"the process under {profiler} ran levers {report['levers']}, not {levers.to_dict()}; check what sets them."
        )


def run(spec: dict[str, Any], engine: Engine) -> dict[str, Any]:
    """Warm-up and passes on an open engine; returns the report."""
    tokens, passes = int(spec["tokens"]), int(spec["passes"])
    plan = engine.plan(tokens)
    random = np.random.default_rng(spec["seed"])
    chosen = frozenset(spec["profile_ops"] or ())
    walls: list[int] = []
    for k in range(-int(spec["warmup"]), passes):
        ids = random.integers(0, plan.geometry.vocab, tokens, dtype=np.int32)
        time.sleep(float(spec["idle_s"]))
        if k < 0:
            engine.prefill(ids)
            continue
        hook = RangeHook(chosen if k == passes - 1 else frozenset())
        start = time.perf_counter_ns()
        with _nvtx().annotate(f"prefill {k}"):
            engine.prefill(ids, hook=hook)
        walls.append(time.perf_counter_ns() - start)
    return {
        "levers": plan.levers.to_dict(),
        "ops": len(plan),
        "macs": plan.macs,
        "walls_ns": walls,
        "engine": engine.describe(),
    }


def main(path: str) -> None:
    """Opens the engine of the spec at `path`, runs it, writes the report."""
    from engine.models import resolve
    from engine.open import open_engine

    spec = json.loads(Path(path).read_text())
    model = resolve(spec["model"], gpu=spec["backend"] == "cuda")
    with open_engine(model, Levers.from_dict(spec["levers"]), backend=spec["backend"]) as engine:
        report = run(spec, engine)
    write_atomic(Path(spec["report"]), to_json(report))


if __name__ == "__main__":
    main(sys.argv[1])
