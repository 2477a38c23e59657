"""Named ranges of a recording (NVTX, a profiler's annotations), and which of them a launch was submitted in.

What decides is the call that submitted the launch, its thread and the moment at which it began, never the device's time.
A *thread range* (push/pop, an annotation) holds the calls of its thread. A *process range* (start/end) may be ended by
another thread and overlap others without nesting in them: it holds the calls of its whole process.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.errors import HarnessError
from harness.sources.usable import LATEST_NS

if TYPE_CHECKING:
    from harness.sources.trace import Trace

STEP = "ProfilerStep#"
"""torch.profiler's step annotations; as a pattern it stands for every step."""
DEEPEST = 64
"""Ranges around one another that a path names: a thread that pushes and never pops nests without end."""

_NUMBERED = re.compile(r", (?:seq|op_id|sizes) = .*", re.DOTALL)


def folded(text: str) -> str:
    """The name without what PyTorch's emit_nvtx adds to an operator's, another number each time; `--range` takes the result.

    >>> folded("aten::mm, seq = 12, op_id = 7"), folded("layer.0")
    ('aten::mm*', 'layer.0')
    """
    return _NUMBERED.sub("*", text)


@dataclass(frozen=True)
class Range:
    """One range on the host's clock, ns."""

    path: str  # "prefill/layer3/attn": the enclosing ranges of its thread, outermost first
    text: str
    start: int
    end: int
    thread: int  # −1: a process range
    process: int


@dataclass
class Ranges:
    """Ranges by (start, the longer first): int64 [n] each, times on one clock with the launches' calls.

    One that never ended is open until the recording's end (`ended` is false, `end` beyond every call).
    """

    texts: list[
        str
    ]  # distinct texts; `labels` beside them, with the domain in front where it has a name ("NCCL:ncclSend")
    labels: list[str]
    text: np.ndarray  # position in both
    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray  # that opened it
    process: np.ndarray
    shared: np.ndarray  # bool: a process range
    ended: np.ndarray  # bool
    threads: dict[int, str] = field(default_factory=dict)  # thread → how it is called; else by its low 24 bits
    launched_on: np.ndarray | None = None  # `thread` stands for a device's stream: that of every launch of the table
    what: str = "NVTX range"

    def __post_init__(self) -> None:
        order = np.lexsort((-self.end, self.start))
        for name in ("text", "start", "end", "thread", "process", "shared", "ended"):
            setattr(self, name, getattr(self, name)[order])

    @classmethod
    def of(cls, rows: Sequence[tuple[str, str, int, int | None, int, int, bool]], **more: object) -> Ranges:
        """From (text, label, start, end or None, thread, process, is a process range) of every range, in any order."""
        texts, labels, start, end, thread, process, shared = zip(*rows, strict=True) if rows else ((),) * 7
        code, distinct = pd.MultiIndex.from_arrays([texts, labels]).factorize() if rows else (np.empty(0, np.int64), ())
        pairs = [tuple(_writable(part) for part in pair) for pair in distinct]
        return cls(
            [text for text, _ in pairs], [label for _, label in pairs], np.asarray(code, np.int64),
            np.array(start, np.int64), np.array([LATEST_NS if e is None else e for e in end], np.int64),
            np.array(thread, np.int64), np.array(process, np.int64), np.array(shared, bool),
            np.array([e is not None for e in end], bool), **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Range]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: int) -> Range:
        if not -len(self) <= i < len(self):
            raise IndexError(i)
        thread = -1 if self.shared[i] else int(self.thread[i])
        code, paths = self._text_paths
        path, text = "/".join(paths[code[i]]), self.texts[self.text[i]]
        return Range(path, text, int(self.start[i]), int(self.end[i]), thread, int(self.process[i]))

    def shifted(self, zero: int) -> Ranges:
        """The same with times from `zero`."""
        return replace(self, start=self.start - zero, end=np.where(self.ended, self.end - zero, self.end))

    @cached_property
    def parent(self) -> np.ndarray:
        """Position of the range around each thread range: of its thread, from begin to end; −1 none. Process ranges have none."""
        found = np.full(len(self), -1, np.int64)
        opened: dict[int, list[int]] = {}
        for i, (end, thread, shared) in enumerate(
            zip(self.end.tolist(), self.thread.tolist(), self.shared, strict=True)
        ):
            if shared:
                continue
            stack = opened.setdefault(thread, [])
            while stack and self.end[stack[-1]] < end:
                stack.pop()
            if stack:
                found[i] = stack[-1]
            stack.append(i)
        return found

    def paths(self, names: Sequence[str]) -> tuple[np.ndarray, list[tuple[str, ...]]]:
        """(code of every range, path of every code) with a name for every one of `texts`: outermost first, at most DEEPEST."""
        inner, distinct = pd.factorize(np.array(names, object))
        known: dict[tuple[int, int], int] = {}
        number: dict[tuple[str, ...], int] = {}
        code = np.empty(len(self), np.int64)
        paths: list[tuple[str, ...]] = []
        for i, (around, name) in enumerate(zip(self.parent.tolist(), inner[self.text].tolist(), strict=True)):
            key = (int(code[around]) if around >= 0 else -1, name)
            at = known.get(key)
            if at is None:
                path = (*paths[key[0]], distinct[name]) if around >= 0 else (distinct[name],)
                path = ("…", *path[1 - DEEPEST :]) if len(path) > DEEPEST else path
                at = known[key] = number.setdefault(path, len(paths))
                if at == len(paths):
                    paths.append(path)
            code[i] = at
        return code, paths

    @cached_property
    def _text_paths(self) -> tuple[np.ndarray, list[tuple[str, ...]]]:
        return self.paths(self.texts)

    def outermost(self) -> list[str]:
        """Texts of the ranges that ended with none around them that did."""
        around = self.parent.copy()
        while (beyond := (around >= 0) & ~self.ended[around]).any():
            around[beyond] = self.parent[around[beyond]]
        return [self.texts[i] for i in self.text[self.ended & (around < 0)]]

    def called(self, thread: int) -> str:
        """The operating system's number of a thread."""
        return self.threads.get(thread, str(thread & 0xFFFFFF))

    def innermost(self, at: np.ndarray, thread: np.ndarray, process: np.ndarray) -> np.ndarray:
        """Position of the range that a call of `thread`, begun at `at`, belongs to; −1 none. int64 [calls] each.

        Of the ranges open then (both ends included) that its own thread opened, the one that began last, for thread
        ranges the innermost. Where its thread has none open: of its process's process ranges the one that began last.
        """
        found = self._last_begun(np.arange(len(self)), self.thread, at, thread)
        rest = np.flatnonzero(found < 0)
        if len(rest) and self.shared.any():
            shared = np.flatnonzero(self.shared)
            found[rest] = self._last_begun(shared, self.process[shared], at[rest], process[rest])
        return found

    def _last_begun(self, mine: np.ndarray, owner: np.ndarray, at: np.ndarray, asked: np.ndarray) -> np.ndarray:
        found = np.full(len(at), -1, np.int64)
        for key in pd.unique(asked):
            own = mine[owner == key]
            if len(own) == 0:
                continue
            rows = np.flatnonzero(asked == key)
            moments, latest = _steps(self.start[own].tolist(), self.end[own])
            step = np.searchsorted(moments, at[rows], side="right") - 1
            last = np.where(step >= 0, latest[np.maximum(step, 0)], -1)
            found[rows] = np.where(last >= 0, own[np.maximum(last, 0)], -1)
        return found

    def inside(self, wanted: np.ndarray, at: np.ndarray, thread: np.ndarray, process: np.ndarray) -> list[np.ndarray]:
        """Positions of the calls that began inside each of the ranges `wanted` (positions), however deep, in rising order."""
        by: dict[tuple[bool, int], tuple[np.ndarray, np.ndarray]] = {}
        found = []
        for i in wanted.tolist():
            shared = bool(self.shared[i])
            key = (shared, int((self.process if shared else self.thread)[i]))
            if key not in by:
                mine = np.flatnonzero((process if shared else thread) == key[1])
                mine = mine[np.argsort(at[mine], kind="stable")]
                by[key] = at[mine], mine
            moments, rows = by[key]
            low, high = np.searchsorted(moments, self.start[i]), np.searchsorted(moments, self.end[i], side="right")
            found.append(np.sort(rows[low:high]))
        return found

    def matching(self, pattern: str, path: Path) -> np.ndarray:
        """Positions of the ranges that ended and that `pattern` names: by text, then by path, then as a glob. Raises
        HarnessError where it names none of the file `path`."""
        code, paths = self._text_paths
        joined = ["/".join(parts) for parts in paths]
        glob = f"{pattern}*" if pattern == STEP else pattern
        for name_fits, path_fits in (
            (lambda t: t == pattern, lambda p: False),
            (lambda t: False, lambda p: p == pattern or p.endswith("/" + pattern)),
            (lambda t: fnmatch.fnmatchcase(t, glob), lambda p: fnmatch.fnmatchcase(p, glob)),
        ):
            named = np.array([name_fits(t) for t in self.texts], bool)
            pathed = np.array([path_fits(p) for p in joined], bool)
            fits = named[self.text] | pathed[code] if len(self) else np.zeros(0, bool)
            if (fits & self.ended).any():
                return np.flatnonzero(fits & self.ended)
            if fits.any():
                raise HarnessError(
                    f"{path}: the range {pattern!r} never ended ({int(fits.sum())} opened, none closed before the recording stopped), so it "
                    "holds no window; stop the recording after the range, or name another range or an --occurrence."
                )
        known = sorted({self.texts[i] for i in np.unique(self.text[self.ended])} - {""})
        shown = ", ".join(repr(k) for k in known[:8]) + (", …" if len(known) > 8 else "")
        raise HarnessError(
            f"{path} has no {self.what} {pattern!r}; " + (f"it has {shown}." if known else f"{self.none()}.")
        )

    def none(self) -> str:
        """What to record, where there are none."""
        if self.what == "annotation":
            return "it has no ranges at all: annotate with torch.profiler.record_function and profile the CPU's activity, too"
        return "it has no ranges at all: mark them in the code (NVTX) and record with `-t cuda,nvtx`"


def _writable(text: str) -> str:
    """The text in signs that UTF-8 has: JSON can spell half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _steps(start: list[int], end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(moments, from each on the position of the range that is open and began last; −1 none) of ranges in order."""
    closing = np.argsort(end, kind="stable")
    close = (end[closing] + 1).tolist()  # the end itself is inside
    order, n = closing.tolist(), len(start)
    closed = bytearray(n)
    stack: list[int] = []
    moments, latest = [], []
    i = j = 0
    while j < n:
        moment = start[i] if i < n and start[i] <= close[j] else close[j]
        while i < n and start[i] == moment:
            stack.append(i)
            i += 1
        while j < n and close[j] == moment:
            closed[order[j]] = 1
            j += 1
        while stack and closed[stack[-1]]:
            stack.pop()
        moments.append(moment)
        latest.append(stack[-1] if stack else -1)
    return np.array(moments, np.int64), np.array(latest, np.int64)


def submitted(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(known, moment in ns, thread, process) of the call that submitted each launch of a trace; where ranges are the
    device's, of the launch itself and its stream."""
    found, ranges = trace.found, trace.found.ranges
    n = len(trace.launches)
    if ranges is not None and ranges.launched_on is not None:
        return np.ones(n, bool), trace.launches["start_ns"].to_numpy(), ranges.launched_on, np.zeros(n, np.int64)
    if found.calls is None or found.call is None:
        return np.zeros(n, bool), *(np.zeros(n, np.int64),) * 3
    known, at = found.call >= 0, np.maximum(found.call, 0)
    return known, found.calls.start[at], found.calls.thread[at], found.calls.process[at]


def select(trace: Trace, pattern: str, path: Path) -> list[tuple[Range, np.ndarray]]:
    """Per range that `pattern` names, by start, the positions of the launches that were submitted inside it.

    Raises HarnessError where there is none, and where nothing was launched on the ranges' threads, but on others meanwhile.
    """
    ranges = trace.found.ranges
    assert ranges is not None, "read without ranges"
    wanted = ranges.matching(pattern, path)
    known, at, thread, process = submitted(trace)
    rows = np.flatnonzero(known)
    at, thread, process = at[rows], thread[rows], process[rows]
    inside = [rows[mine] for mine in ranges.inside(wanted, at, thread, process)]
    if not any(map(len, inside)):
        meanwhile = np.zeros(len(at), bool)
        for i in wanted.tolist():
            meanwhile |= (at >= ranges.start[i]) & (at <= ranges.end[i])
        if meanwhile.any():
            theirs = ", ".join(ranges.called(t) for t in np.unique(thread[meanwhile])[:4].tolist())
            own = np.unique(ranges.thread[wanted[~ranges.shared[wanted]]])[:4].tolist()
            mine = ", ".join(map(ranges.called, own)) or "of another process"
            advice = ", or use a start/end range" if ranges.what == "NVTX range" else ""
            raise HarnessError(
                f"{path}: the {ranges.what.removeprefix('NVTX ')} {pattern!r} is on thread {mine}, and the {int(meanwhile.sum())} launches while it was "
                f"open came from thread {theirs}; open it on the thread that launches{advice}."
            )
    return [(ranges[i], mine) for i, mine in zip(wanted.tolist(), inside, strict=True)]
