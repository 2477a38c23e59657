"""`harness decompose --by nvtx`: which named range submitted which time."""

from __future__ import annotations

import csv
import io
import json
import sqlite3
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from made import OTHER_PID, PID, Content, Kernel, event, trace_file, write
from rich.console import Console

from harness.attribution.by_range import range_rows
from harness.attribution.decompose import decompose
from harness.attribution.decomposition import Decomposition
from harness.attribution.recorded import load_recorded
from harness.cli import group
from harness.errors import HarnessError
from harness.report.by_range import LINES, _ends, name_of, print_ranges, to_csv, to_markdown
from harness.sources.ranges import DEEPEST, Ranges, folded

TID, OTHER_TID = PID | 7, PID | 9


def by_range(path: Path, **window: object) -> Decomposition:
    loaded = load_recorded(path, by="nvtx", **window)  # type: ignore[arg-type]
    result = decompose(loaded.launches, wall_ns=loaded.wall_ns, **loaded.about)
    assert loaded.ranges is not None
    result.ranges = range_rows(loaded.launches, loaded.ranges, result.busy_ms)
    assert not [why for why in result.broken() if "range" in why]
    return result


def found(result: Decomposition) -> dict[str, tuple[int, int]]:
    """Name → (launches, Σ ns)."""
    return {name_of(row): (row.launches, round(row.sum_ms * 1e6)) for row in result.ranges}


def export(calls: list[tuple[int, int]], ranges: list[tuple], raw: list[tuple[str, tuple]] | None = None) -> Content:
    """A launch of 10 ns for every (moment, thread) of `calls`, long after them."""
    return Content(
        kernels=[Kernel("gemm_k", 10**6 + 20 * i, 10**6 + 20 * i + 10, correlation=i + 1, pid=tid & ~0xFFFFFF) for i, (_, tid) in enumerate(calls)],
        calls=[(at, at + 1, tid, i + 1) for i, (at, tid) in enumerate(calls)],
        ranges=ranges, raw=raw or [],
    )  # fmt: skip


def test_a_launch_belongs_to_the_innermost_range_open_when_its_call_began(tmp_path: Path) -> None:
    calls = [(105, TID), (115, TID), (150, TID), (120, TID), (199, TID), (300, TID), (201, TID)]
    ranges = [
        (100, 200, "layer", TID),
        (110, 120, "attn", TID),
        (140, 160, "attn", TID),
        (0, 10**7, "else", OTHER_PID | 7),
    ]
    result = by_range(write(tmp_path / "x.sqlite", export(calls, ranges)))
    assert found(result) == {"layer / attn": (3, 30), "layer": (2, 20), "outside any range": (2, 20)}
    assert {name_of(r): r.instances for r in result.ranges} == {"layer / attn": 2, "layer": 1, "outside any range": 0}


def test_a_launch_without_a_call_is_not_outside(tmp_path: Path) -> None:
    content = export([(5, TID), (50, TID)], [(0, 10, "in", TID)])
    content.kernels.append(Kernel("gemm_k", 2 * 10**6, 2 * 10**6 + 7, correlation=99))
    result = by_range(write(tmp_path / "x.sqlite", content))
    assert found(result) == {"in": (1, 10), "outside any range": (1, 10), "call not recorded": (1, 7)}
    assert any("was not recorded" in note for note in result.notes)


def test_launches_of_a_thread_without_ranges_are_said_and_those_between_ranges_are_not(tmp_path: Path) -> None:
    ranges = [(0, 100, "forward", TID)]
    apart = by_range(write(tmp_path / "a.sqlite", export([(5, TID), (50, OTHER_TID)], ranges)))
    assert found(apart)["outside any range"] == (1, 10) and any("of thread 9 are outside" in n for n in apart.notes)
    after = by_range(write(tmp_path / "b.sqlite", export([(5, TID), (150, OTHER_TID)], ranges)))
    assert found(after)["outside any range"] == (1, 10) and not any("outside" in n for n in after.notes)


def test_a_range_that_never_ended_is_open_until_the_end_and_holds_those_inside(tmp_path: Path) -> None:
    ranges = [(0, None, "serve", TID), (10, 20, "step", TID)]
    result = by_range(write(tmp_path / "x.sqlite", export([(15, TID), (25, TID)], ranges)))
    assert found(result) == {"serve / step": (1, 10), "serve": (1, 10)}
    assert any("never ended" in note and "'serve'" in note for note in result.notes)


def test_process_ranges_hold_what_no_range_of_its_own_thread_does(tmp_path: Path) -> None:
    """Start/end ranges overlap: of those open in the process, the one that began last; a thread's own come first."""
    calls = [(15, OTHER_TID), (25, OTHER_TID), (35, OTHER_TID), (45, OTHER_TID), (28, TID), (26, OTHER_PID | 9)]
    ranges = [(10, 30, "request 1", TID), (20, 40, "request 2", TID), (24, 26, "step", OTHER_TID)]
    sql = "UPDATE NVTX_EVENTS SET eventType = 60 WHERE start IN (10, 20)"
    result = by_range(write(tmp_path / "x.sqlite", export(calls, ranges, [(sql, ())])), device=0)
    assert found(result) == {"request 1": (1, 10), "request 2": (2, 20), "step": (1, 10), "outside any range": (2, 20)}


def test_all_nodes_of_a_graph_and_a_whole_graph_belong_to_the_launch_calls_range(tmp_path: Path) -> None:
    content = export([(5, TID)], [(0, 10, "replay", TID), (20, 30, "next", TID)])
    content.kernels += [
        Kernel("gemm_k", 2 * 10**6 + 20 * i, 2 * 10**6 + 20 * i + 3, correlation=1, node=i) for i in range(4)
    ]
    content.graphs = [(3 * 10**6, 3 * 10**6 + 50)]
    content.raw = [("ALTER TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ADD COLUMN correlationId INTEGER", ()),
                   ("ALTER TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE ADD COLUMN globalPid INTEGER", ()),
                   (f"UPDATE CUPTI_ACTIVITY_KIND_GRAPH_TRACE SET correlationId = 1, globalPid = {PID}", ())]  # fmt: skip
    assert found(by_range(write(tmp_path / "x.sqlite", content))) == {"replay": (6, 10 + 12 + 50)}


def test_numbers_of_emit_nvtx_are_folded_layers_are_not_and_domains_are_named(tmp_path: Path) -> None:
    names = ["aten::mm, seq = 1, op_id = 2", "aten::mm, op_id = 3", "layer.0", "layer.1", "a\nb\x1b[31m", "send"]
    calls = [(100 * i + 5, TID) for i in range(len(names))]
    ranges = [(100 * i, 100 * i + 50, name, TID) for i, name in enumerate(names)]
    raw = [("ALTER TABLE NVTX_EVENTS ADD COLUMN domainId INTEGER", ()), ("UPDATE NVTX_EVENTS SET domainId = 3 WHERE start = 500", ()),
           (f"INSERT INTO NVTX_EVENTS (start, eventType, text, globalTid, domainId) VALUES (1, 75, 'NCCL', {TID}, 3)", ())]  # fmt: skip
    path = write(tmp_path / "x.sqlite", export(calls, ranges, raw))
    got = {name: n for name, (n, _) in found(by_range(path)).items()}
    assert got == {"aten::mm*": 2, "layer.0": 1, "layer.1": 1, "a b [31m": 1, "NCCL:send": 1}
    assert (
        len(load_recorded(path, range_=folded(names[0])).launches) == 2
        and len(load_recorded(path, range_="send").launches) == 1
    )


def test_the_window_comes_first_then_the_ranges(tmp_path: Path) -> None:
    calls = [(5, TID), (15, TID), (105, TID), (115, TID), (300, TID)]
    ranges = [(0, 50, "step", TID), (10, 20, "attn", TID), (100, 150, "step", TID), (110, 120, "attn", TID)]
    path = write(tmp_path / "x.sqlite", export(calls, ranges))
    assert found(by_range(path, range_="step")) == {"step": (2, 20), "step / attn": (2, 20)}
    assert found(by_range(path, range_="step", occurrence=2)) == {"step": (1, 10), "step / attn": (1, 10)}


def annotated(cat: str, **where: int) -> list[dict]:
    """Annotations "step" around "attn" of category `cat`, and three launches: in attn, in step, in none."""
    call = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 1, "dur": 1}
    made = [event("gemm_k", ts, 5, correlation=i) for i, ts in enumerate((510, 530, 550), 1)]
    made += [call | {"ts": ts, "args": {"correlation": i}} for i, ts in enumerate((13, 25, 45), 1)]
    base = 500 if cat == "gpu_user_annotation" else 0
    spans = [("step", 10, 30), ("attn", 10, 10)]
    return made + [
        {"ph": "X", "cat": cat, "name": n, "ts": base + a, "dur": d, "args": {}, **where} for n, a, d in spans
    ]


@pytest.mark.parametrize(
    ("cat", "where"), [("user_annotation", {"pid": 9, "tid": 1}), ("gpu_user_annotation", {"pid": 0, "tid": 7})]
)
def test_annotations_of_the_host_or_where_there_are_none_of_the_device(tmp_path: Path, cat: str, where: dict) -> None:
    result = by_range(trace_file(tmp_path / "t.json", annotated(cat, **where)))
    assert found(result) == {"step / attn": (1, 5000), "step": (1, 5000), "outside any range": (1, 5000)}
    assert any("the device's alone" in note for note in result.notes) == (cat == "gpu_user_annotation")


def test_the_hosts_annotations_of_another_process_with_the_same_thread_number_hold_nothing(tmp_path: Path) -> None:
    result = by_range(trace_file(tmp_path / "t.json", annotated("user_annotation", pid=10, tid=1)))
    assert found(result) == {"outside any range": (3, 15000)}


def test_a_trace_without_ranges_or_calls_says_what_to_record(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match=r"no ranges at all: .*-t cuda,nvtx"):
        load_recorded(write(tmp_path / "a.sqlite", export([(5, TID)], [])), by="nvtx")
    content = export([(5, TID)], [(0, 10, "in", TID)])
    content.calls = []
    with pytest.raises(HarnessError, match=r"no call of the launches.*-t cuda,nvtx"):
        load_recorded(write(tmp_path / "b.sqlite", content), by="nvtx")
    with pytest.raises(HarnessError, match="record_function"):
        load_recorded(trace_file(tmp_path / "t.json", [event("gemm_k", 1, 5)]), by="nvtx")


SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(0, 2), st.booleans(), st.sampled_from("abc")),
    max_size=25,
)
CALLS = st.lists(st.tuples(st.integers(0, 95), st.integers(0, 3)), min_size=1, max_size=30)


@settings(max_examples=150, deadline=None)
@given(spans=SPANS, calls=CALLS)
def test_the_lookup_is_the_search_through_all_ranges(spans: list[tuple], calls: list[tuple[int, int]]) -> None:
    """Threads 0 and 1 are of process 0, the others of process 1; ranges overlap as they like."""
    ranges = Ranges.of([(name, name, a, a + n, thread, thread // 2, shared) for a, n, thread, shared, name in spans])
    at, thread = np.array(calls, np.int64).T
    got = ranges.innermost(at, thread, thread // 2)
    for moment, of, mine in zip(at.tolist(), thread.tolist(), got.tolist(), strict=True):
        opened = [i for i in range(len(ranges)) if ranges.start[i] <= moment <= ranges.end[i]]
        own = [i for i in opened if ranges.thread[i] == of]
        others = [i for i in opened if ranges.shared[i] and ranges.process[i] == of // 2]
        candidates = own or others
        best = max(candidates, key=lambda i: (ranges.start[i], -ranges.end[i], i)) if candidates else -1
        assert mine == best
        around = [i for i in own if not ranges.shared[i] and i != mine]
        if mine >= 0 and ranges.parent[mine] >= 0:
            parent = int(ranges.parent[mine])
            assert (
                parent in around
                and ranges.start[parent] <= ranges.start[mine]
                and ranges.end[parent] >= ranges.end[mine]
            )


@settings(max_examples=25, deadline=None)
@given(spans=SPANS.filter(len), calls=CALLS)
def test_sums_are_conserved_per_class(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple], calls: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("x") / "x.sqlite"
    content = export([(at, PID | of) for at, of in calls], [(a, a + n, name, PID | of) for a, n, of, _, name in spans])
    for i, kernel in enumerate(content.kernels):
        kernel.name, kernel.end = ("gemm_k", "softmax_k", "rms_norm")[i % 3], kernel.end + 7 * (i % 4)
    result = by_range(write(path, content))
    sums: dict[str, int] = defaultdict(int)
    for row in result.ranges:
        for part in row.classes:
            sums[part.cls] += round(part.sum_ms * 1e6)
    assert sums == {cls: round(ms * 1e6) for cls, ms in result.by_class().items()}
    assert sum(row.launches for row in result.ranges) == len(calls)


def test_an_edited_record_is_broken_and_an_old_one_is_read(tmp_path: Path) -> None:
    calls, ranges = [(5, TID), (15, TID), (50, TID)], [(0, 30, "layer", TID), (10, 20, "attn", TID)]
    result = by_range(write(tmp_path / "x.sqlite", export(calls, ranges)))
    sound = result.to_dict()
    assert Decomposition.model_validate(json.loads(json.dumps(sound))).broken() == result.broken()
    old = {key: value for key, value in sound.items() if key != "ranges"}
    assert Decomposition.model_validate(old).broken() == result.broken()
    for edit in (lambda r: r[0]["classes"][0].update(sum_ms=r[0]["classes"][0]["sum_ms"] + 1e-6), lambda r: r.pop(),
                 lambda r: r[0].update(launches=2), lambda r: r[0].update(union_ms=1.0), lambda r: r[0].update(share=0.9)):  # fmt: skip
        changed = json.loads(json.dumps(sound))
        edit(changed["ranges"])
        assert len(Decomposition.model_validate(changed).broken()) > len(result.broken())


def many(count: int, tmp_path: Path) -> Path:
    ranges = [(10 * i, 10 * i + 8, f"request {i} with a name that is long enough to be cut", TID) for i in range(count)]
    return write(tmp_path / "x.sqlite", export([(10 * i + 1, TID) for i in range(count)], ranges))


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_fits_and_says_what_it_leaves_out(tmp_path: Path, width: int, terminal: bool) -> None:
    result = by_range(many(100, tmp_path))
    text = io.StringIO()
    print_ranges(result, Console(file=text, width=width, force_terminal=terminal, color_system=None))
    lines = text.getvalue().splitlines()
    assert f"… and {100 - LINES} more ranges, 0.60 µs" in text.getvalue()
    if terminal:
        assert max(map(len, lines)) <= width
    else:
        assert (
            "request 99 with a name that is long enough to be cut" in text.getvalue()
            or "request 0 with a name that is long enough to be cut" in text.getvalue()
        )
    assert len(list(csv.DictReader(io.StringIO(to_csv(result))))) == 100
    assert to_markdown(result).count("\n") == 1 + LINES + 2


@pytest.mark.parametrize(
    ("width", "cut"),
    [(40, "step / layer0 / self_attn / aten::copy_*"), (39, "step / … / self_attn / aten::copy_*"), (24, "step / … / aten::copy_*"),
     (22, "step … aten::copy_*"), (18, "… / aten::copy_*"), (9, "… / aten…")],
)  # fmt: skip
def test_a_path_is_cut_in_its_middle(width: int, cut: str) -> None:
    assert _ends("step / layer0 / self_attn / aten::copy_*", width) == cut and len(cut) <= width


def test_ranges_that_are_pushed_and_never_popped_cost_no_square(tmp_path: Path) -> None:
    ranges = Ranges.of([("deep", "deep", i, None, 1, 0, False) for i in range(3000)])
    code, paths = ranges.paths(ranges.labels)
    assert max(map(len, paths)) == DEEPEST and len(paths) <= DEEPEST + 1 and len(code) == 3000


def test_the_command_writes_every_row_and_refuses_what_it_cannot_split(tmp_path: Path) -> None:
    path = many(60, tmp_path)
    names = [str(tmp_path / n) for n in ("x.json", "x.csv", "x.md")]
    arguments = ["decompose", str(path), "--by", "nvtx", "--json", names[0], "--csv", names[1], "--markdown", names[2]]
    done = CliRunner().invoke(group, arguments, standalone_mode=False)
    assert done.exception is None, done.output
    held = json.loads(Path(names[0]).read_text())["ranges"]
    assert len(held) == 60 and len(Path(names[1]).read_text().splitlines()) == 61
    assert "| range |" in Path(names[2]).read_text() and "By named range" in done.output
    plain = CliRunner().invoke(group, ["decompose", str(path)], standalone_mode=False)
    assert "By named range" not in plain.output
    with pytest.raises(Exception, match="--csv goes with --by"):
        CliRunner().invoke(
            group, ["decompose", str(path), "--csv", names[1]], standalone_mode=False, catch_exceptions=False
        )


def test_twenty_layers_of_a_real_export_are_what_sql_says(traces: Path) -> None:
    path = traces / "nsys_2025.3.2_h200_gemm_nvtx.sqlite"
    result = by_range(path)
    want: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as db:
        for table in ("KERNEL", "MEMSET"):
            for name, ns in db.execute(
                f"SELECT (SELECT s.value FROM NVTX_EVENTS n JOIN StringIds s ON s.id = n.textId WHERE n.eventType = 59 AND n.globalTid = r.globalTid "
                f"AND r.start BETWEEN n.start AND n.end ORDER BY n.start DESC LIMIT 1), k.end - k.start FROM CUPTI_ACTIVITY_KIND_{table} k "
                "JOIN CUPTI_ACTIVITY_KIND_RUNTIME r ON r.correlationId = k.correlationId"
            ):
                row = want[name or "outside any range"]
                row[0], row[1] = row[0] + 1, row[1] + ns
    assert found(result) == {name: tuple(row) for name, row in want.items()}
    assert len(want) == 21 and want["layer7"][0] == 2


def test_the_step_of_a_real_profile_is_what_its_json_says(traces: Path) -> None:
    import gzip

    path = traces / "kineto_h100_qwen1.5_0.5b.json.gz"
    events = [e for e in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] if e.get("ph") == "X"]
    step = next(e for e in events if e.get("cat") == "user_annotation")
    calls = {e["args"]["correlation"]: e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver")}
    want: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy"):
            call = calls.get(e["args"]["correlation"])
            inside = call and call["tid"] == step["tid"] and step["ts"] <= call["ts"] <= step["ts"] + step["dur"]
            row = want["call not recorded" if call is None else step["name"] if inside else "outside any range"]
            row[0], row[1] = row[0] + 1, row[1] + round(e["dur"] * 1000)
    assert found(by_range(path)) == {name: tuple(row) for name, row in want.items()}
