"""Reads Nsight Systems exports (SQLite schemas 2.9 to 3.25, or `.nsys-rep` through nsys itself) into a launch table.

What differs between schemas is looked up in the file, never assumed: tables that are absent, empty or of a later version
(`_V2`), the name of the meta-data table, NVTX text inline or in StringIds, text that is not UTF-8, graph columns, names
that are still mangled. A record without a usable time is left out, counted and named.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import pandas as pd

from harness import launches
from harness.errors import HarnessError
from harness.privacy import GONE
from harness.sources.names import demangled
from harness.sources.ranges import Ranges
from harness.sources.rows import Rows, first_line, read_columns
from harness.sources.submissions import Call, Calls, call_kind, match
from harness.sources.trace import Diagnostic, Findings, LeftOut, Sharing, Trace, taking_turns
from harness.sources.usable import EARLIEST_NS, LATEST_NS, by_start, usable

KERNEL = "CUPTI_ACTIVITY_KIND_KERNEL"
MEMCPY = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSET = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPH = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RUNTIME = "CUPTI_ACTIVITY_KIND_RUNTIME"
OVERHEAD = "CUPTI_ACTIVITY_KIND_OVERHEAD"
PROFILER = "PROFILER_OVERHEAD"
DIAGNOSTIC = "DIAGNOSTIC_EVENT"
NVTX = "NVTX_EVENTS"
ACTIVITIES = {KERNEL: "kernel", MEMCPY: "memcpy", MEMSET: "memset", GRAPH: "graph"}
"""Table of the export → kind of launch."""

_VERSIONED = re.compile(r"^((?:CUPTI_ACTIVITY_KIND|NVTX)_\w+?)_V(\d+)$")
"""A table of a later version; the plain name is the exporter's own answer where both exist."""

_DROPPED = re.compile(
    r"\b(\d[\d,]*)\b[^.;:\d]{0,60}?\b(?:dropped|lost|discarded|missing|missed|overwritten)\b"
    r"|\b(?:dropped|lost|discarded|missed)\b[^.;\d]{0,40}?\b(\d[\d,]*)\b",
    re.IGNORECASE,
)
"""A count of lost records in a profiler's message: "12345 activity records were dropped", "Dropped 17 events"."""

_SEVERITY: dict[int, Literal["error", "warning"]] = {2: "warning", 3: "error"}
"""DIAGNOSTIC_EVENT.severity (ENUM_DIAGNOSTIC_SEVERITY_LEVEL); the others tell how the recording went."""

_FIELDS: dict[str, int | None] = {
    "start": None, "end": None, "deviceId": None, "streamId": 0, "graphNodeId": -1, "correlationId": -1, "globalPid": -1,
}  # fmt: skip
"""Columns of every activity table, and what stands for one that is missing; None: a record needs it."""
_SHAPE = {"gridX": 0, "gridY": 0, "gridZ": 0, "blockX": 0, "blockY": 0, "blockZ": 0, "registersPerThread": -1,
          "staticSharedMemory": 0, "dynamicSharedMemory": 0}  # fmt: skip
_PACKS = (
    {"gridX": 31, "gridY": 16, "gridZ": 16},
    {"blockX": 11, "blockY": 11, "blockZ": 8, "registersPerThread": 10, "staticSharedMemory": 21},
)
"""Columns that are read as one number: grids are at most 2³¹ − 1 by 65,535 by 65,535, blocks 1,024 by 1,024 by 64 threads."""

COPY_KINDS = {
    1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA", 8: "DtoD", 9: "HtoH", 10: "PtoP",
    11: "Unified HtoD", 12: "Unified DtoH", 13: "Unified DtoD",
}  # fmt: skip
"""CUpti_ActivityMemcpyKind; 11 and above are nsys's own for managed memory."""

PUSH_POP, START_END, DOMAIN = 59, 60, 75
"""NVTX_EVENTS.eventType of the two kinds of range, of one thread and of a whole process, and of a domain's name."""

_NOT_TRACED = "export it again with `nsys export --type sqlite`"


class Export:
    """An open export. Context manager; every method raises HarnessError, in one sentence, where the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._origin: int | None = None
        self._unknown: dict[str, LeftOut] = {}  # values that are no numbers, of records that do without
        self._torn: list[tuple[int, int]] = []  # globalPid, correlation id of records that were left out
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
        if not {"id", "name"} <= set(self.columns.get("TARGET_INFO_GPU", [])):
            return {}
        rows = self.rows("SELECT id, name FROM TARGET_INFO_GPU WHERE typeof(id) = 'integer' AND typeof(name) = 'text'")
        return {i: " ".join(str(name).split()) for i, name in rows}

    def launches(self) -> pd.DataFrame:
        """Every device activity as a launch table; times in ns from the first activity of the file."""
        return self.read().launches

    def read(self) -> Trace:
        """The same as a Trace, with what was noticed on the way."""
        with self._guard():
            return self._read()

    def ranges(self) -> Ranges:
        """Every NVTX range, times in absolute ns; those of a named domain are labelled "domain:text", as nsys does."""
        with self._guard():
            return self._ranges()

    def _ranges(self) -> Ranges:
        columns = self.columns.get(NVTX, [])
        if not {"start", "end", "eventType", "globalTid"} <= set(columns):
            return Ranges.of([])
        text = "n.text" if "text" in columns else "NULL"
        join = ""
        if "textId" in columns and "StringIds" in self.columns:
            text, join = f"ifnull({text}, s.value)", "LEFT JOIN StringIds s ON s.id = n.textId"
        domain = "n.domainId" if "domainId" in columns else "0"
        rows = self.rows(
            f"SELECT n.eventType, n.globalTid, {domain}, {text}, n.start, n.end FROM {self.tables[NVTX]} n {join} "
            f"WHERE n.eventType IN ({PUSH_POP}, {START_END}, {DOMAIN}) AND typeof(n.start) = 'integer' AND typeof(n.globalTid) = 'integer' "
            "AND (n.end IS NULL OR typeof(n.end) = 'integer' AND n.end >= n.start)"
        )
        usable = [(k, t, d, "" if label is None else str(label), a, b) for k, t, d, label, a, b in rows
                  if EARLIEST_NS < a < LATEST_NS and (b is None or b < LATEST_NS)]  # fmt: skip
        domains = {(_process_of(t), d): label for k, t, d, label, _, _ in usable if k == DOMAIN}
        found = []
        for kind, thread, number, label, start, end in usable:
            if kind != DOMAIN:
                named = domains.get((_process_of(thread), number), "")
                whole = f"{named}:{label}" if named else label
                found.append((label, whole, start, end, thread, _process_of(thread), kind == START_END))
        return Ranges.of(found)

    def overheads(self, start: int, end: int) -> dict[str, np.ndarray]:
        """Tracer and driver overhead that touches [start, end] (absolute ns): name → its intervals [n, 2], cut to it.

        "Command Buffer Full" and "Lazy Function Loading" are the driver's; the others are the tracer's own.
        """
        found: dict[str, list[np.ndarray]] = {}
        for table in (OVERHEAD, PROFILER):
            if not {"nameId", "start", "end"} <= set(self.columns.get(table, [])) or "StringIds" not in self.columns:
                continue
            rows = self.rows(
                f"SELECT ifnull(s.value, 'unnamed'), o.start, o.end FROM {self.tables[table]} o LEFT JOIN StringIds s ON s.id = o.nameId "
                "WHERE o.end > ? AND o.start < ? AND o.end >= o.start AND typeof(o.start) = 'integer' AND typeof(o.end) = 'integer' "
                "ORDER BY 1, 2",
                (start, end),
            )
            for name, part in pd.DataFrame(rows, columns=["name", "start", "end"]).groupby("name", sort=False):
                found.setdefault(str(name), []).append(part[["start", "end"]].to_numpy(np.int64).clip(start, end))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def origin(self) -> int:
        """Absolute ns of the first device activity: the zero of the launch table."""
        if self._origin is None:
            self.read()
        assert self._origin is not None
        return self._origin

    # Reading

    def _read(self) -> Trace:
        found = Findings()
        bad: dict[str, LeftOut] = {}
        self._unknown, self._torn = {}, []
        parts = [part for table in ACTIVITIES if (part := self._activity(table, bad)) is not None]
        if not parts:
            raise HarnessError(self._why_nothing(bad))
        joined = {key: np.concatenate([p[key] for p in parts]) if len(parts) > 1 else parts[0][key] for key in parts[0]}
        parts.clear()
        found.records = len(joined["start"]) + sum(b.count for b in bad.values())
        keep, left_out = usable(joined["start"], joined["end"], lambda i: repr(str(joined["name"][i])[:60]))
        found.left_out = [*bad.values(), *left_out]
        if keep is not None and not keep.any():
            raise HarnessError(self._why_nothing({b.reason: b for b in found.left_out}))
        # A record that was left out is its call's activity all the same.
        torn = np.array(self._torn, np.int64).reshape(-1, 2).T
        seen = np.r_[joined["process"], torn[0]], np.r_[joined["correlation"], torn[1]]
        start, end = joined["start"], joined["end"]
        position = None if keep is None else np.flatnonzero(keep)
        if not ((start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] >= end[:-1]))).all():
            order = by_start(start, end)
            position = order if keep is None else order[keep[order]]
        if position is not None:
            joined = {key: values[position] for key, values in joined.items()}
        start, end = joined.pop("start"), joined.pop("end")
        zero = self._origin = int(start[0])
        process, correlation = joined.pop("process"), joined.pop("correlation")
        kernels = joined["kind"] == launches.KINDS.index("kernel")
        device = self._tell_apart(joined.pop("device"), process, start, end, kernels, found)
        table = launches.from_columns(
            name=_text(joined["name"]),
            kind=pd.Categorical.from_codes(joined["kind"], categories=list(launches.KINDS)),
            start_ns=start - zero,
            end_ns=end - zero,
            device=device.astype(np.int32),
            stream=joined["stream"],
            graph_node=launches.nullable(joined["node"], "Int64"),
            grid=_text(joined["grid"]),
            block=_text(joined["block"]),
            registers=launches.nullable(joined["registers"], "Int32"),
            smem_bytes=launches.nullable(joined["smem"], "Int64"),
            bytes=launches.nullable(joined["bytes"], "Int64"),
        )
        calls = self._calls()
        if calls is not None and (correlation >= 0).any():
            hidden = (joined["kind"] == launches.KINDS.index("graph")) & (correlation < 0)
            usable_rows = np.arange(len(start)) if position is None and len(torn[0]) else position
            found.call = match(calls, *seen, usable=usable_rows, whole_graphs=bool(hidden.any()))
            found.calls = calls.shifted(zero)
        found.diagnostics = self._diagnostics()
        notes = [f"nsys export, schema {self.schema}"]
        notes += [
            f"{u.count} times {u.reason} and was taken as unknown, first in {u.first}" for u in self._unknown.values()
        ]
        graphs = joined["kind"] == launches.KINDS.index("graph")
        if graphs.any():
            notes.append(
                f"{int(graphs.sum())} CUDA graph launches ({(end - start)[graphs].sum() / 1e6:.3f} ms) were traced as a whole and hide their kernels; "
                "record again with `nsys profile --cuda-graph-trace=node` to see them"
            )
        wall = int(end.max()) - zero
        overheads = {name: spans - zero for name, spans in self.overheads(zero, zero + wall).items()}
        return Trace(table, wall, "nsys", notes, self.gpus, overheads, found=found)

    def _activity(self, table: str, bad: dict[str, LeftOut]) -> dict[str, np.ndarray] | None:
        """Columns of one activity table, or None where it is absent or empty; what it cannot use is added to `bad`."""
        columns = set(self.columns.get(table, []))
        if not columns:
            return None
        kind = ACTIVITIES[table]
        label = {
            "kernel": next((c for c in ("demangledName", "shortName", "mangledName") if c in columns), ""),
            "memcpy": "copyKind",
            "memset": "",
            "graph": "graphId",
        }[kind]
        wanted = _FIELDS | (_SHAPE if kind == "kernel" else {"bytes": -1} if kind != "graph" else {})
        wanted |= {label: -1} if label else {}
        if missing := {"start", "end"} - columns:
            raise HarnessError(f"{self.path}: table {table} has no column {min(missing)!r}; {_NOT_TRACED}.")
        present = {c: (0 if c == "deviceId" and default is None and c not in columns else default)
                   for c, default in wanted.items() if c in columns}  # fmt: skip
        read = read_columns(self.database, self.tables[table], present, packs=_PACKS)
        _note_bad(read, table, bad, self._unknown)
        if read.bad_rows and {"globalPid", "correlationId"} <= columns:
            at = ",".join(str(rowid) for rowid, _ in read.bad_rows)
            self._torn += [
                (p, c)
                for p, c in self.rows(
                    f"SELECT globalPid, correlationId FROM {self.tables[table]} WHERE rowid IN ({at})"
                )
                if isinstance(p, int) and isinstance(c, int)
            ]
        n = len(read.columns["start"])
        if n == 0:
            return None

        def column(name: str) -> np.ndarray:
            found = read.columns.pop(name, None)
            return np.full(n, wanted[name] or 0, np.int64) if found is None else found

        out = {
            "start": column("start"),
            "end": column("end"),
            "device": column("deviceId"),
            "stream": column("streamId"),
        }
        out |= {"node": column("graphNodeId"), "correlation": column("correlationId"), "process": column("globalPid")}
        fits = (np.abs(out["device"]) < 1 << 31) if n else np.ones(0, bool)
        none, empty = np.full(n, -1, np.int64), np.full(n, "", object)
        out |= {"grid": empty, "block": empty, "registers": none, "smem": none, "bytes": none}
        if kind == "kernel":
            out["grid"] = _sizes(*(column(f"grid{axis}") for axis in "XYZ"))
            out["block"] = _sizes(*(column(f"block{axis}") for axis in "XYZ"))
            out["registers"] = _within(column("registersPerThread"), 1 << 31)
            fixed, dynamic = (_within(column(f"{part}SharedMemory"), 1 << 40) for part in ("static", "dynamic"))
            out["smem"] = np.where((fixed < 0) | (dynamic < 0), -1, fixed + dynamic)
        elif kind != "graph":
            out["bytes"] = column("bytes")
        out["name"] = self._names(kind, column(label) if label else none)
        out["kind"] = np.full(n, launches.KINDS.index(kind), np.int8)
        if not fits.all():
            _add(bad, "with a device number out of range", int((~fits).sum()), f"{out['device'][~fits][0]} in {table}")
            self._torn += zip(out["process"][~fits].tolist(), out["correlation"][~fits].tolist(), strict=True)
            out = {key: values[fits] for key, values in out.items()}
        return out

    def _calls(self) -> Calls | None:
        """Calls that launch, copy, wait or capture, by start in absolute ns; None where none were recorded."""
        columns = set(self.columns.get(RUNTIME, []))
        if not {"start", "end", "correlationId", "nameId"} <= columns or "StringIds" not in self.columns:
            return None
        named = self.rows("SELECT id, value FROM StringIds WHERE value GLOB 'cu*' OR value GLOB 'hip*'")
        kinds = {i: kind for i, name in named if isinstance(i, int) and (kind := call_kind(str(name))) != Call.OTHER}
        if not kinds:
            return None
        launching = {i for i, kind in kinds.items() if kind in (Call.LAUNCH, Call.LAUNCH_EX, Call.GRAPH)}
        # A driver's call can lie inside a runtime's, which their ends tell; they cost a read that is else not needed.
        layered = len({str(name)[:4] == "cuda" for i, name in named if i in launching}) > 1
        waiting = {i for i, kind in kinds.items() if kind in (Call.WAIT, Call.BLOCKING_COPY)}
        parts = [
            self._calls_of(set(kinds) - waiting, columns, with_end=layered),
            self._calls_of(waiting, columns, with_end=True),
        ]
        got = {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}
        if len(got["start"]) == 0:
            return None
        code, ids = pd.factorize(got["nameId"])
        kind = np.array([kinds[int(i)] for i in ids], np.int64)[code]
        return Calls(
            got["start"], got["end"], got["globalTid"], _process_of(got["globalTid"]), got["correlationId"], kind
        )

    def _calls_of(self, ids: set[int], columns: set[str], *, with_end: bool) -> dict[str, np.ndarray]:
        """Columns of the runtime calls of these names that did not fail; without their ends these are their starts."""
        wanted: dict[str, int | None] = {"start": None, "correlationId": -1, "nameId": None}
        wanted |= {"end": None} if with_end else {}
        wanted |= {"globalTid": 0} if "globalTid" in columns else {}
        if not ids:
            return {key: np.empty(0, np.int64) for key in (*wanted, "end", "globalTid")}
        where = f"nameId IN ({', '.join(map(str, sorted(ids)))})"
        if "returnValue" in columns:
            where += " AND ifnull(returnValue, 0) = 0"  # a call that failed launches nothing
        packs = [{"correlationId": 40, "nameId": 23}] if min(ids) >= 0 and max(ids) < 1 << 23 else []
        got = read_columns(self.database, self.tables[RUNTIME], wanted, where, packs).columns
        return {"end": got["start"], "globalTid": np.zeros(len(got["start"]), np.int64)} | got

    def _diagnostics(self) -> list[Diagnostic]:
        """The profiler's own errors, warnings, and whatever says that records were lost, each once."""
        if not {"severity", "text"} <= set(self.columns.get(DIAGNOSTIC, [])):
            return []
        found: dict[str, Diagnostic] = {}
        for severity, text in self.rows(f"SELECT severity, text FROM {DIAGNOSTIC} ORDER BY rowid LIMIT 10000"):
            said = " ".join(str(text).split())[:300]
            dropped = sum(int((a or b).replace(",", "")[:18]) for a, b in _DROPPED.findall(said))
            if severity in _SEVERITY or dropped:
                found.setdefault(said, Diagnostic(_SEVERITY.get(severity, "warning"), said, dropped))
        return list(found.values())

    def _why_nothing(self, bad: dict[str, LeftOut]) -> str:
        """One sentence about an export of which no launch can be read."""
        if bad:
            said = "; ".join(f"{b.count} {b.reason}, first {b.first}" for b in bad.values())
            return f"{self.path} holds no usable device record ({said}); {_NOT_TRACED}."
        tables = self.columns
        if "StringTable" in tables or any(t.startswith("CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL") for t in tables):
            return f"{self.path} is a database of nvprof or the Visual Profiler, which nsys replaces; record it again with `nsys profile -t cuda,nvtx` and export that."
        if any(t.lstrip("_").startswith("rocpd_") for t in tables):
            return (
                f"{self.path} is a rocpd database of AMD's profiler, which is not read; record the run with torch.profiler and give "
                "its export_chrome_trace."
            )
        rows = self._calls()
        count = int(np.isin(rows.kind, [Call.LAUNCH, Call.LAUNCH_EX, Call.GRAPH]).sum()) if rows is not None else 0
        if count:
            return (
                f"{self.path} holds {count:,} launch calls, no kernels: the work ran in a process that was not traced (an MPS or inference "
                "server, a child that nsys did not follow), or the driver gave no device records (no permission, another profiler "
                "attached); trace the process that runs the kernels, and look at nsys's own messages."
            )
        if not any(t in tables for t in (*ACTIVITIES, RUNTIME, "StringIds")):
            return f"{self.path} is an SQLite database, but no nsys export: it has none of its tables; give one made by `nsys export --type sqlite`."
        return f"{self.path} holds no kernel, copy or graph; record it again with `nsys profile -t cuda,nvtx`."

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
            names = [demangled(str(text.get(int(i)) or f"[unnamed kernel {i}]")) for i in unique]
        elif kind == "memcpy":
            names = [f"[CUDA memcpy {COPY_KINDS.get(int(i), f'kind {i}')}]" for i in unique]
        elif kind == "graph":
            names = [f"[CUDA graph {i}]" for i in unique]
        else:
            names = ["[CUDA memset]"] * len(unique)
        return np.array(names, object)[inverse]

    def _tell_apart(
        self,
        device: np.ndarray,
        process: np.ndarray,
        start: np.ndarray,
        end: np.ndarray,
        worked: np.ndarray,
        found: Findings,
    ) -> np.ndarray:
        """Device numbers under which two GPUs never share one, and in `found` which processes use which device.

        A process counts its devices from 0. Where the export's device table tells which GPUs are meant and two processes
        call different ones by the same number, the GPU's id is the device.
        """
        spread = process if len(process) == 0 or (process != process[0]).any() else process[:1]
        pids = [int(p) for p in pd.unique(spread)]
        gpu = self._gpu_of() if len(pids) > 1 else {}
        if len({(o, g) for (_, o), g in gpu.items()}) > len({o for _, o in gpu}):
            device = _remapped(device, process, gpu)
        known = {int(d): pids for d in pd.unique(device)}
        if len(pids) > 1:
            code, _ = pd.factorize(process)
            pairs = np.unique(np.stack([device, code]), axis=1)
            known = {int(d): [pids[int(c)] for c in pairs[1][pairs[0] == d]] for d in np.unique(pairs[0])}
        found.processes = known
        found.owner = process if len(pids) > 1 else None
        for number, of in known.items():
            of = [p for p in of if p >= 0]
            if len(of) > 1:
                rows = (device == number) & worked & (process >= 0)
                together, why = taking_turns(process[rows], start[rows], end[rows]) if rows.any() else (0.0, "")
                listed = self._listed_gpus()
                if gpu and all(any(q == _pid(p) for q, _ in gpu) for p in of):
                    why = "one GPU, as the export's device table names one for them"
                elif listed == 1:
                    why = "one GPU, as the recording names a single GPU"
                elif listed > 1:
                    why = why if why.startswith("they ran") else ""  # turns may be chance where there are others
                found.sharing.append(Sharing(number, [str(_pid(p)) for p in of], together, why))
        return device

    def _listed_gpus(self) -> int:
        """How many GPUs TARGET_INFO_GPU names, by UUID where it has one; 0 without the table."""
        columns = set(self.columns.get("TARGET_INFO_GPU", []))
        if "id" not in columns:
            return 0
        key = [c for c in ("uuid", "vmId", "id") if c in columns]
        rows = self.rows(f"SELECT {', '.join(key)} FROM TARGET_INFO_GPU WHERE typeof(id) = 'integer'")
        return len(
            {r[0] if key[0] == "uuid" and r[0] and set(str(r[0])) - set("0-") and r[0] != GONE else r for r in rows}
        )

    def _gpu_of(self) -> dict[tuple[int, int], int]:
        """(pid, CUDA ordinal) → GPU id, where the export has a device table that tells processes apart."""
        if not {"pid", "cudaId", "gpuId"} <= set(self.columns.get("TARGET_INFO_CUDA_DEVICE", [])):
            return {}
        rows = self.rows("SELECT pid, cudaId, gpuId FROM TARGET_INFO_CUDA_DEVICE")
        return {(p, o): g for p, o, g in rows if all(isinstance(v, int) and abs(v) < 1 << 31 for v in (p, o, g))}

    def _columns(self) -> dict[str, list[str]]:
        """Table → its columns; fills `tables`, under which name each is in the file. A later version stands in for a table
        that is absent under its plain name."""
        names = [str(r[0]) for r in self.db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        self.tables = {t: t for t in names if not t.startswith("ENUM_")}
        versions = sorted((int(m[2]), m[1], t) for t in names if (m := _VERSIONED.match(t)))
        later = {plain: actual for _, plain, actual in versions}
        self.tables = later | self.tables
        return {
            t: [str(r[1]) for r in self.db.execute(f'PRAGMA table_info("{actual}")')]
            for t, actual in self.tables.items()
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
            raise HarnessError(
                f"{self.path} cannot be read as an nsys export ({first_line(error)}); {_NOT_TRACED}."
            ) from None
        except (TypeError, ValueError, OverflowError) as error:
            raise HarnessError(
                f"{self.path} holds a value of the wrong type ({first_line(error)}); {_NOT_TRACED}."
            ) from None


def read_nsys(path: Path, *, ranges: bool = False) -> Trace:
    """All launches of an export as a Trace over every device; its wall is the span of all activity. ranges: read them, too."""
    with Export(path) as export:
        trace = export.read()
        if ranges:
            trace.found.ranges = export.ranges().shifted(export.origin())
        return trace


def _note_bad(read: Rows, table: str, bad: dict[str, LeftOut], unknown: dict[str, LeftOut]) -> None:
    """Counts a table's rows that lack a whole number where they need one in `bad`, other such values in `unknown`."""
    for rowid, column in read.bad_rows:
        _add(bad, f"whose {column!r} is no whole number", 1, f"row {rowid} of {table}")
    for rowid, column in read.bad_values:
        _add(unknown, f"{column!r} is no whole number", 1, f"row {rowid} of {table}")


def _add(bad: dict[str, LeftOut], reason: str, count: int, first: str) -> None:
    before = bad.get(reason)
    bad[reason] = LeftOut(reason, count + (before.count if before else 0), before.first if before else first)


def _process_of(tid: Any) -> Any:
    """globalPid of a globalTid: the low 24 bits hold the thread."""
    return tid & ~0xFFFFFF


def _pid(process: int) -> int:
    """The operating system's process id in a globalPid."""
    return process >> 24 & 0xFFFFFF


def _remapped(device: np.ndarray, process: np.ndarray, gpu: dict[tuple[int, int], int]) -> np.ndarray:
    pairs, inverse = np.unique(np.stack([process >> 24 & 0xFFFFFF, device]), axis=1, return_inverse=True)
    return np.array([gpu.get((int(p), int(d)), int(d)) for p, d in pairs.T], np.int64)[inverse.reshape(-1)]


def _sizes(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """ "x,y,z" of every row, made once per distinct triple."""
    code, _ = pd.factorize(x)
    for axis in (y, z):
        if (axis != axis[0]).any():
            inner, seen = pd.factorize(axis)
            code, _ = pd.factorize(code * len(seen) + inner)
    first = np.zeros(int(code.max()) + 1, np.int64)
    first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    return np.array([f"{x[i]},{y[i]},{z[i]}" for i in first], object)[code]


def _within(values: np.ndarray, limit: int) -> np.ndarray:
    """The values, those out of range as unknown (−1)."""
    outside = (values < 0) | (values >= limit)
    return np.where(outside, -1, values) if outside.any() else values


def _text(values: np.ndarray) -> pd.Series:
    """A string column whose rows share their str objects: a million names of 500 characters are 8 MB, not 500."""
    return pd.Series(pd.array(values, dtype=pd.StringDtype("python")))
