"""Reads Nsight Systems exports (SQLite schemas 2.9 to 3.25, or `.nsys-rep` through nsys itself) into a launch table.

What differs between schemas is looked up in the file, never assumed: tables that are absent or empty, the name of the
meta-data table, NVTX text inline or in StringIds, text that is not UTF-8, graph columns.
"""

from __future__ import annotations

import contextlib
import fnmatch
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pandas as pd

from harness import launches
from harness.errors import HarnessError
from harness.sources.rows import read_integers
from harness.sources.trace import Trace

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
OVERHEAD = "CUPTI_ACTIVITY_KIND_OVERHEAD"
PROFILER = "PROFILER_OVERHEAD"
ACTIVITIES = {KERNEL: "kernel", MEMCPY: "memcpy", MEMSET: "memset", GRAPH: "graph"}
"""Table of the export → kind of launch."""

COPY_KINDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "Unified HtoD", 12: "Unified DtoH", 13: "Unified DtoD",
}  # fmt: skip
"""CUpti_ActivityMemcpyKind; 11 and above are nsys's own for managed memory."""

PUSH_POP, START_END = 59, 60
"""NVTX_EVENTS.eventType of the two kinds of range: of one thread, and of a whole process."""

_NOT_TRACED = "export it again with `nsys export --type sqlite`"


@dataclass(frozen=True)
class Range:
    """One NVTX range on the host's clock, absolute ns."""

    path: str  # "prefill/layer3/attn": the enclosing ranges of its thread, outermost first
    text: str
    start: int
    end: int
    thread: int  # globalTid; −1: a start/end range, which belongs to the whole process
    process: int  # globalPid


class Export:
    """An open export. Context manager; every method raises HarnessError, in one sentence, where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._origin: int | None = None
        if not path.is_file():
            raise HarnessError(f"{path} is no file; give an nsys .sqlite export or .nsys-rep.")
        self.database = self._exported(path) if path.suffix in (".nsys-rep", ".qdstrm") else path
        if self.database.stat().st_size == 0:
            raise HarnessError(f"{path} is empty; {_NOT_TRACED}.")
        with self.database.open("rb") as file:
            if file.read(16) != b"SQLite format 3\0":
                raise HarnessError(f"{path} is not an SQLite file; {_NOT_TRACED}.")
        with self._guard():
            self.db = sqlite3.connect(f"{self.database.resolve().as_uri()}?mode=ro", uri=True)
            # Process names and MPI text are in the locale of their host; a wrong byte must not cost the trace.
            self.db.text_factory = lambda raw: raw.decode("utf-8", "replace")
            self.columns = self._columns()

    def __enter__(self) -> Export:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.db.close()
        if self._scratch:
            self._scratch.cleanup()

    @property
    def schema(self) -> str:
        """The export's own schema version, such as "3.20.3"; "unknown" where the file does not say."""
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if table in self.columns:
                found = self.rows(f"SELECT value FROM {table} WHERE name = 'EXPORT_SCHEMA_VERSION'")
                if found:
                    return str(found[0][0])
        return "unknown"

    @property
    def gpus(self) -> dict[int, str]:
        """GPU id → name, where the export has TARGET_INFO_GPU."""
        if "TARGET_INFO_GPU" not in self.columns:
            return {}
        return {int(i): str(name) for i, name in self.rows("SELECT id, name FROM TARGET_INFO_GPU")}

    def devices(self) -> dict[int, dict[str, int]]:
        """Device → kind → number of rows, over kernels, copies, memsets and whole graphs."""
        found: dict[int, dict[str, int]] = {}
        for table, kind in ACTIVITIES.items():
            if table in self.columns:
                for device, count in self.rows(f"SELECT deviceId, count(*) FROM {table} GROUP BY deviceId"):
                    found.setdefault(int(device), {})[kind] = count
        return dict(sorted(found.items()))

    def launches(self) -> pd.DataFrame:
        """Every device activity as a launch table; times in ns from the first activity of the file."""
        return self._table()[0]

    def launches_with_ranges(self, pattern: str) -> tuple[pd.DataFrame, list[tuple[Range, np.ndarray]]]:
        """The launch table, and per matching NVTX range the positions of the launches that it submitted.

        A launch belongs to a range when the runtime call that submitted it started inside it, on the range's thread
        (start/end ranges: in its process). `pattern` is matched against a range's text, then its path, then as a glob.
        """
        table, correlation, process = self._table(with_correlation=True)
        ranges = self._matching(pattern)
        position, start, thread = self._submissions(process, correlation)
        owner = {r: r.thread if r.thread >= 0 else r.process for r in ranges}
        by: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for key in set(owner.values()):
            mine = np.flatnonzero((thread == key) | (process[position] == key))
            by[key] = start[mine], position[mine]
        inside = []
        for r, key in owner.items():
            starts, positions = by[key]
            low, high = np.searchsorted(starts, r.start), np.searchsorted(starts, r.end, side="right")
            inside.append((r, np.sort(positions[low:high])))
        return table, inside

    def ranges(self) -> list[Range]:
        """Every NVTX range that ended, by start; nested ones carry the path of those around them."""
        columns = self.columns.get("NVTX_EVENTS", [])
        if not columns:
            return []
        text = "n.text" if "text" in columns else "NULL"
        join = ""
        if "textId" in columns and "StringIds" in self.columns:
            text, join = f"ifnull({text}, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
        rows = self.rows(
            f"SELECT n.start, n.end, n.eventType, n.globalTid, {text} FROM NVTX_EVENTS n {join} "
            f"WHERE n.end IS NOT NULL AND n.eventType IN ({PUSH_POP}, {START_END}) ORDER BY n.start, n.end DESC"
        )
        found: list[Range] = []
        open_: dict[int, list[Range]] = {}
        for start, end, kind, tid, label in rows:
            label = "" if label is None else str(label)
            stack = open_.setdefault(int(tid), [])
            while stack and stack[-1].end < end:
                stack.pop()
            path = f"{stack[-1].path}/{label}" if stack and kind == PUSH_POP else label
            made = Range(path, label, int(start), int(end), int(tid) if kind == PUSH_POP else -1, _process_of(int(tid)))
            found.append(made)
            if kind == PUSH_POP:
                stack.append(made)
        return found

    def overheads(self, start: int, end: int) -> dict[str, np.ndarray]:
        """Tracer and driver overhead that touches [start, end] (absolute ns): name → its intervals [n, 2], cut to it.

        "Command Buffer Full" and "Lazy Function Loading" are the driver's; the others are the tracer's own.
        """
        found: dict[str, list[np.ndarray]] = {}
        for table in (OVERHEAD, PROFILER):
            if not {"nameId", "start", "end"} <= set(self.columns.get(table, [])):
                continue
            rows = self.rows(
                f"SELECT ifnull(s.value, 'unnamed'), o.start, o.end FROM {table} o LEFT JOIN StringIds s ON s.id = o.nameId "
                "WHERE o.end > ? AND o.start < ? AND o.end >= o.start ORDER BY 1, 2",
                (start, end),
            )
            for name, part in pd.DataFrame(rows, columns=["name", "start", "end"]).groupby("name", sort=False):
                found.setdefault(str(name), []).append(part[["start", "end"]].to_numpy(np.int64).clip(start, end))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def origin(self) -> int:
        """Absolute ns of the first device activity: the zero of the launch table."""
        if self._origin is None:
            starts = [
                self.rows(f"SELECT min(start) FROM {table}")[0][0]
                for table in ACTIVITIES
                if "start" in self.columns.get(table, [])
            ]
            self._origin = min((int(s) for s in starts if s is not None), default=0)
        return self._origin

    # Reading

    def _table(self, *, with_correlation: bool = False) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
        """(launch table, correlation id, globalPid), the two arrays in the table's order and empty unless asked for."""
        with self._guard():
            parts = [part for table in ACTIVITIES if (part := self._activity(table, with_correlation)) is not None]
        if not parts:
            raise HarnessError(
                f"{self.path} holds no kernel, copy or graph; record it again with `nsys profile -t cuda,nvtx`."
            )
        joined = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
        zero = self._origin = int(joined["start"].min())
        order = np.lexsort((joined["end"], joined["start"]))
        if not np.array_equal(order, np.arange(len(order))):
            joined = {key: values[order] for key, values in joined.items()}
        table = launches.from_columns(
            name=_text(joined["name"]),
            kind=pd.Categorical.from_codes(joined["kind"], categories=list(launches.KINDS)),
            start_ns=joined["start"] - zero,
            end_ns=joined["end"] - zero,
            device=joined["device"].astype(np.int32),
            stream=joined["stream"],
            graph_node=launches.nullable(joined["node"], "Int64"),
            grid=_text(joined["grid"]),
            block=_text(joined["block"]),
            registers=launches.nullable(joined["registers"], "Int32"),
            smem_bytes=launches.nullable(joined["smem"], "Int64"),
            bytes=launches.nullable(joined["bytes"], "Int64"),
        )
        empty = np.empty(0, np.int64)
        return table, joined.get("correlation", empty), joined.get("process", empty)

    def _activity(self, table: str, with_correlation: bool) -> dict[str, np.ndarray] | None:
        """Columns of one activity table, or None where it is absent or empty."""
        columns = self.columns.get(table, [])
        if not columns:
            return None

        def column(name: str, default: str = "-1") -> str:
            return f"ifnull({name}, {default})" if name in columns else default

        kind = ACTIVITIES[table]
        # Packed where values are small by the hardware's or CUPTI's own limits: fewer columns are a faster read.
        place = f"({column('deviceId', '0')} << 32) | {column('streamId', '0')}"
        shape = [
            f"({column('gridX', '0')} << 32) | ({column('gridY', '0')} << 16) | {column('gridZ', '0')}",
            f"({column('blockX', '0')} << 50) | ({column('blockY', '0')} << 39) | ({column('blockZ', '0')} << 31)"
            f" | ({column('registersPerThread', '0')} << 21)"
            f" | ({column('staticSharedMemory', '0')} + {column('dynamicSharedMemory', '0')})",
        ]
        label = {
            "kernel": column("demangledName") if "demangledName" in columns else column("shortName"),
            "memcpy": column("copyKind"),
            "memset": "0",
            "graph": column("graphId"),
        }[kind]
        size = [column("bytes")] if kind in ("memcpy", "memset") else []
        remap = self._device_collisions()
        process = [column("globalPid")] if with_correlation or remap else []
        correlation = [column("correlationId")] if with_correlation else []
        select = ["start", "end", place, column("graphNodeId"), label]
        select += shape if kind == "kernel" else []
        select += size + process + correlation
        read = read_integers(self.database, table, select)
        n = len(read[0])
        if n == 0:
            return None
        values = iter(read)
        out = {key: next(values) for key in ("start", "end", "stream", "node", "label")}
        out["device"], out["stream"] = out["stream"] >> 32, out["stream"] & 0xFFFFFFFF
        none = np.full(n, -1, np.int64)
        grid, threads = np.full(n, "", object), np.full(n, "", object)
        registers, smem = none, none
        if kind == "kernel":
            grid = _decode(next(values), lambda v: f"{v >> 32},{v >> 16 & 0xFFFF},{v & 0xFFFF}")
            code = next(values)
            threads = _decode(code >> 31, lambda v: f"{v >> 19},{v >> 8 & 0x7FF},{v & 0xFF}")
            registers, smem = code >> 21 & 0x3FF, code & 0x1FFFFF
        out |= {"grid": grid, "block": threads, "registers": registers, "smem": smem}
        out["bytes"] = next(values) if size else none
        if process:
            out["process"] = next(values)
            if remap:
                out["device"] = _remapped(out["device"], out["process"], remap)
            if not with_correlation:
                del out["process"]
        if correlation:
            out["correlation"] = next(values)
        out["name"] = self._names(kind, out.pop("label"))
        out["kind"] = np.full(n, launches.KINDS.index(kind), np.int8)
        return out

    def _names(self, kind: str, ids: np.ndarray) -> np.ndarray:
        """Names of rows, each resolved once per distinct id."""
        inverse, unique = pd.factorize(ids)
        if kind == "kernel":
            text: dict[int, str] = {}
            for chunk in np.array_split(unique, len(unique) // 500 + 1):
                marks = ",".join("?" * len(chunk))
                if "StringIds" in self.columns:
                    text |= dict(
                        self.db.execute(f"SELECT id, value FROM StringIds WHERE id IN ({marks})", chunk.tolist())
                    )
            names = [text.get(int(i)) or f"[unnamed kernel {i}]" for i in unique]
        elif kind == "memcpy":
            names = [f"[CUDA memcpy {COPY_KINDS.get(int(i), f'kind {i}')}]" for i in unique]
        elif kind == "graph":
            names = [f"[CUDA graph {i}]" for i in unique]
        else:
            names = ["[CUDA memset]"] * len(unique)
        return np.array(names, object)[inverse]

    def _device_collisions(self) -> dict[tuple[int, int], int]:
        """(pid, CUDA ordinal) → GPU id, only where two processes call different GPUs by the same ordinal."""
        if "TARGET_INFO_CUDA_DEVICE" not in self.columns:
            return {}
        rows = self.rows("SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE")
        gpus: dict[int, set[int]] = {}
        for _, ordinal, gpu in rows:
            gpus.setdefault(ordinal, set()).add(gpu)
        return {(p, o): g for p, o, g in rows} if any(len(g) > 1 for g in gpus.values()) else {}

    def _submissions(self, process: np.ndarray, correlation: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(launch's position, call's start in absolute ns, call's globalTid) of launches whose call was recorded, by start."""
        if RUNTIME not in self.columns:
            return (np.empty(0, np.int64),) * 3
        with self._guard():
            select = ["start", "ifnull(globalTid, 0)", "ifnull(correlationId, -1)"]
            start, thread, called = read_integers(self.database, RUNTIME, select)
        order = np.argsort(start, kind="stable")
        start, thread, called = start[order], thread[order], called[order]
        # A correlation id is unique in its process only; the first call of one submitted the work.
        code, _ = pd.factorize(np.concatenate([_process_of(thread), process]))
        keys = pd.Index(code << 40 | np.concatenate([called, correlation]))
        first = np.flatnonzero(~keys[: len(start)].duplicated())
        row = keys[first].get_indexer(keys[len(start) :])
        position = np.flatnonzero(row >= 0)
        call = first[row[position]]
        order = np.argsort(call, kind="stable")
        return position[order], start[call[order]], thread[call[order]]

    def _matching(self, pattern: str) -> list[Range]:
        ranges = self.ranges()
        for test in (
            lambda r: r.text == pattern,
            lambda r: r.path == pattern or r.path.endswith("/" + pattern),
            lambda r: fnmatch.fnmatchcase(r.text, pattern) or fnmatch.fnmatchcase(r.path, pattern),
        ):
            found = [r for r in ranges if test(r)]
            if found:
                return found
        known = sorted({r.text for r in ranges if r.text})
        shown = ", ".join(repr(k) for k in known[:8]) + (", …" if len(known) > 8 else "")
        raise HarnessError(
            f"{self.path} has no NVTX range {pattern!r}; "
            + (f"it has {shown}." if known else "it has no ranges at all: record with `-t cuda,nvtx`.")
        )

    def _columns(self) -> dict[str, list[str]]:
        tables = [r[0] for r in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {
            t: [r[1] for r in self.db.execute(f'PRAGMA table_info("{t}")')] for t in tables if not t.startswith("ENUM_")
        }

    def rows(self, sql: str, values: tuple[object, ...] = ()) -> list[tuple]:
        """Rows of a query; text that is not UTF-8 comes with replacement characters."""
        with self._guard():
            return self.db.execute(sql, values).fetchall()

    def _exported(self, report: Path) -> Path:
        from harness.sources import nsys_driver

        self._scratch = tempfile.TemporaryDirectory(prefix="harness-nsys-")
        return nsys_driver.export(report, Path(self._scratch.name) / "export.sqlite")

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns SQLite's errors, and values of the wrong type, into the one sentence about this file."""
        try:
            yield
        except sqlite3.Error as error:
            raise HarnessError(f"{self.path} cannot be read as an nsys export ({error}); {_NOT_TRACED}.") from None
        except (TypeError, ValueError, OverflowError) as error:
            raise HarnessError(f"{self.path} holds a value of the wrong type ({error}); {_NOT_TRACED}.") from None


def read_nsys(path: Path) -> Trace:
    """All launches of an export as a Trace over every device; its wall is the span of all activity."""
    with Export(path) as export:
        return _trace(export, export.launches())


def read_nsys_ranges(path: Path, pattern: str) -> tuple[Trace, list[tuple[str, np.ndarray]]]:
    """The same, and per matching NVTX range its path and the positions of the launches that it submitted."""
    with Export(path) as export:
        table, inside = export.launches_with_ranges(pattern)
        return _trace(export, table), [(r.path, rows) for r, rows in inside]


def _trace(export: Export, table: pd.DataFrame) -> Trace:
    notes = [f"nsys export, schema {export.schema}"]
    graphs = table["kind"] == "graph"
    if graphs.any():
        ms = (table["end_ns"] - table["start_ns"])[graphs].sum() / 1e6
        notes.append(
            f"{int(graphs.sum())} CUDA graph launches ({ms:.3f} ms) were traced as a whole and hide their kernels; "
            "record again with `nsys profile --cuda-graph-trace=node` to see them"
        )
    wall, zero = int(table["end_ns"].max()), export.origin()
    overheads = {name: spans - zero for name, spans in export.overheads(zero, zero + wall).items()}
    return Trace(table, wall, "nsys", notes, export.gpus, overheads)


def _process_of(tid: Any) -> Any:
    """globalPid of a globalTid: the low 24 bits hold the thread."""
    return tid & ~0xFFFFFF


def _remapped(device: np.ndarray, process: np.ndarray, gpu: dict[tuple[int, int], int]) -> np.ndarray:
    pid = process >> 24 & 0xFFFFFF
    pairs, inverse = np.unique(np.stack([pid, device]), axis=1, return_inverse=True)
    return np.array([gpu.get((int(p), int(d)), int(d)) for p, d in pairs.T], np.int64)[inverse]


def _decode(codes: np.ndarray, text: Callable[[int], str]) -> np.ndarray:
    """Strings of packed integers, made once per distinct value."""
    inverse, unique = pd.factorize(codes)
    return np.array([text(int(u)) for u in unique], object)[inverse]


def _text(values: np.ndarray) -> pd.Series:
    """A string column whose rows share their str objects: a million names of 500 characters are 8 MB, not 500."""
    return pd.Series(pd.array(values, dtype=pd.StringDtype("python")))
