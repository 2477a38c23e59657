"""`harness trace info` says what a trace offers to look at, and the command that looks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from made import PID, Content, Kernel, event, trace_file, write

from harness.cli import group


def info(path: Path) -> dict[str, Any]:
    done = CliRunner().invoke(group, ["trace", "info", str(path), "--json", "-"], standalone_mode=False)
    assert done.exception is None and done.return_value == 0, done.output
    return json.loads(done.output)


def run(command: str) -> int:
    """The exit status of a command that was shown."""
    argv = shlex.split(command)
    assert argv[0] == "harness"
    done = CliRunner().invoke(group, argv[1:], standalone_mode=False)
    assert done.exception is None, done.exception
    return int(done.return_value)


def test_ranges_are_counted_and_the_command_that_comes_next_runs(tmp_path: Path) -> None:
    tid = PID | 7
    content = Content(
        kernels=[Kernel("flash_fwd_kernel", 1000 * i, 1000 * i + 900, correlation=i) for i in range(6)],
        calls=[(1000 * i - 500, 1000 * i - 400, tid, i) for i in range(6)],
        ranges=[(-600, 2000, "prefill", tid), (-550, 100, "inner", tid), (2100, 2200, "aten::mm, seq = 7", tid), (2300, 2400, "aten::mm, seq = 8", tid), (2500, 2600, "aten::mm, seq = 9", tid)],
    )  # fmt: skip
    found = info(write(tmp_path / "a trace.sqlite", content))
    assert found["ranges"] == [{"name": "aten::mm*", "count": 3}, {"name": "prefill", "count": 1}]
    assert found["processes"] == {"0": [str(PID)]} and found["repeats"] == {}
    assert run(found["next"].replace("aten::mm*", "prefill")) == 0


def test_annotations_of_a_profiler_trace_are_ranges_and_devices_are_chosen(tmp_path: Path) -> None:
    steps = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{i}", "pid": 1, "tid": 1, "ts": 10 * i, "dur": 9}
        for i in range(2)
    ]
    kernels = [event("flash_fwd_kernel", 10 * i, 5, device=i % 2) for i in range(6)]
    found = info(trace_file(tmp_path / "t.json", steps + kernels))
    assert [r["name"] for r in found["ranges"]] == ["ProfilerStep#0", "ProfilerStep#1"]
    assert "--device 0" in found["next"] and "--range" in found["next"]


def test_a_recorded_benchmark_repeats_its_prefill(traces: Path) -> None:
    found = info(traces / "nsys_h200_llama_cpp_mmq_ub4096.sqlite")
    assert found["repeats"] == {
        "0": {"count": 4, "launches": 848, "prefills": True, "what": "4 × the same 848 launches"}
    }
    assert found["next"].endswith("--occurrence 2")


def test_layers_that_repeat_are_listed_as_layers_and_the_next_command_runs(tmp_path: Path) -> None:
    names = ["void vllm::rms_norm_kernel<float>(float*)", "ampere_sgemm_128x64_tn", "flash_fwd_kernel", "ampere_sgemm_64x64_tn", "void vllm::act_and_mul_kernel<float, vllm::silu_kernel>(float*)"]  # fmt: skip
    kernels = [event(names[i % 5], 12 * i, 10) for i in range(5 * 12)]
    found = info(trace_file(tmp_path / "t.json", kernels))
    assert found["repeats"]["0"]["what"] == "12 × of 5 launches, one attention each: layers or groups of layers"
    assert not found["repeats"]["0"]["prefills"] and "--occurrence" not in found["next"]
    assert run(found["next"]) == 0
