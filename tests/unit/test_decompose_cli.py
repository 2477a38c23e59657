"""`harness decompose` and `harness doctor` as a person runs them, on the CPU backend with a tiny model."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from engine.cpu.run import CpuEngine
from engine.geometry import tiny
from engine.levers import Levers
from engine.plan import build_plan
from engine.synth import SynthModel
from harness import launches
from harness.attribution.decompose import decompose, load_decomposition
from harness.attribution.embedded import decompose_engine
from harness.attribution.measure import DecomposeProtocol
from harness.attribution.roofline import Ceilings
from harness.config import load_protocol
from harness.report.decomposition import print_decomposition, to_markdown
from harness.sources.host import trace_prefill

Run = Callable[..., tuple[int, str, str]]
TINY = ("decompose", "--model", "tiny-llama", "--tokens", "128", "--backend", "cpu", "--no-ceilings")
NOISE = {"reconciliation", "possibility"}
"""Checks that a busy machine may fail honestly; no other may fail here."""


def believed(path: Path, status: int) -> None:
    """The exit status says what the file's checks say, and nothing but noise may have failed."""
    failed = {c.name for c in load_decomposition(path).checks if not c.ok}
    assert failed <= NOISE
    assert status == (6 if failed else 0)


def test_one_command_writes_everything(harness: Run, tmp_path: Path) -> None:
    status, out, err = harness(
        *TINY,
        "--json",
        tmp_path / "d.json",
        "--markdown",
        tmp_path / "d.md",
        "--plot",
        tmp_path / "d.png",
        "--save",
        tmp_path / "all",
    )
    believed(tmp_path / "d.json", status)
    assert err == ""
    assert "gate_up" in out and "= traced wall" in out and out.rstrip().endswith(".")
    assert max(map(len, out.splitlines())) <= 80
    d = load_decomposition(tmp_path / "d.json")
    plan = build_plan(tiny("llama"), 128, precision="f32")
    assert d.launches == len(plan) and len(d.walls_ms) == 3 and d.source == "host" and d.regime == "burst"
    assert sum(r.gmac or 0 for r in d.classes) == pytest.approx(plan.macs / 1e9, rel=1e-9)
    assert sum(r.sum_ms for r in d.classes) == pytest.approx(d.busy_ms + d.overlap_ms, rel=1e-6)
    assert d.busy_ms + d.gap_ms == pytest.approx(d.traced_wall_ms, rel=1e-9)
    (shown,) = (p for p in d.passes if p.table)
    assert shown.class_ms == pytest.approx(d.by_class(), rel=1e-9), "each pass keeps its classes' times"
    assert {"cpu", "commit", "model_sha256", "threads", "source", "protocol"} <= d.provenance.keys()
    assert "![" in (tmp_path / "d.md").read_text() and "(d.png)" in (tmp_path / "d.md").read_text()
    assert (tmp_path / "d.png").read_bytes()[:4] == b"\x89PNG"
    assert sorted(p.name for p in (tmp_path / "all").iterdir()) == [
        "README.md",
        "decomposition.json",
        "decomposition.png",
        "launches.parquet",
    ]
    assert len(launches.load(tmp_path / "all" / "launches.parquet")) == d.launches


def test_json_on_stdout_is_alone_there(harness: Run) -> None:
    _, out, _ = harness(*TINY, "--runs", "1", "--json", "-")
    assert json.loads(out)["schema"] == "decomposition/1"


def test_a_config_and_levers_are_taken(harness: Run, tmp_path: Path) -> None:
    (tmp_path / "arm.yaml").write_text(
        "model: tiny-qwen2\ntokens: 64\nengine: {kind: embedded, backend: cpu}\nlevers: {tail: full}\n"
    )
    harness("decompose", "--config", tmp_path / "arm.yaml", "--set", "concat=on", "--no-ceilings", "--runs", "1",
            "--regime", "burst", "--json", tmp_path / "d.json")  # fmt: skip
    d = load_decomposition(tmp_path / "d.json")
    assert (
        d.tokens == 64
        and d.levers["tail"] == "full"
        and d.levers["concat"] == "on"
        and d.model.startswith("tiny-qwen2")
    )
    assert "1 full layer" not in d.structure


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("--set", "concta=on"), 1, "did you mean 'concat'"),
        (("--set", "concat"), 1, "is no lever=value pair"),
        (("--model", "no-such.gguf"), 1, "no-such.gguf"),
        (("--tokens", "999999"), 1, "do not fit the context"),
        (("--reference", "nowhere.json"), 1, "nowhere.json does not exist"),
        (("--json", "/dev/null/x/d.json"), 1, "cannot write /dev/null/x/d.json"),
        (("--plot", "x.bmp"), 1, ".bmp is no figure format"),
        (("--source", "nsys"), 1, "'nsys' cannot trace the cpu backend; use --source host"),
        (("--occurrence", "2"), 64, "--occurrence goes with --trace"),
        (("--tokens", "0"), 64, "--tokens"),
    ],
)
def test_a_wrong_request_is_one_sentence(
    harness: Run, in_tmp: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    found, _, err = harness(*TINY, "--runs", "1", *arguments)
    assert found == status and says in err
    if status == 1:
        assert err.startswith("error: ") and err.count("\n") == 1
    assert not [p for p in in_tmp.rglob("*") if p.name.endswith(".part")]


def test_a_reference_of_another_window_must_be_declared_and_is_marked(harness: Run, tmp_path: Path) -> None:
    reference = tmp_path / "ref.json"
    status, *_ = harness(*TINY, "--runs", "1", "--json", reference)
    believed(reference, status)
    table = json.loads(reference.read_text())
    for check in table["checks"]:  # a table that a busy machine spoilt is refused, and that is not what this test is of
        check["ok"] = True
    reference.write_text(json.dumps(table))
    _, out, _ = harness(*TINY, "--runs", "1", "--reference", reference)
    assert "ratio" in out and "×~" not in out
    reference.write_text(json.dumps(json.loads(reference.read_text()) | {"created": "2026-01-02T03:04:05+00:00"}))
    status, _, err = harness(*TINY, "--runs", "1", "--reference", reference)
    assert status == 1 and "in another window" in err and "--across-windows" in err
    _, out, _ = harness(*TINY, "--runs", "1", "--reference", reference, "--across-windows")
    assert "×~" in out and "the reference is of another window (2026-01-02" in " ".join(out.split())


class Reusing(CpuEngine):
    """Computes once and returns that result for ever."""

    def prefill(self, ids: np.ndarray, *, hook: object = None, all_logits: bool = False) -> np.ndarray:
        if not hasattr(self, "first"):
            self.first = super().prefill(ids)
        if hook:
            super().prefill(ids, hook=hook)  # type: ignore[arg-type]
        return self.first


class Nonsense(CpuEngine):
    """Returns NaN."""

    def prefill(self, ids: np.ndarray, **more: object) -> np.ndarray:
        return super().prefill(ids, **more) * np.float32("nan")  # type: ignore[arg-type]


@pytest.mark.parametrize(("engine", "says"), [(Reusing, "returned the logits of forward 1"), (Nonsense, "not finite")])
def test_a_result_that_was_not_computed_is_caught(engine: type[CpuEngine], says: str) -> None:
    model, protocol = SynthModel(tiny("llama")), load_protocol("decompose", DecomposeProtocol)
    with engine(model, Levers(cpu_threads=1)) as cheat:
        d = decompose_engine(cheat, model, 32, protocol, runs=2, with_ceilings=False).decomposition
    check = d.check("results")
    assert not check.ok and says in check.detail


def test_a_sustained_regime_loads_first_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SynthModel(tiny("llama"))
    protocol = load_protocol("decompose", DecomposeProtocol).model_copy(update={"load_s": 0.05, "idle_s": 60.0})
    with CpuEngine(model, Levers(cpu_threads=1)) as engine:
        d = decompose_engine(engine, model, 32, protocol, regime="sustained", runs=2, with_ceilings=False).decomposition
    assert d.regime == "sustained" and d.provenance["protocol"]["regime"] == "sustained"


@pytest.mark.parametrize("width", [60, 80, 100, 130])
def test_the_table_fits_its_terminal_and_a_wide_one_shows_all(width: int) -> None:
    with CpuEngine(SynthModel(tiny("llama")), Levers(cpu_threads=1)) as engine:
        trace = trace_prefill(engine, np.arange(64, dtype=np.int32))
        roof = Ceilings("cpu", "toy", "burst", "f32", 10.0, 100.0, 400.0)
        d = decompose(
            trace.launches, wall_ns=trace.wall_ns, plan=engine.plan(64), ceilings=roof, source="host", device="toy"
        )
    out = io.StringIO()
    print_decomposition(d, Console(width=width, file=out))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert {"class", "ms", "share", "SOL"} <= set(text.split())
    shown = {"weights", "launches", "GMAC", "TFLOP/s", "GB/s", "bound", "budget"} <= set(text.split())
    assert shown or width < 120
    assert to_markdown(d).count("| gate_up |") == 1


def test_a_killed_run_leaves_no_half_written_file(tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    arguments = [sys.executable, "-m", "harness.cli", *TINY, "--json", str(out), "--save", str(tmp_path / "all")]
    run = subprocess.Popen(
        arguments, env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}, stdout=subprocess.DEVNULL
    )
    try:
        run.wait(timeout=2.5)
    except subprocess.TimeoutExpired:
        run.kill()
        run.wait()
    if out.exists():
        load_decomposition(out)
    for path in (tmp_path / "all").glob("*.json") if (tmp_path / "all").is_dir() else []:
        load_decomposition(path)


def test_doctor_says_what_is_missing_and_what_installs_it(harness: Run) -> None:
    status, out, _ = harness("doctor", "--json", "-")
    assert status == 0
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert {"CPU", "BLAS", "driver", "CuPy", "CUPTI", "nsys", "ncu", "compute-sanitizer", "cache"} <= findings.keys()
    assert all(f["fix"] for f in findings.values() if f["state"] == "missing")
