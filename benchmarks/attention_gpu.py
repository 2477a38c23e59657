"""Prefill attention alone at the 7B geometry (28 heads on 4, head_dim 128): ours, cuDNN's and PyTorch's, on one GPU.

    python benchmarks/attention_gpu.py [--tokens 3325 2659] [--repeats 30] [--out attention]
    python benchmarks/attention_gpu.py --render reports/h200/attention.json

The first measures and writes OUT.json and OUT.txt; the second writes the text again from its record, on any machine.
A sample is a pass over several sets of random operands, more bytes than the L2 holds, between two CUDA events, divided by the
sets; ours and cuDNN's passes are replayed from a graph, PyTorch's is submitted call by call.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.errors import EngineError
from harness.files import to_json, write_atomic

try:  # rendering needs neither
    import cupy as cp

    from engine.cuda import attention, cudnn_attention, jit
except ImportError:
    cp = None

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


def measure(tokens: int, rows: int, repeats: int) -> list[dict[str, Any]]:
    """A record's rows: every kernel that runs here at `rows` query rows of `tokens` keys, the others with why not."""
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
    measured: list[dict[str, Any]] = []
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
            why = (str(reason).splitlines() or [type(reason).__name__])[0][:90]
            measured.append({"keys": tokens, "rows": rows, "kernel": name, "why": why})
            continue
        tflops = 4 * HEADS * D * pairs / ms / 1e9
        measured.append({"keys": tokens, "rows": rows, "kernel": name, "ms": ms, "tflop_per_s": tflops, "error": error(sets[0], tokens)})  # fmt: skip
    return measured


def against_cudnn(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> float | None:
    """A row's time over cuDNN's at the same shape, as the inverse of their rates; None where either was not measured."""
    same = [r for r in rows if (r["keys"], r["rows"], r["kernel"]) == (row["keys"], row["rows"], "cuDNN")]
    return same[0]["tflop_per_s"] / row["tflop_per_s"] if same and "ms" in same[0] and "ms" in row else None


def conclusion(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows say: our best kernel at every shape against cuDNN, or alone where nothing else ran."""
    said = []
    for keys, queries in dict.fromkeys((r["keys"], r["rows"]) for r in rows):
        here = [r for r in rows if (r["keys"], r["rows"]) == (keys, queries) and "ms" in r]
        ours_here = [r for r in here if r["kernel"].startswith("ours")]
        if not ours_here:
            continue
        best = min(ours_here, key=lambda r: r["ms"])
        what = f"{keys} tokens" if queries == keys else f"{queries} row{'s' * (queries != 1)} of {keys} keys"
        line = f"{what}: our best kernel is {best['kernel'].removeprefix('ours ')}, {best['ms']:.4f} ms"
        ratio = against_cudnn(best, rows)
        others = [r for r in here if r not in ours_here]
        if ratio is not None:
            fastest = min(here, key=lambda r: r["ms"])
            line += f", {ratio:.2f} × cuDNN's time" + (
                "" if fastest is best else f"; the fastest is {fastest['kernel']}"
            )
        elif not others:
            line += "; nothing else was measured at this shape"
        said.append(line + ".")
    worst = max((r["error"] for r in rows if "error" in r), default=None)
    if worst is not None:
        said.append(f"No kernel is further from float64 than {worst:.1e} (relative L2).")
    return said


def report(record: dict[str, Any]) -> str:
    """A record's text: what it says, the rows, and what their columns are."""
    rows = record["rows"]
    about = " · ".join(str(record[k]) for k in ("device", "commit") if record.get(k))
    lines = ["Prefill attention alone at the 7B geometry: 28 heads on 4, head_dim 128, causal, f16" + (f" · {about}" if about else ""), ""]  # fmt: skip
    lines += [*conclusion(rows), "", f"  keys   rows  {'kernel':12s}       ms  TFLOP/s    error  × cuDNN"]
    for r in rows:
        start = f"{r['keys']:6d} {r['rows']:6d}  {r['kernel']:12s}"
        if "why" in r:
            lines.append(f"{start} not measured: {r['why']}")
            continue
        ratio = against_cudnn(r, rows)
        line = f"{start} {r['ms']:8.4f}  {r['tflop_per_s']:7.1f}  {r['error']:.1e}"
        lines.append(line + (f"     {ratio:4.2f}" if ratio is not None else ""))
    return "\n".join([*lines, "", *COLUMNS, ""])


COLUMNS = (
    "keys      tokens in the cache; rows: query rows, all of them (prefill) or one (the last layer's tail, decode)",
    "ms        median time of one call; lower is better",
    "TFLOP/s   over the causal pairs: 4 · heads · head_dim · rows · (keys − (rows − 1) / 2) FLOP",
    "error     relative L2 of 16 rows, all heads, against float64",
    "× cuDNN   its time over cuDNN's at the same shape",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3325, 2659])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("attention"), help="without suffix")
    parser.add_argument("--render", type=Path, help="a record whose text is written again, beside it")
    options = parser.parse_args()
    if options.render:
        write_atomic(options.render.with_suffix(".txt"), report(json.loads(options.render.read_text())))
        return
    if cp is None:
        raise SystemExit("CuPy is not installed; measure on a machine with a GPU and `pip install '.[cuda]'`.")
    from harness.attribution import provenance

    state = provenance.gpu_state()
    record: dict[str, Any] = {
        "schema": "attention/1", "device": str(state.get("gpu") or ""), "commit": provenance.commit(), "repeats": options.repeats, "rows": [],
    }  # fmt: skip
    for rows_of in (lambda tokens: tokens, lambda tokens: 1):
        for tokens in options.tokens:
            record["rows"] += measure(tokens, rows_of(tokens), options.repeats)
    write_atomic(options.out.with_suffix(".json"), to_json(record))
    write_atomic(options.out.with_suffix(".txt"), report(record))
    print(report(record), end="")


if __name__ == "__main__":
    main()
