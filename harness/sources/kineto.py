"""Reads PyTorch profiler traces (Kineto JSON, plain or gzip) into a launch table, one event at a time.

A trace of 1 GB is never held as Python objects: the text is decoded event by event from a sliding window, and of every
event only the columns that the launch table needs are kept.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from harness import launches
from harness.errors import HarnessError
from harness.sources.trace import Trace

KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset"}
"""Event category (lower case; the last two are older profilers') → kind of launch."""

_SYNC = re.compile(r"^(Context|Device|Stream|Event) (Sync|Wait)", re.IGNORECASE)
"""Names of synchronisation events. Some profilers put them on the device's rows; none of them is work."""

_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_WINDOW = 1 << 22  # characters that are read at a time
_LONGEST = 1 << 28  # characters of one value: a damaged file must not be read whole in search of a value's end
_FIX = "record it again with torch.profiler's export_chrome_trace"


@dataclass
class _Columns:
    """What is kept of the events, column by column."""

    name: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    node: list[int] = field(default_factory=list)
    grid: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    registers: list[int] = field(default_factory=list)
    smem: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    correlation: list[int] = field(default_factory=list)
    syncs: int = 0
    with_ranges: bool = False  # whether the host's side is wanted: the calls and ranges below
    calls: dict[int, tuple[int, object]] = field(default_factory=dict)  # correlation id → (start ns, thread)
    ranges: list[tuple[str, int, int, object]] = field(default_factory=list)  # name, start, end, thread
    gpus: dict[int, str] = field(default_factory=dict)


def read_kineto(path: Path) -> Trace:
    """All launches of a profiler trace as a Trace over every device; its wall is the span of all activity.

    Times: start = round(ts · 1000) ns, end = start + round(dur · 1000). Raises HarnessError for a file that is no such
    trace, that is damaged or that ends early, and for one without any launch.
    """
    return _trace(*_read(path))


def read_kineto_ranges(path: Path, pattern: str) -> tuple[Trace, list[tuple[str, np.ndarray]]]:
    """The same, and per matching annotation its name and the positions of the launches that were submitted inside it."""
    table, columns = _read(path, with_ranges=True)
    found = [r for r in columns.ranges if r[0] == pattern] or [
        r for r in columns.ranges if fnmatch.fnmatchcase(r[0], pattern)
    ]
    if not found:
        known = ", ".join(sorted({repr(r[0]) for r in columns.ranges})[:8]) or "none"
        raise HarnessError(f"{path} has no annotation {pattern!r}; it has {known}.")
    order = np.lexsort((columns.end, columns.start))
    calls = [columns.calls.get(columns.correlation[i], (-1, None)) for i in order]
    started = np.array([c[0] for c in calls], np.int64)
    inside = []
    for name, start, end, thread in sorted(found, key=lambda r: r[1]):
        hit = np.flatnonzero((started >= start) & (started <= end))
        inside.append((name, np.array([i for i in hit if calls[i][1] == thread], np.int64)))
    return _trace(table, columns), inside


def _trace(table: pd.DataFrame, columns: _Columns) -> Trace:
    notes = ["PyTorch profiler trace"]
    if columns.syncs:
        notes.append(f"{columns.syncs} synchronisation events on device rows are not launches and were left out")
    return Trace(table, int(table["end_ns"].max()), "kineto", notes, columns.gpus)


def _read(path: Path, *, with_ranges: bool = False) -> tuple[pd.DataFrame, _Columns]:
    if not path.is_file():
        raise HarnessError(f"{path} is no file; give a PyTorch profiler trace (.json or .json.gz).")
    columns = _Columns(with_ranges=with_ranges)
    try:
        with _open(path) as text:
            for event in _events(text, columns.gpus):
                _take(event, columns)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise HarnessError(f"{path} cannot be read ({error}); {_FIX}.") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise HarnessError(
            f"{path} is not a whole PyTorch profiler trace ({type(error).__name__}: {error}); {_FIX}."
        ) from None
    if not columns.name:
        raise HarnessError(f"{path} holds no kernel, copy or memset; profile with ProfilerActivity.CUDA.")
    zero = min(columns.start)
    try:
        table = launches.from_columns(
            name=pd.Series(pd.array(np.array(columns.name, object), dtype=pd.StringDtype("python"))),
            kind=columns.kind,
            start_ns=np.array(columns.start, np.int64) - zero,
            end_ns=np.array(columns.end, np.int64) - zero,
            device=np.array(columns.device, np.int32),
            stream=np.array(columns.stream, np.int64),
            graph_node=launches.nullable(columns.node, "Int64"),
            grid=columns.grid,
            block=columns.block,
            registers=launches.nullable(columns.registers, "Int32"),
            smem_bytes=launches.nullable(columns.smem, "Int64"),
            bytes=launches.nullable(columns.bytes, "Int64"),
        )
    except (OverflowError, ValueError) as error:
        raise HarnessError(f"{path} holds a number out of range ({error}); {_FIX}.") from None
    return table, columns


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise ValueError("the file is empty")
    if magic == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _events(text: IO[str], gpus: dict[int, str]) -> Iterator[Any]:
    """Every element of "traceEvents" (or of a bare list), decoded one at a time; fills `gpus` on the way."""
    scan = _Scanner(text)
    if scan.peek() == "[":
        yield from scan.array()
        return
    scan.expect("{")
    found = False
    while scan.peek() != "}":
        key = scan.value()
        scan.expect(":")
        if key == "traceEvents" and scan.peek() == "[":
            found = True
            yield from scan.array()
        elif key == "deviceProperties":
            gpus |= {int(p["id"]): str(p["name"]) for p in scan.value() if p.get("name")}
        else:
            scan.value()
        if scan.peek() == ",":
            scan.expect(",")
        elif scan.peek() != "}":
            raise ValueError(f"{scan.peek()!r} where a comma or the end should be")
    if not found:
        raise ValueError('it has no "traceEvents"')


class _Scanner:
    """JSON values one after another from a text stream, through a window that holds little more than one value."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self._window, self._at, self._ended = text, "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def _more(self) -> bool:
        # At least doubles what is left, so that a value far larger than the window costs O(n), not O(n²).
        piece = self._text.read(max(_WINDOW, len(self._window) - self._at))
        self._ended = not piece
        self._window, self._at = self._window[self._at :] + piece, 0
        return bool(piece)

    def peek(self) -> str:
        """The next character that is not white space; ValueError at the end of the file."""
        while True:
            while self._at < len(self._window):
                if not self._window[self._at].isspace():
                    return self._window[self._at]
                self._at += 1
            if not self._more():
                raise ValueError("it ends too early")

    def expect(self, mark: str) -> None:
        found = self.peek()
        if found != mark:
            raise ValueError(f"{found!r} where {mark!r} should be")
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                found, end = self._decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if len(self._window) - self._at < _LONGEST and self._more():
                    continue
                raise ValueError(f"{error.msg} near its end" if self._ended else error.msg) from None
            # A number at the window's edge may go on in the next piece: "0" of "0.", "1" of "1e+".
            if len(self._window) - end < 3 and not isinstance(found, (dict, list, str)) and not self._ended:
                self._more()
                continue
            self._at = end
            return found

    def array(self) -> Iterator[Any]:
        self.expect("[")
        while self.peek() != "]":
            yield self.value()
            if self.peek() == ",":
                self.expect(",")
            elif self.peek() != "]":
                raise ValueError(f"{self.peek()!r} where a comma or ']' should be")
        self.expect("]")


def _take(event: Any, columns: _Columns) -> None:
    """Keeps what the launch table needs of one event."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        return
    category = str(event.get("cat", "")).lower()
    kind = KINDS.get(category)
    if kind is None:
        if not columns.with_ranges:
            return
        if category in _CALLS:
            correlation = (event.get("args") or {}).get("correlation")
            if correlation is not None:
                columns.calls.setdefault(int(correlation), (_ns(event["ts"]), event.get("tid")))
        elif category == "user_annotation":
            start = _ns(event["ts"])
            columns.ranges.append((str(event.get("name")), start, start + _ns(event.get("dur", 0)), event.get("tid")))
        return
    name = str(event["name"])
    if _SYNC.search(name):
        columns.syncs += 1
        return
    args = event.get("args") or {}
    start = _ns(event["ts"])
    columns.name.append(sys.intern(name))
    columns.kind.append(kind)
    columns.start.append(start)
    columns.end.append(start + _ns(event.get("dur", 0)))
    columns.device.append(int(args["device"] if "device" in args else event["pid"]))
    columns.stream.append(int(args["stream"] if "stream" in args else event["tid"]))
    columns.node.append(int(args.get("graph node id") or -1))
    columns.grid.append(_dims(args.get("grid")))
    columns.block.append(_dims(args.get("block")))
    columns.registers.append(int(args.get("registers per thread", -1)))
    columns.smem.append(int(args.get("shared memory", -1)))
    columns.bytes.append(int(args.get("bytes", -1)))
    columns.correlation.append(int(args.get("correlation", -1)))


def _ns(microseconds: float) -> int:
    return round(float(microseconds) * 1000)


def _dims(sizes: list[int] | None) -> str:
    return ",".join(str(int(s)) for s in sizes) if sizes else ""
