"""The NumPy backend: executes a plan op by op. Slow and obvious: the oracle, and the backend where there is no GPU."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import psutil

from engine.backend import Greedy, OpHook, Progress
from engine.cpu.ops import OPS
from engine.cpu.state import Buffers, Cache, Forward, rope_table
from engine.cpu.threads import Threads
from engine.cpu.weights import Weights
from engine.decode import checked_ids, continue_greedily, positions_of
from engine.errors import EngineError
from engine.levers import Levers
from engine.plan import Plan, build_plan
from engine.tensors import Model, require_runnable


class CpuEngine:
    """A model in float32 on the CPU (see `engine.backend.Engine`)."""

    name = "cpu"

    def __init__(self, model: Model, levers: Levers, progress: Progress | None = None) -> None:
        require_runnable(model)
        self.geometry, self.levers, self.model_name = model.geometry, levers, model.name
        self.weights: Weights | None = Weights(model, progress)
        self.threads = Threads(levers.cpu_threads)
        self._buffers = Buffers()
        self._cache: Cache | None = None

    def plan(self, tokens: int, *, all_logits: bool = False) -> Plan:
        """The plan that `prefill` would execute. Raises EngineError where the rows do not fit the context."""
        return build_plan(self.geometry, tokens, self.levers, precision="f32", all_logits=all_logits)

    def prefill(self, ids: np.ndarray, *, hook: OpHook | None = None, all_logits: bool = False) -> np.ndarray:
        """One forward of int32 [T] from an empty cache: float32 [vocab], or [T, vocab] with `all_logits`.

        Raises EngineError for an id outside the vocabulary or more rows than the context.
        """
        ids = checked_ids(ids, self.geometry.vocab, self.model_name)
        plan = self.plan(len(ids), all_logits=all_logits)
        self._reserve(len(ids))
        logits = self._forward(plan, ids, hook)
        return logits if all_logits else logits[0]

    def greedy(self, ids: np.ndarray, count: int) -> Greedy:
        """Prefill of int32 [T], then `count` greedy tokens with a KV cache. Raises EngineError as `prefill`."""
        ids = checked_ids(ids, self.geometry.vocab, self.model_name)
        positions = positions_of(len(ids), count)
        build_plan(self.geometry, positions, self.levers, precision="f32")  # fits the context, or says so first
        self._reserve(positions)

        def forward(token: np.ndarray, past: int) -> np.ndarray:
            plan = build_plan(self.geometry, 1, self.levers, precision="f32", past=past)
            return self._forward(plan, token, None)[0]

        return continue_greedily(ids, self._forward(self.plan(len(ids)), ids, None)[0], count, forward)

    def _forward(self, plan: Plan, ids: np.ndarray, hook: OpHook | None) -> np.ndarray:
        """Executes the plan's ops after `plan.past` cached rows: float32 [rows of the head, vocab]."""
        if self.weights is None or self._cache is None:
            raise EngineError(f"the engine of {self.model_name} is closed; open it again.")
        rope = rope_table(self.geometry, plan.past, plan.tokens)
        f = Forward(self.weights, self.levers, self.threads, self._buffers, self._cache, plan.past, ids, rope)
        with self.threads.single_threaded_blas():
            for op in plan:
                if hook:
                    hook.begin(op)
                OPS[op.kind](f, op)
                if hook:
                    hook.end(op)
        if plan.all_logits:
            self._buffers.drop("output")  # T × vocab floats are not worth holding
        return f.logits

    def _reserve(self, rows: int) -> None:
        """An empty cache of at least `rows` rows; an old one that is large enough is used again."""
        if self._cache is None or self._cache.capacity < rows:
            self._cache = None  # free the old one before the new one is there
            self._cache = Cache(self.geometry, rows)

    def device_memory_bytes(self) -> int:
        """Resident set of this process, bytes."""
        return int(psutil.Process().memory_info().rss)

    def describe(self) -> dict[str, object]:
        """CPU, threads and libraries. There are no kernels of ours here, so no kernel hashes."""
        return {
            "device": cpu_name(), "threads": self.threads.count, "attention_block": self.levers.cpu_attention_block,
            "numpy": np.__version__, "blas": self.threads.blas(), "python": platform.python_version(),
            "precision": "f32", "kernels": {},
        }  # fmt: skip

    def close(self) -> None:
        """Frees weights, cache and buffers and ends the threads. Idempotent."""
        self.weights = self._cache = None
        self._buffers = Buffers()
        self.threads.close()

    def __enter__(self) -> CpuEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def cpu_name() -> str:
    """The CPU's model name as the kernel reports it, or the machine type where it does not."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
