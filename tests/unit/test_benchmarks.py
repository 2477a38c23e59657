"""Pages of benchmarks/ are functions of the records beside them: the committed ones are their renderings, and say what is true."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

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
