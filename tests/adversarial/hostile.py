"""Python engines that misbehave as processes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from typing import Any

import numpy as np


class Hostile:
    """Behaves for `after` forwards, then does `what`."""

    def __init__(self, what: str, after: int) -> None:
        self.what, self.after, self.calls = what, after, 0

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        self.calls += 1
        if self.calls > self.after:
            self.act()
        return np.random.default_rng(int(ids.sum())).standard_normal(8).astype(np.float32)

    def act(self) -> None:
        print("about to misbehave:", self.what, file=sys.stderr, flush=True)
        if self.what == "exit":
            os._exit(7)
        elif self.what == "segfault":
            ctypes.string_at(0)
        elif self.what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.what == "hang":
            time.sleep(3600)
        elif self.what == "out of memory":
            raise MemoryError("cannot allocate 18.4 GB")
        elif self.what == "raise":
            raise RuntimeError("launch failed: too much shared memory")
        elif self.what == "garbage on the pipe":
            os.write(int(sys.argv[2]), b"\x00\xff not json\n")
        elif self.what == "garbage on stdout":
            print("\x00\xff{not json", flush=True)


def setup(*, levers: dict[str, Any], what: str, after: int = 0) -> Hostile:
    return Hostile(what, after)


def no_engine(*, levers: dict[str, Any]) -> int:
    return 3
