"""Ours beside PyTorch Transformers on one GPU, in one window: the same geometry, tokens and regime, interleaved in pairs.

    python benchmarks/peers_gpu.py --save reports/h200/peers [--tokens 3325] [--pairs 8] [--seconds 480]
    python benchmarks/peers_gpu.py --render reports/h200/peers/peers.json

Each pair runs both engines back to back, each in a fresh process, in an order set by a seeded fair coin; both prefill the same fresh
random tokens. PyTorch's model has random f16 weights, SDPA attention, a KV cache, and logits of the last row only. A wall is the
host's clock around a whole forward, ids on the host to logits on the host, after the rest of the burst regime. The record is written after
every pair, and no pair is begun that would not end within --seconds. Needs torch and transformers beside the engine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from engine.titles import title
from harness.files import to_json, write_atomic

SCHEMA = "peers/1"
OURS, PEER = "ours", "PyTorch Transformers"


class Transformers:
    """A Transformers decoder of a model's geometry with random f16 weights; `prefill` as the harness calls it."""

    def __init__(self, model: str | None, device: str) -> None:
        import torch
        import transformers

        from engine.models import resolve

        g = resolve(model, gpu=device == "cuda").geometry
        self._torch, self._device, self._transformers = torch, device, transformers.__version__
        config = transformers.AutoConfig.for_model(
            g.architecture, hidden_size=g.hidden, intermediate_size=g.ffn, num_hidden_layers=g.layers, num_attention_heads=g.heads,
            num_key_value_heads=g.kv_heads, head_dim=g.head_dim, vocab_size=g.vocab, max_position_embeddings=g.context,
            rms_norm_eps=g.rms_eps, tie_word_embeddings=g.tied_embedding,
        )  # fmt: skip
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        try:
            with torch.device(device):
                self._model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        finally:
            torch.set_default_dtype(before)
        parameters = list(self._model.parameters())
        if any(p.dtype != torch.float16 or p.device.type != device for p in parameters):
            raise RuntimeError("the model is not wholly f16 on its device")
        self._parameters = sum(p.numel() for p in parameters)

    def prefill(self, ids: np.ndarray) -> np.ndarray:
        """int32 [T] → the last row's logits on the host, float32 [vocab]."""
        torch = self._torch
        with torch.inference_mode():
            fed = torch.from_numpy(ids.astype(np.int64))[None].to(self._device)
            logits = self._model(input_ids=fed, use_cache=True, logits_to_keep=1).logits
            return logits[0, -1].float().cpu().numpy()

    def describe(self) -> dict[str, Any]:
        """Versions and what decides the speed."""
        return {
            "torch": self._torch.__version__, "transformers": self._transformers, "attention": self._model.config._attn_implementation,
            "dtype": "float16", "parameters": self._parameters,
        }  # fmt: skip

    def device_memory_bytes(self) -> int:
        """Most bytes of tensors at once; on a CPU the process's resident set."""
        return self._torch.cuda.max_memory_allocated() if self._device == "cuda" else psutil.Process().memory_info().rss


def transformers_engine(levers: dict[str, Any], model: str | None, device: str) -> Transformers:
    """What the PyTorch arm's config names as its set-up."""
    return Transformers(model, device)


def measure(
    model: str | None, tokens: int, pairs: int, inner: int, seconds: float, seed: int, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:  # fmt: skip
    """Runs the pairs; `keep` gets the record after each. Raises WorkerFailure where an engine crashes or hangs."""
    from engine.models import resolve
    from engine.open import choose
    from harness.ab.process import ArmProcess
    from harness.ab.protocol import LandingProtocol
    from harness.ab.schedule import order
    from harness.ab.start import lock_for
    from harness.attribution import provenance
    from harness.config import ArmConfig, EmbeddedEngine, PythonEngine, load_protocol
    from harness.window.sentinel import Sentinel

    began = time.monotonic()
    protocol = load_protocol("landing", LandingProtocol)
    backend = choose()
    opened = resolve(model, gpu=backend == "cuda")
    peer = PythonEngine(
        kind="python", setup="peers_gpu:transformers_engine", path=(str(Path(__file__).resolve().parent),), vocab=opened.geometry.vocab,
        args={"model": model, "device": backend},
    )  # fmt: skip
    arms = {
        "A": ArmConfig(name=OURS, engine=EmbeddedEngine(), model=model, tokens=tokens),
        "B": ArmConfig(name=PEER, engine=peer, tokens=tokens),
    }
    device = 0 if backend == "cuda" else None
    record: dict[str, Any] = {
        "schema": SCHEMA, "model": opened.name, "tokens": tokens, "regime": "burst", "idle_s": protocol.burst_idle_s, "inner": inner,
        "warmup": protocol.warmup, "seed": seed, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": provenance.commit(), "before": provenance.gpu_state() if backend == "cuda" else {}, "engines": {}, "pairs": [],
    }  # fmt: skip
    longest = 0.0
    with Sentinel(device) as sentinel, lock_for(device, sentinel) as lock:
        for pair in range(1, pairs + 1):
            start = time.monotonic()
            if pair > 1 and start - began + 1.1 * longest > seconds:
                break
            halves: dict[str, Any] = {"order": order(seed, pair)}
            for letter in halves["order"]:
                arm = arms[letter]
                with ArmProcess(arm.model_dump(mode="json", by_alias=True), Path.cwd(), lock, sentinel.gpu) as worker:
                    answer = worker.ask(
                        "half", protocol.half_timeout_s, seed=seed, pair=pair, inner=inner, warmup=protocol.warmup,
                        regime="burst", idle_s=protocol.burst_idle_s, load_s=protocol.sustained_load_s,
                    )  # fmt: skip
                if answer["broken"]:
                    raise SystemExit(f"{arm.name}: {'; '.join(answer['broken'])}; a time of wrong results measures nothing.")  # fmt: skip
                halves[arm.name] = [f["wall_ms"] + f["residue_ms"] for f in answer["forwards"]]
                record["engines"][arm.name] = _about(answer)
            longest = max(longest, time.monotonic() - start)
            record["pairs"].append(halves)
            keep(record)
    return record


def _about(answer: dict[str, Any]) -> dict[str, Any]:
    """Of a half's answer: what ran, without the lists that an engine adds for its own round pages."""
    described = answer["described"]
    engine = {k: v for k, v in described.get("engine", {}).items() if isinstance(v, str | int | float)}
    return {"backend": described["backend"], "memory_bytes": answer["memory"], **engine}


def ratios(record: dict[str, Any]) -> list[float]:
    """PyTorch's wall over ours in every pair, each the median of its half."""
    return [statistics.median(pair[PEER]) / statistics.median(pair[OURS]) for pair in record["pairs"]]


def wall(record: dict[str, Any], name: str) -> float:
    """Median over all timed forwards of an engine, ms."""
    return statistics.median(value for pair in record["pairs"] for value in pair[name])


def report(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    found = ratios(record)
    n = len(found)
    tokens = record["tokens"]
    gpu = record["before"].get("gpu", "CPU")
    rows = []
    for name in (OURS, PEER):
        values = [v for pair in record["pairs"] for v in pair[name]]
        about = record["engines"][name]
        held = f"{about['memory_bytes'] / 1e9:.2f} GB" if about.get("memory_bytes") else "–"
        rows.append(
            f"| {name} | {wall(record, name):.2f} | {min(values):.2f} … {max(values):.2f} | {1e3 * tokens / wall(record, name):,.0f} | {held} |"
        )
    facts = ", ".join(f"{k} {v}" for k, v in record["engines"][PEER].items() if k not in ("backend", "memory_bytes"))
    return "\n".join(
        [
            f"# Ours beside PyTorch Transformers: {title(record['model'])}, {tokens} tokens",
            "",
            f"**Ours prefills in {wall(record, OURS):.2f} ms where PyTorch Transformers takes {wall(record, PEER):.2f} ms: "
            f"{statistics.median(found):.2f} × faster, median of {n} interleaved pair{'s' * (n != 1)} ({min(found):.2f} … {max(found):.2f}), "
            f"{record['regime']}, {gpu}.**",
            "",
            "| engine | wall, ms | range, ms | tok/s | device memory |",
            "|:--|--:|--:|--:|--:|",
            *rows,
            "",
            f"The wall is the median of {record['inner']} forwards in each of {n} fresh processes, ids on the host to logits on the host, "
            f"after {record['idle_s']:g} s of rest each. Both run the geometry of {record['model']} on the same random tokens and keep their "
            "KV cache; PyTorch's weights are random f16, its attention SDPA, its logits those of the last row. Ours leaves out what the last row's "
            "logits do not need of the last layer, which Transformers does not.",
            "",
            f"{PEER}: {facts}.",
            f"Measured {record['at']} at {record['commit']}, seed {record['seed']}, by `python benchmarks/peers_gpu.py --tokens {tokens} --pairs {n}`.",
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3325)
    parser.add_argument("--model", help="a geometry preset [default: qwen2.5-7b-q4_k_m]", default="qwen2.5-7b-q4_k_m")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--inner", type=int, default=5, help="timed forwards of a half")
    parser.add_argument("--seconds", type=float, default=480, help="no pair is begun that would not end by then")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--save", type=Path, default=Path("peers"), help="folder of peers.json and README.md")
    parser.add_argument("--render", type=Path, help="a record whose page is written again, beside it")
    options = parser.parse_args()
    if options.render:
        write_atomic(options.render.with_name("README.md"), report(json.loads(options.render.read_text())))
        return
    if min(options.tokens, options.pairs, options.inner) < 1:
        raise SystemExit("--tokens, --pairs and --inner must be at least 1.")

    def keep(record: dict[str, Any]) -> None:
        write_atomic(options.save / "peers.json", to_json(record))
        pair = record["pairs"][-1]
        print(f"pair {len(record['pairs'])}: {OURS} {statistics.median(pair[OURS]):.2f} ms, {PEER} {statistics.median(pair[PEER]):.2f} ms", flush=True)  # fmt: skip

    from harness.ab.process import WorkerFailure
    from harness.errors import HarnessError

    try:
        record = measure(options.model, options.tokens, options.pairs, options.inner, options.seconds, options.seed, keep)  # fmt: skip
    except WorkerFailure as failure:
        raise SystemExit("\n".join([*failure.tail, f"error: {failure}; the pairs before it are kept."])) from None
    except HarnessError as error:
        raise SystemExit(f"error: {error}") from None
    write_atomic(options.save / "README.md", report(record))
    print(report(record))


if __name__ == "__main__":
    main()
