"""One arm inside its own process: opens the engine, times halves, runs gates, traces. `worker` puts a pipe around it."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from harness.ab import schedule
from harness.ab.engines import Arm, CommandArm, EmbeddedArm, open_arm
from harness.errors import HarnessError

Clock = Callable[[], int]
LATE_S = 0.05
"""How long the last result of a half is watched for a change after its clock stopped."""


class Session:
    """One opened arm. `clock` gives nanoseconds; `sleep` takes seconds: a simulated engine brings its own of both."""

    def __init__(
        self,
        arm: dict[str, Any],
        directory: Path,
        *,
        clock: Clock = time.perf_counter_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.arm, self.directory, self.clock, self.sleep = arm, directory, clock, sleep
        self.born = clock()
        self.boot = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.target: Arm = open_arm(arm, directory)
        self.spin_us = (arm["plant"] or {}).get("spin_us") or 0.0

    def open(self) -> dict[str, Any]:
        """What was opened: description, the plan's ops where there is a plan, memory."""
        return {
            "boot": self.boot,
            "pid": os.getpid(),
            "described": self.target.describe(),
            "plan": self._plan(),
            "memory": self.target.memory_bytes(),
        }

    def _plan(self) -> list[dict[str, Any]] | None:
        if not isinstance(self.target, EmbeddedArm):
            return None
        return [
            {"name": op.name, "kind": op.kind, "class": op.cls, "m": op.m, "n": op.n, "k": op.k, "macs": op.macs}
            for op in self.target.engine.plan(self.arm["tokens"])
        ]

    def half(
        self,
        *,
        seed: int,
        pair: int,
        inner: int,
        warmup: int,
        regime: str,
        idle_s: float,
        load_s: float,
        logits: str | None = None,
    ) -> dict[str, Any]:
        """One half of a pair: warm-up, then `inner` timed forwards on fresh tokens, in the regime.

        logits: a path for the forwards' logits, float32 [inner, vocab] as .npy, to be compared with the other arm's.
        """
        if isinstance(self.target, CommandArm):
            return self._command_half(self.target, seed, pair, inner, warmup, regime, idle_s, load_s)
        target, tokens = self.target, self.arm["tokens"]
        ids = [
            schedule.token_ids(schedule.tokens_seed(seed, pair, k), tokens, target.vocab) for k in range(inner + warmup)
        ]
        for extra in ids[inner:]:
            target.forward(extra)
        target.synchronize()
        target.synchronize()  # the first one may load code; every later one costs what it always costs
        if regime == "sustained":
            until, k = self.clock() + int(load_s * 1e9), 0
            while self.clock() < until:
                target.forward(ids[inner + k % warmup])
                k += 1
            target.synchronize()
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        forwards: list[dict[str, Any]] = []
        kept: list[np.ndarray] = []
        late: list[int] = []
        live: np.ndarray | None = None
        for k in range(inner):
            if regime == "burst":
                self.sleep(idle_s)
            if live is not None and not _same(live, kept[-1]):
                late.append(k - 1)
            start = self.clock()
            live = target.forward(ids[k])
            if self.spin_us:
                self._spin(self.spin_us)
            end = self.clock()
            if live is not None:
                live = np.asarray(live)
                kept.append(live.copy())
            waiting = self.clock()
            target.synchronize()
            residue = self.clock() - waiting
            forwards.append(
                {"wall_ms": (end - start) / 1e6, "start_ns": start, "end_ns": end, "residue_ms": residue / 1e6}
            )
        self.sleep(LATE_S)
        if live is not None and not _same(live, kept[-1]):
            late.append(inner - 1)
        if logits and len(kept) == inner:
            np.save(logits, np.stack(kept))
        return {
            "at": at,
            "forwards": forwards,
            "logits": [logits_hash(x) for x in kept],
            "broken": _broken(kept) + [f"forward {k} changed after the clock stopped" for k in late],
            "described": target.describe(),
            "memory": target.memory_bytes(),
            "process_s": (self.clock() - self.born) / 1e9,
        }

    def _spin(self, microseconds: float) -> None:
        """A planted slowdown: the host does nothing useful for a known time, inside the timed forward."""
        until = self.clock() + int(microseconds * 1e3)
        while self.clock() < until:
            pass

    def _command_half(
        self,
        target: CommandArm,
        seed: int,
        pair: int,
        inner: int,
        warmup: int,
        regime: str,
        idle_s: float,
        load_s: float,
    ) -> dict[str, Any]:
        """The same for a command. One that reports a list of inner runs runs once, another one `inner` times.

        A command warms up inside its own process (or pays for not doing so, as its users do), so `warmup` only sees to
        it that its files are in the page cache before the first pair.
        """
        if pair == 0:
            for k in range(warmup):
                target.run(schedule.tokens_seed(seed, pair, inner + k))
        until = self.clock() + int(load_s * 1e9)
        while regime == "sustained" and self.clock() < until:
            target.run(schedule.tokens_seed(seed, pair, inner))
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        forwards: list[dict[str, Any]] = []
        while len(forwards) < inner:
            if regime == "burst":
                self.sleep(idle_s)
            walls, start, end = target.run(schedule.tokens_seed(seed, pair, len(forwards)))
            if self.spin_us:
                self._spin(self.spin_us)
                walls = [wall + self.spin_us / 1e3 for wall in walls]
            forwards += [{"wall_ms": w, "start_ns": start, "end_ns": end, "residue_ms": 0.0} for w in walls]
        return {"at": at, "forwards": forwards, "logits": [], "broken": [], "described": target.describe(), "memory": target.memory_bytes(),
                "process_s": (self.clock() - self.born) / 1e9}  # fmt: skip

    def logits(self, *, seed: int, tokens: int, path: str) -> dict[str, Any]:
        """One forward of `tokens` random ids; its logits go to `path` (.npy). {"there": False} where it gives none."""
        if isinstance(self.target, CommandArm):
            return {"there": False}
        result = self.target.forward(schedule.token_ids(seed, tokens, self.target.vocab))
        self.target.synchronize()
        if result is None:
            return {"there": False}
        np.save(path, np.asarray(result, dtype=np.float32))
        return {"there": True, "hash": logits_hash(np.asarray(result)), "described": self.target.describe()}

    def greedy(self, *, prompt: list[int] | None, count: int, path: str) -> dict[str, Any]:
        """A greedy continuation; the prompt's last logits go to `path`. {"there": False} where the arm has no greedy."""
        engine = getattr(self.target, "engine", None) or getattr(self.target, "target", None)
        run = getattr(engine, "greedy", None)
        if run is None or isinstance(self.target, CommandArm):
            return {"there": False}
        if prompt is None:
            prompt = self._prompt()
        found = run(np.asarray(prompt, dtype=np.int32), count)
        np.save(path, np.asarray(found.prefill_logits, dtype=np.float32))
        return {"there": True, "prompt": list(map(int, prompt)), "generated": list(map(int, found.generated)),
                "margins": list(map(float, found.margins))}  # fmt: skip

    def _prompt(self) -> list[int]:
        """Text in the model's own vocabulary; random ids where it has none."""
        assert not isinstance(self.target, CommandArm)
        tokenizer = self.target.model.tokenizer() if isinstance(self.target, EmbeddedArm) else None
        if tokenizer is None:
            return [int(i) for i in schedule.token_ids(1, 32, self.target.vocab)]
        return [int(i) for i in tokenizer.encode(PROMPT)]

    def command_gate(self, *, gate: dict[str, Any], seed: int, path: str) -> dict[str, Any]:
        """Runs a declared gate of a command: exit status, the hash and head of its stdout, its file copied to `path`."""
        assert isinstance(self.target, CommandArm)
        status, stdout = self.target.process(tuple(gate["argv"]), seed, check=gate["compare"] != "exit")
        if gate["file"]:
            source = self.directory / (self.arm["engine"]["cwd"] or ".") / gate["file"]
            try:
                np.save(path, np.load(source))
            except (OSError, ValueError) as error:
                raise HarnessError(f"gate file {source} is no readable .npy ({error}); correct the gate.") from None
        return {"status": status, "stdout": stdout[-200_000:]}

    def traced(self, *, passes: int, regime: str, idle_s: float, load_s: float) -> dict[str, Any]:
        """A decomposition with `passes` traced passes, and the launch names of each op of its table."""
        if not isinstance(self.target, EmbeddedArm):
            return {
                "there": False,
                "why": f"a {self.target.kind} engine has no plan, so no launch of it is known to be a lever's",
            }
        from harness.ab.traced import trace_arm

        return trace_arm(self.target, self.arm["tokens"], passes=passes, regime=regime, idle_s=idle_s, load_s=load_s)

    def floor(self, *, regime: str, fresh: bool = False) -> dict[str, Any]:
        """The least wall (ms) that the measured compute ceiling allows for the plan's MACs; {"there": False} without a plan.

        `fresh`: the ceiling is measured again first, and the higher one counts.
        """
        if not isinstance(self.target, EmbeddedArm):
            return _named_floor(self.arm, self.directory, regime, fresh)
        from harness.attribution.roofline import ceilings_for

        engine = self.target.engine
        plan = engine.plan(self.arm["tokens"])
        ceilings = ceilings_for(engine.name, regime, plan=plan, fresh=fresh)
        return {
            "there": True,
            "floor_ms": 2e3 * plan.macs / (ceilings.tflop_per_s * 1e12),
            "ceilings": asdict(ceilings),
        }

    def close(self) -> dict[str, Any]:
        """Frees the engine."""
        self.target.close()
        return {}


PROMPT = "The capital of France is"


def _named_floor(arm: dict[str, Any], directory: Path, regime: str, fresh: bool) -> dict[str, Any]:
    """For an engine of the user's that names its model: the same floor from the model's geometry."""
    if not arm["model"]:
        return {"there": False}
    from engine.errors import ModelError
    from engine.levers import Levers
    from engine.models import resolve
    from engine.open import choose
    from engine.plan import build_plan
    from harness.ab.engines import model_path
    from harness.attribution.roofline import ceilings_for

    backend = choose()
    try:
        geometry = resolve(model_path(arm["model"], directory), gpu=backend == "cuda").geometry
    except ModelError as error:  # a name that only the user's engine knows
        return {"there": False, "why": f"no floor for the wall: {error}"}
    plan = build_plan(geometry, arm["tokens"], Levers(), precision="f16" if backend == "cuda" else "f32")
    ceilings = ceilings_for(backend, regime, plan=plan, fresh=fresh)
    return {"there": True, "floor_ms": 2e3 * plan.macs / (ceilings.tflop_per_s * 1e12), "ceilings": asdict(ceilings)}


def logits_hash(logits: np.ndarray) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


def _broken(results: list[np.ndarray]) -> list[str]:
    """What is wrong with a half's results on their face: not finite, constant, or the same for different tokens."""
    found: list[str] = []
    seen: dict[str, int] = {}
    for k, result in enumerate(results):
        if not np.isfinite(result).all():
            found.append(f"forward {k} has logits that are not finite")
        elif result.size > 1 and np.ptp(result) == 0:
            found.append(f"forward {k} has constant logits ({result.flat[0]:g})")
        elif (digest := logits_hash(result)) in seen:
            found.append(f"forward {k} repeats the logits of forward {seen[digest]} for other tokens")
        seen.setdefault(logits_hash(result), k)
    return found
