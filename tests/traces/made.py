"""Traces made by hand: nsys exports of any schema, and PyTorch profiler files."""

from __future__ import annotations

import gzip
import json
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PID, OTHER_PID = 1 << 48 | 4242 << 24, 1 << 48 | 4343 << 24


@dataclass
class Schema:
    """How an export of some version spells things."""

    version: str = "3.20.3"
    meta: str = "META_DATA_EXPORT"  # EXPORT_META_DATA until 2.x
    inline_text: bool = False  # NVTX text in the row, or in StringIds
    graph_columns: bool = True  # graphNodeId
    empty_tables: bool = False  # tables of every kind exist, empty
    runtime: bool = True


@dataclass
class Kernel:
    """One launch of the synthetic export."""

    name: str
    start: int
    end: int
    device: int = 0
    correlation: int = 0
    pid: int = PID
    node: int | None = None


@dataclass
class Content:
    """What an export holds."""

    kernels: list[Kernel] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)  # start, end, bytes
    graphs: list[tuple[int, int]] = field(default_factory=list)
    calls: list[tuple[int, int, int, int]] = field(default_factory=list)  # start, end, globalTid, correlation
    ranges: list[tuple[int, int, str, int]] = field(default_factory=list)  # start, end, text, globalTid
    raw: list[tuple[str, tuple]] = field(default_factory=list)  # further statements


def write(path: Path, content: Content, schema: Schema | None = None) -> Path:
    """A SQLite export with `content`, spelled as `schema` says."""
    s = schema or Schema()
    db = sqlite3.connect(path)
    strings: dict[str, int] = {}

    def string(text: str) -> int:
        return strings.setdefault(text, len(strings))

    db.execute("CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT)")
    db.execute(f"CREATE TABLE {s.meta} (name TEXT, value TEXT)")
    db.execute(f"INSERT INTO {s.meta} VALUES ('EXPORT_SCHEMA_VERSION', ?)", (s.version,))
    node = ", graphNodeId INTEGER" if s.graph_columns else ""
    if content.kernels or s.empty_tables:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId "
            "INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER, registersPerThread INTEGER, gridX INTEGER, gridY "
            f"INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER{node})"
        )
        for k in content.kernels:
            row = [
                k.start,
                k.end,
                k.device,
                7,
                k.correlation,
                k.pid,
                string(k.name),
                string(k.name),
                32,
                5,
                3,
                2,
                128,
                4,
                1,
                48,
                1024,
            ]
            row += [k.node] if s.graph_columns else []
            db.execute(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * len(row))})", row)
    if content.copies or s.empty_tables:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId INTEGER, "
            "globalPid INTEGER, bytes INTEGER, copyKind INTEGER)"
        )
        db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 13, 0, {PID}, ?, 1)", content.copies)
    if s.empty_tables:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, bytes INTEGER)"
        )
        db.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_OVERHEAD (start INTEGER, end INTEGER, nameId INTEGER)")
    if content.graphs:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, graphId INTEGER)"
        )
        db.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?, ?, 0, 7, 3)", content.graphs)
    if s.runtime:
        db.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
        )
        name = string("cudaLaunchKernel")
        db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, {name})", content.calls)
    if content.ranges or s.empty_tables:
        extra = "" if s.inline_text else ", textId INTEGER"
        db.execute(
            f"CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER{extra})"
        )
        for start, end, text, tid in content.ranges:
            row = [start, end, 59, text if s.inline_text else None, tid] + ([] if s.inline_text else [string(text)])
            db.execute(f"INSERT INTO NVTX_EVENTS VALUES ({','.join('?' * len(row))})", row)
    for sql, values in content.raw:
        db.execute(sql, values)
    db.executemany("INSERT OR IGNORE INTO StringIds VALUES (?, ?)", [(i, text) for text, i in strings.items()])
    db.commit()
    db.close()
    return path


def event(name: str, ts: float, dur: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": ts,
        "dur": dur,
        "args": {"device": 0, "stream": 7, **args},
    }


def trace_file(path: Path, events: list[Any], **keys: Any) -> Path:
    text = json.dumps({"schemaVersion": 1, "traceEvents": events, **keys})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path
