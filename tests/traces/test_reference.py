"""`harness reference llama-bench`, end to end: a recorded trace behind a stand-in nsys, a stand-in llama-bench's JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from harness.attribution.decompose import load_decomposition
from harness.attribution.reference import command_line, parse_anchor
from harness.cli import group
from harness.errors import HarnessError

TRACE = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "nsys_h200_llama_cpp_mmq_ub4096.sqlite"
needs_trace = pytest.mark.skipif(not TRACE.exists(), reason=f"{TRACE} is absent")

ENTRY = {
    "build_commit": "0c1e570", "model_type": "qwen2 7B Q4_K - Medium", "model_filename": "/models/q.gguf", "n_batch": 4096,
    "n_ubatch": 4096, "n_prompt": 3325, "n_gen": 0, "samples_ns": [372_000_000, 352_000_000, 351_000_000, 350_000_000, 354_000_000],
}  # fmt: skip


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{body}")
    path.chmod(0o755)
    return path


@pytest.fixture
def bench(tmp_path: Path) -> Path:
    other = ENTRY | {"n_prompt": 0, "n_gen": 128}
    return script(tmp_path / "llama-bench", f"print({json.dumps([other, ENTRY])!r})")


@needs_trace
def test_a_reference_is_the_last_traced_prefill_with_the_untraced_wall(
    bench: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = script(
        tmp_path / "nsys",
        "import sys, shutil, pathlib\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('-o') + 1])\n"
        "if sys.argv[1] == 'profile':\n"
        "    assert '-s' in sys.argv and '--cuda-graph-trace=node' in sys.argv\n"
        "    out.with_suffix('.nsys-rep').write_text('recorded')\n"
        f"else:\n    shutil.copy({str(TRACE)!r}, out)\n",
    )
    monkeypatch.setenv("HARNESS_NSYS", str(nsys))
    out, kept = tmp_path / "ref.json", tmp_path / "ref.sqlite"
    arguments = ["reference", "llama-bench", "--bin", str(bench), "-m", "qwen2.5-7b-q4_k_m", "--tokens", "3325", "--ub", "4096",
                 "--json", str(out), "--trace", str(kept)]  # fmt: skip
    done = CliRunner().invoke(group, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    reference = load_decomposition(out)
    assert reference.wall_ms == pytest.approx(351.5), "the median without the first repetition"
    assert reference.busy_ms == pytest.approx(282.4, rel=0.05)
    by_type = {(r.cls, r.weight_type): r for r in reference.classes}
    assert by_type["gemm", "q4_K"].us_per_gmac == pytest.approx(10.64, rel=0.05)
    assert by_type["gemm", "q6_K"].us_per_gmac == pytest.approx(14.12, rel=0.05)
    assert {"gate_up", "down", "q_o", "attention"} <= {r.cls for r in reference.roles}
    assert reference.provenance["llama_bench"]["build_commit"] == "0c1e570"
    assert kept.exists() and "/models" not in out.read_text()


def test_llama_bench_is_asked_for_one_prefill_and_nothing_else() -> None:
    line = command_line(Path("llama-bench"), Path("m.gguf"), 3325, ub=4096, repetitions=5, extra=("-t", "4"))
    assert " ".join(line) == "llama-bench -m m.gguf -p 3325 -n 0 -ngl 99 -fa 1 -r 5 -o json -ub 4096 -b 4096 -t 4"
    assert "-ub" not in command_line(Path("llama-bench"), Path("m.gguf"), 3325, ub=None, repetitions=5)


@pytest.mark.parametrize(
    "text",
    ["", "no json", "{}", "[]", "[{}]", json.dumps([ENTRY | {"samples_ns": []}]), json.dumps([ENTRY, ENTRY]),
     json.dumps([ENTRY | {"n_prompt": 512}]), json.dumps([ENTRY | {"samples_ns": [0, 1]}]), "[1]", "null"],
)  # fmt: skip
def test_output_that_is_no_llama_bench_result_is_one_sentence(text: str) -> None:
    with pytest.raises(HarnessError, match="llama-bench"):
        parse_anchor(text, 3325, "llama-bench")


def test_a_binary_that_fails_says_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.attribution.reference import run_anchor

    bad = script(tmp_path / "llama-bench", "import sys; print('error: no such model', file=sys.stderr); sys.exit(3)")
    with pytest.raises(HarnessError, match="status 3: error: no such model"):
        run_anchor([str(bad)], 10, timeout_s=20)
    with pytest.raises(HarnessError, match="cannot be run"):
        run_anchor([str(tmp_path / "none")], 10, timeout_s=20)
    slow = script(tmp_path / "slow", "import time; time.sleep(30)")
    with pytest.raises(HarnessError, match="did not end within"):
        run_anchor([str(slow)], 10, timeout_s=1)


def test_a_wrong_model_and_a_wrong_binary_are_told_before_the_profiler(tmp_path: Path) -> None:
    from engine.geometry import PRESETS
    from engine.synth import SynthModel, write_gguf
    from harness.attribution.reference import reference_of_llama_bench

    whole, nothing = tmp_path / "whole.gguf", tmp_path / "nothing"
    write_gguf(SynthModel(PRESETS["tiny-llama"](), 0), whole)
    more: dict[str, Any] = {"ub": None, "repetitions": 2, "timeout_s": 5.0, "trace_to": None}
    with pytest.raises(HarnessError, match="nothing"):
        reference_of_llama_bench(Path("/bin/true"), nothing, 8, **more)
    with pytest.raises(HarnessError, match="nothing does not exist"):
        reference_of_llama_bench(nothing, whole, 8, **more)


def test_a_binary_in_this_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.attribution.reference import reference_of_llama_bench

    monkeypatch.chdir(tmp_path)
    for name, words in (("llama-bench", "out of memory"), ("nsys", "")):
        Path(name).write_text(f"#!/bin/sh\necho {words} >&2\nexit 3\n")
        Path(name).chmod(0o755)
    monkeypatch.setenv("HARNESS_NSYS", str(tmp_path / "nsys"))
    with pytest.raises(HarnessError, match="llama-bench ended with status 3: out of memory"):
        reference_of_llama_bench(
            Path("./llama-bench"), Path("tiny-llama"), 8, ub=None, repetitions=2, timeout_s=5.0, trace_to=None
        )
