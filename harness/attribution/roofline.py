"""Ceilings measured on this machine, in the regime that they are used in, and the floors that follow from them.

A ceiling is an upper envelope: several shapes and sizes are measured, the best repetition of the best one counts. What
is measured is what the path could do at best: on the CPU float32 GEMM over every usable core; on the GPU f16 GEMM with
f32 accumulation; and streaming memory (bytes read + written), from DRAM and from the caches. Datasheets are asked only
where nothing was measured, and only for what is impossible (`on_paper`): never for a floor or a SOL.

Cached per device, driver and regime (CPU: model, threads and BLAS) in the cache directory; a later measurement of the
same machine can only raise a ceiling.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.cpu.run import cpu_name
from engine.cpu.threads import Threads
from harness.errors import HarnessError
from harness.files import read_json, to_json, write_atomic
from harness.window.sentinel import Sentinel

if TYPE_CHECKING:
    from engine.plan import Plan

Shape = tuple[int, int, int]  # M, N, K
Report = Callable[[str, int, int], None]  # (what, done, of)

IDLE_S = 0.2
"""Burst: idle time before each measurement."""
LOAD_S = 3.0
"""Sustained: seconds of load before the first measurement."""
BUSY = 0.25
"""CPU ceilings measured while others used more of the cores are too low: they are measured again at the next chance."""


@dataclass(frozen=True)
class Ceilings:
    """The measured roofs of one device in one regime."""

    backend: str  # cpu, cuda
    device: str
    regime: str  # burst, sustained
    precision: str  # of the GEMM: f32, f16
    tflop_per_s: float
    gb_per_s: float  # DRAM, 10⁹ bytes read + written a second
    cache_gb_per_s: float  # the fastest at any size: an op whose operands are still in cache cannot beat it
    gemm: list[dict[str, float]] = field(default_factory=list)  # {"m", "n", "k", "tflop_per_s"}
    memory: list[dict[str, float]] = field(default_factory=list)  # {"bytes", "gb_per_s"}
    key: dict[str, Any] = field(default_factory=dict)  # driver, threads, BLAS: what makes it another machine
    measured: str = ""
    foreign: float = 0.0  # share of the host's cores that others used meanwhile

    def floor_seconds(self, macs: np.ndarray, nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(compute, memory) seconds that each launch needs at the ceilings; NaN (unknown) counts as none."""
        compute = 2 * np.nan_to_num(macs) / (self.tflop_per_s * 1e12)
        return compute, np.nan_to_num(nbytes) / (self.gb_per_s * 1e9)

    def raised_by(self, other: Ceilings) -> Ceilings:
        """The upper envelope of two measurements of one machine."""
        return replace(
            other,
            tflop_per_s=max(self.tflop_per_s, other.tflop_per_s),
            gb_per_s=max(self.gb_per_s, other.gb_per_s),
            cache_gb_per_s=max(self.cache_gb_per_s, other.cache_gb_per_s),
            foreign=min(self.foreign, other.foreign),
        )

    def to_dict(self) -> dict[str, Any]:
        """As in JSON."""
        return asdict(self)


def load_ceilings(path: Path, regime: str, gpu: str) -> Ceilings:
    """Ceilings of a file: `harness doctor --ceilings --json FILE`, or one entry of it (as the cache keeps them).

    Of several, those of `regime`; a recorded trace has none ("recorded"), and the highest count. Raises HarnessError for a
    file that is none, and for ceilings of another GPU than the trace names.
    """
    hint = "write them on that machine with `harness doctor --ceilings --json FILE`"
    data = read_json(path, hint)
    entries = data["ceilings"] if isinstance(data, dict) and "ceilings" in data else [data]
    try:
        found = [Ceilings(**entry) for entry in entries or []]
        usable = all(0 < v < float("inf") for c in found for v in (c.tflop_per_s, c.gb_per_s, c.cache_gb_per_s))
    except TypeError:
        found, usable = [], False
    if not found or not usable:
        raise HarnessError(f"{path} holds no ceilings; {hint}.")
    matching = [c for c in found if c.regime == regime]
    best = max(matching or (found if regime == "recorded" else []), key=lambda c: c.tflop_per_s, default=None)
    if best is None:
        raise HarnessError(f"{path} has ceilings of {', '.join(c.regime for c in found)}, not of {regime}; {hint}.")
    if gpu and not gpu.startswith("device ") and best.device != gpu:
        raise HarnessError(f"{path} has the ceilings of {best.device}, and the trace is of {gpu}; {hint}.")
    return best


def ceilings_for(
    backend: str,
    regime: str,
    *,
    plan: Plan | None = None,
    threads: int = 0,
    report: Report | None = None,
    fresh: bool = False,
) -> Ceilings:
    """This machine's ceilings in a regime: from the cache, else measured now (CPU: ≈ 3 s; GPU: ≈ 2 s, sustained 6 s).

    plan: whose largest GEMM shapes are measured beside the standard ones. `fresh` measures even where the cache
    has a figure, and keeps the higher of both.
    """
    key = _key(backend, regime, threads)
    path = _cache_path(key)
    cached = _load(path)
    if cached and not fresh and cached.foreign <= BUSY:
        return cached
    shapes = _largest_gemms(plan, rows=2048 if backend == "cpu" else 4096)
    host = Sentinel(None)
    measured = (
        _measure_cpu(regime, shapes, threads, key, report)
        if backend == "cpu"
        else _measure_cuda(regime, shapes, key, report)
    )
    measured = replace(measured, foreign=host.host_load()["foreign"] if backend == "cpu" else 0.0)
    best = cached.raised_by(measured) if cached else measured
    with suppress(HarnessError):  # a cache that cannot be written costs time, not correctness
        write_atomic(path, to_json(best.to_dict()))
    return best


def _key(backend: str, regime: str, threads: int) -> dict[str, Any]:
    if backend == "cpu":
        pool = Threads(threads)
        try:
            return {"backend": backend, "regime": regime, "device": cpu_name(), "threads": pool.count, "blas": pool.blas(),
                    "numpy": np.__version__}  # fmt: skip
        finally:
            pool.close()
    from engine.cuda.ceilings import identity
    from harness.attribution.provenance import gpu_state

    return {"backend": backend, "regime": regime, **identity(), "driver": gpu_state().get("driver")}


def _cache_path(key: dict[str, Any]) -> Path:
    from engine.cache import cache_dir

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "ceilings" / f"{key['backend']}-{key['regime']}-{digest}.json"


def _load(path: Path) -> Ceilings | None:
    """The cached ceilings; a file that is damaged counts as none, since it can be measured again."""
    try:
        return Ceilings(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _largest_gemms(plan: Plan | None, rows: int, count: int = 4) -> list[Shape]:
    """The model's GEMM shapes with the most MACs, cut to `rows` rows: the rate has settled by then."""
    if plan is None:
        return []
    shapes = {(min(op.m, rows), op.n, op.k) for op in plan if op.kind == "gemm" and op.m > 1}
    return sorted(shapes, key=lambda s: -s[0] * s[1] * s[2])[:count]


def _measure_cpu(
    regime: str, shapes: Sequence[Shape], threads: int, key: dict[str, Any], report: Report | None
) -> Ceilings:
    """float32 GEMM and memory streams over every core, as the CPU backend runs them: a pool, BLAS single-threaded."""
    pool = Threads(threads)
    sizes = [1 << 19, 1 << 21, 1 << 23, 1 << 27]  # bytes of one operand: caches, then DRAM
    all_shapes = [(1536, 1536, 1536), (2048, 1024, 1024), *shapes]
    steps = len(all_shapes) + len(sizes)
    gemm, memory = [], []
    try:
        with pool.single_threaded_blas():
            if regime == "sustained":
                _load_for(LOAD_S, _cpu_gemm(pool, (1024, 1024, 1024)))
            for m, n, k in all_shapes:
                seconds = _best(_cpu_gemm(pool, (m, n, k)), regime, budget_s=0.25)
                gemm.append({"m": m, "n": n, "k": k, "tflop_per_s": 2 * m * n * k / seconds / 1e12})
                _tell(report, len(gemm), steps)
            for i, size in enumerate(sizes, 1):
                for moved, stream in _cpu_streams(pool, size):
                    seconds = _best(stream, regime, budget_s=0.2)
                    memory.append({"bytes": moved, "gb_per_s": moved / seconds / 1e9})
                _tell(report, len(gemm) + i, steps)
    finally:
        pool.close()
    return _assemble("cpu", cpu_name(), regime, "f32", gemm, memory, key)


def _cpu_gemm(pool: Threads, shape: Shape) -> Callable[[], None]:
    """y[M, N] = x[M, K] · Wᵀ, its rows shared out over the pool."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((n, k), np.float32)
    y = np.empty((m, n), np.float32)

    def part(start: int, stop: int) -> None:
        np.matmul(x[start:stop], w.T, out=y[start:stop])

    return lambda: pool.rows(part, m, -(-m // pool.count))


def _cpu_streams(pool: Threads, size: int) -> Iterable[tuple[int, Callable[[], None]]]:
    """(bytes moved, run): a copy and a read-only sum over arrays of `size` bytes, shared out over the pool."""
    source = np.random.default_rng(0).random(size // 8)
    target = np.empty_like(source)
    edges = np.linspace(0, len(source), pool.count + 1, dtype=int)
    ranges = list(pairwise(edges.tolist()))

    def copy(start: int, stop: int) -> None:
        np.copyto(target[start:stop], source[start:stop])

    def read(start: int, stop: int) -> None:
        np.dot(source[start:stop], source[start:stop])

    return [
        (2 * source.nbytes, lambda: pool.each(copy, ranges)),
        (source.nbytes, lambda: pool.each(read, ranges)),
    ]


def _best(run: Callable[[], None], regime: str, budget_s: float) -> float:
    """Seconds of the fastest of at least three repetitions within the budget, after a discarded one."""
    run()
    if regime == "burst":
        time.sleep(IDLE_S)
    best, spent, count = float("inf"), 0.0, 0
    while spent < budget_s or count < 3:
        start = time.perf_counter()
        run()
        seconds = time.perf_counter() - start
        best, spent, count = min(best, seconds), spent + seconds, count + 1
    return best


def _load_for(seconds: float, run: Callable[[], None]) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        run()


def _tell(report: Report | None, done: int, of: int) -> None:
    if report:
        report("measuring ceilings", done, of)


def _measure_cuda(regime: str, shapes: Sequence[Shape], key: dict[str, Any], report: Report | None) -> Ceilings:
    """f16 GEMM through cublasLt, device copies and reads, timed by events."""
    from engine.cuda.ceilings import copy_seconds, gemm_seconds, read_seconds

    all_shapes = [(4096, 4096, 4096), (8192, 8192, 4096), *shapes]
    sizes = [8 << 20, 16 << 20, 256 << 20]  # bytes of one operand: in L2, in L2 on the largest GPUs, DRAM
    idle_s, load_s = (IDLE_S, 0.0) if regime == "burst" else (0.0, LOAD_S)
    gemm, memory = [], []
    for m, n, k in all_shapes:
        seconds = gemm_seconds(m, n, k, idle_s=idle_s, load_s=load_s)
        load_s = min(load_s, 0.3)  # the load goes on: short pauses between shapes do not cool it down
        gemm.append({"m": m, "n": n, "k": k, "tflop_per_s": 2 * m * n * k / seconds / 1e12})
        _tell(report, len(gemm), len(all_shapes) + len(sizes))
    for size in sizes:
        copied = 2 * size / copy_seconds(size, idle_s=idle_s, load_s=load_s)
        read = 2 * size / read_seconds(2 * size, idle_s=idle_s, load_s=load_s)
        memory += [{"bytes": 2 * size, "gb_per_s": copied / 1e9}, {"bytes": 2 * size, "gb_per_s": read / 1e9}]
        _tell(report, len(gemm) + len(memory) // 2, len(all_shapes) + len(sizes))
    return _assemble("cuda", str(key["device"]), regime, "f16", gemm, memory, key)


def _assemble(
    backend: str, device: str, regime: str, precision: str, gemm: list[dict[str, float]],
    memory: list[dict[str, float]], key: dict[str, Any],
) -> Ceilings:  # fmt: skip
    largest = max(point["bytes"] for point in memory)
    dram = max(point["gb_per_s"] for point in memory if point["bytes"] * 2 >= largest)
    return Ceilings(
        backend=backend,
        device=device,
        regime=regime,
        precision=precision,
        tflop_per_s=max(point["tflop_per_s"] for point in gemm),
        gb_per_s=dram,
        cache_gb_per_s=max(point["gb_per_s"] for point in memory),
        gemm=gemm,
        memory=memory,
        key=key,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
    )
