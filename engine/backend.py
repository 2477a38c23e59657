"""What every backend offers: a prefill and a greedy decode over a plan's ops, each op announced to an optional hook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from engine.plan import Op, Plan


class OpHook(Protocol):
    """Hears of every op as its launches are submitted. A tracer tags launches with `op.index` between the two calls."""

    def begin(self, op: Op) -> None:
        """Called right before the op's first launch (CPU: before it computes)."""

    def end(self, op: Op) -> None:
        """Called right after the op's last launch was submitted (CPU: after it computed)."""


Progress = Callable[[str, int, int], None]
"""(what, done, of): called while weights load and kernels compile, so that a front end can show an ETA."""


@dataclass(frozen=True)
class Greedy:
    """A greedy continuation. `margins[i]` is the top-two logit gap at the step that chose `generated[i]`."""

    prompt_ids: list[int]
    generated: list[int]
    margins: list[float]
    prefill_logits: np.ndarray  # float32 [vocab], the prompt's last token


class Engine(Protocol):
    """A loaded model on one backend with one set of levers. Context manager: leaving it frees the device's memory."""

    name: str  # "cpu" or "cuda"

    def plan(self, tokens: int, *, all_logits: bool = False) -> Plan:
        """The plan that `prefill` would execute."""

    def prefill(self, ids: np.ndarray, *, hook: OpHook | None = None, all_logits: bool = False) -> np.ndarray:
        """Runs one forward from an empty cache, from submit to logits on the host.

        ids: int32 [T]. Returns float32 [vocab] (the last row's logits), or [T, vocab] with `all_logits`.
        Raises EngineError for an id outside the vocabulary or more rows than the context.
        """

    def greedy(self, ids: np.ndarray, count: int) -> Greedy:
        """Prefill of int32 [T], then `count` greedy tokens with a KV cache."""

    def device_memory_bytes(self) -> int:
        """Bytes of weights, caches and workspaces that this engine holds on its device (CPU: of the process)."""

    def describe(self) -> dict[str, object]:
        """What decides its speed beyond the levers: device, chosen GEMM algorithms, kernel hashes, library versions."""

    def close(self) -> None:
        """Frees everything. Idempotent."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *exc: object) -> None: ...
