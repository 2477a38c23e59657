"""Recordings that are not the work that ran fail a check that names the cause; honest look-alikes pass every one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from made import OTHER_PID, PID, Content, Kernel, Schema, event, trace_file, write

from harness.attribution.decompose import Decomposition, decompose, headline
from harness.attribution.recorded import load_recorded, read_trace
from harness.cli import group
from harness.errors import HarnessError

NEW = ("records", "processes", "streams", "activity")
GIVEN = [
    ("nsys_2022.2.1_saxpy_mpi.sqlite", None), ("nsys_2025.3.2_h200_gemm_nvtx.sqlite", None), ("nsys_2025.5.2_graph_mode.sqlite", None),
    ("nsys_2026.2.1_2gpu_before.sqlite", 0), ("nsys_2026.2.1_2gpu_before.sqlite", 1), ("nsys_2026.2.1_2gpu_after.sqlite", 0),
    ("nsys_2026.2.1_2gpu_after.sqlite", 1), ("nsys_h200_llama_cpp_cublas_ub4096.sqlite", None), ("nsys_h200_llama_cpp_mmq_ub4096.sqlite", None),
    ("kineto_h100_qwen1.5_0.5b.json.gz", None), ("kineto_vllm_prefill_decode_graph.json.gz", None),
]  # fmt: skip
EPOCH = 1_718_000_000_000_000  # µs
SEVERITY = {"info": 1, "warning": 2, "error": 3}


def decomposed(path: Path, **options: Any) -> Decomposition:
    found = load_recorded(path, **options)
    return decompose(found.launches, wall_ns=found.wall_ns, roles=found.roles, **found.about)


def failed(result: Decomposition) -> list[str]:
    return [c.name for c in result.checks if not c.ok and c.name in NEW]


def call(name: str, ts: float, correlation: int, dur: float = 3, pid: object = 100, tid: int = 100) -> dict[str, Any]:
    return {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": {"correlation": correlation}}  # fmt: skip


def forward(count: int = 40, base: float = 1000, **keys: Any) -> list[dict[str, Any]]:
    """Launch calls, and back-to-back kernels of 10 µs, each 20 µs after its call."""
    events = []
    for i in range(count):
        events.append(call("cudaLaunchKernel", base + 11 * i - 20, i + 1))
        events.append(event(f"k{i % 4}", base + 11 * i, 10, correlation=i + 1) | keys)
    return events


def runtime(content: Content, name: str, rows: list[tuple[int, int, int, int]], returned: int = 0) -> None:
    """Further runtime calls (start, end, globalTid, correlation) of a name."""
    name_id = 9000 + len(content.raw)
    content.raw.append(("INSERT INTO StringIds VALUES (?, ?)", (name_id, name)))
    for start, end, tid, correlation in rows:
        sql = "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)"
        content.raw.append((sql, (start, end, tid, correlation, name_id)))
    if returned:
        content.raw.append(("ALTER TABLE CUPTI_ACTIVITY_KIND_RUNTIME ADD COLUMN returnValue INTEGER", ()))
        content.raw.append(
            ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET returnValue = ? WHERE nameId = ?", (returned, name_id))
        )


def export(count: int = 200, lost: int = 0, pid: int = PID) -> Content:
    """`count` launch calls a µs apart, their kernels 50 µs after each; the device records of `lost` of them are missing."""
    kept = [i for i in range(count) if not 50 <= i < 50 + lost]
    return Content(
        kernels=[Kernel(f"k{i % 3}", 50_000 + 1000 * i, 50_800 + 1000 * i, correlation=i + 1, pid=pid) for i in kept],
        calls=[(1000 * i, 1000 * i + 500, pid | 7, i + 1) for i in range(count)],
    )


# Records without a time


@pytest.mark.parametrize("base", [EPOCH, 1_428_625_731_622.25])
def test_records_that_lost_their_time_are_left_out_and_fail(tmp_path: Path, base: float) -> None:
    lost = [event("lost", 0, 0, correlation=900 + i) for i in range(5)]
    result = decomposed(trace_file(tmp_path / "t.json", forward(base=base) + lost))
    assert result.traced_wall_ms == pytest.approx(0.439, abs=0.001)
    assert failed(result) == ["records"]
    assert "5 of 45 device records without a time were left out, first 'lost'" in result.check("records").detail


def test_a_diff_of_recordings_says_which_is_unsound(tmp_path: Path) -> None:
    lost = [event("lost", 0, 0, correlation=900 + i) for i in range(5)]
    whole = trace_file(tmp_path / "whole.json", forward(base=EPOCH))
    torn = trace_file(tmp_path / "torn.json", forward(base=EPOCH) + lost)
    sound = CliRunner().invoke(group, ["diff", str(whole), str(whole), "--json", "-"])
    assert json.loads(sound.stdout)["unsound"] == [] and sound.exit_code == 0
    found = json.loads(CliRunner().invoke(group, ["diff", str(whole), str(torn), "--json", "-"]).stdout)
    assert [u["side"] for u in found["unsound"]] == [str(torn)] and "without a time" in found["unsound"][0]["why"]
    assert "do not rely on it" in CliRunner().invoke(group, ["diff", str(whole), str(torn)]).stdout.replace("\n", " ")


def test_records_that_begin_at_zero_in_a_trace_of_small_times_are_launches(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.json", [event("first", 0, 0), *forward(base=30)])
    assert len(load_recorded(path).launches) == 41 and not failed(decomposed(path))
    content = Content(kernels=[Kernel("k", 0, 0), Kernel("k", 900_000_000, 900_000_500)])
    assert len(read_trace(write(tmp_path / "x.sqlite", content)).launches) == 2


def test_one_bad_record_is_named_and_fails_nothing(tmp_path: Path) -> None:
    content = export()
    content.kernels.append(Kernel("backwards", 90_000, 80_000, correlation=1000))
    content.calls.append((60_000, 60_100, PID | 7, 1000))
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert not failed(result) and result.launches == 200
    assert (
        "1 of 201 device records that end before they start was left out, first 'backwards'"
        in result.check("records").detail
    )


def test_a_record_that_was_left_out_is_its_calls_activity(tmp_path: Path) -> None:
    content = export(36)
    content.raw.append(("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 'text' WHERE rowid = 9", ()))
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert not failed(result) and result.launches == 35
    assert "1 of 36 device records whose 'end' is no whole number was left out" in result.check("records").detail
    assert result.check("activity").detail.startswith("all 36 launch calls")
    events = forward(36)
    del events[17]["dur"]
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert not failed(result) and result.check("activity").detail.startswith("all 36 launch calls")


# The profiler's own words


@pytest.mark.parametrize(
    ("severity", "text", "fails"),
    [
        ("error", "CUPTI: 12345 activity records were dropped.", True),
        ("error", "The target application crashed.", True),
        ("warning", "Dropped 1,234 events: the buffer was full", True),
        ("info", "17 CUDA events were lost.", True),
        ("warning", "Not all CUDA events might have been collected.", False),
        ("warning", "No NVTX events collected. Does the process use NVTX?", False),
        ("info", "Number of CUDA events collected: \t7141.", False),
        ("warning", "0 activity records were dropped.", False),
    ],
)
def test_messages_of_the_profiler_fail_where_they_tell_of_loss(
    tmp_path: Path, severity: str, text: str, fails: bool
) -> None:
    content = export()
    content.raw += [
        (
            "CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, timestampType INTEGER, source INTEGER, severity INTEGER, text TEXT)",
            (),
        ),
        ("INSERT INTO DIAGNOSTIC_EVENT VALUES (1, 0, 3, ?, ?)", (SEVERITY[severity], text)),
    ]
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert failed(result) == (["records"] if fails else [])
    said = " ".join(text.split())
    assert (said in result.check("records").detail) == fails
    assert any(said in note for note in result.notes) == (severity == "warning" and not fails)


# Processes on one device number


def test_ranks_under_prefixed_pids_are_devices_of_their_own(tmp_path: Path) -> None:
    events = []
    for rank in range(2):
        for e in forward(base=1000 + 3 * rank):
            events.append(e | {"pid": f"[TP0{rank}] {e['pid']}"})
    path = trace_file(tmp_path / "t.json", events)
    with pytest.raises(HarnessError, match=r"2 devices: 0 \(40 launches\), 1 \(40 launches\)"):
        load_recorded(path)
    for device in (0, 1):
        result = decomposed(path, device=device)
        assert not failed(result) and result.busy_ms == pytest.approx(0.4) and result.overlap_ms == 0


def test_ranks_under_renumbered_pids_are_devices_of_their_own(tmp_path: Path) -> None:
    events = [e | {"pid": e["pid"] + 1000 * rank} for rank in range(3) for e in forward(base=1000 + 3 * rank)]
    trace = read_trace(trace_file(tmp_path / "t.json", events))
    assert trace.launches["device"].value_counts().to_dict() == {0: 40, 1: 40, 2: 40}


def test_two_host_processes_on_one_device_number_fail(tmp_path: Path) -> None:
    events = forward() + [e | {"pid": 200 if e["cat"] == "cuda_runtime" else 0} for e in forward(base=1002)]
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert "processes" in failed(result)
    assert "2 processes (100, 200) call a GPU device 0" in result.check("processes").detail


def test_one_rank_with_a_prefix_and_two_processes_with_a_device_each_are_sound(tmp_path: Path) -> None:
    one = [e | {"pid": f"[TP03] {e['pid']}"} for e in forward()]
    assert not failed(decomposed(trace_file(tmp_path / "one.json", one)))
    other = [
        e | ({"pid": 200} if e["cat"] == "cuda_runtime" else {"pid": 1, "args": e["args"] | {"device": 1}})
        for e in forward(base=1003)
    ]
    path = trace_file(tmp_path / "two.json", forward() + other)
    assert not failed(decomposed(path, device=0)) and not failed(decomposed(path, device=1))


def two_processes(second: int = 700) -> Content:
    content = export()
    other = export(pid=OTHER_PID)
    for k in other.kernels:
        k.start, k.end = k.start + second, k.end + second
    for k in content.kernels + other.kernels:
        k.end = k.start + 100
    content.kernels += other.kernels
    content.calls += other.calls
    return content


DEVICE_TABLE = "CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)"
GPU_TABLE = "CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)"


def test_processes_of_which_nothing_says_that_they_share_a_gpu_fail(tmp_path: Path) -> None:
    content = two_processes()
    content.raw += [(GPU_TABLE, ()), ("INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100'), (1, 'H100')", ())]
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert failed(result) == ["processes"] and "4242, 4343" in result.check("processes").detail


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (
            [(DEVICE_TABLE, ()), ("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 4242), (0, 0, 4343)", ())],
            "device table",
        ),
        ([(GPU_TABLE, ()), ("INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100')", ())], "a single GPU"),
    ],
)
def test_processes_that_share_one_gpu_are_sound(tmp_path: Path, raw: list, why: str) -> None:
    content = two_processes()
    content.raw += raw
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert not failed(result) and why in result.check("processes").detail


def test_processes_one_after_another_are_sound(tmp_path: Path) -> None:
    result = decomposed(write(tmp_path / "x.sqlite", two_processes(second=10_000_000)))
    assert not failed(result) and "one after another" in result.check("processes").detail


def ranks(pids: tuple[object, object], apart: int, ids: int = 0, of_stream: int = 13) -> list[dict[str, Any]]:
    """Two forwards of which the host's calls lie one after another; the second's kernels begin `apart` µs after the first's."""
    first = forward()
    second = [
        e | {"ts": 1000 + apart + 11 * (e["args"]["correlation"] - 1) if e["cat"] == "kernel" else e["ts"] + 5000}
        | {"args": e["args"] | {"correlation": e["args"]["correlation"] + ids} | ({"stream": of_stream} if e["cat"] == "kernel" else {})}
        for e in first
    ]  # fmt: skip
    by = [[e | ({"pid": pid} if e["cat"] == "cuda_runtime" else {}) for e in part] for part, pid in zip((first, second), pids, strict=True)]  # fmt: skip
    return [*by[0], *by[1]]


@pytest.mark.parametrize("ids", [0, 1000])
@pytest.mark.parametrize(("pids", "who"), [((100, 200), "100, 200"), ((1, 1), "1, another 1")])
def test_kernels_of_two_processes_at_once_fail_whatever_their_calls_say(
    tmp_path: Path, pids: tuple[int, int], who: str, ids: int
) -> None:
    result = decomposed(trace_file(tmp_path / "t.json", ranks(pids, apart=3, ids=ids)))
    if pids == (1, 1) and ids:  # ids of its own under one pid: one process on two streams
        assert not failed(result)
        return
    assert failed(result) == ["processes"]
    detail = result.check("processes").detail
    assert f"2 processes ({who})" in detail and "run at once for" in detail and "under MPS" in detail


@pytest.mark.parametrize("pids", [(100, 200), (1, 1)])
def test_processes_one_after_another_on_the_device_are_sound_in_a_profile(
    tmp_path: Path, pids: tuple[int, int]
) -> None:
    """A server that was started again: its correlation ids begin anew, and nothing overlaps."""
    result = decomposed(trace_file(tmp_path / "t.json", ranks(pids, apart=5000)))
    assert not failed(result) and "they ran one after another" in result.check("processes").detail


def test_processes_that_take_turns_count_no_time_twice(tmp_path: Path) -> None:
    events = [
        e | ({"ts": 1000 + 2 * (e["ts"] - 1000)} if e["cat"] == "kernel" else {}) for e in ranks((100, 200), apart=0)
    ]
    turns = [e | ({"ts": e["ts"] + 11} if e["args"].get("stream") == 13 else {}) for e in events]
    result = decomposed(trace_file(tmp_path / "t.json", turns))
    assert (
        not failed(result)
        and "their kernels take turns and no time is counted twice" in result.check("processes").detail
    )


def contexts(gap: float, calls: bool) -> list[dict[str, Any]]:
    """Kernels of contexts 1 and 2 by turns, the next one's start `gap` µs after the last one's end."""
    made = []
    for i in range(40):
        if calls:
            made.append(call("cudaLaunchKernel", 900 + i, i + 1, dur=0.5))
        made.append(event("k", 1000 + (10 + gap) * i, 10, correlation=i + 1, context=1 + i % 2) | {"tid": 7 + i % 2})
        made[-1]["args"]["stream"] = 7 + i % 2
    return made


def test_contexts_at_once_without_any_call_fail_and_by_turns_are_sound(tmp_path: Path) -> None:
    result = decomposed(trace_file(tmp_path / "t.json", contexts(-4, calls=False)))
    assert failed(result) == ["processes"] and "2 contexts (context 1, context 2)" in result.check("processes").detail
    assert not failed(decomposed(trace_file(tmp_path / "u.json", contexts(1, calls=False))))


def test_contexts_of_one_process_are_one_gpu(tmp_path: Path) -> None:
    """Green contexts: the calls are of one process, which calls one GPU by one number."""
    result = decomposed(trace_file(tmp_path / "t.json", contexts(-4, calls=True)))
    assert not failed(result) and result.check("processes").detail == "device 0 is one process's"


def test_mps_is_sound_where_a_device_table_names_one_gpu_and_is_named_where_none_does(tmp_path: Path) -> None:
    content = two_processes(second=50)  # kernels of 100 ns
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert failed(result) == ["processes"] and "or one under MPS" in result.check("processes").detail
    table = (GPU_TABLE.replace(")", ", uuid TEXT)"), ())
    content.raw += [table, ("INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100', 'aa-1'), (1, 'H100', 'aa-1')", ())]
    result = decomposed(write(tmp_path / "y.sqlite", content))
    assert not failed(result) and "names a single GPU" in result.check("processes").detail
    content.raw[-1] = ("INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100', 'aa-1'), (1, 'H100', 'bb-2')", ())
    assert failed(decomposed(write(tmp_path / "z.sqlite", content))) == ["processes"]


# Launches without device activity


def test_graph_launches_without_nodes_fail_and_the_gap_does_not_dominate(tmp_path: Path) -> None:
    graphs = [call("cudaGraphLaunch", 2000 + 2500 * i, 5000 + i) for i in range(20)]
    nodes = [event("node", 2020 + i, 1, correlation=5000) | {"args": {"device": 0, "stream": 7, "correlation": 5000, "graph node id": i + 1}} for i in range(3)]  # fmt: skip
    result = decomposed(trace_file(tmp_path / "t.json", forward(4) + graphs + nodes + forward(4, base=60_000)))
    assert failed(result) == ["activity"] and result.gap_ms > result.busy_ms
    assert result.check("activity").detail.startswith("19 of 20 graph launches have no device activity")
    assert headline(result).startswith(
        "19 of 20 graph launches have no device activity"
    ) and "not idle time" in headline(result)
    assert not result.gap_causes_ms and not result.idle, "no cause of a gap that is no wait"
    assert any("the gap's causes are unknown" in note for note in result.notes)


@pytest.mark.parametrize(("lost", "fails"), [(0, False), (2, False), (3, True), (60, True)])
def test_lost_kernels_fail_above_one_percent(tmp_path: Path, lost: int, fails: bool) -> None:
    result = decomposed(write(tmp_path / "x.sqlite", export(lost=lost)))
    assert failed(result) == (["activity"] if fails else [])
    assert (f"{lost} of 200 kernel launches" in result.check("activity").detail) == bool(lost)


def test_lost_launches_in_a_range_are_the_ranges(tmp_path: Path) -> None:
    content = export(lost=10)
    content.ranges = [(40_000, 80_000, "hit", PID | 7), (100_000, 150_000, "whole", PID | 7)]
    path = write(tmp_path / "x.sqlite", content)
    assert failed(decomposed(path, range_="hit")) == ["activity"] and not failed(decomposed(path, range_="whole"))


def test_calls_inside_a_capture_launch_nothing_and_the_graph_they_make_does(tmp_path: Path) -> None:
    content = export()
    tid = PID | 7
    runtime(content, "cudaStreamBeginCapture_v10000", [(60_100, 60_200, tid, 2001)])
    runtime(
        content, "cudaLaunchKernelExC_v11060", [(60_300 + 10 * i, 60_305 + 10 * i, tid, 3000 + i) for i in range(50)]
    )
    runtime(content, "cudaStreamEndCapture_v10000", [(61_000, 61_100, tid, 2002)])
    runtime(content, "cudaGraphLaunch_v10000", [(70_100, 70_200, tid, 4000), (80_100, 80_200, tid, 4001)])
    content.kernels += [Kernel("node", 300_000 + i, 300_001 + i, correlation=4000, node=i) for i in range(9)]
    content.raw += [
        ("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, graphId INTEGER, "
         "correlationId INTEGER, globalPid INTEGER)", ()),
        ("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (300100, 300200, 0, 7, 3, 4001, ?)", (PID,)),
    ]  # fmt: skip
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert not failed(result) and result.check("activity").detail.startswith("all 202 launch calls")


def test_calls_that_failed_that_queue_host_functions_or_lie_in_others_are_no_lost_launches(tmp_path: Path) -> None:
    content = export()
    tid = PID | 7
    runtime(content, "cuLaunchHostFunc", [(60_100 + i, 60_101 + i, tid, 3000 + i) for i in range(20)])
    # The driver's call inside the runtime's, under an id of its own.
    runtime(content, "cuLaunchKernelEx", [(1000 * i + 100, 1000 * i + 400, tid, 5000 + i) for i in range(200)])
    runtime(
        content, "cudaLaunchKernel_v7000", [(60_700 + i, 60_701 + i, tid, 4000 + i) for i in range(20)], returned=98
    )
    assert not failed(decomposed(write(tmp_path / "x.sqlite", content)))


def test_calls_before_the_first_record_and_in_flight_when_the_recording_stopped_are_not_counted(tmp_path: Path) -> None:
    content = export()
    content.kernels = content.kernels[20:-50]  # the device was 50 µs behind when the recording stopped
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert not failed(result) and "all 130 launch calls" in result.check("activity").detail


def test_records_that_end_while_the_host_had_long_submitted_all_are_lost(tmp_path: Path) -> None:
    kernels = [Kernel("k", 100_000 + 1000 * i, 100_900 + 1000 * i, correlation=i + 1) for i in range(100)]
    calls = [(100_001 + 10 * i, 100_005 + 10 * i, PID | 7, i + 1) for i in range(100)]
    result = decomposed(write(tmp_path / "x.sqlite", Content(kernels=kernels[:70], calls=calls)))
    assert failed(result) == ["activity"] and "30 of 100 kernel launches" in result.check("activity").detail


def test_calls_without_any_kernel_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "x.sqlite", Content(calls=export().calls))
    with pytest.raises(
        HarnessError, match=r"200 launch calls, no kernels: the work ran in a process that was not traced"
    ):
        load_recorded(path)
    with pytest.raises(
        HarnessError, match=r"40 launch calls, no kernels: the work ran in a process that was not traced"
    ):
        load_recorded(trace_file(tmp_path / "t.json", [e for e in forward() if e["cat"] == "cuda_runtime"]))


# Streams


@pytest.mark.parametrize("offset", [0.001, 0.5])
def test_records_that_are_there_twice_fail(tmp_path: Path, offset: float) -> None:
    events = [e for k in forward() for e in ([k, k | {"ts": k["ts"] + offset}] if k["cat"] == "kernel" else [k])]
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert failed(result) == ["streams"] and "the trace holds its records twice" in result.check("streams").detail
    assert headline(result).startswith("Launches of one stream overlap by") and "dominates" not in headline(result)


def test_recordings_mixed_in_one_stream_fail(tmp_path: Path) -> None:
    mixed = [event("other", 1000 + 7 * i, 6, correlation=500 + i) for i in range(60)]
    result = decomposed(trace_file(tmp_path / "t.json", [e for e in forward() if e["cat"] == "kernel"] + mixed))
    assert failed(result) == ["streams"] and "are mixed" in result.check("streams").detail


def test_programmatic_dependent_launches_overlap_honestly(tmp_path: Path) -> None:
    events = []
    for i in range(40):  # resident early, each waits for the one before it
        events.append(call("cudaLaunchKernelExC", 980 + 10 * i, i + 1))
        events.append(event(f"k{i % 4}", 1000 + 10 * i - (4 if i else 0), 10 + (4 if i else 0), correlation=i + 1))
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert result.overlap_ms > 0.3 * result.busy_ms
    assert not failed(result) and "programmatic dependent launch" in result.check("streams").detail
    # The same by calls that cannot launch so is two recordings in one.
    plain = [e | {"name": "cudaLaunchKernel"} if e["cat"] == "cuda_runtime" else e for e in events]
    assert failed(decomposed(trace_file(tmp_path / "u.json", plain))) == ["streams"]


def test_nodes_of_a_graph_and_launches_of_two_streams_overlap_honestly(tmp_path: Path) -> None:
    nodes = [
        event("n", 1000 + 5 * i, 9) | {"args": {"device": 0, "stream": 7, "graph node id": i + 1}} for i in range(40)
    ]
    assert not failed(decomposed(trace_file(tmp_path / "n.json", nodes)))
    streams = [event("s", 1000 + 5 * i, 9) | {"args": {"device": 0, "stream": 7 + i % 2}} for i in range(40)]
    result = decomposed(trace_file(tmp_path / "s.json", streams))
    assert not failed(result) and result.overlap_ms > 0.1
    assert "several at once in 0.20 ms of busy" in headline(result), "no share above 100 %"


# The gap


def test_a_hole_is_printed_as_one_and_fails_nothing_by_itself(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.json", forward() + forward(base=90_000))
    result = decomposed(path)
    assert not failed(result) and result.hole is not None
    assert headline(result).startswith("A hole of 88.56 ms in 89.44 ms, between k3 and k0: nothing was recorded in it.")


def test_many_waits_are_no_hole(tmp_path: Path) -> None:
    events = [event("k", 1000 + 100 * i, 10) for i in range(50)]
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert result.hole is None and headline(result).startswith("The gap dominates")


def test_a_hole_over_a_few_lost_launches_fails(tmp_path: Path) -> None:
    """Below 1 % of the window's launches, and still why it is there."""
    graphs = [call("cudaGraphLaunch", 40_000 + 1000 * i, 7000 + i) for i in range(4)]
    events = (
        forward(300)
        + graphs
        + [
            e | {"args": e["args"] | {"correlation": e["args"]["correlation"] + 1000}}
            for e in forward(300, base=90_000)
        ]
    )
    assert failed(decomposed(trace_file(tmp_path / "t.json", events))) == ["activity"]


def test_the_gap_is_split_by_cause_and_sums_to_itself(tmp_path: Path) -> None:
    tid = PID | 7
    content = Content(
        kernels=[Kernel(n, s, e, correlation=c) for c, (n, s, e) in enumerate([("a", 1000, 2000), ("b", 2500, 3000), ("c", 5000, 6000), ("d", 9000, 9500), ("e", 9700, 9900)], 1)],
        calls=[(500, 600, tid, 1), (700, 800, tid, 2), (4000, 4100, tid, 3), (8000, 8100, tid, 4), (9690, 9695, tid, 5)],
    )  # fmt: skip
    runtime(content, "cudaStreamSynchronize_v3020", [(5500, 7000, tid, 99)])
    content.raw += [
        ("CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)", ()),
        ("INSERT INTO StringIds VALUES (800, 'CUPTI Buffer flush')", ()),
        ("INSERT INTO PROFILER_OVERHEAD VALUES (3200, 3500, 1, 800)", ()),
    ]
    result = decomposed(write(tmp_path / "x.sqlite", content))
    causes = {name: round(ms * 1e6) for name, ms in result.gap_causes_ms.items()}
    # a–b: the call was there in time. b–c: the call came late, 300 ns of it the tracer's. c–d: the host waited. d–e: late.
    assert causes == {"profiler overhead": 300, "synchronisation": 3000, "launch-bound": 1700 + 200, "unknown": 500}
    assert sum(causes.values()) == round(result.gap_ms * 1e6)
    first = result.idle[0]
    assert (first.before, first.after, first.cause) == ("c", "d", "synchronisation") and first.ms == pytest.approx(3e-3)


def test_another_process_that_waits_explains_nothing(tmp_path: Path) -> None:
    content = Content(kernels=[Kernel("a", 1000, 2000, correlation=1), Kernel("b", 5000, 6000, correlation=2)],
                      calls=[(500, 600, PID | 7, 1), (4000, 4100, PID | 7, 2)])  # fmt: skip
    runtime(content, "cudaDeviceSynchronize", [(1500, 3000, OTHER_PID | 7, 9)])
    result = decomposed(write(tmp_path / "x.sqlite", content))
    assert result.gap_causes_ms["launch-bound"] == pytest.approx(3e-3) and result.gap_causes_ms["synchronisation"] == 0


@pytest.mark.parametrize(("name", "device"), GIVEN, ids=[f"{n}-{d}" for n, d in GIVEN])
def test_recorded_traces_pass_every_new_check_and_their_gap_is_whole(
    traces: Path, name: str, device: int | None
) -> None:
    result = decomposed(traces / name, device=device)
    assert not failed(result) and {c.name for c in result.checks} >= set(NEW)
    assert sum(result.gap_causes_ms.values()) == pytest.approx(result.gap_ms, abs=1e-6)


# Resolution


def test_doubles_of_epoch_microseconds_make_no_gap_and_no_overlap(tmp_path: Path) -> None:
    events = [event("k", EPOCH + 456.789 + 1.5 * i, 1.5) for i in range(300)]
    result = decomposed(trace_file(tmp_path / "t.json", events))
    assert (result.overlap_ms, result.gap_ms) == (0, 0) and result.busy_ms == pytest.approx(0.45)
    assert any("time resolution: 250 ns" in note for note in result.notes)


def test_digits_beyond_a_double_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    rows = [json.dumps(event("k", 0, 1.5)).replace('"ts": 0', f'"ts": {EPOCH + (456_789 + 1600 * i) // 1000}.{(456_789 + 1600 * i) % 1000:03}') for i in range(50)]  # fmt: skip
    path.write_text('{"traceEvents": [' + ",".join(rows) + "]}")
    result = decomposed(path)
    assert result.gap_ms == pytest.approx(49 * 0.0001) and any("time resolution: 1 ns" in note for note in result.notes)


def test_gaps_of_small_times_stay(tmp_path: Path) -> None:
    result = decomposed(
        trace_file(tmp_path / "t.json", [event("k", 1_428_625_731_622.25 + 1.6 * i, 1.5) for i in range(50)])
    )
    assert result.gap_ms == pytest.approx(49 * 0.0001, abs=2e-6) and not any(
        "resolution" in note for note in result.notes
    )


# Schemas that differ


@pytest.mark.parametrize("suffix", ["_V2", "_V3", "_V10"])
def test_tables_of_a_later_version_stand_in_for_the_plain_ones(tmp_path: Path, suffix: str) -> None:
    content = export()
    tables = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME")
    plain = read_trace(write(tmp_path / "x.sqlite", content))
    content.raw += [(f"ALTER TABLE {t} RENAME TO {t}{suffix}", ()) for t in tables]
    later = read_trace(write(tmp_path / "y.sqlite", content))
    assert later.launches.equals(plain.launches) and later.found.calls is not None


def test_streams_and_ids_of_64_bits_are_kept(tmp_path: Path) -> None:
    content = export(10)
    content.raw += [("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET streamId = ?, graphNodeId = ? WHERE rowid = 3", (2**62 + 5, 2**61 + 1)),
                    ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET correlationId = correlationId + ?", (2**60,)),
                    ("UPDATE CUPTI_ACTIVITY_KIND_RUNTIME SET correlationId = correlationId + ?", (2**60,))]  # fmt: skip
    trace = read_trace(write(tmp_path / "x.sqlite", content))
    assert trace.launches["stream"].tolist()[2] == 2**62 + 5 and trace.launches["graph_node"].tolist()[2] == 2**61 + 1
    assert trace.found.call is not None and trace.found.call.tolist() == list(range(10))


@pytest.mark.parametrize("tid", ["stream 7", "Stream #7(Compute)", 2**63, 2**64 - 1])
def test_streams_of_any_spelling_are_read(tmp_path: Path, tid: object) -> None:
    e = event("k", 1, 5) | {"tid": tid, "args": {"device": 0}}
    table = read_trace(trace_file(tmp_path / "t.json", [e, event("k", 7, 5)])).launches
    assert len(table) == 2 and (table["stream"].iloc[0] == 7) == (tid == "stream 7")


def test_mangled_names_are_demangled(tmp_path: Path) -> None:
    mangled = "_ZN4vllm18act_and_mul_kernelIN3c108BFloat16EXadL_ZNS_11silu_kernelIS2_EET_RKS4_EELb1EEEvPS4_PKS4_i"
    content = Content(
        kernels=[
            Kernel(mangled, 0, 10),
            Kernel("_Znonsense", 20, 30),
            Kernel("_Z12rms_norm_f32ILi1024ELb1EEvPKfPfiiif", 40, 50),
        ]
    )
    table = read_trace(write(tmp_path / "x.sqlite", content)).launches
    assert table["name"].tolist()[0].startswith("void vllm::act_and_mul_kernel<c10::BFloat16")
    assert table["name"].tolist()[1:] == [
        "_Znonsense",
        "void rms_norm_f32<1024, true>(float const*, float*, int, int, int, float)",
    ]
    assert (
        read_trace(trace_file(tmp_path / "t.json", [event(mangled, 1, 2)]))
        .launches["name"]
        .iloc[0]
        .startswith("void vllm::")
    )


def test_a_device_table_without_pid_is_read(tmp_path: Path) -> None:
    content = export()
    content.raw += [("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER)", ()), ("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0)", ())]  # fmt: skip
    assert not failed(decomposed(write(tmp_path / "x.sqlite", content)))


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (["CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL (_id_ INTEGER, start INT)", "StringTable (_id_ INTEGER, value TEXT)"], "nvprof"),
        (["rocpd_api (id INTEGER)", "rocpd_op (id INTEGER)"], "a rocpd database of AMD's"),
        (["rocpd_kernel_dispatch_00ab (id INTEGER)", "rocpd_string_00ab (id INTEGER)"], "a rocpd database of AMD's"),
        (["notes (text TEXT)"], "no nsys export"),
    ],
)  # fmt: skip
def test_databases_of_other_profilers_are_named(tmp_path: Path, tables: list[str], says: str) -> None:
    import sqlite3

    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as db:
        for table in tables:
            db.execute(f"CREATE TABLE {table}")
    with pytest.raises(HarnessError, match=says) as caught:
        load_recorded(path)
    assert "record" in str(caught.value) or "give one" in str(caught.value)


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([{"ph": "X", "pid": 1, "tid": 13, "ts": 100.0, "dur": 50.0, "name": "gemm_fusion", "args": {"hlo_op": "gemm.3"}}], "XLA's profiler"),
        ([{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:TPU:0"}}], "XLA's profiler"),
        ([{"name": "aten::mm", "ph": "X", "ts": 1, "dur": 2, "tid": 0, "pid": "CPU functions", "args": {}}], "legacy autograd"),
        ([{"name": "aten::mm", "ph": "X", "ts": 1, "dur": 2, "tid": 0, "pid": "CUDA functions", "args": {}}], "legacy autograd"),
        ([{"name": "aten::mm", "ph": "X", "cat": "cpu_op", "ts": 1, "dur": 2, "tid": 0, "pid": 1, "args": {}}], "profile with ProfilerActivity.CUDA"),
    ],
)  # fmt: skip
def test_traces_of_other_profilers_are_named(tmp_path: Path, events: list, says: str) -> None:
    with pytest.raises(HarnessError, match=says):
        load_recorded(trace_file(tmp_path / "t.json", events))


# Ranges


def test_a_range_that_never_ended_and_one_on_another_thread_are_said_as_they_are(tmp_path: Path) -> None:
    content = export()
    content.ranges = [(0, None, "open", PID | 7), (0, 10**6, "elsewhere", PID | 9), (0, 500, "empty", PID | 7)]  # type: ignore[list-item]
    for inline in (True, False):
        path = write(tmp_path / f"{inline}.sqlite", content, Schema(inline_text=inline))
        with pytest.raises(HarnessError, match="'open' never ended"):
            load_recorded(path, range_="open")
        with pytest.raises(
            HarnessError, match="'elsewhere' is on thread 9, and the 200 launches while it was open came from thread 7"
        ):
            load_recorded(path, range_="elsewhere")


def test_profiler_steps_are_ranges_one_by_one_and_together(tmp_path: Path) -> None:
    steps = [{"ph": "X", "cat": cat, "name": f"ProfilerStep#{i}", "pid": 100, "tid": 100, "ts": 970 + 110 * i, "dur": 109}
             for i, cat in enumerate(["user_annotation", "Operator", "cpu_op"])]  # fmt: skip
    path = trace_file(tmp_path / "t.json", forward() + steps)
    assert [len(load_recorded(path, range_=f"ProfilerStep#{i}").launches) for i in range(3)] == [10, 10, 10]
    assert len(load_recorded(path, range_="ProfilerStep#").launches) == 30
    other = [s | {"tid": 5} for s in steps]
    with pytest.raises(
        HarnessError, match="is on thread 5, and the 10 launches while it was open came from thread 100"
    ):
        load_recorded(trace_file(tmp_path / "u.json", forward() + other), range_="ProfilerStep#1")


def test_every_launch_knows_its_call(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "x.sqlite", export()))
    calls, at = trace.found.calls, trace.found.call
    assert calls is not None and at is not None
    assert np.array_equal(trace.launches["start_ns"].to_numpy() - calls.start[at], np.full(200, 50_000))
