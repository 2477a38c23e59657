"""Whatever a file holds, a reader gives a launch table that decomposes, or one sentence.

Bounded here; `python benchmarks/fuzz_traces.py` runs the same for as long as it is given.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made import PID, Content, Kernel, event, trace_file, write

from harness import launches
from harness.attribution.by_range import range_rows
from harness.attribution.checks import SUM_LIMIT, charged_twice
from harness.attribution.decompose import decompose
from harness.attribution.recorded import load_recorded
from harness.errors import HarnessError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
bounded = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

CELLS = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, -1, 2**31, 2**32, 2**62, -(2**63), 2**63 - 1]),
    st.floats(), st.text(max_size=8), st.binary(max_size=8), st.sampled_from(["12", "-3", "1e9", "inf", "0x10", " 7 "]),
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.sampled_from(["stream 7", "[TP01] 0", "1e400", "12.5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
RANGES = st.sampled_from([None, "prefill", "*"])
BY = st.sampled_from([None, "nvtx"])


def export() -> Content:
    """A little of every table that the reader looks at."""
    tid = PID | 7
    return Content(
        kernels=[
            Kernel(f"k{i % 2}<int>(int)", 1000 * i, 1000 * i + 900, correlation=i, node=i if i > 6 else None)
            for i in range(9)
        ],
        copies=[(100, 200, 64), (300, 400, 32)],
        graphs=[(9500, 9900)],
        calls=[(1000 * i - 500, 1000 * i - 400, tid, i) for i in range(9)],
        ranges=[(0, 4000, "prefill", tid), (100, 200, "inner", tid)],
        raw=[
            ("CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT)", ()),
            ("INSERT INTO TARGET_INFO_GPU VALUES (0, 'H100')", ()),
            ("CREATE TABLE TARGET_INFO_CUDA_DEVICE (gpuId INTEGER, cudaId INTEGER, pid INTEGER)", ()),
            ("INSERT INTO TARGET_INFO_CUDA_DEVICE VALUES (0, 0, 4242)", ()),
            ("CREATE TABLE DIAGNOSTIC_EVENT (timestamp INTEGER, severity INTEGER, text TEXT)", ()),
            ("INSERT INTO DIAGNOSTIC_EVENT VALUES (0, 2, 'a warning')", ()),
            ("CREATE TABLE PROFILER_OVERHEAD (start INTEGER, end INTEGER, globalTid INTEGER, nameId INTEGER)", ()),
            ("INSERT INTO PROFILER_OVERHEAD VALUES (950, 990, 7, 0)", ()),
        ],
    )


def holds(path: Path, range_: str | None = None, by: str | None = None) -> None:
    """It decomposes to a table that adds up, or is refused in one line that fits a terminal's patience."""
    try:
        found = load_recorded(path, device=None, range_=range_, by=by)
        launches.check(found.launches)
        result = decompose(found.launches, wall_ns=max(found.wall_ns, 1), roles=found.roles, **found.about)
        if found.ranges is not None:
            result.ranges = range_rows(found.launches, found.ranges, result.busy_ms)
            assert not [why for why in result.broken() if "range" in why]
        json.dumps(result.to_dict(), allow_nan=False)
        conserved = result.check("conservation")
        # Bytes that repeat a whole record make it stand twice, which is for this check to say.
        assert conserved.value <= SUM_LIMIT and (conserved.ok or bool(charged_twice(found.launches)))
        assert math.isfinite(result.gap_ms) and sum(result.gap_causes_ms.values()) <= max(result.gap_ms, 0) + 1e-3
    except HarnessError as error:
        assert "\n" not in str(error) and len(str(error)) < 900 and error.exit_status == 1


@bounded
@given(data=st.data())
def test_any_value_in_any_cell_of_an_export(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "x.sqlite"
    path.unlink(missing_ok=True)
    write(path, export())
    with sqlite3.connect(path) as db:
        tables = sorted(r[0] for r in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'"))
        for _ in range(data.draw(st.integers(1, 5))):
            table = data.draw(st.sampled_from(tables))
            columns = [
                r[1] for r in db.execute(f"PRAGMA table_info({table})") if not (table == "StringIds" and r[1] == "id")
            ]
            column, row = data.draw(st.sampled_from(columns)), data.draw(st.sampled_from(["1", "2", "rowid"]))
            db.execute(f'UPDATE {table} SET "{column}" = ? WHERE rowid = {row}', (data.draw(CELLS),))
        if data.draw(st.booleans()):
            db.execute(f"DROP TABLE {data.draw(st.sampled_from(tables))}")
    db.close()
    holds(path, data.draw(RANGES), data.draw(BY))


@bounded
@given(data=st.data())
def test_any_value_in_any_field_of_an_event(tmp_path: Path, data: st.DataObject) -> None:
    events: list[Any] = []
    for i in range(6):
        events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": 10 * i, "dur": 1, "args": {"correlation": i}})  # fmt: skip
        events.append(event(f"k{i}", 10 * i + 2, 5, correlation=i, grid=[1, 2, 3]))
    events.append({"ph": "X", "cat": "user_annotation", "name": "prefill", "pid": 9, "tid": 9, "ts": 0, "dur": 40})
    events.append({"ph": "X", "cat": "overhead", "name": "flush", "pid": -1, "tid": 0, "ts": 8, "dur": 3})
    for _ in range(data.draw(st.integers(1, 5))):
        chosen = data.draw(st.sampled_from([e for e in events if isinstance(e, dict)]))
        inner = chosen.get("args")
        target = inner if isinstance(inner, dict) and inner and data.draw(st.booleans()) else chosen
        if target:
            target[data.draw(st.sampled_from(sorted(target)))] = data.draw(VALUES)
    keys = {"deviceProperties": data.draw(VALUES), "distributedInfo": data.draw(VALUES)}
    holds(trace_file(tmp_path / "t.json", events, **keys), data.draw(RANGES), data.draw(BY))


@bounded
@given(data=st.data())
def test_any_bytes_over_a_file(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes changed, cut off, repeated or moved."""
    if data.draw(st.booleans()):
        path = tmp_path / "x.sqlite"
        path.unlink(missing_ok=True)
        write(path, export())
    else:
        path = trace_file(tmp_path / "t.json", [event(f"k{i}", i * 10, 5, correlation=i) for i in range(9)])
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at, to = sorted(data.draw(st.integers(0, len(raw) - 1)) for _ in range(2))
        what = data.draw(st.sampled_from(["change", "repeat", "remove", "swap"]))
        if what == "change":
            raw[at] = data.draw(st.integers(0, 255))
        elif what == "repeat":
            raw[at:at] = raw[at : min(to, at + 4096)]
        elif what == "remove" and to - at < len(raw) // 2:
            del raw[at:to]
        else:
            raw[at], raw[to] = raw[to], raw[at]
        if not raw:
            break
    path.write_bytes(raw)
    holds(path)
