"""Pages of benchmarks/ are functions of the records beside them: the committed ones are their renderings, and say what is true."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    file = ROOT / "benchmarks" / f"{name}.py"
    if not file.is_file():
        pytest.skip("installed without its benchmarks")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_attention_text_is_its_records_rendering() -> None:
    record = ROOT / "reports" / "h200" / "attention.json"
    assert record.with_suffix(".txt").read_text() == script("attention_gpu").report(json.loads(record.read_text()))


def attention_rows(**ms: float) -> list[dict[str, Any]]:
    return [
        {"keys": 8, "rows": 8, "kernel": name.replace("_", " "), "ms": v, "tflop_per_s": 100 / v, "error": 1e-4}
        for name, v in ms.items()
    ]


def test_the_attention_text_opens_with_what_its_rows_say() -> None:
    attention = script("attention_gpu")
    said = attention.conclusion(attention_rows(cuDNN=0.2, ours_mma=0.3, ours_wgmma=0.25))
    assert said[0] == "8 tokens: our best kernel is wgmma, 0.2500 ms, 1.25 × cuDNN's time; the fastest is cuDNN."
    assert "the fastest is" not in attention.conclusion(attention_rows(cuDNN=0.2, ours_mma=0.1))[0]
    alone = [*attention_rows(ours_mma=0.1), {"keys": 8, "rows": 8, "kernel": "cuDNN", "why": "no cuDNN here"}]
    text = attention.report({"device": "d", "rows": alone})
    assert "nothing else was measured at this shape" in text and "cuDNN        not measured: no cuDNN here" in text
    assert text.index("our best kernel") < text.index("  keys   rows"), "what it says comes first"


def test_the_committed_million_is_its_records_rendering() -> None:
    record = ROOT / "benchmarks" / "trace_million.json"
    held = json.loads(record.read_text())
    assert record.with_suffix(".md").read_text() == script("trace_million").report(held["results"], held["facts"])


@pytest.mark.parametrize(
    ("seconds", "gigabytes", "said"),
    [
        (4.39, 0.51, "not met: 4.39 s against 4 s."),
        (3.9, 1.2, "not met: 1.20 GB against 1 GB."),
        (5.0, 2.0, "not met: 5.00 s against 4 s and 2.00 GB against 1 GB."),
        (3.9, 0.5, ": met, with 3.90 s and 0.50 GB."),
    ],
)
def test_the_million_is_met_by_the_whole_process_or_not_at_all(seconds: float, gigabytes: float, said: str) -> None:
    million = script("trace_million")
    fast = {"s": 0.1, "cpu_s": 0.1, "gb": 0.1}
    results = {"harness": fast, "command": {"s": seconds, "cpu_s": 9.0, "gb": gigabytes}, "sql": fast, "pandas": fast}
    facts = {"launches": 1, "file_mb": 1.0, "cpu": "c", "cores": 2, "python": "3", "repeat": 3}
    text = million.report(results, facts)
    assert said in text.splitlines()[2] and text.count("Target") == 1


@pytest.mark.parametrize("name", ["attention_gpu", "trace_million"])
def test_a_page_is_rendered_without_a_gpu(name: str, tmp_path: Path) -> None:
    held = {"attention_gpu": "reports/h200/attention", "trace_million": "benchmarks/trace_million"}[name]
    suffix = ".txt" if name == "attention_gpu" else ".md"
    record = tmp_path / "record.json"
    record.write_bytes((ROOT / f"{held}.json").read_bytes())
    subprocess.run([sys.executable, ROOT / "benchmarks" / f"{name}.py", "--render", record], check=True, cwd=tmp_path)
    assert record.with_suffix(suffix).read_bytes() == (ROOT / f"{held}{suffix}").read_bytes()


def peers_record() -> dict[str, Any]:
    return {
        "schema": "peers/1", "model": "m", "tokens": 100, "regime": "burst", "idle_s": 0.2, "inner": 3, "seed": 1, "at": "now",
        "commit": "abc", "before": {"gpu": "GPU"},
        "engines": {"ours": {"backend": "cuda", "memory_bytes": 2 * 10**9}, "PyTorch Transformers": {"backend": "python", "memory_bytes": None, "torch": "2"}},
        "pairs": [
            {"order": "AB", "ours": [10.0, 11.0, 12.0], "PyTorch Transformers": [22.0, 22.0, 23.0]},
            {"order": "BA", "ours": [10.0, 10.0, 10.0], "PyTorch Transformers": [30.0, 30.0, 90.0]},
        ],
    }  # fmt: skip


def test_the_page_of_peers_is_a_function_of_its_record(tmp_path: Path) -> None:
    peers = script("peers_gpu")
    assert peers.ratios(peers_record()) == [2.0, 3.0], "medians of halves, pair by pair"
    text = peers.report(peers_record())
    assert (
        "**Ours prefills in 10.00 ms where PyTorch Transformers takes 26.50 ms: 2.50 × faster, median of 2 interleaved pairs (2.00 … 3.00)"
        in text
    )
    assert "| ours | 10.00 | 10.00 … 12.00 | 10,000 | 2.00 GB |" in text and "torch 2" in text
    record = tmp_path / "peers.json"
    record.write_text(json.dumps(peers_record()))
    subprocess.run([sys.executable, ROOT / "benchmarks" / "peers_gpu.py", "--render", record], check=True, cwd=tmp_path)
    assert (tmp_path / "README.md").read_text() == text


def test_the_committed_peers_are_their_records_rendering() -> None:
    record = ROOT / "reports" / "h200" / "peers" / "peers.json"
    if not record.is_file():
        pytest.skip("not measured yet")
    assert record.with_name("README.md").read_text() == script("peers_gpu").report(json.loads(record.read_text()))


def test_the_peer_is_the_models_geometry_in_f16() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    engine = script("peers_gpu").transformers_engine({}, "tiny-qwen2", "cpu")
    logits = engine.prefill(np.arange(9, dtype=np.int32))
    assert logits.shape == (512,) and logits.dtype == np.float32 and np.isfinite(logits).all() and np.ptp(logits) > 0
    assert engine.describe()["attention"] == "sdpa" and engine.describe()["dtype"] == "float16"
    layer = (
        256 * (256 + 2 * 128) + (256 + 2 * 128) + 256 * 256 + 3 * 256 * 768 + 2 * 256
    )  # q, k, v and biases, o, FFN, norms
    assert engine.describe()["parameters"] == 2 * layer + 2 * 512 * 256 + 256
