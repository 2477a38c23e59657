"""Prefill attention alone at the 7B geometry (28 heads on 4, head_dim 128): ours, cuDNN's and PyTorch's, on one GPU.

    python benchmarks/attention_gpu.py [--tokens 3325 2659] [--repeats 30]

Each row: the median time of one call, its TFLOP/s over the causal pairs (4 · heads · d · T(T + 1)/2 FLOP), the relative L2
error of sampled rows against float64, and how it compares with cuDNN. The last rows are the one-row tail (decode).
A sample is a pass over several sets of random operands, more bytes than the L2 holds, between two CUDA events, divided by the
sets; ours and cuDNN's passes are replayed from a graph, PyTorch's is submitted call by call.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np

from engine.cuda import attention, cudnn_attention, jit
from engine.errors import EngineError

HEADS, KV_HEADS, D = 28, 4, 128
SCALE = 1 / math.sqrt(D)
OPERAND_BYTES = 256 << 20  # of all sets together; an H200's L2 holds 60 MB

Submit = Callable[[], object]


def operands(tokens: int, rows: int) -> dict[str, Any]:
    """Random f16 q [rows, heads, d], k and v [tokens, kv_heads, d], and an output of NaN."""

    def draw(count: int, heads: int) -> Any:
        return cp.random.standard_normal((count, heads, D), dtype=cp.float32).astype(cp.float16)

    q = draw(rows, HEADS)
    return {"q": q, "k": draw(tokens, KV_HEADS), "v": draw(tokens, KV_HEADS), "out": cp.full_like(q, cp.nan)}


def arguments(rows: int) -> dict[str, Any]:
    return {
        "rows": rows, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": D,
        "q_stride": HEADS * D, "kv_stride": KV_HEADS * D, "out_stride": HEADS * D, "scale": SCALE,
    }  # fmt: skip


def ours(stream: Any, x: dict[str, Any], tokens: int, variant: attention.Variant | None) -> Submit:
    rows = len(x["q"])
    need = attention.attention_workspace_bytes(rows=rows, past=tokens - rows, heads=HEADS, head_dim=D, variant=variant)
    x["workspace"] = cp.full(max(need, 16), 0xFF, cp.uint8)
    launches = attention.bind_attention(
        stream.ptr, *(x[n].data.ptr for n in ("q", "k", "v", "out")), past=tokens - rows, variant=variant,
        workspace_ptr=x["workspace"].data.ptr, workspace_bytes=need, **arguments(rows),
    )  # fmt: skip

    def submit() -> None:
        for launch in launches:
            launch()

    return submit


def cudnn(stream: Any, x: dict[str, Any]) -> Submit:
    (submit,) = cudnn_attention.bind_attention(
        stream.ptr, *(x[n].data.ptr for n in ("q", "k", "v", "out")), **arguments(len(x["q"]))
    )
    return submit


def torch_sdpa(stream: Any, x: dict[str, Any]) -> Submit:
    """PyTorch's scaled_dot_product_attention, as it chooses its backend. Raises ImportError without PyTorch."""
    import torch

    q, k, v = (torch.from_dlpack(x[n]).transpose(0, 1)[None] for n in ("q", "k", "v"))
    out = torch.from_dlpack(x["out"])
    external = torch.cuda.ExternalStream(stream.ptr)

    def submit() -> None:
        with torch.cuda.stream(external):
            x["torch"] = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def finish() -> None:  # outside the timed calls: the result goes where `error` reads it
        out.copy_(x["torch"][0].transpose(0, 1))

    x["finish"] = finish
    return submit


def median_ms(stream: Any, submits: list[Submit], repeats: int, *, capture: bool) -> float:
    """Median over `repeats` passes of the mean time of a call, after two passes that warm up."""

    def submit_all() -> None:
        for submit in submits:
            submit()

    submit_all()
    run: Callable[[], object] = submit_all
    if capture:
        with stream:
            stream.begin_capture()
            submit_all()
            graph = stream.end_capture()
        run = lambda: graph.launch(stream)  # noqa: E731
    run()
    times = []
    for _ in range(repeats):
        start, end = cp.cuda.Event(), cp.cuda.Event()
        start.record(stream)
        run()
        end.record(stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(start, end) / len(submits))
    return float(np.median(times))


def error(x: dict[str, Any], tokens: int) -> float:
    """Relative L2 of 16 rows of the output, over all heads, against float64."""
    rows = len(x["q"])
    sampled = np.unique(np.linspace(0, rows - 1, 16).astype(int))
    q, k, v, out = (x[n].get().astype(np.float64) for n in ("q", "k", "v", "out"))
    difference = norm = 0.0
    for row in sampled:
        visible = tokens - rows + row + 1
        for head in range(HEADS):
            kv = head // (HEADS // KV_HEADS)
            scores = k[:visible, kv] @ q[row, head] * SCALE
            p = np.exp(scores - scores.max())
            expected = p @ v[:visible, kv] / p.sum()
            difference += float(((out[row, head] - expected) ** 2).sum())
            norm += float((expected**2).sum())
    return math.sqrt(difference / norm)


def measure(tokens: int, rows: int, repeats: int) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    one = 2 * D * (2 * rows * HEADS + 2 * tokens * KV_HEADS)
    sets = [operands(tokens, rows) for _ in range(max(2, min(12, OPERAND_BYTES // one)))]
    cp.cuda.runtime.deviceSynchronize()
    pairs = rows * (tokens - rows) + rows * (rows + 1) // 2
    variants: list[attention.Variant] = ["split"] if rows == 1 else ["mma"]
    if jit.device_arch() == "sm_90a":
        variants.append("wgmma")
    contenders: dict[str, Callable[[dict[str, Any]], Submit]] = {}
    if rows > 1:
        contenders["cuDNN"] = lambda x: cudnn(stream, x)
        contenders["torch SDPA"] = lambda x: torch_sdpa(stream, x)
    for variant in variants:
        contenders[f"ours {variant}"] = lambda x, variant=variant: ours(stream, x, tokens, variant)  # type: ignore[misc]
    peer = None
    for name, bind in contenders.items():
        try:
            for x in sets:
                x["out"].fill(cp.nan)
            cp.cuda.runtime.deviceSynchronize()
            ms = median_ms(stream, [bind(x) for x in sets], repeats, capture=name != "torch SDPA")
            cp.cuda.runtime.deviceSynchronize()
            if "finish" in sets[0]:
                sets[0].pop("finish")()
                cp.cuda.runtime.deviceSynchronize()
        except (ImportError, EngineError, RuntimeError) as reason:
            print(f"{tokens:6d} {rows:6d}  {name:12s} not measured: {str(reason).splitlines()[0][:90]}")
            continue
        peer = ms if name == "cuDNN" else peer
        tflops = 4 * HEADS * D * pairs / ms / 1e9
        against = f"{ms / peer:5.2f} × cuDNN" if peer else ""
        print(
            f"{tokens:6d} {rows:6d}  {name:12s} {ms:8.4f} ms {tflops:7.1f} TFLOP/s  error {error(sets[0], tokens):.1e}  {against}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3325, 2659])
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    print(f"  keys   rows  {'kernel':12s}")
    for tokens in options.tokens:
        measure(tokens, tokens, options.repeats)
    for tokens in options.tokens:
        measure(tokens, 1, options.repeats)


if __name__ == "__main__":
    main()
