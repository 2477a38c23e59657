"""Decomposes a prefill of the embedded engine, from a model's name to a decomposition with its launch table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from harness.attribution import provenance, roofline
from harness.attribution.decompose import Decomposition, decompose
from harness.attribution.measure import (
    DecomposeProtocol,
    Measurement,
    Regime,
    Report,
    TraceElsewhere,
    TraceOne,
    describe_protocol,
    measure,
)
from harness.config import load_protocol
from harness.errors import HarnessError
from harness.window.rules import DROPPING_BITS, QuietWindow, disturbances
from harness.window.sentinel import Sentinel, throttle_names

if TYPE_CHECKING:
    from engine.backend import Engine
    from engine.levers import Levers


@dataclass
class Result:
    """A decomposition, and the launches that its rows sum up."""

    decomposition: Decomposition
    launches: pd.DataFrame
    measurement: Measurement


def decompose_prefill(
    model: str | None,
    tokens: int,
    levers: Levers,
    protocol: DecomposeProtocol,
    *,
    backend: Literal["auto", "cpu", "cuda"] = "auto",
    regime: Regime | None = None,
    runs: int | None = None,
    reference: Decomposition | Mapping[str, float] | None = None,
    one_window: bool = True,
    with_ceilings: bool = True,
    ceilings_path: Path | None = None,
    source: str = "auto",
    report: Report | None = None,
) -> Result:
    """Opens the model on a backend ("auto": CUDA where there is a GPU), measures it as the protocol says, attributes it.

    source: host (CPU), cupti (CUDA, in process), nsys (CUDA, in a process of its own), auto for the first that fits.
    Raises HarnessError or EngineError: no such model, no GPU, a token count beyond the context.
    """
    from engine.models import resolve
    from engine.open import choose, open_engine

    chosen = choose(backend)
    regime = regime or protocol.regime
    tracer = _tracer(source, chosen, model, levers, regime, protocol)
    loaded = resolve(model, gpu=chosen == "cuda", progress=report)
    with open_engine(loaded, levers, backend=chosen, progress=report) as engine:
        return decompose_engine(
            engine, loaded, tokens, protocol, tracer=tracer,
            regime=regime, runs=runs, reference=reference, one_window=one_window, with_ceilings=with_ceilings,
            ceilings_path=ceilings_path, report=report,
        )  # fmt: skip


def decompose_engine(
    engine: Engine,
    model: Any,
    tokens: int,
    protocol: DecomposeProtocol,
    *,
    tracer: TraceOne | TraceElsewhere | None = None,
    regime: Regime | None = None,
    runs: int | None = None,
    reference: Decomposition | Mapping[str, float] | None = None,
    one_window: bool = True,
    with_ceilings: bool = True,
    ceilings_path: Path | None = None,
    report: Report | None = None,
) -> Result:
    """The same on an open engine; `model` is what it was opened with. A tracer of another process closes the engine."""
    regime = regime or protocol.regime
    part = protocol.of(engine.name)
    plan = engine.plan(tokens)  # too many tokens are an error before anything is measured
    ceilings = None
    if ceilings_path is not None:
        ceilings = roofline.load_ceilings(ceilings_path, regime, "")
        if ceilings.backend != engine.name:
            raise HarnessError(
                f"{ceilings_path} has ceilings of the {ceilings.backend} backend, and the engine runs on {engine.name}; measure them there."
            )
    elif with_ceilings:
        ceilings = roofline.ceilings_for(engine.name, regime, plan=plan, threads=_threads(engine), report=report)

    tracer = tracer or _tracer("auto", engine.name, None, None, regime, protocol)
    with _Watch(gpu=engine.name == "cuda", required=part.window == "required") as watch:
        measured = measure(engine, tokens, protocol, trace=tracer, regime=regime, runs=runs, report=report)
    state = watch.gpu
    facts = _provenance(
        engine.name, model, state, measured, describe_protocol(protocol, regime, len(measured.walls_ns), engine.name)
    )

    def attribute() -> Decomposition:
        return decompose(
            measured.trace.launches,
            wall_ns=measured.trace.wall_ns,
            plan=plan,
            untraced_wall_ns=measured.walls_ns,
            reference=reference,
            one_window=one_window,
            ceilings=ceilings,
            window=watch.verdict(),
            passes=measured.passes,
            min_passes=part.passes,
            provenance=facts,
            model=model.name,
            source=measured.trace.source,
            device=str(state.get("gpu") or measured.facts["engine"].get("device") or engine.name),
            regime=regime,
            notes=[*([model.note] if getattr(model, "note", "") else []), *measured.trace.notes],
            more_checks=[measured.results],
        )

    result = attribute()
    if ceilings and ceilings_path is None and not result.check("possibility").ok:
        # A ceiling that was measured in a bad moment is beaten by honest work: measure again, and only then believe it.
        raised = roofline.ceilings_for(
            engine.name, regime, plan=plan, threads=_threads(engine), report=report, fresh=True
        )
        if raised != ceilings:
            ceilings = raised
            result = attribute()
    return Result(result, measured.trace.launches, measured)


def _threads(engine: Engine) -> int:
    """The CPU backend's threads lever; 0 elsewhere."""
    levers = getattr(engine, "levers", None)
    return levers.cpu_threads if levers is not None and engine.name == "cpu" else 0


def _tracer(
    source: str, backend: str, model: str | None, levers: Levers | None, regime: Regime, protocol: DecomposeProtocol
) -> TraceOne | TraceElsewhere:
    """The source that traces a backend. Raises HarnessError where they do not go together."""
    if source == "auto":
        source = "cupti" if backend == "cuda" else "host"
    if source == "host" and backend == "cpu":
        from harness.sources import host

        return host.trace_prefill
    if source == "cupti" and backend == "cuda":
        from harness.sources import cupti

        cupti.check_installed()  # before anything is measured
        return cupti.trace_prefill
    if source == "nsys" and backend == "cuda":
        if regime != "burst" or levers is None:
            raise HarnessError("source 'nsys' traces the burst regime; use --regime burst, or --source cupti.")
        from harness.sources.nsys_driver import find_nsys
        from harness.sources.nsys_prefill import trace_passes

        find_nsys()  # before anything is measured
        wanted = levers
        return TraceElsewhere(
            lambda plan, passes, seed: trace_passes(
                model,
                wanted,
                plan,
                warmup=protocol.warmup + protocol.cuda.runs,
                passes=passes,
                idle_s=protocol.idle_s,
                seed=seed,
            )
        )
    fits = "host" if backend == "cpu" else "cupti or nsys"
    raise HarnessError(f"source {source!r} cannot trace the {backend} backend; use --source {fits}.")


def _provenance(
    backend: str, model: Any, state: Mapping[str, Any], measured: Measurement, protocol: dict[str, Any]
) -> dict[str, Any]:
    described = {k: v for k, v in measured.facts["engine"].items() if v not in ({}, [], "", None)}
    facts: dict[str, Any] = {"backend": backend}
    if backend == "cpu":
        facts |= {"cpu": described.get("device"), "threads": described.get("threads")}
    facts |= state
    facts |= {
        "commit": provenance.commit(),
        "model_title": model.title,
        "model_sha256": model.sha256(),
        "synthetic": bool(model.synthetic),
        "source": measured.trace.source,
        "protocol": protocol,
        "token_seed": measured.seed,
        "device_memory_bytes": measured.facts["device_memory_bytes"],
        "engine": described,
    }
    return facts


UTILIZATION_PERIOD_S = 1.0
"""NVML averages utilization over at most this long (nvmlDeviceGetUtilizationRates: between 1/6 s and 1 s)."""


class _Watch:
    """The sentinel around the measurement: was the window quiet, and the GPU's state under load."""

    def __init__(self, *, gpu: bool, required: bool) -> None:
        self.required = required
        # Ten samples a second: more would take host time from the launches that are timed.
        self.sentinel = Sentinel(0 if gpu else None, interval_s=0.1)
        self.rules = load_protocol("quiet-window", QuietWindow)
        self.disturbed: list[str] = []
        self.gpu: dict[str, Any] = {}
        self.began = 0

    def __enter__(self) -> _Watch:
        self.sentinel.__enter__()
        self._let_our_own_work_pass()
        # The host clock starts here, so that what loaded the model is not held against the window.
        self.disturbed = disturbances(self.sentinel.snapshot() | {"host": {"foreign": 0.0}}, self.rules, idle=True)
        self.began = time.perf_counter_ns()
        return self

    def _let_our_own_work_pass(self) -> None:
        """NVML's utilization covers up to the last second, in which we loaded weights and measured ceilings."""
        until = time.monotonic() + 2 * UTILIZATION_PERIOD_S
        while self.sentinel.gpu is not None and time.monotonic() < until:
            if (self.sentinel.gpu.utilization() or 0.0) <= self.rules.gpu_utilization:
                return
            time.sleep(UTILIZATION_PERIOD_S / 5)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        during = self.sentinel.during(self.began, time.perf_counter_ns())
        after = disturbances(self.sentinel.snapshot(), self.rules, idle=False)
        self.disturbed += [found for found in after if found not in self.disturbed]
        if bad := DROPPING_BITS & set(throttle_names(during.get("throttle"))):
            self.disturbed.append(f"the GPU throttled: {', '.join(sorted(bad))}")
        self.sentinel.__exit__(kind, error, tb)
        if self.sentinel.gpu is not None:
            self.gpu = provenance.gpu_state()
            self.gpu["clocks"] = self.gpu.get("clocks", {}) | {"mean_sm_mhz": during.get("sm_mhz")}
            self.gpu |= {"mean_power_w": during.get("power_w"), "throttle": throttle_names(during.get("throttle"))}

    def verdict(self) -> dict[str, Any]:
        """As `checks.window` takes it."""
        detail = "; ".join(self.disturbed) or "quiet"
        if self.sentinel.unseen:
            detail += f" ({'; '.join(self.sentinel.unseen)})"
        return {"quiet": not self.disturbed, "required": self.required, "detail": detail}
