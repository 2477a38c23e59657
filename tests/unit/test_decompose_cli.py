"""`harness decompose` and `harness doctor` as a person runs them, on the CPU backend with a tiny model."""

from __future__ import annotations

import io
import json
import os
import signal
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


def test_a_saved_table_gives_the_heading_of_its_run_again(harness: Run, tmp_path: Path) -> None:
    table = tmp_path / "all" / "launches.parquet"
    _, first, _ = harness(*TINY, "--set", "concat=on", "--save", table.parent)
    _, again, _ = harness("decompose", "--trace", table, "--json", tmp_path / "again.json")
    heading = first[: first.index("ok ")]
    assert "128 tokens" in heading and "tok/s" in heading and "levers concat=on" in heading
    assert again.startswith(heading)
    before, after = (load_decomposition(p) for p in (table.with_name("decomposition.json"), tmp_path / "again.json"))
    assert (after.config_hash, after.walls_ms, after.classes) == (before.config_hash, before.walls_ms, before.classes)
    assert after.provenance["trace"] == "launches.parquet"
    status, _, err = harness("decompose", "--trace", table, "--tokens", "64")
    assert status == 1 and "was saved of a prefill of 128 tokens, not 64" in err


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


def run_killed_at(size: int | None, folder: Path) -> int:
    """The exit status of a saving run that the kernel kills in the write that takes any file beyond `size` bytes."""
    code = (
        "import resource, signal, sys\n"
        "from harness.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n"  # Python ignores it: the kernel's kill becomes an error
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "if int(sys.argv[1]): resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)\n"
        "main(sys.argv[2:])\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(size or 0), *TINY, "--runs", "1", "--save", str(folder)],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode


def saved(folder: Path) -> dict[str, bytes]:
    """Every file that a reader would see, each whole: JSON and Parquet load, a PNG has its end, a page its last line."""
    found = {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if not p.name.startswith(".")}
    for name, content in found.items():
        if name.endswith(".json"):
            load_decomposition(folder / name)
        elif name.endswith(".parquet"):
            launches.load(folder / name)
        elif name.endswith(".png"):
            assert content.endswith(b"IEND\xaeB`\x82"), f"{name} was cut"
        else:
            assert name == "README.md" and content.endswith(b"\n")
    return found


@pytest.mark.timeout(900)  # three processes, on a machine that may be shared
def test_a_killed_run_leaves_no_half_written_file(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    assert run_killed_at(None, whole) in (0, 6)
    complete = saved(whole)
    sizes = {name: len(content) for name, content in complete.items()}
    assert set(sizes) == {"README.md", "decomposition.json", "decomposition.png", "launches.parquet"}

    # In the middle of the largest, which the others but the last come before.
    assert max(sizes, key=sizes.__getitem__) == "decomposition.png"
    fresh = tmp_path / "fresh"
    assert run_killed_at(sizes["decomposition.png"] // 2, fresh) == -signal.SIGXFSZ, "nothing was killed"
    assert set(saved(fresh)) == {"decomposition.json", "launches.parquet"}

    # In the middle of the first, over an earlier run's files.
    assert run_killed_at(sizes["decomposition.json"] // 2, whole) == -signal.SIGXFSZ, "nothing was killed"
    assert saved(whole) == complete


def test_doctor_says_what_is_missing_and_what_installs_it(harness: Run) -> None:
    status, out, _ = harness("doctor", "--json", "-")
    assert status == 0
    findings = {f["name"]: f for f in json.loads(out)["findings"]}
    assert {"CPU", "BLAS", "driver", "CuPy", "CUPTI", "nsys", "ncu", "compute-sanitizer", "cache"} <= findings.keys()
    assert all(f["command"] for f in findings.values() if f["state"] == "missing")
