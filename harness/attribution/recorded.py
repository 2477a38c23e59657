"""A trace that somebody else recorded, ready for `decompose`: one device, one window, classes, MACs and roles.

Where the product's own plan is missing, the ledger still comes from it: `--gguf` gives the geometry, launch order within
a layer gives every product its place in it (`roles`), and both views, by family and by role, are there.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from engine.digest import sha256_of
from harness import launches as table_of
from harness.attribution import by_range, gaps
from harness.attribution.classify import Match, Rules, classify_launches, load_rules
from harness.attribution.decomposition import Check
from harness.attribution.recording import Seen, checks_of, notes_of
from harness.errors import HarnessError
from harness.sources.ranges import Range, select
from harness.sources.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.geometry import Geometry
    from harness.attribution.roles import Attributed


@dataclass
class Recorded:
    """One window of a recorded trace on one device."""

    launches: pd.DataFrame
    """Classified by family; `macs` and `layer` where a geometry was given and the launch order fits it."""
    wall_ns: int
    about: dict[str, Any]
    """Keyword arguments of `decompose` beside launches and wall: tokens, model, source, device, notes, provenance."""
    roles: pd.DataFrame | None = None
    """The same launches classed by role, where launch order told them."""
    ranges: by_range.Charged | None = None
    """The named range that submitted each launch, where it was asked for."""
    matches: dict[tuple[str, str], Match] = field(default_factory=dict)
    """(name, kind) → class and rule, for every distinct name of the window."""

    @property
    def notes(self) -> list[str]:
        """What a reader must know of this window."""
        return self.about["notes"]


def load_recorded(
    path: Path,
    *,
    device: int | None = None,
    rules: Sequence[Path] | None = None,
    gguf: str | None = None,
    range_: str | None = None,
    occurrence: int | None = None,
    tail: str | None = None,
    tokens: int | None = None,
    source: str = "auto",
    with_upload: bool = False,
    by: str | None = None,
) -> Recorded:
    """Reads, cuts, classifies and, with a geometry, attributes a trace.

    device: CUDA ordinal; needed where the trace holds several. range_: an NVTX range or profiler annotation.
    occurrence: the K-th whole prefill by the repeating launch sequence, or with a range the K-th of that name, from 1.
    gguf: a GGUF file or a geometry preset. tail: what the last layer computes; llama.cpp's names mean ffn_last_row, others full.
    tokens: of one prefill. with_upload: keep the model's upload in the window, which a `gguf` leaves out of it.
    by: "nvtx" charges every launch to a named range, too.

    Raises HarnessError (one sentence) for a file that cannot be read, several devices without a choice, a window that is
    not there, and rules that are wrong.
    """
    named = load_rules(rules)
    geometry = geometry_of(gguf) if gguf is not None else None
    trace = _read(path, source, ranges=range_ is not None or by is not None)
    inside = select(trace, range_, path) if range_ is not None else []
    table, device = _one_device(trace.launches, device, path)
    if table["kind"].isin(["memcpy", "memset"]).all():
        raise HarnessError(
            f"{path} holds no kernel on device {device}, only {len(table)} copies and memsets; record a window in which the forward runs."
        )
    notes = list(trace.notes)
    whole = range_ is None and occurrence is None
    window, matches = _window(trace, inside, table, device, path, named, rules, range_, occurrence, geometry, notes)
    about: dict[str, Any] = {
        "tokens": tokens,
        "model": "",
        "source": trace.source,
        "device": trace.gpus.get(device, f"device {device}"),
        "notes": notes,
        "provenance": {"trace": path.name, "trace_sha256": sha256_of(path), "gpu": trace.gpus.get(device, "")},
    }
    recorded = Recorded(window.launches, 0, about, matches=matches)
    told = _attribute(recorded, geometry, tokens, tail) if geometry is not None else None
    window.launches = recorded.launches
    contradicted = about.get("prefill_walls_ns") == []  # by the trace: the tokens that were given
    if trace.saved is not None or contradicted:
        pass  # the table says itself what it holds, or nothing tells what a prefill is
    elif whole:
        window = _prefills(recorded, window, told, geometry, tokens, with_upload=with_upload)
    elif range_ is None:
        about["prefills"] = 1
    elif len(window.spans) > 1 and tokens:
        about["prefill_walls_ns"] = []
        notes.append(f"no tok/s: the window joins {len(window.spans)} ranges; choose one with --occurrence")
    if trace.saved is None and not whole and told is None and tokens and not contradicted:
        _check_tokens(recorded, tokens, [])
    seen = Seen(trace, device, window.spans, whole=whole and len(window.launches) == len(table))
    notes += notes_of(trace.found)
    if by is not None:
        recorded.ranges = by_range.charge(trace, window.rows, path)
        notes += recorded.ranges.notes
    about["gap_parts_ms"] = window.overheads(trace.overheads, notes)
    recorded.launches, recorded.wall_ns = window.closed()
    made = checks_of(seen)
    about |= _gap(seen, recorded.launches)
    if any(c.name in ("records", "activity") and not c.ok for c in made):
        about |= {"gap_causes_ms": {}, "idle": []}
        notes.append("the gap's causes are unknown: device records are missing, so part of it is no wait")
    about["more_checks"] = [*made, *about.get("more_checks", [])]
    if trace.saved is not None:
        _as_saved(recorded, trace.saved, path, whole=occurrence is None)
    return recorded


def _check_tokens(recorded: Recorded, tokens: int, repeats: list[np.ndarray]) -> None:
    """The `plan` check of tokens that no ledger was held to, in place; no tok/s where the window is no whole prefill."""
    from harness.attribution.occurrences import find_forwards
    from harness.attribution.roles import NOT_CHECKED, check_tokens

    about, launches = recorded.about, recorded.launches
    told = check_tokens(launches, find_forwards(launches), recorded.matches, tokens, repeats)
    others = [c for c in about.get("more_checks", []) if c.name != "plan"]
    plan = next((c.detail for c in about.get("more_checks", []) if c.name == "plan"), "")
    detail = (
        told.detail
        if told.ok
        else f"{told.detail}; correct --tokens, or choose one prefill with --occurrence or --range"
    )
    if plan and told.ok:
        detail = plan if detail == NOT_CHECKED else f"{plan.replace('tokens and model', 'model', 1)}; {detail}"
    about["more_checks"] = [*others, Check(name="plan", ok=told.ok, detail=detail)]
    if told.no_speed or not told.ok:
        about["prefill_walls_ns"], about["tokens"] = [], None if told.ok else tokens
        recorded.notes.append(
            f"no tok/s: {told.no_speed or told.detail}; choose one prefill with --range or --occurrence"
        )


def _as_saved(recorded: Recorded, saved: table_of.Saved, path: Path, *, whole: bool) -> None:
    """Gives a table that we saved the facts of its run, in place; the walls and the tokens only where the window is `whole`."""
    from harness.attribution.roles import NOT_CHECKED
    from harness.attribution.roofline import Ceilings

    about = recorded.about
    if about["tokens"]:
        detail = f"{saved.tokens} tokens, as the table was saved of" if whole and saved.tokens else NOT_CHECKED
        about["more_checks"].append(Check(name="plan", ok=True, detail=detail))
    about |= {"model": saved.model, "regime": saved.regime, "levers": saved.levers}
    about["provenance"] = saved.provenance | {k: v for k, v in about["provenance"].items() if v}
    about["notes"] += saved.notes
    if saved.ceilings:
        known = {f.name: saved.ceilings[f.name] for f in fields(Ceilings) if f.name in saved.ceilings}
        about["ceilings"] = Ceilings(**known)
    if not whole:
        return
    recorded.wall_ns = saved.wall_ns or recorded.wall_ns
    about |= {"structure": saved.structure, "untraced_wall_ns": saved.walls_ns, "gap_parts_ms": saved.gap_parts_ms}
    if about["tokens"] not in (None, saved.tokens) and saved.tokens:
        raise HarnessError(
            f"{path} was saved of a prefill of {saved.tokens} tokens, not {about['tokens']}; leave out --tokens."
        )
    about["tokens"] = saved.tokens or about["tokens"]


def _window(trace: Trace, inside: list[tuple[Range, np.ndarray]], table: pd.DataFrame, device: int, path: Path, named: Rules,
            rules: Sequence[Path] | None, range_: str | None, occurrence: int | None, geometry: Geometry | None,
            notes: list[str]) -> tuple[Window, dict[tuple[str, str], Match]]:  # fmt: skip
    """The window that was asked for, classified by family, and what each name was found to be."""
    if range_ is not None:
        window = _of_ranges(trace.launches, inside, device, range_, occurrence, notes)
        window.launches, matches = _classified(window.launches, named, rules)
        return window, matches
    rows = np.flatnonzero(trace.launches["device"].to_numpy() == device)
    table, matches = _classified(table, named, rules)
    if occurrence is not None:
        return _occurrence(table, rows, occurrence, path, notes, geometry.layers if geometry else None), matches
    return Window(table, [(int(table["start_ns"].min()), int(table["end_ns"].max()))], rows), matches


def _classified(
    table: pd.DataFrame, named: Rules, rules: Sequence[Path] | None
) -> tuple[pd.DataFrame, dict[tuple[str, str], Match]]:
    """By family; a table saved by ourselves keeps its classes: attributed by tag, better than by name."""
    if (table["class"] != "").any() and not rules:
        return table, {}
    return classify_launches(table, named)


UPLOAD = 0.5
"""Copies to the device ahead of the first prefill that hold at least half of the model's bytes are its upload."""
LEAST_UPLOAD = 64 << 20
"""... of at least this many bytes: the inputs of a toy model are larger than its weights."""
QUICK = 100_000
"""Launches in which prefills are looked for without being asked to (0.1 s; a million take a second)."""


def _prefills(recorded: Recorded, window: Window, told: Attributed | None, geometry: Geometry | None, tokens: int | None,
              *, with_upload: bool) -> Window:  # fmt: skip
    """The prefills of a whole recording: how many, how long each, and without the model's upload ahead of the first.

    Fills `about`: tokens (of all of them), prefills, prefill_walls_ns (empty: nothing tells what one is).
    """
    from harness.attribution.occurrences import find_repeats

    about, notes, table = recorded.about, recorded.notes, window.launches
    if told is None and tokens is None and len(table) > QUICK:
        return window
    repeats = find_repeats(table, geometry.layers if geometry else None)
    found = repeats.prefills
    if told is not None and len(found) != told.prefills:
        edges = [*told.first_rows, len(table)]
        found = [np.arange(a, b) for a, b in pairwise(edges)]
        found[0] = np.arange(_after_upload(table, edges[0], geometry), edges[1])
    if told is None and tokens:
        _check_tokens(recorded, tokens, found)
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    whole = about.get("prefill_walls_ns") != []
    if found and whole:
        about["prefills"] = len(found)
        about["prefill_walls_ns"] = [int(end[rows].max() - start[rows].min()) for rows in found]
        about["tokens"] = (told.tokens if told else tokens or 0) * len(found) or None
        if len(found) > 1:
            what = f"{len(found)} prefills" if told else f"{len(found)} × the same launches"
            speed = "tok/s is the median one's; " if about["tokens"] else ""
            notes.append(f"{what} in the window: {speed}--occurrence 1 to {len(found)} chooses one")
    elif tokens and whole and repeats.everything and repeats.count > 1:
        about["prefill_walls_ns"] = []
        notes.append(
            f"no tok/s: the launch sequence repeats {repeats.count} × and nothing runs once, so layers of one prefill and several "
            "prefills look alike; name one with --occurrence and --gguf (which counts layers), or with --range"
        )
    first = int(found[0][0]) if found else 0
    copies = _uploaded(table, first, geometry)
    if copies is None:
        return window
    copied = int(copies["bytes"].fillna(0).sum())
    ms = (copies["end_ns"] - copies["start_ns"]).sum() / 1e6
    upload = f"a model upload ahead of the first prefill ({len(copies)} copies, {copied / 1e9:.2f} GB, {ms:,.1f} ms)"
    if with_upload or told is None:
        notes.append(
            f"{upload} is in the window{', as asked' if with_upload else '; --occurrence or --gguf leaves it out'}"
        )
        return window
    notes.append(f"{upload} is left out of the window with all that ran before the prefill; --with-upload keeps it")
    if recorded.roles is not None:
        recorded.roles = recorded.roles.iloc[first:].reset_index(drop=True)
    rest = recorded.launches.iloc[first:].reset_index(drop=True)
    return Window(rest, [(int(rest["start_ns"].min()), int(rest["end_ns"].max()))], window.rows[first:])


def _uploaded(table: pd.DataFrame, row: int, geometry: Geometry | None) -> pd.DataFrame | None:
    """The copies to the device ahead of a row, where they are a model's upload."""
    ahead = table.iloc[:row]
    copies = ahead[ahead["name"].str.contains("HtoD")]
    least = max(UPLOAD * model_bytes(geometry) if geometry else 0, LEAST_UPLOAD)
    return copies if copies["bytes"].fillna(0).sum() >= least else None


def _after_upload(table: pd.DataFrame, row: int, geometry: Geometry | None) -> int:
    """Where the first prefill starts, whose first layer starts at `row`: at the table's start, or behind the upload, cut where
    the device waits longest ahead of the first kernel (its inputs' copies are the prefill's)."""
    copies = _uploaded(table, row, geometry)
    if copies is None:
        return 0
    sizes = copies["bytes"].fillna(0).cumsum().to_numpy(dtype=np.int64)
    most = int(copies.index[np.searchsorted(sizes, 0.9 * sizes[-1])])
    kernels = np.flatnonzero((table["kind"] == "kernel").to_numpy())
    high = int(kernels[np.searchsorted(kernels, most)])
    between = np.arange(most + 1, high + 1)
    start = table["start_ns"].to_numpy()
    reach = np.maximum.accumulate(table["end_ns"].to_numpy())
    return int(between[np.argmax(start[between] - reach[between - 1])])


def model_bytes(geometry: Geometry) -> int:
    """Bytes of the model's matrices as its file stores them."""
    from engine.plan import element_bytes

    total = 0
    for tensor, kind in geometry.weight_types.items():
        n, k = geometry.matrix_shape(tensor)
        total += element_bytes(kind, n * k)
    return total


def read_trace(path: Path, source: str = "auto") -> Trace:
    """All launches of a trace file on every device, unclassified, whatever recorded it. Raises HarnessError."""
    return _read(path, source)


def classified_launches(
    path: Path, *, device: int | None = None, rules: Sequence[Path] | None = None, range_: str | None = None,
    occurrence: int | None = None,
) -> tuple[pd.DataFrame, str, list[str]]:  # fmt: skip
    """(launches by family, source, checks of the recording that failed) of a trace file; every device of it unless one is
    named, or a window is chosen.

    range_, occurrence: as for `load_recorded`. Raises HarnessError.
    """
    named = load_rules(rules)
    trace = _read(path, "auto", ranges=range_ is not None)
    inside = select(trace, range_, path) if range_ is not None else []
    if range_ is None and occurrence is None and device is None:
        table = trace.launches
        ends = table.groupby("device").agg(first=("start_ns", "min"), last=("end_ns", "max"))
        every = [Seen(trace, int(d), [(int(a), int(b))], whole=True) for d, a, b in ends.itertuples()]
        return _classified(table, named, rules)[0], trace.source, _failed(every)
    table, device = _one_device(trace.launches, device, path)
    window, _ = _window(trace, inside, table, device, path, named, rules, range_, occurrence, None, [])
    whole = range_ is None and occurrence is None
    return window.launches, trace.source, _failed([Seen(trace, device, window.spans, whole=whole)])


def _failed(windows: Sequence[Seen]) -> list[str]:
    """The failed checks of a recording's windows, each cause once."""
    found = [check for seen in windows for check in checks_of(seen) if not check.ok]
    return list(dict.fromkeys(f"its check {check.name} failed ({check.detail})" for check in found))


def _read(path: Path, source: str, *, ranges: bool = False) -> Trace:
    """The trace of every device. ranges: with its named ranges."""
    kind = source if source in ("nsys", "kineto") else _kind(path)
    if kind == "nsys":
        from harness.sources.nsys import read_nsys

        return read_nsys(path, ranges=ranges)
    if kind == "kineto":
        from harness.sources.kineto import read_kineto

        return read_kineto(path)
    if ranges:
        raise HarnessError(f"{path} is a launch table and holds no ranges; give the trace that it was made from.")
    table, saved = table_of.load_saved(path)
    if len(table) == 0:
        raise HarnessError(f"{path} holds no launch; record a window in which the forward runs.")
    told = source if source in ("cupti", "host") else saved.source if saved else ""
    gpus = {int(table["device"].iloc[0]): saved.device} if saved and saved.device else {}
    return Trace(table, int(table["end_ns"].max()), told, gpus=gpus, saved=saved)


def _kind(path: Path) -> str:
    """nsys, kineto or parquet, by the file's first bytes, then by its suffix."""
    if not path.is_file():
        raise HarnessError(
            f"{path} is no file; give an nsys .sqlite or .nsys-rep, a PyTorch profiler JSON, or a launches.parquet."
        )
    with path.open("rb") as file:
        magic = file.read(16)
    name = path.name.lower()
    if magic.startswith(b"NVR\0") or name.endswith(".ncu-rep"):
        raise HarnessError(
            f"{path} is a report of Nsight Compute, not a trace; read it with `harness sol --ncu-rep {path}`."
        )
    if magic.startswith(b"SQLite format 3") or name.endswith((".sqlite", ".nsys-rep", ".qdstrm", ".db")):
        return "nsys"
    if magic.startswith(b"PAR1") or name.endswith(".parquet"):
        return "parquet"
    if magic.startswith(b"\x1f\x8b") or magic.lstrip()[:1] in (b"{", b"[") or name.endswith((".json", ".json.gz")):
        return "kineto"
    if not magic:
        raise HarnessError(f"{path} is empty; record the trace again.")
    raise HarnessError(
        f"{path} is neither an nsys export nor a PyTorch profiler trace nor a launches.parquet; give one of those."
    )


def _one_device(table: pd.DataFrame, device: int | None, path: Path) -> tuple[pd.DataFrame, int]:
    counts = table["device"].value_counts().sort_index()
    if device is None:
        if len(counts) > 1:
            listed = ", ".join(f"{d} ({n} launches)" for d, n in counts.items())
            raise HarnessError(f"{path} holds {len(counts)} devices: {listed}; choose one with --device.")
        return table, int(counts.index[0])
    if device not in counts.index:
        raise HarnessError(f"{path} has no device {device}; it has {', '.join(map(str, counts.index))}.")
    return (table if len(counts) == 1 else table[table["device"] == device].reset_index(drop=True)), device


@dataclass
class Window:
    """Launches of one device and the spans, in the trace's ns, that they are looked at in."""

    launches: pd.DataFrame
    spans: list[tuple[int, int]]  # ordered, disjoint
    rows: np.ndarray  # position of every launch in the trace's table

    def closed(self) -> tuple[pd.DataFrame, int]:
        """The launches with times from the window's start, the time between its spans taken out; its length in ns."""
        first = np.array([a for a, _ in self.spans])
        length = np.array([b - a for a, b in self.spans])
        shift = first - np.r_[0, np.cumsum(length)[:-1]]
        start, end = self.launches["start_ns"].to_numpy(), self.launches["end_ns"].to_numpy()
        by = shift[np.searchsorted(first, start, side="right") - 1]
        return self.launches.assign(start_ns=start - by, end_ns=end - by), int(length.sum())

    def overheads(self, found: dict[str, np.ndarray], notes: list[str]) -> dict[str, float]:
        """ms per name of tracer or driver overhead that ran while the device waited: part of the gap, not the host's."""
        reach = np.maximum.accumulate(self.launches["end_ns"].to_numpy())
        start = self.launches["start_ns"].to_numpy()
        idle = [(int(a), int(b)) for a, b in zip(reach[:-1], start[1:], strict=True) if b > a] if found else []
        parts: dict[str, float] = {}
        taken: list[tuple[int, int]] = []  # by the names before: overheads nest, and no nanosecond is named twice
        for name, spans in found.items():
            inside = [part for a, b in spans.tolist() for part in _cut(a, b, self.spans)]
            waiting = [part for a, b in inside for part in _cut(a, b, idle)]
            new = _without(waiting, taken)
            taken = _joined([*taken, *waiting])
            if inside:
                parts[name] = sum(b - a for a, b in new) / 1e6
                notes.append(
                    f"{name}: {len(inside)} row{'s' if len(inside) > 1 else ''}, {sum(b - a for a, b in _joined(inside)) / 1e6:.3f} ms of tracer or driver overhead in the "
                    f"window, {parts[name]:.3f} ms of it while the device waits: part of the gap, not the host's"
                )
        return parts


def _gap(seen: Seen, table: pd.DataFrame) -> dict[str, Any]:
    """The gap by cause, and the longest waits of the window's launches (`table`, closed), as `decompose` takes them."""
    rows, calls, call = seen.rows, seen.trace.found.calls, seen.trace.found.call
    if (
        calls is None or call is None or len(rows) != len(table)
    ):  # a range's launches among others' have gaps of their own
        return {}
    every = seen.trace.launches
    start, end = every["start_ns"].to_numpy()[rows], every["end_ns"].to_numpy()[rows]
    parts, cause = gaps.attribute(start, end, call[rows], calls, seen.trace.overheads, seen.spans)
    return {"gap_causes_ms": parts, "idle": gaps.largest(table, cause)}


def _cut(a: int, b: int, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """[a, b) inside ordered disjoint spans."""
    found = []
    for low, high in spans[max(bisect_left(spans, (a, a)) - 1, 0) :]:
        if low >= b:
            break
        if min(b, high) > max(a, low):
            found.append((max(a, low), min(b, high)))
    return found


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ordered disjoint spans of the same union."""
    joined: list[tuple[int, int]] = []
    for a, b in sorted(spans):
        if joined and a <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], b))
        else:
            joined.append((a, b))
    return joined


def _without(spans: list[tuple[int, int]], taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The union of spans less that of taken, which is ordered and disjoint."""
    left = []
    for a, b in _joined(spans):
        for low, high in _cut(a, b, taken):
            if low > a:
                left.append((a, low))
            a = high
        if b > a:
            left.append((a, b))
    return left


def _occurrence(
    table: pd.DataFrame, rows: np.ndarray, k: int, path: Path, notes: list[str], layers: int | None
) -> Window:
    """The K-th whole prefill of a classified table. Raises HarnessError where there are not as many, or only one."""
    from harness.attribution.occurrences import find_forwards, find_repeats

    if layers and (forwards := find_forwards(table)) and forwards.whole and layers not in forwards.whole:
        raise HarnessError(
            f"{path} holds forwards of {', '.join(map(str, sorted(set(forwards.whole))))} layers, and the model of --gguf has {layers}; "
            "give the --gguf of this recording."
        )
    repeats = find_repeats(table, layers)
    found = repeats.prefills
    if not found and not repeats.count:
        raise HarnessError(
            f"no launch sequence repeats in {path}, so there is no --occurrence {k}; name an NVTX --range instead."
        )
    if not found:
        raise HarnessError(
            f"{path} holds one prefill as far as its launches tell ({repeats.why_none()}), so there is no --occurrence {k}; leave it "
            f"out{'' if layers else ', give --gguf where there are several prefills'}, or name an NVTX --range."
        )
    if k > len(found):
        raise HarnessError(
            f"the launch sequence of {path} repeats {len(found)} times; give --occurrence 1 to {len(found)}."
        )
    part = table.iloc[found[k - 1]].reset_index(drop=True)
    notes.append(
        f"occurrence {k} of {len(found)}: a sequence of {len(part)} launches that repeats; the wall is its span on the device"
    )
    return Window(part, [(int(part["start_ns"].min()), int(part["end_ns"].max()))], rows[found[k - 1]])


def _of_ranges(
    launches: pd.DataFrame,
    inside: list[tuple[Range, np.ndarray]],
    device: int,
    name: str,
    k: int | None,
    notes: list[str],
) -> Window:
    """Launches that a range submitted; several ranges of that name are one window of several spans."""
    if k is not None:
        if k > len(inside):
            raise HarnessError(f"there are {len(inside)} ranges {name!r}; give --occurrence 1 to {len(inside)}.")
        inside = inside[k - 1 : k]
    on_device = (launches["device"] == device).to_numpy()
    start, end = launches["start_ns"].to_numpy(), launches["end_ns"].to_numpy()
    rows = np.zeros(len(launches), bool)
    spans: list[tuple[int, int]] = []
    for _, found in inside:
        mine = found[on_device[found]]
        if len(mine):
            rows[mine] = True
            spans.append((int(start[mine].min()), int(end[mine].max())))
    if not spans:
        raise HarnessError(
            f"no launch on device {device} was submitted inside the range {name!r}; choose another range."
        )
    notes.append(
        f"{len(spans)} range{'s' if len(spans) > 1 else ''} {name!r}, projected on the device through the launches submitted "
        "inside; the wall is their span on the device"
    )
    return Window(launches[rows].reset_index(drop=True), _joined(spans), np.flatnonzero(rows))


def geometry_of(model: str) -> Geometry:
    """Geometry of a preset or a GGUF. Raises HarnessError or the engine's own error."""
    from engine.geometry import PRESETS

    if model in PRESETS:
        return PRESETS[model]()
    from engine.gguf_model import open_model

    path = Path(model)
    if not path.is_file():
        raise HarnessError(
            f"{model} is neither a GGUF file nor one of {', '.join(PRESETS)}; name one of those instead."
        )
    return open_model(path).geometry


def _attribute(recorded: Recorded, geometry: Geometry, tokens: int | None, tail: str | None) -> Attributed | None:
    """MACs, layers and roles from the ledger of `geometry`, in place; None where the launches do not fit it."""
    from harness.attribution.roles import RolesUnknown, attribute

    about, notes = recorded.about, recorded.notes
    given = tail is not None
    if tail is None:
        tail = "ffn_last_row" if _is_llama_cpp(recorded) else "full"
        notes.append(
            f"tail taken as {tail} ({'as llama.cpp computes it' if tail == 'ffn_last_row' else 'the default'}); --tail names another"
        )
    about["model"] = geometry.name or "GGUF"
    about["levers"] = {"tail": tail}
    try:
        told = attribute(recorded.launches, recorded.matches, geometry, tokens=tokens, tail=tail)
        if _is_llama_cpp(recorded):
            check_logits(recorded.launches, geometry)
    except RolesUnknown as why:
        what = "--gguf, --tokens or --tail" if given else "--gguf or --tokens"
        if why.contradicted:
            about["prefill_walls_ns"] = []
        about.setdefault("more_checks", []).append(
            Check(
                name="plan", ok=not why.contradicted,
                detail=f"the ledger is not charged: {why}; give the {what} of this recording, or the window of one prefill"
                if why.contradicted
                else f"tokens and model as given, not checked: {why}",
            )
        )  # fmt: skip
        notes.append(
            f"no roles and no GMAC: {why}; "
            + (f"correct {what}, or choose one prefill with --occurrence or --range" if why.contradicted else why.hint)
        )
        return None
    recorded.launches, recorded.roles = told.launches, told.roles
    about["tokens"] = told.tokens * told.prefills
    about["prefills"] = told.prefills
    gmac = float(told.launches["macs"].fillna(0).sum()) / told.prefills / 1e9
    about.setdefault("more_checks", []).append(
        Check(name="plan", ok=True, detail=f"{gmac * told.prefills:,.3f} GMAC booked once: {told.fits}")
    )
    chunks = f" in {len(told.chunks)} chunks of {_counted(told.chunks)} rows" if len(told.chunks) > 1 else ""
    notes.append(
        f"{told.prefills} prefill{'s' if told.prefills > 1 else ''} of {told.tokens} tokens{chunks}, {gmac:,.1f} GMAC each; roles from launch order"
    )
    if told.stray:
        notes.append(
            f"products that are no matrix of the model are left without GMAC: {', '.join(n[:60] for n in told.stray)}"
        )
    return told


def check_logits(launches: pd.DataFrame, geometry: Geometry) -> None:
    """llama.cpp copies whole rows of f32 logits back: their size is a multiple of the vocabulary. Raises RolesUnknown."""
    from harness.attribution.roles import RolesUnknown

    back = launches.loc[launches["name"].str.contains("DtoH"), "bytes"].dropna()
    last = int(back.iloc[-1]) if len(back) else 0
    if last >= 4096 and last % (4 * geometry.vocab):
        raise RolesUnknown(
            f"the logits that are copied back are {last // 4} numbers, no rows of {geometry.name or 'the model'}'s {geometry.vocab} words",
            contradicted=True,
        )


def _counted(chunks: list[int]) -> str:
    """ "6 × 512 + 253" of [512, 512, 512, 512, 512, 512, 253]."""
    parts: list[list[int]] = []
    for rows in chunks:
        if parts and parts[-1][1] == rows:
            parts[-1][0] += 1
        else:
            parts.append([1, rows])
    return " + ".join(f"{n} × {rows}" if n > 1 else str(rows) for n, rows in parts)


def _is_llama_cpp(recorded: Recorded) -> bool:
    return any(m.rule is not None and m.rule.file == "llama_cpp.yaml" for m in recorded.matches.values())


def names(path: Path, *, rules: Sequence[Path] | None = None, device: int | None = None) -> list[dict[str, Any]]:
    """Every distinct (name, kind) of a trace with its class, weight type, tile, arithmetic, rule, launches and ms, the
    longest first. Raises HarnessError as `load_recorded`."""
    named = load_rules(rules)
    trace = read_trace(path)
    table = trace.launches if device is None else _one_device(trace.launches, device, path)[0]
    _, matches = classify_launches(table, named)
    duration = (table["end_ns"] - table["start_ns"]).groupby([table["name"], table["kind"]], observed=True)
    sums = duration.agg(["sum", "count"])
    rows = []
    for (name, kind), match in matches.items():
        ns, count = sums.loc[(name, kind)]
        rows.append(
            {
                "name": name,
                "kind": kind,
                "class": match.cls,
                "weight_type": match.weight_type,
                "tile": match.tile,
                "arithmetic": match.arithmetic,
                "rule": str(match.rule) if match.rule else "" if match.cls == "other" else "by kind",
                "launches": int(count),
                "ms": int(ns) / 1e6,
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])
