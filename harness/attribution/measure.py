"""One engine, one token count: untraced walls in a regime, then traced passes of their own.

Every forward gets fresh random tokens; every result's logits are hashed, so a forward that was skipped, or whose result
was reused, is caught by the `results` check.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from harness.attribution.checks import find_outliers, overhead_limit
from harness.attribution.decomposition import Check, Pass
from harness.config import Strict
from harness.launches import union_ns
from harness.sources.trace import Trace

if TYPE_CHECKING:
    from engine.backend import Engine
    from engine.plan import Plan

Regime = Literal["burst", "sustained"]
Report = Callable[[str, int, int], None]
TraceOne = Callable[["Engine", np.ndarray], Trace]
"""(engine, int32 [T]) → one traced prefill in this process."""


@dataclass(frozen=True)
class TraceElsewhere:
    """Traced passes in another process: run(plan, passes, seed) → one Trace per pass."""

    run: Callable[[Plan, int, int], list[Trace]]


class BackendProtocol(Strict):
    """What one backend's decomposition needs."""

    runs: int
    passes: int
    window: Literal["required", "reported"]
    warmup_tokens: int | None = None
    """Tokens of a warm-up, at most; nothing: as many as the timed forwards have."""


class DecomposeProtocol(Strict):
    """protocols/decompose.yaml."""

    regime: Regime
    idle_s: float
    load_s: float
    warmup: int
    extra_passes: int
    cuda: BackendProtocol
    cpu: BackendProtocol

    def of(self, backend: str) -> BackendProtocol:
        """The part for a backend."""
        return self.cuda if backend == "cuda" else self.cpu


@dataclass
class Measurement:
    """What was run. `table` is the index of the traced pass that the decomposition describes."""

    walls_ns: list[int]
    traces: list[Trace]
    passes: list[Pass]
    table: int
    results: Check
    seed: int
    facts: dict[str, Any]
    """The engine's memory and own description, once it had run."""

    @property
    def trace(self) -> Trace:
        """The traced pass of median wall."""
        return self.traces[self.table]


class _Forwards:
    """Prefills of fresh random tokens in one regime, their results hashed."""

    def __init__(self, engine: Engine, tokens: int, protocol: DecomposeProtocol, regime: Regime, seed: int) -> None:
        self.engine, self.tokens, self.protocol, self.regime = engine, tokens, protocol, regime
        self.seed = seed
        self.vocab = engine.plan(tokens).geometry.vocab
        self.rng = np.random.default_rng(seed)
        self.hashes: list[str] = []
        self.broken: list[str] = []

    def ids(self) -> np.ndarray:
        return self.rng.integers(0, self.vocab, self.tokens, dtype=np.int32)

    def settle(self) -> None:
        """Burst: idle before a forward. Sustained: nothing, the load goes on."""
        if self.regime == "burst":
            time.sleep(self.protocol.idle_s)

    def load(self) -> None:
        """Sustained: forwards back to back until the load has lasted."""
        until = time.perf_counter() + self.protocol.load_s
        while self.regime == "sustained" and time.perf_counter() < until:
            self.engine.prefill(self.ids())

    def timed(self) -> int:
        """ns from submit to logits on the host."""
        ids = self.ids()
        self.settle()
        start = time.perf_counter_ns()
        logits = self.engine.prefill(ids)
        wall = time.perf_counter_ns() - start
        self.judge(logits)
        return wall

    def judge(self, logits: np.ndarray) -> None:
        number = len(self.hashes) + 1
        if not np.isfinite(logits).all():
            self.broken.append(f"forward {number} has logits that are not finite")
        elif float(np.ptp(logits)) == 0.0:
            self.broken.append(f"forward {number} has constant logits")
        digest = hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]
        if digest in self.hashes:
            self.broken.append(f"forward {number} returned the logits of forward {self.hashes.index(digest) + 1}")
        self.hashes.append(digest)

    def check(self) -> Check:
        detail = (
            "; ".join(self.broken[:3])
            or f"{len(self.hashes)} forwards of fresh tokens, logits finite and all different"
        )
        return Check(name="results", ok=not self.broken, value=float(len(self.broken)), limit=0.0, detail=detail)


def measure(
    engine: Engine,
    tokens: int,
    protocol: DecomposeProtocol,
    *,
    trace: TraceOne | TraceElsewhere,
    regime: Regime | None = None,
    runs: int | None = None,
    report: Report | None = None,
) -> Measurement:
    """Warm-up, untraced walls, then traced passes, as the protocol says.

    trace: the source's `trace_prefill`; a pass with outlier launches, or whose wall lies outside what the untraced ones
    allow, stays in `passes`, and another pass is made (at most `extra_passes` more). Or a `TraceElsewhere`, for which this
    engine is closed first: both would hold the weights. The table is the pass of median wall among the clean ones, or
    among all where none is clean.
    """
    regime = regime or protocol.regime
    part = protocol.of(engine.name)
    runs = runs or part.runs
    forwards = _Forwards(engine, tokens, protocol, regime, secrets.randbits(32))
    plan = engine.plan(tokens)
    for i in range(protocol.warmup):
        _tell(report, "warming up", i, protocol.warmup)
        engine.prefill(forwards.ids()[: part.warmup_tokens])
    _tell(report, "warming up", protocol.warmup, protocol.warmup)
    forwards.load()
    walls = []
    for i in range(runs):
        _tell(report, "timing forwards", i, runs)
        walls.append(forwards.timed())
    _tell(report, "timing forwards", runs, runs)
    facts = {"device_memory_bytes": engine.device_memory_bytes(), "engine": engine.describe()}

    traces: list[Trace] = []
    passes: list[Pass] = []
    if isinstance(trace, TraceElsewhere):
        _tell(report, "tracing in a process of its own", 0, 1)
        engine.close()
        for traced in trace.run(plan, part.passes, forwards.seed):
            traces.append(traced)
            passes.append(_pass(traced, plan))
        _tell(report, "tracing in a process of its own", 1, 1)
    else:
        if engine.name == "cuda":
            trace(engine, forwards.ids())  # a tracer's first pass allocates its buffers
        wanted, limit = part.passes, part.passes + protocol.extra_passes
        while len(traces) < wanted:
            _tell(report, "tracing forwards", len(traces), wanted)
            ids = forwards.ids()
            forwards.load()  # before every pass: reading the last one's records let the device rest
            forwards.settle()
            traces.append(trace(engine, ids))
            passes.append(_pass(traces[-1], plan))
            if wanted < limit and not _clean(passes[-1], walls, traces[-1].source):
                wanted += 1
        _tell(report, "tracing forwards", wanted, wanted)
    table = _median_index(passes, walls, traces[0].source)
    passes[table].table = True
    return Measurement(walls, traces, passes, table, forwards.check(), forwards.seed, facts)


def _pass(traced: Trace, plan: Plan) -> Pass:
    table = traced.launches
    duration = (table["end_ns"] - table["start_ns"]).groupby(table["class"].fillna("").replace("", "other")).sum()
    return Pass(
        wall_ms=traced.wall_ns / 1e6,
        busy_ms=union_ns(traced.launches["start_ns"], traced.launches["end_ns"]) / 1e6,
        launches=len(traced.launches),
        outliers=find_outliers(traced.launches, plan)[:10],
        class_ms={str(cls): float(ns) / 1e6 for cls, ns in duration.items() if ns},
    )


def _clean(traced: Pass, walls_ns: list[int], source: str) -> bool:
    """No outlier launch, and a wall that the untraced ones allow."""
    walls = [w / 1e6 for w in walls_ns]
    return not traced.outliers and abs(traced.wall_ms / median(walls) - 1) <= overhead_limit(walls, source)


def _median_index(passes: list[Pass], walls_ns: list[int], source: str) -> int:
    """Index of the (lower) median wall among the clean passes, else among all."""
    chosen = [i for i, p in enumerate(passes) if _clean(p, walls_ns, source)] or list(range(len(passes)))
    chosen.sort(key=lambda i: passes[i].wall_ms)
    return chosen[(len(chosen) - 1) // 2]


def _tell(report: Report | None, what: str, done: int, of: int) -> None:
    if report:
        report(what, done, of)


def describe_protocol(protocol: DecomposeProtocol, regime: str, runs: int, backend: str) -> dict[str, Any]:
    """The protocol's part of the provenance."""
    return {
        "name": "decompose", "regime": regime, "idle_s": protocol.idle_s, "load_s": protocol.load_s,
        "warmup": protocol.warmup, "runs": runs, "passes": protocol.of(backend).passes,
    }  # fmt: skip
