"""Engines that run in no time: their walls pass on a clock of their own, honest or not.

`setup` is what a config's `setup: simulated:setup` names. In a worker process the wall is slept for real; inside a test
`CLOCK` is virtual and shared by all arms, like the one machine that they would run on.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import numpy as np

VOCAB = 64


class VirtualClock:
    """Nanoseconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000
        self.virtual = True

    def ns(self) -> int:
        self.now_ns += 100  # reading a clock takes time, so that waiting for it ends
        return self.now_ns if self.virtual else time.perf_counter_ns()

    def pass_ms(self, ms: float) -> None:
        if self.virtual:
            self.now_ns += int(ms * 1e6)
        elif ms:
            time.sleep(ms / 1e3)

    def sleep(self, seconds: float) -> None:
        self.pass_ms(1e3 * seconds)


class Machine:
    """What all processes on one machine share: drift, slow noise, and how many forwards there have been."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.calls = 0
        self.slow = 0.0

    def noise(self, sd: float) -> float:
        """A factor: half white, half AR(1), 2 % spikes, drift."""
        self.calls += 1
        each = sd / 2**0.5
        self.slow = 0.9 * self.slow + self.rng.normal(0, each * (1 - 0.81) ** 0.5)
        spike = self.rng.uniform(0.05, 0.5) if self.rng.random() < 0.02 else 0.0
        return float(np.exp(self.rng.normal(0, each) + self.slow + 2e-5 * self.calls) * (1 + spike))


CLOCK = VirtualClock()
MACHINE = Machine()


def right_logits(ids: np.ndarray) -> np.ndarray:
    """float32 [VOCAB], a function of the ids alone."""
    seed = int.from_bytes(hashlib.sha256(ids.tobytes()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)


class Engine:
    """An engine whose forward takes `wall_ms / (1 + gain)`, and that may cheat in one way."""

    def __init__(self, wall_ms: float, gain: float, sd: float, cheat: str) -> None:
        self.wall_ms, self.gain, self.sd, self.cheat = wall_ms, gain, sd, cheat
        self.calls = 0
        self.first: np.ndarray | None = None
        self.pending_ms = 0.0
        self.buffer = np.zeros(VOCAB, np.float32)

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        self.calls += 1
        wall = self.wall_ms / (1 + self.gain) * (MACHINE.noise(self.sd) if self.sd else 1.0)
        logits = right_logits(ids)
        if self.cheat == "every second call 5 % slower":
            wall *= 1.05 if MACHINE.calls % 2 else 1.0
            MACHINE.calls += not self.sd
        elif self.cheat == "result reused" and self.calls > 2:
            assert self.first is not None
            CLOCK.pass_ms(wall / 10)
            return self.first
        elif self.cheat == "work skipped" or (self.cheat == "work skipped when timed" and self.calls > 2):
            CLOCK.pass_ms(wall * 0.86)
            return (logits * (1 + 0.05 * np.sin(np.arange(VOCAB)))).astype(np.float32)
        elif self.cheat == "zeros":
            CLOCK.pass_ms(wall / 10)
            return np.zeros(VOCAB, np.float32)
        elif self.cheat == "other stream, result late" and self.calls > 2:
            # The result arrives in the buffer after the call returned, and nobody waits for it.
            CLOCK.pass_ms(wall / 10)
            self.buffer = MACHINE.rng.standard_normal(VOCAB).astype(np.float32)  # what memory held
            if not CLOCK.virtual:
                threading.Timer(0.02, np.copyto, (self.buffer, logits)).start()
            return self.buffer
        elif self.cheat == "other stream, result right":
            CLOCK.pass_ms(wall / 10)
            self.pending_ms += 0.9 * wall
            return logits
        elif self.cheat == "not a number":
            logits[3] = np.nan
        elif self.cheat == "not deterministic":
            logits = logits + np.float32(1e-6) * MACHINE.rng.standard_normal(VOCAB).astype(np.float32)
        CLOCK.pass_ms(wall)
        if self.first is None:
            self.first = logits
        return logits

    def synchronize(self) -> None:
        CLOCK.pass_ms(self.pending_ms)
        self.pending_ms = 0.0

    def device_memory_bytes(self) -> int:
        return 123_000_000


def setup(
    *,
    levers: dict[str, Any],
    wall_ms: float = 20.0,
    gain: float = 0.0,
    sd: float = 0.0,
    cheat: str = "",
    real: bool = False,
) -> Engine:
    """The engine of a config; `real` makes its walls pass on the real clock."""
    CLOCK.virtual = not real
    return Engine(wall_ms, gain, sd, cheat)
