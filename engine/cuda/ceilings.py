"""How fast this GPU can do what a prefill is made of: f16 GEMM through cublasLt, and copies and reads of device memory.

Random operands (a GEMM on zeros draws less power and runs faster than any real one), events around batches of launches,
the best batch counts. `idle_s` lets a power-capped GPU rest first (burst); `load_s` keeps it busy first (sustained).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

from engine.cuda import jit
from engine.cuda.arena import Arena
from engine.cuda.cublaslt import CublasLt
from engine.cuda.weights import fill_random_f16
from engine.driver import check_driver

BATCH_S = 2e-3
"""About this long is one timed batch: long against an event's resolution, short against a clock step."""
BATCHES = 9


def identity() -> dict[str, Any]:
    """What makes another machine: device name, multiprocessors, CUDA driver and cublasLt versions.

    Raises EngineError where the driver is too old for these libraries.
    """
    check_driver()
    from cupy.cuda import runtime
    from nvmath.bindings import cublasLt

    properties = runtime.getDeviceProperties(runtime.getDevice())
    return {
        "device": properties["name"].decode(),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "cuda_driver": int(runtime.driverGetVersion()),
        "cublaslt": int(cublasLt.get_version()),
    }


def gemm_seconds(m: int, n: int, k: int, *, idle_s: float = 0.0, load_s: float = 0.0) -> float:
    """Seconds of y[m, n] = x[m, k] · w[n, k]ᵀ in f16 with f32 sums, by the best algorithm that cublasLt offers."""
    from cupy.cuda import Stream

    stream = Stream(non_blocking=True)
    arena = Arena(f"a GEMM of {m} × {n} × {k}", {"x": 2 * m * k, "w": 2 * n * k, "y": 2 * m * n})
    lt = CublasLt(stream.ptr, "timed")
    try:
        fill_random_f16(arena["x"], m * k, 1, stream.ptr)
        fill_random_f16(arena["w"], n * k, 2, stream.ptr)
        return _best(lt.gemm(m, n, k, arena["x"], arena["w"], arena["y"], "f16"), stream, idle_s, load_s)
    finally:
        stream.synchronize()
        lt.close()
        arena.close()


def copy_seconds(size: int, *, idle_s: float = 0.0, load_s: float = 0.0) -> float:
    """Seconds of a device-to-device copy of `size` bytes, which reads and writes as many."""
    from cupy.cuda import Stream, runtime

    stream = Stream(non_blocking=True)
    arena = Arena(f"a copy of {size} bytes", {"from": size, "to": size})
    try:
        fill_random_f16(arena["from"], size // 2, 1, stream.ptr)

        def copy() -> None:
            runtime.memcpyAsync(arena["to"], arena["from"], size, runtime.memcpyDeviceToDevice, stream.ptr)

        return _best(copy, stream, idle_s, load_s)
    finally:
        stream.synchronize()
        arena.close()


def read_seconds(size: int, *, idle_s: float = 0.0, load_s: float = 0.0) -> float:
    """Seconds of reading `size` bytes (a multiple of 16) and writing none: memory turns around less than in a copy."""
    from cupy.cuda import Stream, runtime

    stream = Stream(non_blocking=True)
    arena = Arena(f"a read of {size} bytes", {"from": size, "sink": 4})
    blocks = 8 * int(runtime.getDeviceProperties(runtime.getDevice())["multiProcessorCount"])
    try:
        fill_random_f16(arena["from"], size // 2, 1, stream.ptr)
        launch = jit.kernel("stream", symbol="read_stream").bind(
            stream.ptr, (blocks,), (256,), ctypes.c_void_p(arena["from"]), ctypes.c_ulonglong(size // 16),
            ctypes.c_void_p(arena["sink"]), ctypes.c_uint(0x9E3779B9),
        )  # fmt: skip
        return _best(launch, stream, idle_s, load_s)
    finally:
        stream.synchronize()
        arena.close()


def _best(launch: Callable[[], None], stream: Any, idle_s: float, load_s: float) -> float:
    """Seconds per launch in the fastest batch."""

    def batch(count: int) -> float:
        start, end = Event(), Event()
        start.record(stream)
        for _ in range(count):
            launch()
        end.record(stream)
        end.synchronize()
        return 1e-3 * get_elapsed_time(start, end) / count

    from cupy.cuda import Event, get_elapsed_time

    batch(1)  # loads the kernel's code
    count = max(1, round(BATCH_S / max(batch(3), 1e-6)))
    until = time.perf_counter() + load_s
    while time.perf_counter() < until:
        batch(count)
    if idle_s:
        time.sleep(idle_s)
    return min(batch(count) for _ in range(BATCHES))
