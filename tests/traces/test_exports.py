"""nsys exports of every schema shape, damaged files, and what a scrubbed export still tells."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import OTHER_PID, PID, Content, Kernel, Schema, write

from harness import launches
from harness.attribution.recorded import load_recorded, read_trace
from harness.cli import group
from harness.errors import HarnessError
from harness.sources.nsys import Export, read_nsys
from harness.sources.ranges import select
from harness.sources.rows import BATCH_ROWS, read_integers
from harness.sources.scrub import scrub

schemas = st.builds(
    Schema,
    version=st.sampled_from(["2.9.1", "3.1.7", "3.20.3", "3.24.0", "3.25.0"]),
    meta=st.sampled_from(["META_DATA_EXPORT", "EXPORT_META_DATA"]),
    inline_text=st.booleans(),
    graph_columns=st.booleans(),
    empty_tables=st.booleans(),
)
spans = st.tuples(st.integers(0, 10**6), st.integers(0, 10**4))
contents = st.builds(
    lambda kernels, copies, origin: Content(
        kernels=[
            Kernel(f"kernel_{n}<(int){n}>(int)", origin + s, origin + s + d, correlation=i)
            for i, ((s, d), n) in enumerate(kernels)
        ],
        copies=[(origin + s, origin + s + d, 16 * d) for s, d in copies],
    ),
    st.lists(st.tuples(spans, st.integers(0, 3)), min_size=1, max_size=12),
    st.lists(spans, max_size=4),
    st.integers(0, 2**62),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas, content=contents)
def test_every_schema_reads_to_the_same_launches(tmp_path: Path, schema: Schema, content: Content) -> None:
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    write(path, content, schema)
    table = read_trace(path).launches
    zero = min([k.start for k in content.kernels] + [c[0] for c in content.copies])
    expected = sorted(
        [(k.start - zero, k.end - zero, k.name) for k in content.kernels]
        + [(s - zero, e - zero, "[CUDA memcpy HtoD]") for s, e, _ in content.copies],
        key=lambda row: row[:2],
    )
    got = list(zip(table["start_ns"], table["end_ns"], table["name"], strict=True))
    assert [g[:2] for g in got] == [e[:2] for e in expected]
    assert sorted(got) == sorted(expected)
    kernels = table[table["kind"] == "kernel"]
    assert set(kernels["grid"]) == {"5,3,2"} and set(kernels["block"]) == {"128,4,1"}
    assert set(kernels["registers"]) == {32} and set(kernels["smem_bytes"]) == {1072}
    assert launches.union_ns(table["start_ns"], table["end_ns"]) <= (table["end_ns"] - table["start_ns"]).sum()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_export_is_one_sentence_or_a_valid_table(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    write(path, Content(kernels=[Kernel(f"k{i}", i * 10, i * 10 + 5) for i in range(200)]))
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(1, len(raw)))])
    try:
        table = load_recorded(path, device=0).launches
    except HarnessError as error:
        assert str(path) in str(error) or "launch" in str(error)
        assert "\n" not in str(error).strip()
    else:
        launches.check(table)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.sqlite", b"", "is empty"),
        ("text.sqlite", b"this is no database, only text", "not an SQLite file"),
        ("cut.sqlite", None, "cannot be read|no kernel|holds a value"),
        ("text.bin", b"neither one nor the other", "neither an nsys export nor"),
        ("nothing.bin", b"", "is empty"),
        ("empty.json", b"", "empty"),
        ("empty.json.gz", b"", "empty"),
        ("cut.json", b'{"traceEvents": [{"ph": "X", "cat": "ker', "not a whole PyTorch profiler trace"),
        ("cut.json.gz", b"\x1f\x8b\x08\x00", "cannot be read"),
        ("none.json", b'{"traceEvents": []}', "holds no kernel"),
        ("other.json", b'{"schema": "something"}', 'no "traceEvents"'),
        ("bad.parquet", b"PAR1nonsense", "not a readable Parquet"),
        ("bad.nsys-rep", b"nonsense", "nsys"),
    ],
)
def test_files_that_are_no_trace_give_one_sentence_and_exit_1(
    tmp_path: Path, name: str, content: bytes | None, says: str
) -> None:
    path = tmp_path / name
    if content is None:
        whole = write(tmp_path / "whole.sqlite", Content(kernels=[Kernel(f"k{i}", i, i + 1) for i in range(500)]))
        content = whole.read_bytes()[:5000]
    path.write_bytes(content)
    with pytest.raises(HarnessError, match=says) as caught:
        load_recorded(path)
    assert caught.value.exit_status == 1 and "\n" not in str(caught.value)


def test_a_missing_file_and_a_trace_without_launches_say_so(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="is no file"):
        load_recorded(tmp_path / "absent.sqlite")
    path = write(tmp_path / "x.sqlite", Content(), Schema(empty_tables=True))
    with pytest.raises(HarnessError, match="holds no kernel, copy or graph; record it again"):
        load_recorded(path)
    path = write(tmp_path / "y.sqlite", Content(copies=[(0, 10, 64)]))
    with pytest.raises(HarnessError, match="holds no kernel on device 0, only 1 copies"):
        load_recorded(path)


def test_correlation_ids_are_joined_per_process(tmp_path: Path) -> None:
    """Two processes count their correlation ids from 1: a range of one must not claim the other's kernels."""
    tid, other = PID | 1, OTHER_PID | 1
    content = Content(
        kernels=[Kernel("mine", 1000, 1100, correlation=1), Kernel("theirs", 1200, 1300, correlation=1, pid=OTHER_PID)],
        calls=[(100, 110, tid, 1), (105, 115, other, 1)],
        ranges=[(90, 120, "step", tid)],
    )
    path = write(tmp_path / "x.sqlite", content)
    trace = read_nsys(path, ranges=True)
    inside = select(trace, "step", path)
    assert [trace.launches["name"].iloc[rows].tolist() for _, rows in inside] == [["mine"]]


@pytest.mark.parametrize("inline", [True, False])
def test_nested_ranges_project_through_the_launch_not_through_the_devices_time(tmp_path: Path, inline: bool) -> None:
    tid = PID | 7
    content = Content(
        # Submitted in "attn" and "ffn", run long after both ended.
        kernels=[
            Kernel("a", 9000, 9100, correlation=1),
            Kernel("f", 9200, 9300, correlation=2),
            Kernel("x", 9400, 9500, correlation=3),
        ],
        calls=[(120, 121, tid, 1), (160, 161, tid, 2), (320, 321, tid, 3)],
        ranges=[(100, 200, "layer0", tid), (110, 130, "attn", tid), (150, 170, "ffn", tid), (300, 400, "layer1", tid)],
    )
    path = write(tmp_path / "x.sqlite", content, Schema(inline_text=inline))
    for pattern, names in [("layer0", ["a", "f"]), ("attn", ["a"]), ("layer0/ffn", ["f"]), ("layer*", ["a", "f", "x"])]:
        assert load_recorded(path, range_=pattern).launches["name"].tolist() == names
    assert load_recorded(path, range_="layer0").wall_ns == 300  # 9000 … 9300


def test_a_copy_inside_graph_replay_and_a_graph_of_its_own_are_both_counted(tmp_path: Path) -> None:
    content = Content(kernels=[Kernel("k", 0, 10, node=5)], copies=[(20, 30, 4)], graphs=[(40, 90)])
    table = read_trace(write(tmp_path / "x.sqlite", content)).launches
    assert table["kind"].tolist() == ["kernel", "memcpy", "graph"]
    assert table["name"].tolist()[2] == "[CUDA graph 3]" and table["graph_node"].tolist()[0] == 5


def test_text_that_is_not_utf8_costs_no_trace(tmp_path: Path) -> None:
    content = Content(
        kernels=[Kernel("k", 0, 10, correlation=1)], calls=[(0, 1, PID | 1, 1)], ranges=[(0, 5, "ok", PID | 1)],
        raw=[("UPDATE NVTX_EVENTS SET text = CAST(x'ff6b' AS TEXT)", ())],
    )  # fmt: skip
    path = write(tmp_path / "x.sqlite", content, Schema(inline_text=True))
    with Export(path) as export:
        assert export.ranges()[0].text == "\ufffdk"


def test_driver_overhead_is_named_and_cut_to_the_devices_waits(tmp_path: Path) -> None:
    content = Content(
        kernels=[Kernel("k", 1000, 2000), Kernel("k", 5000, 6000)],
        raw=[
            ("INSERT INTO StringIds VALUES (900, 'Command Buffer Full')", ()),
            ("INSERT INTO CUPTI_ACTIVITY_KIND_OVERHEAD VALUES (1500, 2500, 900)", ()),
            ("INSERT INTO CUPTI_ACTIVITY_KIND_OVERHEAD VALUES (2400, 2600, 900)", ()),
        ],
    )
    found = load_recorded(write(tmp_path / "x.sqlite", content, Schema(empty_tables=True)))
    # 1500 … 2600 on the host, of which the device waits from 2000 on.
    assert found.about["gap_parts_ms"] == {"Command Buffer Full": pytest.approx(600e-6)}
    assert any(n.startswith("Command Buffer Full: 2 rows, 0.001 ms") for n in found.notes)


def test_two_processes_whose_ordinals_mean_different_gpus_are_kept_apart(tmp_path: Path) -> None:
    content = Content(
        kernels=[Kernel("a", 0, 10), Kernel("b", 5, 15, pid=OTHER_PID)],
        raw=[
            ("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)", ()),
            ("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (4, 0, 4242), (6, 0, 4343)", ()),
        ],
    )
    assert read_trace(write(tmp_path / "x.sqlite", content)).launches["device"].tolist() == [4, 6]


def test_a_table_read_by_two_threads_is_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a b%20c.sqlite", Content(kernels=[Kernel("k", i, i + 3) for i in range(1000)]))
    whole = read_integers(path, "CUPTI_ACTIVITY_KIND_KERNEL", ["start", "end - start"])
    monkeypatch.setattr("harness.sources.rows.SPLIT_ROWS", 10)
    monkeypatch.setattr("harness.sources.rows.BATCH_ROWS", 7)
    halves = read_integers(path, "CUPTI_ACTIVITY_KIND_KERNEL", ["start", "end - start"])
    assert whole[0].tolist() == halves[0].tolist() == list(range(1000)) and set(halves[1]) == {3}


@pytest.mark.parametrize("value", ["soon", None, 1.5])
def test_a_value_of_another_type_after_the_first_batch_is_one_too(tmp_path: Path, value: object) -> None:
    with sqlite3.connect(tmp_path / "x.sqlite") as db:
        db.execute("CREATE TABLE t (a)")
        db.executemany("INSERT INTO t VALUES (?)", [*[(1,)] * (BATCH_ROWS + 10), (value,)])
    with pytest.raises(TypeError, match=r"no whole number|Type mismatch"):
        read_integers(tmp_path / "x.sqlite", "t", ["a"])


def test_damage_after_the_first_batch_is_the_files_not_the_values(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE t (a)")
        db.executemany("INSERT INTO t VALUES (?)", [(i,) for i in range(4 * BATCH_ROWS)])
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size * 3 // 8)  # in the middle of the first thread's second batch
        file.write(b"\xff" * (size // 50))
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        read_integers(path, "t", ["a"])


@pytest.mark.parametrize("value", ["soon", None, 1.5, b"1"])
def test_a_time_that_is_no_whole_number_costs_its_record_alone(tmp_path: Path, value: object) -> None:
    kernels = [Kernel("k", i, i + 3) for i in range(9)]
    update = "UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = ?"
    content = Content(kernels=kernels, raw=[(f"{update} WHERE rowid = 5", (value,))])
    trace = read_trace(write(tmp_path / "x.sqlite", content))
    assert len(trace.launches) == 8 and trace.found.records == 9
    (left_out,) = trace.found.left_out
    assert (left_out.count, left_out.first) == (1, "row 5 of CUPTI_ACTIVITY_KIND_KERNEL")
    with pytest.raises(HarnessError, match=r"no usable device record .9 whose 'end' is no whole number"):
        read_trace(write(tmp_path / "y.sqlite", Content(kernels=kernels, raw=[(update, (value,))])))


SECRETS = (
    "hunter2-token",
    "alice",
    "gpu-node-17",
    "/home/alice/models",
    "AKIAEXAMPLE",
    "launch_me --secret",
    "bash-of-alice",
)


def with_environment(path: Path) -> Path:
    content = Content(
        kernels=[Kernel("mul_mat_q<(ggml_type)12, 128, false>(int)", 0, 10, correlation=1)],
        calls=[(0, 1, PID | 1, 1)],
        ranges=[(0, 5, "prefill of alice on gpu-node-17", PID | 1)],
        raw=[
            ("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, value TEXT)", ()),
            ("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('Hostname', 'gpu-node-17')", ()),
            ("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)", ()),
            ("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'API_TOKEN=hunter2-token')", ()),
            ("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:ENVIRONMENT_VARIABLE', 'USER=alice')", ()),
            ("INSERT INTO META_DATA_CAPTURE VALUES ('PROCESS_0:COMMAND', 'launch_me --secret')", ()),
            ("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_USER', 'alice')", ()),
            ("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_INPUT_PATH_ABS', '/home/alice/models/x.nsys-rep')", ()),
            ("CREATE TABLE PROCESSES (globalPid INTEGER, pid INTEGER, name TEXT)", ()),
            ("INSERT INTO PROCESSES VALUES (1, 1, 'bash-of-alice')", ()),
            ("INSERT INTO StringIds VALUES (501, 'AWS_KEY=AKIAEXAMPLE')", ()),
            ("INSERT INTO StringIds VALUES (502, '/home/alice/models')", ()),
            ("CREATE TABLE NOTES (text TEXT)", ()),
            ("INSERT INTO NOTES VALUES ('hunter2-token')", ()),
            ("DELETE FROM NOTES", ()),  # freed pages keep their bytes
        ],
    )
    return write(path, content)


def test_scrub_leaves_no_byte_of_the_environment_and_the_same_launches(tmp_path: Path) -> None:
    source, out = with_environment(tmp_path / "x.sqlite"), tmp_path / "y.sqlite"
    assert all(secret.encode() in source.read_bytes() for secret in SECRETS)
    done = CliRunner().invoke(group, ["trace", "scrub", str(source), "-o", str(out)], standalone_mode=False)
    assert done.exception is None and done.return_value == 0
    raw = out.read_bytes()
    assert [secret for secret in SECRETS if secret.encode() in raw] == []
    assert read_trace(out).launches.equals(read_trace(source).launches)
    with Export(out) as export:
        assert export.schema == "3.20.3"
        assert export.ranges()[0].text == "prefill of scrubbed on scrubbed"
    assert list(tmp_path.glob(".*part")) == []


def test_scrub_in_place_and_of_something_else(tmp_path: Path) -> None:
    source = with_environment(tmp_path / "x.sqlite")
    before = read_trace(source).launches
    scrub(source, source)
    assert read_trace(source).launches.equals(before) and b"alice" not in source.read_bytes()
    (tmp_path / "t.sqlite").write_text("no database")
    with pytest.raises(HarnessError, match="not an SQLite file"):
        scrub(tmp_path / "t.sqlite", tmp_path / "z.sqlite")
    assert not (tmp_path / "z.sqlite").exists()


def test_recorded_traces_survive_scrubbing(traces: Path, tmp_path: Path) -> None:
    for name in (
        "nsys_2022.2.1_saxpy_mpi.sqlite",
        "nsys_2025.3.2_h200_gemm_nvtx.sqlite",
        "nsys_2026.2.1_2gpu_before.sqlite",
    ):
        out = tmp_path / name
        scrub(traces / name, out)
        assert read_trace(out).launches.equals(read_trace(traces / name).launches)
        with Export(out) as ours, Export(traces / name) as theirs:
            assert [r.path for r in ours.ranges()] == [r.path for r in theirs.ranges()]
            assert ours.schema == theirs.schema
