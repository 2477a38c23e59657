"""PyTorch profiler traces: streamed, never counting waits as work, damaged ones told apart from whole ones."""

from __future__ import annotations

import gzip
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import event, trace_file

from harness import launches
from harness.errors import HarnessError
from harness.sources import kineto
from harness.sources.kineto import read_kineto
from harness.sources.ranges import select


def test_times_are_rounded_as_agreed(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.json", [event("a", 100.0004, 1.0006), event("b", 102.5, 2.0)])
    table = read_kineto(path).launches
    # start = round(ts · 1000), end = start + round(dur · 1000)
    assert table["start_ns"].tolist() == [0, 2500] and table["end_ns"].tolist() == [1001, 4500]


def test_waits_on_device_rows_are_not_launches(tmp_path: Path) -> None:
    events = [
        event("k", 1, 5),
        event("Stream Sync", 1, 900, cat="cuda_sync"),
        event("Context Sync", 1, 900, cat="kernel"),
        event("Stream Wait Event", 1, 900, cat="kernel"),
        event("Event Synchronize", 1, 900, cat="gpu_memset"),
        event("ProfilerStep#1", 1, 900, cat="gpu_user_annotation"),
        event("cudaDeviceSynchronize", 1, 900, cat="cuda_runtime", correlation=4),
        event("synchronize_blocks_kernel<int>", 10, 5),  # a kernel whose name only sounds like one
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1, "pid": 0, "tid": 7},
        {"ph": "M", "name": "process_name", "ts": 1, "pid": 0},
    ]
    trace = read_kineto(trace_file(tmp_path / "t.json.gz", events))
    assert trace.launches["name"].tolist() == ["k", "synchronize_blocks_kernel<int>"]
    assert any("3 synchronisation events" in note for note in trace.notes)


def test_bare_lists_older_categories_and_keys_after_the_events(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(
        json.dumps([event("k", 1, 5, cat="Kernel"), event("m", 7, 1, cat="Memcpy", bytes=64)])
    )
    table = read_kineto(tmp_path / "list.json").launches
    assert table["kind"].tolist() == ["kernel", "memcpy"] and table["bytes"].tolist()[1] == 64
    path = trace_file(tmp_path / "t.json", [event("k", 1, 5)], deviceProperties=[{"id": 0, "name": "NVIDIA H100"}])
    assert read_kineto(path).gpus == {0: "NVIDIA H100"}


def test_annotations_take_what_their_thread_submitted(tmp_path: Path) -> None:
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "dur": 1}
    events = [
        event("a", 500, 5, correlation=1), event("b", 510, 5, correlation=2), event("c", 520, 5, correlation=3),
        call | {"tid": 1, "ts": 12, "args": {"correlation": 1}},
        call | {"tid": 2, "ts": 13, "args": {"correlation": 2}},  # another thread
        call | {"tid": 1, "ts": 30, "args": {"correlation": 3}},  # after the annotation
        {"ph": "X", "cat": "user_annotation", "name": "prefill", "pid": 9, "tid": 1, "ts": 10, "dur": 10, "args": {}},
    ]  # fmt: skip
    path = trace_file(tmp_path / "t.json", events)
    trace = read_kineto(path)
    inside = select(trace, "prefill", path)
    assert [trace.launches["name"].iloc[rows].tolist() for _, rows in inside] == [["a"]]
    with pytest.raises(HarnessError, match="no annotation 'decode'; it has 'prefill'"):
        select(trace, "decode", path)


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    ),
    st.integers(1, 40),
    st.integers(0, 4),
)
def test_the_window_cuts_values_anywhere(value: Any, window: int, indent: int) -> None:
    text = json.dumps(
        {"before": value, "traceEvents": [value, 12, "x", value], "after": [value]}, indent=indent or None
    )
    text += "\n" * indent
    kept = kineto._WINDOW
    kineto._WINDOW = window
    try:
        events = list(kineto._events(io.StringIO(text), {}))
        # Numbers with a fraction keep their digits.
        assert events == json.loads(json.dumps([value, 12, "x", value]), parse_float=str)
    finally:
        kineto._WINDOW = kept


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_json_is_one_sentence_or_a_valid_table(tmp_path: Path, data: st.DataObject) -> None:
    text = json.dumps({"traceEvents": [event(f"k{i}", i * 10, 5, grid=[1, 2, 3], correlation=i) for i in range(20)]})
    raw = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "t.json"
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        launches.check(read_kineto(path).launches)
    except HarnessError as error:
        assert "\n" not in str(error) and error.exit_status == 1


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"ts": "soon"}, "whose time is no number"),
        ({"dur": None}, "whose time is no number"),
        ({"ts": float("nan")}, "whose time is no number"),
        ({"dur": True}, "whose time is no number"),
        ({"args": {"device": "GPU"}}, "without a device number"),
        ({"ts": 1e300}, "with a time out of range"),
        ({"dur": 2**63}, "with a time out of range"),
        ({"dur": -1}, "that end before they start"),
    ],
)
def test_an_event_with_a_wrong_value_is_left_out_and_named(tmp_path: Path, bad: dict[str, Any], why: str) -> None:
    broken = event("broken", 2, 5) | bad
    found = read_kineto(trace_file(tmp_path / "t.json", [event("k", 1, 5), broken]))
    assert found.launches["name"].tolist() == ["k"] and found.found.records == 2
    assert [(b.reason, b.count, b.first) for b in found.found.left_out] == [(why, 1, "'broken'")]
    with pytest.raises(HarnessError, match=f"no usable device record .1 {why}"):
        read_kineto(trace_file(tmp_path / "u.json", [broken]))


@pytest.mark.parametrize("args", [3, None, {"correlation": "x", "grid": "8", "bytes": -5, "stream": None}])
def test_arguments_of_the_wrong_type_are_unknown(tmp_path: Path, args: Any) -> None:
    table = read_kineto(trace_file(tmp_path / "t.json", [event("k", 1, 5) | {"args": args}])).launches
    assert table["grid"].tolist() == [""] and table["bytes"].isna().all()


def test_a_large_trace_is_streamed(tmp_path: Path) -> None:
    """100 MB of host-side events around a few kernels: what is held is a window, not the file."""
    path = tmp_path / "big.json"
    filler = json.dumps(event("aten::mm", 1, 2, cat="cpu_op", stack="x" * 900)) + ","
    with path.open("w") as file:
        file.write('{"traceEvents": [')
        for _ in range(100):
            file.write(filler * 1000)
            file.write(json.dumps(event("k", 5, 1)) + ",")
        file.write(json.dumps(event("k", 9, 1)) + "]}")
    script = (
        "import resource, sys; from pathlib import Path; import pandas; from harness.sources.kineto import read_kineto\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "n = len(read_kineto(Path(sys.argv[1])).launches)\n"
        "print(n, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    count, grown_kb = map(int, done.stdout.split())
    assert path.stat().st_size > 90e6
    assert count == 101 and grown_kb < 60_000


def test_a_damaged_gzip_stream_is_one_sentence(tmp_path: Path) -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": f"k{i * 7919}", "ts": i, "dur": 1, "pid": 0, "tid": 7} for i in range(3000)
    ]
    data = bytearray(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    path = tmp_path / "x.json.gz"
    for at in range(20, len(data) - 300, len(data) // 20):
        path.write_bytes(data[:at] + b"\xa5" * 300 + data[at + 300 :])
        with pytest.raises(HarnessError, match=r"x\.json\.gz"):
            read_kineto(path)


@pytest.mark.parametrize(
    ("name", "dims", "shape"),
    [
        ("aten::mm", [[7, 64], [64, 96]], "7,96,64"),
        ("aten::addmm", [[96], [7, 64], [64, 96], [], []], "7,96,64"),
        ("aten::bmm", [[1, 7, 64], [1, 64, 96]], "7,96,64"),
        ("aten::bmm", [[4, 7, 64], [4, 64, 96]], ""),  # several products
        ("aten::mm", [[7, 64], [65, 96]], ""),
        ("aten::mm", [["7", 64], [64, 96]], ""),
        ("aten::mm", [[1 << 70, 64], [64, 96]], ""),
        ("aten::mm", [[7, 64]], ""),
        ("aten::mm", "64", ""),
        ("aten::mm", [None, {"a": 1}], ""),
        ("aten::add", [[7, 64], [64, 96]], ""),
    ],
)
def test_the_dimensions_of_a_products_operator_are_its_launchs(
    tmp_path: Path, name: str, dims: Any, shape: str
) -> None:
    """record_shapes=True: the launch submitted inside an operator has the dimensions of its inputs; the next one has none."""
    path = tmp_path / "t.json"
    events = [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": 0, "dur": 10, "args": {"Input Dims": dims}},
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": 50, "dur": 10, "args": {"Input Dims": [[1, 2], [2, 3]]}},
    ]  # fmt: skip
    for i, at in enumerate((5, 55)):
        events += [
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": at, "dur": 2, "args": {"correlation": i + 1}},
            {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": at + 20, "dur": 5,
             "args": {"device": 0, "stream": 7, "correlation": i + 1}},
        ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}))
    assert read_kineto(path).launches["shape"].tolist() == [shape, ""]


def product(op: str, dims: Any, ts: float, correlation: int, thread: int = 9) -> list[dict[str, Any]]:
    """An operator with its inputs' dimensions, the call inside it, and the kernel that the call submitted later."""
    return [
        {"ph": "X", "cat": "cpu_op", "name": op, "pid": 9, "tid": thread, "ts": ts, "dur": 5, "args": {"Input Dims": dims}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": thread, "ts": ts + 1, "dur": 1,
         "args": {"correlation": correlation}},
        event("gemm", ts + 1000, 2, correlation=correlation),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "dims", "shape"),
    [
        ("aten::mm", [[7, 3], [3, 5]], "7,5,3"),
        ("aten::addmm", [[5], [7, 3], [3, 5], [], []], "7,5,3"),
        ("aten::bmm", [[1, 7, 3], [1, 3, 5]], "7,5,3"),
        ("aten::bmm", [[4, 7, 3], [4, 3, 5]], ""),  # a batch of products is none of a weight matrix
        ("aten::add", [[7, 3], [3, 5]], ""),
        ("aten::mm", [[7, 3], [4, 5]], ""),
        ("aten::mm", [[7, "3"], [3, 5]], ""),
        ("aten::mm", [[7, 3]], ""),
        ("aten::mm", [[[7, 3], [3, 5]], [[3, 5]]], ""),
        ("aten::mm", [[7, 10**40], [10**40, 5]], ""),
        ("aten::mm", [[7, -3], [-3, 5]], ""),
        ("aten::mm", [[7, 1.5], [1.5, 5]], ""),
        ("aten::mm", [], ""),
        ("aten::mm", "[[7, 3], [3, 5]]", ""),
        ("aten::mm", {"0": [7, 3]}, ""),
        ("aten::mm", None, ""),
    ],
)
def test_dimensions_of_an_operator_are_those_of_the_kernel_that_it_submitted(
    op: str, dims: Any, shape: str, tmp_path: Path
) -> None:
    events = [*product(op, dims, 10, 1), *product("aten::mm", [[2, 2], [2, 2]], 10, 2, thread=8), event("k", 9000, 1)]
    assert read_kineto(trace_file(tmp_path / "t.json", events)).launches["shape"].tolist() == [shape, "2,2,2", ""]


def test_a_recorded_traces_products_have_their_dimensions(traces: Path) -> None:
    table = read_kineto(traces / "kineto_h100_qwen1.5_0.5b.json.gz").launches
    told = table["shape"][table["name"].str.contains("xmma_gemm")].value_counts().to_dict()
    # 24 layers of q, k, v, o; gate, up; down on 16 × 559 rows. What ran before the profiler saw the host tells none.
    told.pop("")
    assert told == {"8944,1024,1024": 96, "8944,2816,1024": 48, "8944,1024,2816": 24}
