"""NumPy on several cores: row ranges and independent blocks run in a pool while BLAS itself stays on one thread.

NumPy releases the GIL inside its loops and inside BLAS, so plain threads scale. BLAS is held to one thread because its
own workers spin between calls and would take the cores from the element-wise ops.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController


def usable_cores() -> int:
    """Cores that this process may run on (its affinity, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Threads:
    """A pool of `count` workers and their scratch arrays. `count` 0 means every usable core."""

    def __init__(self, count: int = 0) -> None:
        self.count = count or usable_cores()
        self._blas = ThreadpoolController()
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix="cpu-engine") if self.count > 1 else None
        self._local = threading.local()

    def single_threaded_blas(self) -> Any:
        """A context in which a BLAS call uses the thread that makes it, and no other."""
        return self._blas.limit(limits=1, user_api="blas")

    def each(self, task: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
        """Runs `task(*a)` for every a, in any order; returns when all are done and re-raises the first error."""
        work = list(arguments)
        if self._pool is None or len(work) == 1:
            for a in work:
                task(*a)
        else:
            running = [self._pool.submit(task, *a) for a in work]
            wait(running)  # all of them, so that none still writes when an error leaves here
            for done in running:
                done.result()

    def rows(self, task: Callable[[int, int], None], total: int, at_most: int) -> None:
        """Runs `task(start, stop)` over [0, total) in equal ranges of at most `at_most` rows, as many for each worker.

        A total below `at_most` stays one range: handing out a few rows costs more than computing them.
        """
        ranges = 1 if total <= at_most else self.count * -(-total // (self.count * at_most))
        edges = [total * i // ranges for i in range(ranges + 1)]
        self.each(task, pairwise(edges))

    def scratch(self, rows: int, columns: int) -> np.ndarray:
        """The calling thread's float32 [rows, columns], contents undefined, valid until its next call."""
        held = getattr(self._local, "array", None)
        if held is None or held.size < rows * columns:
            held = self._local.array = np.empty(rows * columns, np.float32)
        return held[: rows * columns].reshape(rows, columns)

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.shutdown()

    def blas(self) -> list[dict[str, Any]]:
        """Name, version and architecture of every BLAS loaded, as threadpoolctl sees them."""
        return [
            {"name": lib["internal_api"], "version": lib["version"], "architecture": lib.get("architecture")}
            for lib in self._blas.info()
            if lib["user_api"] == "blas"
        ]
