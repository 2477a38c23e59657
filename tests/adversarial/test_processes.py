"""Real worker processes: whatever an engine does to its process, the round ends with a reason and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.ab.process import ArmProcess, DeviceLock, WorkerFailure
from harness.config import ArmConfig
from harness.errors import HarnessError

HERE = Path(__file__).parent
HALF: dict[str, Any] = {"seed": 1, "pair": 1, "inner": 3, "warmup": 1, "regime": "burst", "idle_s": 0.0, "load_s": 0.0}


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[DeviceLock]:
    with DeviceLock(tmp_path / "device.lock") as held:
        yield held


def start(lock: DeviceLock, setup: str, **args: Any) -> ArmProcess:
    engine = {"kind": "python", "setup": setup, "args": args, "path": ["."], "vocab": 1000}
    arm = ArmConfig.model_validate({"name": "arm", "engine": engine, "tokens": 8})
    return ArmProcess(arm.model_dump(mode="json", by_alias=True), HERE, lock, None)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("exit", "ended with status 7"),
        ("segfault", "SIGSEGV"),
        ("killed", "SIGKILL (out of memory?)"),
        ("hang", "the worker hung"),
        ("out of memory", "out of memory: cannot allocate 18.4 GB"),
        ("raise", "too much shared memory"),
        ("garbage on the pipe", "garbage"),
    ],
)
def test_a_worker_that_fails_is_named_with_the_last_lines_of_its_stderr(
    lock: DeviceLock, what: str, reason: str
) -> None:
    with start(lock, "hostile:setup", what=what, after=2) as worker:
        pid = worker.pid
        with pytest.raises(WorkerFailure) as failure:
            worker.ask("half", 2.0 if what == "hang" else 30.0, **HALF)
    assert reason in str(failure.value)
    assert any("about to misbehave" in line for line in failure.value.tail)
    assert not psutil.pid_exists(pid)


def test_garbage_on_stdout_disturbs_nothing(lock: DeviceLock) -> None:
    with start(lock, "hostile:setup", what="garbage on stdout") as worker:
        assert len(worker.ask("half", 30.0, **HALF)["forwards"]) == 3


def test_an_entry_that_makes_no_engine_is_named(lock: DeviceLock) -> None:
    with pytest.raises(WorkerFailure, match="cannot be called and has no `prefill`"):
        start(lock, "hostile:no_engine")
    with pytest.raises(WorkerFailure, match="cannot be imported"):
        start(lock, "hostile:nothing")


def test_a_result_that_arrives_after_the_clock_stopped_is_caught(lock: DeviceLock) -> None:
    with start(lock, "simulated:setup", cheat="other stream, result late", wall_ms=2.0, real=True) as worker:
        answer = worker.ask("half", 30.0, **HALF | {"warmup": 3})
    assert any("changed after the clock stopped" in reason for reason in answer["broken"])


def test_a_device_serves_one_round_at_a_time(lock: DeviceLock) -> None:
    with pytest.raises(HarnessError, match=f"another round runs on this device .process {os.getpid()}"):
        DeviceLock(lock.path).acquire(wait_s=0.1)


def test_a_killed_round_leaves_no_worker_running(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from harness.ab.process import *; from harness.config import ArmConfig\n"
        "lock = DeviceLock(Path(sys.argv[1])); lock.acquire()\n"
        "arm = ArmConfig.model_validate({'name': 'a', 'tokens': 8, 'engine': {'kind': 'python', 'setup': 'hostile:setup',\n"
        "    'args': {'what': 'hang', 'after': 1}, 'path': ['.'], 'vocab': 1000}})\n"
        "w = ArmProcess(arm.model_dump(mode='json', by_alias=True), Path(sys.argv[2]), lock, None)\n"
        "print(w.pid, flush=True); w.ask('logits', 60.0, seed=1, tokens=8, path=sys.argv[3]); w.ask('logits', 60.0, seed=2, tokens=8, path=sys.argv[3])\n"
    )
    path = tmp_path / "device.lock"
    runner = subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(HERE), str(tmp_path / "x.npy")], stdout=subprocess.PIPE, text=True
    )
    assert runner.stdout is not None
    worker = int(runner.stdout.readline())
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    DeviceLock(path).acquire(wait_s=10)  # free only when runner and worker are both gone
    deadline = time.monotonic() + 10
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(worker)


def command(lock: DeviceLock, script: str, **engine: Any) -> ArmProcess:
    argv = [sys.executable, "-c", script, "{tokens}", "{seed}"]
    arm = ArmConfig.model_validate({"name": "c", "tokens": 100, "engine": {"kind": "command", "argv": argv, **engine}})
    return ArmProcess(arm.model_dump(mode="json", by_alias=True), HERE, lock, None)


def test_a_commands_metric_is_read_in_each_form_and_unit(lock: DeviceLock) -> None:
    sleep = "import time, sys; time.sleep(0.05); "
    forms = [
        ('print(\'[{"samples_ns": [1000000, 2000000, 3000000]}]\')', {"json": "0.samples_ns", "unit": "ns"}, [1.0, 2.0, 3.0]),
        ("print('run 4000 us\\nrun 5000 us\\nrun 6000 us')", {"regex": r"run (\d+) us", "unit": "us"}, [4.0, 5.0, 6.0]),
        ("print('[5e4, 1e5, 2e5]'.join(['{\"rate\": ', '}']))", {"json": "rate", "unit": "tok/s"}, [2.0, 1.0, 0.5]),
    ]  # fmt: skip
    for code, metric, expected in forms:
        with command(lock, sleep + code, metric=metric) as worker:
            answer = worker.ask("half", 30.0, **HALF)
        assert [f["wall_ms"] for f in answer["forwards"]] == pytest.approx(expected)
    with command(lock, sleep) as worker:
        answer = worker.ask("half", 30.0, **HALF)
    assert len(answer["forwards"]) == 3 and all(50 < f["wall_ms"] < 5000 for f in answer["forwards"])


@pytest.mark.parametrize(
    ("script", "engine", "reason"),
    [
        ("print('{\"ms\": 9e9}')", {"metric": {"json": "ms", "unit": "ms"}}, "its whole process took"),
        ("print('hello')", {"metric": {"json": "ms", "unit": "ms"}}, "not JSON"),
        ("print('{}')", {"metric": {"json": "a.b", "unit": "ms"}}, "has no 'a.b'"),
        ("print('hello')", {"metric": {"regex": "t=(.*)", "unit": "ms"}}, "matches nothing"),
        ("print('t=fast')", {"metric": {"regex": "t=(.*)", "unit": "ms"}}, "no number"),
        ("print('t=0')", {"metric": {"regex": "t=(.*)", "unit": "ms"}}, "above 0"),
        ("raise SystemExit(3)", {}, "ended with status 3"),
        ("import time; time.sleep(60)", {"timeout_s": 0.5}, "longer than timeout_s"),
    ],
)
def test_a_command_that_lies_or_fails_ends_the_half_with_a_reason(
    lock: DeviceLock, script: str, engine: dict[str, Any], reason: str
) -> None:
    with command(lock, script, **engine) as worker, pytest.raises(WorkerFailure, match=reason):
        worker.ask("half", 30.0, **HALF)


def test_a_command_that_hangs_leaves_its_own_last_lines_and_no_trace_of_ours(lock: DeviceLock) -> None:
    script = "import sys, time; print('waiting for the device', file=sys.stderr, flush=True); time.sleep(60)"
    with command(lock, script, timeout_s=2) as worker, pytest.raises(WorkerFailure, match="longer than") as failure:
        worker.ask("half", 30.0, **HALF)
    assert [line.strip() for line in failure.value.tail] == ["waiting for the device"]


def test_a_model_that_only_the_users_engine_knows_gives_no_floor_and_says_so(lock: DeviceLock) -> None:
    engine = {"kind": "command", "argv": [sys.executable, "-c", "pass"]}
    arm = ArmConfig.model_validate({"name": "c", "tokens": 100, "model": "acme/secret-7b", "engine": engine})
    with ArmProcess(arm.model_dump(mode="json", by_alias=True), HERE, lock, None) as worker:
        floor = worker.ask("floor", 30.0, regime="burst")
    assert not floor["there"] and "acme/secret-7b" in floor["why"]
