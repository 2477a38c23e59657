"""`harness ab` and `harness gates` as a person runs them: real processes, the CPU engine, exit statuses, JSON, records."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.rounds.store import find_round, load_record
from harness.rounds.verify import verify

HERE = Path(__file__).parent
PROTOCOL = (
    "bar: 0.015\nalpha: 0.05\nbeta: 0.05\ndelta: 0.005\nmin_pairs: 6\nmax_pairs: 8\nconfirm_pairs: 2\n"
    "inner: 3\nwarmup: 1\nburst_idle_s: 0.0\ntraced_passes: 1\n"
)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "quick.yaml").write_text(PROTOCOL)
    engine = f"engine: {{kind: python, setup: 'simulated:setup', path: ['{HERE}'], args: {{real: true, wall_ms: 20}}}}\ntokens: 8\n"
    (tmp_path / "base.yaml").write_text(engine)
    (tmp_path / "lever.yaml").write_text("extends: base.yaml\nengine: {args: {gain: 1.0}}\npredicted_gain: 1.0\n")
    return tmp_path


def harness(directory: Path, *args: str, status: int | tuple[int, ...]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", *args], cwd=directory, capture_output=True, text=True, timeout=280
    )
    assert done.returncode in (status if isinstance(status, tuple) else (status,)), done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


def test_a_fast_lever_lands_with_a_record_that_verifies_until_one_wall_is_changed(here: Path) -> None:
    done = harness(here, "ab", "base.yaml", "lever.yaml", "--protocol", "quick.yaml", "--json", "-", status=0)
    record = json.loads(done.stdout)
    assert (record["schema"], record["verdict"], record["outcome"]) == ("round/1", "LANDED", "landed")
    assert record["evidence"]["for"] >= 20 and record["interval"][0] > 0.015
    path = here / "reports" / "rounds" / "0001-lever-against-base"
    assert (
        (path / "README.md").is_file() and (path / "pairs.png").is_file() and (here / "reports" / "INDEX.md").is_file()
    )
    first = json.loads((path / "samples.jsonl").read_text().splitlines()[0])
    assert {"pair", "order", "arm", "wall_ms", "dropped", "boot", "gpu"} <= first.keys()
    harness(here, "round", "verify", "1", status=0)
    lines = (path / "samples.jsonl").read_text().splitlines()
    changed = json.loads(lines[4])
    changed["wall_ms"][0] *= 1.01
    lines[4] = json.dumps(changed)
    (path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    assert "by its samples" in harness(here, "round", "verify", "1", status=6).stderr


def test_arms_that_run_the_same_are_refused_unless_an_a_a_is_asked_for_by_name(here: Path) -> None:
    done = harness(here, "ab", "base.yaml", "base.yaml", status=1)
    assert "runs exactly what" in done.stderr and "--aa" in done.stderr
    assert not (here / "reports").exists()
    done = harness(here, "ab", "--aa", "base.yaml", "--protocol", "quick.yaml", status=(2, 3))
    assert "LANDED" not in done.stdout  # REVERTED, or INCONCLUSIVE where the machine is too busy to tell
    assert load_record(find_round(1, here / "reports" / "rounds")).aa


def test_a_worker_that_dies_ends_the_round_as_invalid_with_its_last_lines(here: Path) -> None:
    (here / "dies.yaml").write_text(
        f"engine: {{kind: python, setup: 'hostile:setup', path: ['{HERE}'], args: {{what: exit, after: 3}}}}\ntokens: 8\n"
    )
    done = harness(here, "ab", "--aa", "dies.yaml", "--protocol", "quick.yaml", status=4)
    told = " ".join(done.stdout.split())  # it wraps at the console's width
    assert "ended with status 7" in told and "about to misbehave" in told


def test_a_gate_that_fails_has_its_own_exit_status(here: Path) -> None:
    (here / "zeros.yaml").write_text("extends: base.yaml\nengine: {args: {cheat: zeros}}\n")
    done = harness(here, "ab", "base.yaml", "zeros.yaml", "--protocol", "quick.yaml", status=5)
    assert "parity rel L2" in done.stdout
    done = harness(here, "gates", "base.yaml", "zeros.yaml", "--json", "-", status=5)
    gates = json.loads(done.stdout)["gates"]
    assert any(g["ok"] is False for g in gates) and any(g["ok"] is None and g["detail"] for g in gates)


def test_usage_errors_exit_64(here: Path) -> None:
    assert "give 2 config file(s)" in harness(here, "ab", "base.yaml", status=64).stderr
    assert "odd" in harness(here, "ab", "base.yaml", "lever.yaml", "--inner", "4", status=64).stderr


def test_a_command_engine_declares_its_gates_and_runs_like_any_other(here: Path) -> None:
    script = "import sys, time; t = float(sys.argv[1]); time.sleep(t); print('{\"ms\": %f}' % (t * 900))"
    (here / "c.yaml").write_text(
        "engine:\n  kind: command\n"
        f"  argv: ['{sys.executable}', -c, {json.dumps(script)}, '0.04']\n"
        "  metric: {json: ms, unit: ms}\n"
        f"  gates: {{greedy: {{argv: ['{sys.executable}', -c, 'print(1234)'], compare: stdout}}}}\n"
        "tokens: 8\n"
    )
    (here / "d.yaml").write_text(
        f"extends: c.yaml\nengine:\n  argv: ['{sys.executable}', -c, {json.dumps(script)}, '0.02']\n"
    )
    done = harness(here, "ab", "c.yaml", "d.yaml", "--protocol", "quick.yaml", "--inner", "1", "--json", "-", status=0)
    record = json.loads(done.stdout)
    gates = {g["name"]: g["ok"] for g in record["gates"]}
    assert gates["greedy"] is True and gates["parity"] is None and gates["bitwise"] is None
    assert record["estimate"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.slow
def test_a_real_cpu_lever_runs_to_a_verdict_and_an_inert_one_is_a_no_op(here: Path) -> None:
    """The embedded engine on the CPU: the same code path as on a GPU, from gates to record."""
    base = "engine: {kind: embedded, backend: cpu}\nmodel: tiny-llama\ntokens: 64\n"
    (here / "cpu.yaml").write_text(base)
    (here / "threads.yaml").write_text("extends: cpu.yaml\nlevers: {cpu_threads: 1, concat: on}\nops: [gate_up, q_o]\n")
    (here / "inert.yaml").write_text("extends: cpu.yaml\nlevers: {gemm_heuristic: first}\n")
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "ab", "cpu.yaml", "threads.yaml", "--protocol", "quick.yaml", "--boots", "1", "--json", "-"],
        cwd=here, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    record = json.loads(done.stdout)
    assert record["verdict"] in ("LANDED", "REVERTED", "INCONCLUSIVE"), done.stderr
    assert {"qkv", "gate_up"} <= {op["op"] for op in record["ops_affected"] if op["change"] == "added"}
    assert record["mechanism"]["found"] in ("positive", "negative", "none") and record["mechanism"]["before_ms"]
    gates = {g["name"]: g["ok"] for g in record["gates"]}
    assert gates["every op launched, arm B"] is True
    assert any(
        name.startswith("parity vs reference") or name.startswith("parity rel L2 vs reference") for name in gates
    )
    assert record["arms"]["A"]["device_memory_bytes"] > 0
    path = find_round(1, here / "reports" / "rounds")
    assert verify(path) == []
    assert (path / "before.json").is_file() and (path / "after.json").is_file()
    done = harness(here, "ab", "cpu.yaml", "inert.yaml", "--protocol", "quick.yaml", status=2)
    assert "no-op" in done.stdout
    assert load_record(find_round(2, here / "reports" / "rounds")).outcome == "no-op"
