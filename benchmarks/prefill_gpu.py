"""Prefill on one GPU, from nothing to numbers in one command: parity on a small model, the wall in bursts, µs of every class.

    PYTHONPATH=. python benchmarks/prefill_gpu.py [--tokens 3325] [--model qwen2.5-7b-q4_k_m] [--lever concat=on] [--repeat 9] [--json out.json]

The wall is the host's clock around a whole forward, ids to logits, after 0.2 s of rest (the burst regime of a power-capped GPU).
The class table comes from a second pass with CUDA events around every op: each event pair also counts the gap before an
op's first launch, so its sum is a little above the GPU's busy time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.cpu.run import CpuEngine
from engine.cuda.run import CudaEngine
from engine.geometry import tiny
from engine.levers import Levers
from engine.models import resolve
from engine.plan import Op
from engine.synth import SynthModel

REST_S = 0.2


class OpEvents:
    """A hook that records a CUDA event before and after each op's launches."""

    def __init__(self, stream: Any) -> None:
        from cupy.cuda import Event

        self._event, self._stream = Event, stream
        self.pairs: list[tuple[Op, Any, Any]] = []

    def begin(self, op: Op) -> None:
        start = self._event()
        start.record(self._stream)
        self.pairs.append((op, start, None))

    def end(self, op: Op) -> None:
        end = self._event()
        end.record(self._stream)
        op, start, _ = self.pairs[-1]
        self.pairs[-1] = (op, start, end)

    def microseconds(self) -> list[float]:
        """µs of each op, in the plan's order; call it after the forward has returned."""
        from cupy.cuda import get_elapsed_time

        return [1e3 * get_elapsed_time(start, end) for _, start, end in self.pairs]


def parity(levers: Levers) -> dict[str, float]:
    """Relative L2 of the last logits against the CPU oracle on a two-layer model, per token count."""
    model = SynthModel(tiny("qwen2", head_dim=128), seed=3)
    errors = {}
    with CudaEngine(model, levers) as engine, CpuEngine(model, Levers()) as oracle:
        for tokens in (1, 9, 129, 519):
            ids = np.random.default_rng(tokens).integers(0, 512, tokens).astype(np.int32)
            got, want = engine.prefill(ids), oracle.prefill(ids)
            errors[str(tokens)] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return errors


def walls(engine: CudaEngine, tokens: int, repeat: int, rest_s: float) -> list[float]:
    """Milliseconds of `repeat` forwards, each on fresh random ids after `rest_s` of idleness."""
    rng = np.random.default_rng(1)
    times = []
    for _ in range(repeat):
        ids = rng.integers(0, engine.geometry.vocab, tokens).astype(np.int32)
        time.sleep(rest_s)
        start = time.perf_counter()
        logits = engine.prefill(ids)
        times.append(1e3 * (time.perf_counter() - start))
        if not np.isfinite(logits).all() or not logits.any():
            raise SystemExit("the logits are not finite numbers: this time measures nothing")
    return times


def submit_ms(engine: CudaEngine, tokens: int) -> float:
    """Milliseconds that the host spends submitting a forward's launches, without waiting for any (best of 5)."""
    program = engine._program(engine.plan(tokens))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _op, submits in program:
            for submit in submits:
                submit()
        best = min(best, 1e3 * (time.perf_counter() - start))
        engine._stream.synchronize()
    return best


def class_table(engine: CudaEngine, tokens: int, passes: int = 3) -> list[dict[str, Any]]:
    """Per (class, op name): ops, µs summed (median of the passes), GMAC, TFLOP/s and GB/s."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    runs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for n in range(passes):
        hook = OpEvents(engine._stream)
        ids = np.random.default_rng(n).integers(0, engine.geometry.vocab, tokens).astype(np.int32)
        time.sleep(REST_S)
        engine.prefill(ids, hook=hook)
        total: dict[tuple[str, str], float] = defaultdict(float)
        for (op, _, _), us in zip(hook.pairs, hook.microseconds(), strict=True):
            key = (op.cls, op.name.split()[-1])
            total[key] += us
            if n == 0:
                row = sums.setdefault(key, {"class": op.cls, "op": key[1], "ops": 0, "macs": 0, "bytes": 0})
                row["ops"] += 1
                row["macs"] += op.macs
                row["bytes"] += op.bytes
        for key, us in total.items():
            runs[key].append(us)
    rows = []
    for key, row in sums.items():
        us = statistics.median(runs[key])
        rows.append(
            {
                "class": row["class"], "op": row["op"], "ops": row["ops"], "us": us, "gmac": row["macs"] / 1e9,
                "tflop_per_s": 2 * row["macs"] / us / 1e6, "gb_per_s": row["bytes"] / us / 1e3,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["us"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3325)
    parser.add_argument("--model", default="qwen2.5-7b-q4_k_m")
    parser.add_argument("--lever", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    levers = Levers.from_dict(dict(item.split("=", 1) for item in options.lever))
    result: dict[str, Any] = {"tokens": options.tokens, "model": options.model, "levers": levers.to_dict()}

    result["import_s"] = time.time() - psutil.Process().create_time()
    errors = result["parity"] = parity(levers)
    print("parity (relative L2):", "  ".join(f"T={t} {e:.2e}" for t, e in errors.items()), flush=True)

    start = time.perf_counter()
    engine = CudaEngine(resolve(options.model, gpu=True), levers)
    result["load_s"] = time.perf_counter() - start
    start = time.perf_counter()
    engine.prefill(np.random.default_rng(0).integers(0, engine.geometry.vocab, options.tokens).astype(np.int32))
    result["first_forward_s"] = time.perf_counter() - start
    walls(engine, options.tokens, 2, 0)
    burst = result["burst_ms"] = walls(engine, options.tokens, options.repeat, REST_S)
    sustained = result["back_to_back_ms"] = walls(engine, options.tokens, 30, 0)
    result["submit_ms"] = submit_ms(engine, options.tokens)
    rows = result["classes"] = class_table(engine, options.tokens)
    result["memory_bytes"], result["engine"] = engine.device_memory_bytes(), engine.describe()
    overrun = result["overrun"] = engine.overrun_buffers()
    engine.close()

    print(f"python to imports {result['import_s']:.2f} s, load {result['load_s']:.2f} s, first forward {result['first_forward_s']:.2f} s, "
          f"device memory {result['memory_bytes'] / 1e9:.2f} GB, submit {result['submit_ms']:.2f} ms")  # fmt: skip
    print(f"{'class':10} {'op':10} {'ops':>4} {'us':>9} {'us/op':>8} {'GMAC':>9} {'TFLOP/s':>8} {'GB/s':>7}")
    for row in rows:
        print(f"{row['class']:10} {row['op']:10} {row['ops']:4d} {row['us']:9.0f} {row['us'] / row['ops']:8.1f} "
              f"{row['gmac']:9.1f} {row['tflop_per_s']:8.1f} {row['gb_per_s']:7.0f}")  # fmt: skip
    print(f"{'sum':26} {sum(row['us'] for row in rows):9.0f}")
    for name, times in (("burst", burst), ("back to back", sustained)):
        wall = statistics.median(times)
        print(f"{name:13} median {wall:7.2f} ms ({min(times):.2f} … {max(times):.2f}, n = {len(times)})  "
              f"{1e3 * options.tokens / wall:8.0f} tok/s")  # fmt: skip
    for shape, about in result["engine"]["gemm"].items():  # type: ignore[attr-defined]
        print(f"GEMM {shape:24} {about.get('us', '-'):>8} us, first {about.get('first_us', '-'):>8}: {about['how']}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1))
    bad = [f"parity at T={t} is {e:.1e}" for t, e in errors.items() if not e <= 2e-3] + [
        f"{b} overrun" for b in overrun
    ]
    print("FAILED: " + "; ".join(bad) if bad else "ok")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
