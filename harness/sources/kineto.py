"""Reads PyTorch profiler traces (Kineto JSON, plain or gzip) into a launch table, one event at a time.

A trace of 1 GB is never held as Python objects: the text is decoded event by event from a sliding window, and of every
event only the columns that the launch table needs are kept. What profilers write beside the standard is read: `inf` and
`nan`, raw control characters, a byte-order mark, text for streams; an event without a usable time is left out and named.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from math import ulp
from pathlib import Path
from typing import IO, Any

import numpy as np
import pandas as pd

from harness import launches
from harness.errors import HarnessError
from harness.sources.names import demangled
from harness.sources.ranges import STEP, Ranges
from harness.sources.submissions import Call, Calls, call_kind, match
from harness.sources.trace import Findings, LeftOut, Sharing, Trace, taking_turns
from harness.sources.usable import by_start, usable

KINDS = {"kernel": "kernel", "gpu_memcpy": "memcpy", "gpu_memset": "memset", "memcpy": "memcpy", "memset": "memset"}
"""Event category (lower case; the last two are older profilers') → kind of launch."""

_SYNC = re.compile(r"^(Context|Device|Stream|Event) (Sync|Wait)", re.IGNORECASE)
"""Names of synchronisation events. Some profilers put them on the device's rows; none of them is work."""

_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "driver", "hip_runtime")
_WINDOW = 1 << 22  # characters that are read at a time
_LONGEST = 1 << 25  # characters of one value: a damaged file must not be read whole in search of a value's end
_SMALL = 1 << 20  # characters of a value beside the events that is decoded at all
_UNKNOWN = -1
_PRODUCTS = {
    "aten::mm": 0, "aten::bmm": 0, "aten::_int_mm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1,
    "aten::baddbmm": 1,
}  # fmt: skip
"""PyTorch's innermost operators of a matrix product → which of their inputs is the first factor, [M, K]; the next is [K, N]."""
_LAUNCHING = (Call.LAUNCH, Call.LAUNCH_EX, Call.GRAPH)
_FIX = "record it again with torch.profiler's export_chrome_trace"


def _numbers() -> array[int]:
    return array("q")


@dataclass
class _Columns:
    """What is kept of the events, column by column."""

    name: list[str] = field(default_factory=list)
    kind: array[int] = field(default_factory=_numbers)  # index into launches.KINDS
    start: array[int] = field(default_factory=_numbers)
    end: array[int] = field(default_factory=_numbers)
    device: array[int] = field(default_factory=_numbers)
    stream: array[int] = field(default_factory=_numbers)
    node: array[int] = field(default_factory=_numbers)
    grid: list[str] = field(default_factory=list)
    block: list[str] = field(default_factory=list)
    registers: array[int] = field(default_factory=_numbers)
    smem: array[int] = field(default_factory=_numbers)
    bytes: array[int] = field(default_factory=_numbers)
    correlation: array[int] = field(default_factory=_numbers)
    pid: array[int] = field(default_factory=_numbers)  # code of the event's pid
    context: array[int] = field(default_factory=_numbers)
    torn: list[tuple[int, int]] = field(
        default_factory=list
    )  # code of the pid, correlation of records that were left out
    calls: dict[str, array[int]] = field(
        default_factory=lambda: {
            key: _numbers() for key in ("start", "end", "thread", "process", "correlation", "kind")
        }
    )
    products: dict[str, array[int]] = field(
        default_factory=lambda: {key: _numbers() for key in ("thread", "start", "end", "shape")}
    )  # operators of a matrix product whose dimensions are told
    shapes: dict[str, int] = field(default_factory=dict)  # "M,N,K" → its number
    ranges: list[tuple[str, int, int, int]] = field(default_factory=list)  # name, start, end, thread
    on_device: list[tuple[str, int, int, int, int]] = field(
        default_factory=list
    )  # name, start, end, code of pid, stream
    threads: dict[tuple[int, int], int] = field(default_factory=dict)  # codes of pid and tid → a number for the thread
    overheads: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    gpus: dict[int, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)  # text of a pid, tid or stream → what stands for it
    syncs: int = 0
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    double_steps: float = 0.0  # ns between neighbouring doubles at the largest time that looks like one
    exact: bool = False  # some time has more digits than a double
    signs: set[str] = field(default_factory=set)  # of other profilers: "xla", "legacy"

    def code(self, value: object) -> int:
        """A number for a pid, tid or stream: itself where it is an integer of 64 bits, else one of its own from −2 down."""
        if type(value) is int and 0 <= value < 1 << 63:
            return value
        return self.codes.setdefault(str(value), -2 - len(self.codes))

    def thread(self, event: dict[str, Any]) -> int:
        """A number for the event's thread: two processes may call theirs the same."""
        return self.threads.setdefault((self.code(event.get("pid")), self.code(event.get("tid"))), len(self.threads))

    def stream_of(self, value: object) -> int:
        """The stream's number, also of "stream 7"."""
        if isinstance(value, str) and (found := _LAST_NUMBER.search(value)):
            value = int(found[1])
        return self.code(value)

    def leave_out(self, reason: str, event: dict[str, Any]) -> None:
        before = self.left_out.get(reason)
        first = before.first if before else repr(str(event.get("name"))[:60])
        self.left_out[reason] = LeftOut(reason, before.count + 1 if before else 1, first)
        args = event.get("args")
        self.torn.append(
            (self.code(event.get("pid")), _number(args.get("correlation")) if isinstance(args, dict) else _UNKNOWN)
        )


_LAST_NUMBER = re.compile(r"(\d{1,18})\s*$")


def read_kineto(path: Path) -> Trace:
    """All launches of a profiler trace as a Trace over every device; its wall is the span of all activity.

    Times: start = round(ts · 1000) ns, end = start + round(dur · 1000), from the digits as written. Raises HarnessError for
    a file that is no such trace, that is damaged or that ends early, and for one without any launch.
    """
    return _trace(_read(path), path)


def _trace(columns: _Columns, path: Path) -> Trace:
    start, end = np.array(columns.start, np.int64), np.array(columns.end, np.int64)
    found = Findings(records=len(start) + sum(b.count for b in columns.left_out.values()))
    keep, left_out = usable(start, end, lambda i: repr(columns.name[i][:60]))
    found.left_out = [*columns.left_out.values(), *left_out]
    if len(start) == 0 or (keep is not None and not keep.any()):
        raise HarnessError(_why_nothing(columns, found, path))
    order = by_start(start, end)
    position = order if keep is None else order[keep[order]]
    process, correlation = _ranks(columns, columns.pid), np.array(columns.correlation, np.int64)
    start, end = start[position], end[position]

    # Each column is let go as it is taken over: a trace of a million launches is not held twice.
    def column(name: str) -> np.ndarray:
        values: np.ndarray = np.frombuffer(getattr(columns, name), np.int64)[position]
        setattr(columns, name, _numbers())
        return values

    def text(name: str) -> pd.Series:
        values = np.array(getattr(columns, name), object)
        setattr(columns, name, [])
        return pd.Series(pd.array(values[position], dtype=pd.StringDtype("python")))

    stream = column("stream")
    found.ranges = _ranges(columns, np.array(columns.pid, np.int64)[position], stream)
    device, gpus = _devices(columns, position, start, end, found)
    notes = ["PyTorch profiler trace"]
    if columns.double_steps >= 2:
        found.resolution_ns = 1.0 if columns.exact else columns.double_steps
        if columns.exact:
            notes.append(
                f"time resolution: 1 ns, from the digits as written (read as doubles, times this large resolve {columns.double_steps:.0f} ns)"
            )
        else:
            start, end = _snapped(start, end, device, stream, columns.double_steps)
            notes.append(
                f"time resolution: {columns.double_steps:.0f} ns, as times this large were written as doubles; gaps and overlaps below it "
                "within a stream are taken as 0"
            )
    zero = int(start.min())
    found.ranges = found.ranges.shifted(zero)
    table = launches.from_columns(
        name=text("name"),
        kind=pd.Categorical.from_codes(column("kind"), categories=list(launches.KINDS)),
        start_ns=start - zero,
        end_ns=end - zero,
        device=device.astype(np.int32),
        stream=stream,
        graph_node=launches.nullable(column("node"), "Int64"),
        grid=text("grid"),
        block=text("block"),
        registers=launches.nullable(column("registers"), "Int32"),
        smem_bytes=launches.nullable(column("smem"), "Int64"),
        bytes=launches.nullable(column("bytes"), "Int64"),
    )
    calls = _calls(columns)
    if len(calls.start) and (correlation >= 0).any():
        torn = np.array(columns.torn, np.int64).reshape(-1, 2)
        found.call = match(
            calls, np.r_[process, _ranks(columns, torn[:, 0].tolist())], np.r_[correlation, torn[:, 1]], usable=position
        )
        if columns.shapes:
            table["shape"] = pd.array(
                np.where(table["kind"] == "kernel", _shapes_of(columns, calls, found.call), ""),
                dtype=pd.StringDtype("python"),
            )
        found.calls = calls.shifted(zero)
    if columns.syncs:
        notes.append(f"{columns.syncs} synchronisation events on device rows are not launches and were left out")
    overheads = {name: np.array(spans, np.int64) - zero for name, spans in columns.overheads.items()}
    return Trace(table, int(end.max()) - zero, "kineto", notes, gpus, overheads, found=found)


def _ranges(columns: _Columns, pid: np.ndarray, stream: np.ndarray) -> Ranges:
    """The annotations. Where the file has only the device's, each holds the launches that start in it on its stream.

    pid, stream: of every launch of the table.
    """
    text = {code: t for t, code in columns.codes.items()}
    threads = {number: text.get(tid, str(tid)) for (_, tid), number in columns.threads.items()}
    rows = [(name, name, start, end, thread, 0, False) for name, start, end, thread in columns.ranges]
    if rows or not columns.on_device:
        return Ranges.of(rows, threads=threads, what="annotation")
    of_device = np.array([row[3:] for row in columns.on_device], np.int64).T
    code, _ = pd.MultiIndex.from_arrays(np.concatenate([of_device, [pid, stream]], axis=1)).factorize()
    # An annotation ends with its last kernel, and the next kernel may start at that moment.
    rows = [(name, name, start, max(end - 1, start), int(key), 0, False)
            for (name, start, end, _, _), key in zip(columns.on_device, code, strict=False)]  # fmt: skip
    return Ranges.of(rows, launched_on=np.asarray(code[len(rows) :], np.int64), what="annotation")


def _calls(columns: _Columns) -> Calls:
    calls = {key: np.array(values, np.int64) for key, values in columns.calls.items()}
    calls["process"] = _ranks(columns, columns.calls["process"])
    return Calls(**calls)


def _ranks(columns: _Columns, pids: Sequence[int]) -> np.ndarray:
    """The rank of each code of a pid: a number for the text before its own number, as in "[TP00] 100", which a tool that
    merges ranks writes; 0 where pids are plain numbers."""
    ranks: dict[str, int] = {}
    prefix = {
        code: ranks.setdefault(found[1], len(ranks) + 1)
        for text, code in columns.codes.items()
        if (found := re.match(r"(.*\S)[\s:/]+\d+$", text))
    }
    return np.array([prefix.get(p, 0) for p in pids], np.int64) if prefix else np.zeros(len(pids), np.int64)


def _devices(
    columns: _Columns, position: np.ndarray, start: np.ndarray, end: np.ndarray, found: Findings
) -> tuple[np.ndarray, dict[int, str]]:
    """(device number of every launch, GPU names). Records of one device number under several pids are of several ranks,
    each of which calls its GPU so: they become devices of their own."""
    device, pid = (np.array(values, np.int64)[position] for values in (columns.device, columns.pid))
    pairs, code = np.unique(np.stack([device, pid]), axis=1, return_inverse=True)
    gpus = columns.gpus
    if len(np.unique(pairs[0])) < pairs.shape[1]:
        text = {c: t for t, c in columns.codes.items()}
        named = sorted(
            range(pairs.shape[1]), key=lambda i: (text.get(int(pairs[1, i]), ""), int(pairs[1, i]), int(pairs[0, i]))
        )
        number = np.empty(len(named), np.int64)
        number[named] = np.arange(len(named))
        gpus = {
            int(number[i]): f"{columns.gpus.get(int(d), 'device')} (pid {text.get(int(p), str(p))}, its device {d})"
            for i, (d, p) in enumerate(pairs.T.tolist())
        }
        device = number[code.reshape(-1)]
    process = _ranks(columns, pid.tolist())
    found.processes = {d: np.unique(process[device == d]).tolist() for d in np.unique(device).tolist()}
    found.sharing = _sharing(columns, device, position, start, end, found)
    return device, gpus


def _sharing(
    columns: _Columns, device: np.ndarray, position: np.ndarray, start: np.ndarray, end: np.ndarray, found: Findings
) -> list[Sharing]:
    """Devices on which kernels of several processes ran, by the calls that launched them; without calls, of several contexts."""
    owner, names = _owners(columns, device, position)
    found.owner = owner if len(names) > 1 else None
    worked = np.array(columns.kind, np.int64)[position] == launches.KINDS.index("kernel")
    shared = []
    for number in np.unique(device).tolist():
        mine = worked & (device == number) & (owner >= 0)
        if len(codes := np.unique(owner[mine])) > 1:
            together, why = taking_turns(owner[mine], start[mine], end[mine])
            shared.append(Sharing(number, [names[c] for c in codes.tolist()], together, why))
    launched = np.isin(np.array(columns.calls["kind"]), _LAUNCHING)
    hosts = np.unique(np.array(columns.calls["process"], np.int64)[launched]) if launched.any() else np.empty(0)
    if len(hosts) > len(np.unique(device)) and not (owner >= 0).any():  # no record tells its call
        text = {c: t for t, c in columns.codes.items()}
        listed = [text.get(int(p), str(int(p))) for p in hosts]
        shared = [Sharing(d, listed, 0.0, "") for d in np.unique(device).tolist()]
    return shared


def _owners(columns: _Columns, device: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """(code of the process that launched each record, −1 unknown; the processes' names).

    A process launches once under one correlation id. Where an id was launched again, under another pid or the same one (two
    containers call themselves 1), the device's records of that id are told apart by their order.
    """
    correlation = np.array(columns.correlation, np.int64)[position]
    calls = {key: np.array(columns.calls[key], np.int64) for key in ("correlation", "process", "start", "end", "kind")}
    told = np.isin(calls["kind"], _LAUNCHING)
    if not told.any():
        owner, known = pd.factorize(np.array(columns.context, np.int64)[position])
        return np.where(known[owner] >= 0, owner, -1), [f"context {c}" for c in known.tolist()]
    calls = {key: values[told & (calls["correlation"] >= 0)] for key, values in calls.items()}
    order = np.lexsort((calls["start"], calls["process"], calls["correlation"]))
    calls = {key: values[order] for key, values in calls.items()}
    same = (calls["correlation"][1:] == calls["correlation"][:-1]) & (calls["process"][1:] == calls["process"][:-1])
    inside = same & (calls["start"][1:] < calls["end"][:-1])  # the driver's call in the runtime's
    calls = {key: values[np.r_[True, ~inside][: len(values)]] for key, values in calls.items()}
    ids, pids = calls["correlation"], calls["process"]
    once = len(ids) == 0 or (ids[1:] > ids[:-1]).all()
    if once and len(np.unique(pids)) <= 1:
        return np.full(len(position), -1), []  # one process
    again = pd.Series(ids).groupby([ids, pids]).cumcount().clip(upper=1).to_numpy()
    code, known = pd.factorize(pids * 2 + again)  # codes of texts are negative, and stay told apart
    order = np.lexsort((calls["start"], ids))
    ids, code = ids[order], code[order]
    node = np.array(columns.node, np.int64)[position]
    records = pd.Series(correlation).groupby([device, correlation, node])
    place, count = records.cumcount().to_numpy(), records.transform("size").to_numpy()
    low, high = (np.searchsorted(ids, correlation, side=side) for side in ("left", "right"))
    # One record of an id that several launched is one of theirs, and nothing tells whose.
    clear = (high > low) & ((high - low == 1) | (count >= 2)) & (correlation >= 0)
    at = np.minimum(low + np.minimum(place, np.maximum(high - low - 1, 0)), max(len(code) - 1, 0))
    text = {c: t for t, c in columns.codes.items()}
    names = [f"{'another ' if k % 2 else ''}{text.get(k // 2, str(k // 2))}" for k in known.tolist()]
    return np.where(clear, code[at], -1), names


def _snapped(
    start: np.ndarray, end: np.ndarray, device: np.ndarray, stream: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Starts moved to the end before them in their stream where they differ by less than `step` ns; durations stay."""
    start, end = start.copy(), end.copy()
    reach: dict[tuple[int, int], int] = {}
    for i, key in enumerate(zip(device.tolist(), stream.tolist(), strict=True)):
        before, length = reach.get(key), int(end[i] - start[i])
        if before is not None and abs(int(start[i]) - before) < step:
            start[i], end[i] = before, before + length
        reach[key] = max(int(end[i]), before if before is not None else int(end[i]))
    return start, end


def _why_nothing(columns: _Columns, found: Findings, path: Path) -> str:
    """One sentence about a trace of which no launch can be read."""
    if found.left_out:
        said = "; ".join(f"{b.count} {b.reason}, first {b.first}" for b in found.left_out)
        return f"{path} is not a whole PyTorch profiler trace: it holds no usable device record ({said}); {_FIX}."
    if "xla" in columns.signs:
        return f"{path} is a trace of XLA's profiler (JAX, TensorFlow), which is not read; record the run with `nsys profile -t cuda,nvtx` and export that."
    if "legacy" in columns.signs:
        return (
            f"{path} is a trace of the legacy autograd profiler, whose device times are no launches; record it again with "
            "torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])."
        )
    count = int(np.isin(np.array(columns.calls["kind"]), _LAUNCHING).sum())
    if count:
        return (
            f"{path} holds {count:,} launch calls, no kernels: the work ran in a process that was not traced, or CUPTI gave no device "
            "records (no permission, another profiler attached); trace the process that runs the kernels."
        )
    return f"{path} holds no kernel, copy or memset; profile with ProfilerActivity.CUDA."


def _read(path: Path) -> _Columns:
    if not path.is_file():
        raise HarnessError(f"{path} is no file; give a PyTorch profiler trace (.json or .json.gz).")
    columns = _Columns()
    try:
        with _open(path) as text:
            for event in _events(text, columns.gpus):
                _take(event, columns)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise HarnessError(f"{path} cannot be read ({_folded(error)}); {_FIX}.") from None
    except _Mixed as error:
        raise HarnessError(f"{path} {error}; give every rank a file of its own, with its rank in the name.") from None
    except RecursionError:
        raise HarnessError(
            f"{path} is not a whole PyTorch profiler trace (it nests deeper than any profiler writes); {_FIX}."
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise HarnessError(
            f"{path} is not a whole PyTorch profiler trace ({type(error).__name__}: {_folded(error)}); {_FIX}."
        ) from None
    return columns


def _folded(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _open(path: Path) -> IO[str]:
    with path.open("rb") as file:
        magic = file.read(2)
    if not magic:
        raise ValueError("the file is empty")
    if magic == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding="utf-8-sig", errors="replace")
    return path.open(encoding="utf-8-sig", errors="replace")


class _Mixed(ValueError):
    """Texts of two traces in one file."""


def _events(text: IO[str], gpus: dict[int, str]) -> Iterator[Any]:
    """Every element of "traceEvents" (or of a bare list), decoded one at a time; fills `gpus` on the way.

    What lies beside the events is passed over without being held.
    """
    scan = _Scanner(text)
    if scan.peek() == "[":
        yield from scan.array()
        scan.end()
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
            gpus |= _gpu_names(scan.small())
        else:
            scan.skip()
        if scan.peek() == ",":
            scan.expect(",")
        elif scan.peek() != "}":
            raise ValueError(f"{scan.peek()!r} where a comma or the end should be")
    scan.expect("}")
    if not found:
        raise ValueError('it has no "traceEvents"')
    scan.end()


def _gpu_names(properties: Any) -> dict[int, str]:
    """Device → name of Kineto's "deviceProperties"; what is not spelled as such is no name."""
    listed = [p for p in properties if isinstance(p, dict)] if isinstance(properties, list) else []
    return {p["id"]: " ".join(str(p["name"]).split()) for p in listed if type(p.get("id")) is int and p.get("name")}


_MARK = re.compile(r'[{}\[\]"]')
_QUOTE = re.compile(r'["\\]')
_EVENT = re.compile(r'\{\s*"(?:ph|cat|name)"\s*:')
_ODD = re.compile(r'"(?:[^"\\]|\\.)*"|-?\b(?:inf(?:inity)?|nan(?:\(\w*\))?)(?=\s*[,}\]])', re.IGNORECASE | re.DOTALL)
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.|$))', re.DOTALL)


class _Scanner:
    """JSON values one after another from a text stream, through a window that holds little more than one value."""

    def __init__(self, text: IO[str]) -> None:
        self._text, self._window, self._at, self._ended = text, "", 0, False
        # Control characters stay in strings as they are, and numbers with a fraction keep their digits.
        self._decode = json.JSONDecoder(strict=False, parse_float=str).raw_decode
        self._odd = False  # it has been seen to spell values as JSON does not

    def _more(self) -> bool:
        # At least doubles what is left, so that a value far larger than the window costs O(n), not O(n²).
        piece = self._text.read(max(_WINDOW, len(self._window) - self._at))
        self._ended = not piece
        self._window, self._at = self._window[self._at :] + piece, 0
        if self._odd and piece:
            self._window = _ODD.sub(_plain, self._window)
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

    def end(self) -> None:
        """Nothing follows but white space and what is no JSON. Raises _Mixed where another document begins."""
        try:
            if self.peek() in "{[":
                raise _Mixed("holds two traces one after the other")
        except ValueError as error:
            if isinstance(error, _Mixed):
                raise

    def value(self, longest: int | None = None) -> Any:
        """The next value. Raises ValueError where there is none, or where it has more than `longest` characters."""
        longest = _LONGEST if longest is None else longest
        self.peek()
        while True:
            try:
                found, end = self._decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if not self._odd and _is_odd(self._window, error):
                    self._odd = True
                    self._window = self._window[: self._at] + _ODD.sub(_plain, self._window[self._at :])
                    continue
                if len(self._window) - self._at < longest and self._more():
                    continue
                raise ValueError(f"{error.msg} near its end" if self._ended else error.msg) from None
            # A number at the window's edge may go on in the next piece: "0" of "0.", "1" of "1e+".
            if len(self._window) - end < 3 and not isinstance(found, (dict, list)) and not self._ended:
                self._more()
                continue
            self._at = end
            return found

    def small(self) -> Any:
        """The next value, or None for one that is passed over: too long, or no JSON."""
        at_most = _SMALL
        while len(self._window) - self._at < at_most and self._more():
            pass
        try:
            found, end = self._decode(self._window[self._at : self._at + at_most].lstrip())
        except (json.JSONDecodeError, RecursionError):
            self.skip()
            return None
        del end
        self.skip()
        return found

    def skip(self) -> None:
        """Passes over the next value, of any length and depth, holding a window of it."""
        if self.peek() not in '{["':
            self.value(_SMALL)
            return
        depth = 0
        while True:
            mark = _MARK.search(self._window, self._at)
            if mark is None:
                self._at = len(self._window)
                if not self._more():
                    raise ValueError("it ends too early")
                continue
            self._at = mark.end()
            if mark[0] == '"':
                self._skip_string()
            else:
                depth += 1 if mark[0] in "{[" else -1
            if depth <= 0:
                return

    def _skip_string(self) -> None:
        while True:
            mark = _QUOTE.search(self._window, self._at)
            self._at = mark.end() if mark else len(self._window)
            if mark and mark[0] == '"':
                return
            if self._at == len(self._window) and not self._more():
                raise ValueError("it ends too early")
            if mark:
                self._at += 1  # what a backslash escapes

    def array(self) -> Iterator[Any]:
        self.expect("[")
        while self.peek() != "]":
            try:
                found = self.value()
            except ValueError as error:
                raise self._mixed() or error from None
            yield found
            if self.peek() == ",":
                self.expect(",")
            elif self.peek() != "]":
                raise self._mixed() or ValueError(f"{self.peek()!r} where a comma or ']' should be")
        self.expect("]")

    def _mixed(self) -> _Mixed | None:
        """Where an event breaks off and whole events follow, another writer's text lies over it."""
        following = 0
        for mark in _EVENT.finditer(self._window, self._at + 1):
            try:
                found, _ = self._decode(self._window, mark.start())
            except (json.JSONDecodeError, RecursionError):
                continue
            following += isinstance(found, dict) and "ph" in found
            if following >= 2:
                return _Mixed(
                    "breaks off inside an event and goes on with whole ones: two processes (ranks) wrote into one file"
                )
        return None


def _is_odd(window: str, error: json.JSONDecodeError) -> bool:
    """True where the decoder stopped at a spelling that is mended: `inf`, `nan`, a backslash that escapes nothing."""
    return error.msg.startswith("Invalid \\") or bool(
        re.match(r"-?(?:inf|nan)", window[error.pos : error.pos + 4], re.IGNORECASE)
    )


def _plain(found: re.Match[str]) -> str:
    """A string with its wrong escapes as plain backslashes; null for `inf` and `nan`."""
    text = found[0]
    if not text.startswith('"'):
        return "null"
    return _ESCAPE.sub(lambda m: m[0] if m[1] is None else "\\\\" + m[1], text) if "\\" in text else text


def _take(event: Any, columns: _Columns) -> None:
    """Keeps what the launch table needs of one event."""
    if not isinstance(event, dict) or event.get("ph") != "X":
        if isinstance(event, dict):
            _look_for_others(event, columns)
        return
    category = str(event.get("cat", "")).lower()
    kind = KINDS.get(category)
    if kind is None:
        _take_host(event, category, columns)
        return
    name = event.get("name")
    name = name if isinstance(name, str) else str(name)
    if _SYNC.search(name):
        columns.syncs += 1
        return
    if "ts" not in event or "dur" not in event:
        columns.leave_out("without a time", event)
        return
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    try:
        start, length = _ns(event["ts"]), _ns(event["dur"])
    except (TypeError, ValueError, InvalidOperation):
        columns.leave_out("whose time is no number", event)
        return
    device = _device(args["device"] if "device" in args else event.get("pid"))
    if device is None:
        columns.leave_out("without a device number", event)
        return
    if not -_FARTHEST < start < _FARTHEST or not -_FARTHEST < length < _FARTHEST:
        columns.leave_out("with a time out of range", event)
        return
    if abs(start) >= _COARSE and not columns.exact:
        _weigh_digits(event["ts"], columns)
    columns.name.append(_interned(name))
    columns.kind.append(launches.KINDS.index(kind))
    columns.start.append(start)
    columns.end.append(start + length)
    columns.device.append(device)
    columns.pid.append(columns.code(event.get("pid")))
    columns.stream.append(columns.stream_of(args["stream"] if "stream" in args else event.get("tid")))
    columns.node.append(_number(args.get("graph node id")) or _UNKNOWN)
    columns.grid.append(_dims(args.get("grid")))
    columns.block.append(_dims(args.get("block")))
    columns.registers.append(_number(args.get("registers per thread"), 1 << 31))
    columns.smem.append(_number(args.get("shared memory")))
    columns.bytes.append(_number(args.get("bytes")))
    columns.correlation.append(_number(args.get("correlation")))
    columns.context.append(_number(args.get("context")))


def _take_host(event: dict[str, Any], category: str, columns: _Columns) -> None:
    """Calls, annotations and the tracer's own time. One of these that is damaged is nobody's launch, and is passed over."""
    name = event.get("name")
    if not isinstance(name, str):
        return
    if category == "cpu_op" or category == "operator":
        if name in _PRODUCTS:
            _take_product(event, name, columns)
        if not name.startswith(STEP):
            return
    is_call = category in _CALLS
    kind = call_kind_of(name) if is_call else Call.OTHER
    on_device = category == "gpu_user_annotation"
    is_range = category == "user_annotation" or on_device or name.startswith(STEP)
    if kind == Call.OTHER and not is_range and category != "overhead":
        if not category:
            _look_for_others(event, columns)
        return
    span = _span(event)
    if span is None:
        return
    start, end = span
    if on_device:
        pid, stream = columns.code(event.get("pid")), columns.stream_of(event.get("tid"))
        columns.on_device.append((name, start, end, pid, stream))
    elif is_range:
        columns.ranges.append((name, start, end, columns.thread(event)))
    elif category == "overhead":
        columns.overheads.setdefault(name[:60], []).append((start, end))
    else:
        args = event.get("args")
        correlation = _number(args.get("correlation")) if isinstance(args, dict) else _UNKNOWN
        values = (
            start,
            end,
            columns.thread(event),
            columns.code(event.get("pid")),
            correlation,
            int(kind),
        )
        for column, value in zip(columns.calls.values(), values, strict=True):
            column.append(value)


def _span(event: dict[str, Any]) -> tuple[int, int] | None:
    """(start, end) of a host event in ns; None where its times are none."""
    try:
        start, length = _ns(event["ts"]), _ns(event.get("dur", 0))
    except (KeyError, TypeError, ValueError, InvalidOperation):
        return None
    if not -_FARTHEST < start < _FARTHEST or not 0 <= length < _FARTHEST:
        return None
    return start, start + length


def _take_product(event: dict[str, Any], name: str, columns: _Columns) -> None:
    """Keeps when an operator ran and the dimensions of its product, if it tells them (record_shapes=True)."""
    args = event.get("args")
    given = (args.get("Input Dims") or args.get("Input dims")) if isinstance(args, dict) else None
    shape = _product_shape(given, _PRODUCTS[name])
    if not shape:
        return
    span = _span(event)
    if span is None:
        return
    number = columns.shapes.setdefault(shape, len(columns.shapes))
    values = (columns.thread(event), *span, number)
    for column, value in zip(columns.products.values(), values, strict=True):
        column.append(value)


def _product_shape(given: Any, first: int) -> str:
    """ "M,N,K" of the inputs' dimensions; "" for what is no product of two matrices."""
    if not isinstance(given, list) or len(given) < first + 2:
        return ""
    a, b = given[first], given[first + 1]
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b) or len(a) not in (2, 3):
        return ""
    if not all(type(d) is int and 0 < d < _LARGEST_DIM for d in (*a, *b)) or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return ""
    return f"{a[-2]},{b[-1]},{a[-1]}" if len(a) == 2 or a[0] == 1 else ""


_LARGEST_DIM = 1 << 40


def _shapes_of(columns: _Columns, calls: Calls, call: np.ndarray) -> np.ndarray:
    """Of every launch, the "M,N,K" of the product's operator on whose thread and in whose time it was submitted, or ""."""
    thread, start, end, shape = (np.array(values, np.int64) for values in columns.products.values())
    found = np.full(len(call), "", object)
    if len(call) == 0 or len(thread) == 0:
        return found
    order = np.lexsort((start, thread))
    thread, start, end, shape = (values[order] for values in (thread, start, end, shape))
    texts = np.array(list(columns.shapes), object)
    at = np.maximum(call, 0)
    when, where = calls.start[at], calls.thread[at]
    for one in np.unique(thread).tolist():
        first, last = np.searchsorted(thread, [one, one + 1])
        mine = np.flatnonzero((call >= 0) & (where == one))
        op = first + np.searchsorted(start[first:last], when[mine], side="right") - 1
        inside = (op >= first) & (when[mine] <= end[np.maximum(op, 0)])
        found[mine[inside]] = texts[shape[op[inside]]]
    return found


def _look_for_others(event: dict[str, Any], columns: _Columns) -> None:
    """Signs of traces that look like this one and are another profiler's."""
    args = event.get("args")
    if isinstance(args, dict) and (
        "hlo_op" in args or "hlo_module" in args or str(args.get("name", "")).startswith("/device:")
    ):
        columns.signs.add("xla")
    elif event.get("pid") in ("CUDA functions", "CPU functions") or str(event.get("cat")) == "cpu_to_cuda":
        columns.signs.add("legacy")


call_kind_of = lru_cache(maxsize=4096)(call_kind)


@lru_cache(maxsize=65_536)
def _interned(name: str) -> str:
    return sys.intern(demangled(name))


_FARTHEST = 1 << 61
"""Times beyond ± 2⁶¹ ns are no times."""
_COARSE = 1 << 52
"""From 2⁵² ns (52 days in µs) on a double no longer tells microseconds to the nanosecond."""


def _ns(microseconds: Any) -> int:
    """round(µs · 1000), exact from the digits as written. Raises TypeError or ValueError for what is no number."""
    if type(microseconds) is int:
        return microseconds * 1000
    if not isinstance(microseconds, str):
        raise TypeError(f"{microseconds!r} is no time")
    whole, _, fraction = microseconds.partition(".")
    if 0 < len(fraction) <= 3 and whole.isascii() and fraction.isascii() and whole.isdigit() and fraction.isdigit():
        return int(whole) * 1000 + int(fraction.ljust(3, "0"))
    exact = Decimal(microseconds)
    if not exact.is_finite():
        raise ValueError(f"{microseconds} is no time")
    return round(exact.scaleb(3)) if exact.adjusted() < 18 else _FARTHEST


def _weigh_digits(written: Any, columns: _Columns) -> None:
    """Whether a large time carries what only a double's rounding left, or more digits than a double has."""
    if not isinstance(written, str):
        return
    as_double = float(written)
    if repr(as_double) == written or Decimal(as_double) == Decimal(written):
        columns.double_steps = max(columns.double_steps, ulp(as_double) * 1000)
    else:
        columns.exact = True
        columns.double_steps = max(columns.double_steps, ulp(as_double) * 1000)


def _number(value: Any, limit: int = 1 << 63) -> int:
    """A whole number from 0 below `limit`; −1 for anything else."""
    if type(value) is int and 0 <= value < limit:
        return value
    if isinstance(value, str):  # ids as text, and numbers with a fraction, which are kept as written
        try:
            found = (
                int(value)
                if value.isdecimal() and len(value) < 20
                else int(Decimal(value))
                if len(value) < 20 and "e" not in value.lower()
                else -1
            )
        except (ValueError, InvalidOperation, OverflowError):
            return _UNKNOWN
        return found if 0 <= found < limit else _UNKNOWN
    return _UNKNOWN


def _device(value: Any) -> int | None:
    """A device's number, also from "[TP00] 0"; None where there is none."""
    if isinstance(value, str) and (found := _LAST_NUMBER.search(value)):
        value = int(found[1])
    return value if type(value) is int and -(1 << 31) <= value < 1 << 31 else None


def _dims(sizes: Any) -> str:
    """ "x,y,z"; "" for what is no list of numbers. One str for every launch of a shape."""
    if not isinstance(sizes, list) or not all(type(s) is int for s in sizes):
        return ""
    return sys.intern(",".join(map(str, sizes[:3])))
