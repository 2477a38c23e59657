"""Diff of two decompositions or traces: what each class gained, what it cost elsewhere, and whether the two compare.

Times are subtracted as they are where both sides did the same work. That they did is never assumed (`find_work`):

    tokens     both sides say how many tokens they computed; with different counts times are scaled by them
    launches   what did not change tells: kernels whose grids grow with the rows launch as many threads in all on both
               sides (however the prefill was cut into micro-batches, and whatever became of the products in between), and
               what launches a block a row, or most families that grow, did not move together (`_rows_ratio`);
               or the same launches, each as long as before, come f times as often: then each kernel is compared per launch,
               delta(kernel) = (µs per launch after − µs per launch before) × launches before
    declared   the caller says so
    totals     nobody knows: the totals are compared, and the output says that the work behind them is unknown

Two windows of one length hold different amounts of work when one of them is slower, so nothing is normalised by a
window's length. A class's delta is the sum over its kernels, so a mix of long and short launches inside a class cannot
imitate a change. Where both sides know roles they are compared by role: kernels differ between engines, the work does not.

Traced passes of one engine differ among themselves, as its clock does. Where the tables carry their passes, a class's time
is its median over them, and a change is told only when it exceeds what the passes of both sides span together (largest
minus smallest, summed): no pass of one side then reaches a pass of the other. Every other change is *within noise*.

direct gain = the deltas told that are below zero, hidden tax = those above, net = their sum: all in ms at the work of the
first side. What lies within noise is summed apart: net + within noise is the change of the classes' total.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache
from pathlib import PurePath
from statistics import median
from typing import Any, Literal

import pandas as pd

from harness.attribution import classify
from harness.attribution.classify import Match
from harness.attribution.decomposition import ClassRow, Decomposition, Pass
from harness.attribution.occurrences import find_forwards, find_repeats, main_attentions
from harness.attribution.roles import check_tokens
from harness.attribution.shapes import BLOCK_A_ROW, volume
from harness.errors import HarnessError

MOVED = 0.02
"""A kernel or class whose time changed by less than 2 % did not move."""
WORTH = 0.001
"""... nor did one whose change is worth less than 0.1 % of busy."""
EDGE = 0.10
"""Launch counts may differ by 10 % (or 2 launches a device) from the work factor's before they count as changed."""
STAYS = 0.01
"""Threads of all launches of a kernel may differ by 1 % and count as the same: grids are rounded up to blocks."""
SAME = 0.05
"""A launch whose mean time differs by less than 5 % is as long as before."""
MOST, SOME = 0.8, 0.1
"""Parts of a side's time that must speak for a claim: of nearly everything, and of enough to be no accident."""
GROWS = ("norm", "rope", "swiglu", "elementwise", "kv_store", "embedding", "convert", "quantize")
"""Families whose grids grow with the rows. Products and attentions may be persistent, and a dequantise pass is as large as
its weights."""
PRODUCTS = ("gemm", "gemv", "gemm_fixup", "gate_up", "down", "q_o", "k_v", "lm_head", "tail")
FOLDED = {c: "products" for c in PRODUCTS} | {
    c: "between products"
    for c in ("norm", "rope", "rope_kv", "kv_store", "swiglu", "elementwise", "embedding", "sampling", "convert", "copy", "memset")
}  # fmt: skip
"""What a class by role and a class by family have in common, where one side knows roles and the other does not."""
CLASS_SPAN = 0.10
"""Tables that kept busy per pass but no class's time: any class may account for all that busy spans, up to this part of
its own time (attention in three passes of one arm on an H200, under its power cap: 4.30 to 4.76 ms)."""

LONGEST = 48
"""Characters of a kernel's name in the sentence: a library's names hold every parameter of their template."""
WINDOW_MINUTES = 30
"""Two tables without a window's name that were made further apart than this are of two windows."""


@dataclass(frozen=True)
class Amount:
    """Time and launches of one kernel or class on one side."""

    ms: float = 0.0
    launches: int = 0

    @property
    def us_per_launch(self) -> float | None:
        """Mean µs of a launch; None without launches."""
        return 1e3 * self.ms / self.launches if self.launches else None

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.ms + other.ms, self.launches + other.launches)


@dataclass(frozen=True)
class Spread:
    """How far the traced passes of one side lie apart: largest minus smallest, ms."""

    busy_ms: float
    busy: float  # the same as a fraction of the median pass's busy
    class_ms: dict[str, float] | None  # None: the passes did not keep their classes


@dataclass(frozen=True)
class Shape:
    """All launches of one kernel: how many, how long, and with how many threads and in which grids."""

    ms: float
    launches: int
    threads: int  # Σ blocks × threads of a block; 0 where the source tells no grids
    grids: dict[str, Amount] = field(hash=False)


@dataclass(frozen=True)
class Work:
    """How the work of two sides compares, and how that is known."""

    how: Literal["tokens", "launches", "declared", "totals"]
    factor: float = 1.0  # work of the second side / work of the first
    per_launch: bool = False
    detail: str = ""

    @property
    def known(self) -> bool:
        """False where the totals are compared without knowing what work is behind them."""
        return self.how != "totals"


@dataclass
class Side:
    """One side of a diff, whatever it was read from. Keys of `parts` are (class, weight type, name, device)."""

    label: str
    parts: dict[tuple[str, str, str, int], Amount]
    tokens: int | None = None
    regime: str = ""
    device: str = ""
    model: str = ""
    source: str = ""
    window: str = ""  # identity of the measuring window; "" where it has no name
    created: str = ""  # moment, ISO 8601; without a window's name it tells two windows apart
    wall_ms: float | None = None
    named: bool = True  # the parts carry kernel names
    levers: dict[str, Any] = field(default_factory=dict)
    spread: Spread | None = None  # None with fewer than two traced passes
    roles: dict[tuple[str, str, str, int], Amount] | None = None  # the same by role; None where nobody knows roles
    by_role: bool = False  # `parts` are by role
    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)  # by (class, name), of a trace
    prefills: int | None = None  # that the window holds
    count_prefills: Callable[[], int | None] | None = None  # of a trace, where they are not known yet
    unsound: list[str] = field(default_factory=list)  # failed checks, and sums that no longer hold
    cut: str = ""  # "starts", "ends" or both, where a trace does so inside a forward

    @property
    def busy_ms(self) -> float:
        """Summed time of everything."""
        return sum(a.ms for a in self.parts.values())

    def by(self, *fields: int) -> dict[tuple, Amount]:
        """Amounts summed over the chosen positions of the key: 0 class, 1 weight type, 2 name, 3 device."""
        sums: dict[tuple, Amount] = {}
        for key, amount in self.parts.items():
            short = tuple(key[i] for i in fields)
            sums[short] = sums.get(short, Amount()) + amount
        return sums


@dataclass(frozen=True)
class Row:
    """One class or kernel on both sides. `delta_ms` is at the first side's work; negative is faster.

    `noise_ms`: what the passes of both sides span together; 0 where nobody knows.
    """

    key: tuple
    before: Amount
    after: Amount
    delta_ms: float
    noise_ms: float = 0.0

    @property
    def within_noise(self) -> bool:
        """True for a change that passes of one and the same engine show too."""
        return 0 < abs(self.delta_ms) <= self.noise_ms

    @property
    def told_ms(self) -> float:
        """The delta; 0 within noise."""
        return 0.0 if self.within_noise else self.delta_ms

    @property
    def change(self) -> float | None:
        """Delta as a fraction of the first side's time; None for what is new."""
        return self.delta_ms / self.before.ms if self.before.ms else None

    @property
    def per_launch(self) -> float | None:
        """Change of the time per launch as a fraction; None where either side has no launch."""
        a, b = self.after.us_per_launch, self.before.us_per_launch
        return a / b - 1 if a is not None and b else None


@dataclass
class Diff:
    """The comparison, ready to print or to plot."""

    before: Side
    after: Side
    work: Work
    classes: list[Row]
    types: list[Row]  # by (class, weight type), where a class has several
    kernels: list[Row]  # by (class, name); [] where a side has no names
    comparable: list[tuple[str, bool | None, str]]  # (what, same?, detail); None: unknown
    notes: list[str]

    @property
    def normalised_by(self) -> str:
        """tokens, launches, declared or totals: how the work is known."""
        return self.work.how

    @property
    def work_factor(self) -> float:
        """Work of the second side / work of the first; 1 where it is unknown."""
        return self.work.factor

    @property
    def direct_ms(self) -> float:
        """Σ of the classes that got faster, beyond noise (≤ 0)."""
        return sum(min(r.told_ms, 0.0) for r in self.classes)

    @property
    def tax_ms(self) -> float:
        """Σ of the classes that grew, beyond noise (≥ 0)."""
        return sum(max(r.told_ms, 0.0) for r in self.classes)

    @property
    def net_ms(self) -> float:
        """direct + tax."""
        return self.direct_ms + self.tax_ms

    @property
    def noise_ms(self) -> float:
        """Σ of the changes within noise, of either sign; net + this is the change of the total."""
        return sum(r.delta_ms for r in self.classes if r.within_noise)

    def spread_text(self) -> str:
        """How far each side's passes lie apart, as a clause; "" where neither side knows."""
        known = [s for s in (self.before, self.after) if s.spread]
        paths = [PurePath(s.label) for s in known]
        names = [p.name for p in paths]
        if len(set(names)) < len(names):  # two decomposition.json are told apart by their directories
            names = [str(PurePath(*p.parts[-2:])) for p in paths]
        each = " and ".join(f"{s.spread.busy:.1%} ({name})" for s, name in zip(known, names, strict=True) if s.spread)
        return f"passes of one side span {each} of busy" if each else ""

    def sums_text(self) -> str:
        """direct gain, hidden tax and net in one line, and beside them what is within noise."""
        text = f"direct gain {self.direct_ms:+.2f} ms, hidden tax {self.tax_ms:+.2f} ms, net {self.net_ms:+.2f} ms"
        return text + (f"; within noise {self.noise_ms:+.2f} ms" if any(r.within_noise for r in self.classes) else "")

    def moved(self, rows: Iterable[Row]) -> list[Row]:
        """The rows whose change is above both thresholds and beyond noise, largest first."""
        floor = WORTH * self.before.busy_ms
        found = [r for r in rows if abs(r.told_ms) >= floor and abs(r.change if r.change is not None else 1) >= MOVED]
        return sorted(found, key=lambda r: -abs(r.delta_ms))

    def sentence(self) -> str:
        """What the diff says, in one line: which kernels (or classes) improved, which grew."""
        rows, what = (self.kernels, "kernel") if self.kernels else (self.classes, "class")
        moved = self.moved(rows)
        faster, slower = [r for r in moved if r.delta_ms < 0], [r for r in moved if r.delta_ms > 0]
        parts = [
            "improved: " + "; ".join(self._say(r) for r in faster[:3]) + _more(faster)
            if faster
            else f"no {what} improved"
        ]
        if slower:
            parts.append(("grew: " if faster else "") + "; ".join(self._say(r) for r in slower[:3]) + _more(slower))
        elif not faster:
            noisy = any(r.within_noise for r in rows)
            parts = [f"no {what} moved by {MOVED:.0%} or more" + (" beyond noise" if noisy else "")]
        said = "; ".join(parts)
        if bad := [side.label for side in (self.before, self.after) if side.unsound]:
            said += f"; do not rely on it: {' and '.join(bad)} {'are' if len(bad) > 1 else 'is'} unsound"
        return said

    def _say(self, row: Row) -> str:
        name = short_name(str(row.key[-1])) if len(row.key) > 1 else str(row.key[0])
        name = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
        if not row.before.launches:
            return f"{name} is new, {row.after.launches} launches, {row.delta_ms:+.2f} ms"
        if not row.after.launches:
            return f"{name} is gone, {row.delta_ms:+.2f} ms"
        counted = row.after.launches == row.before.launches or self.work.per_launch
        if self.normalised_by == "launches" and counted and row.per_launch is not None and len(row.key) > 1:
            return f"{name} per launch {row.per_launch:+.0%}"
        return f"{name} {row.change:+.1%} ({row.delta_ms:+.2f} ms)"

    def to_json(self) -> dict[str, Any]:
        """The "diff/1" mapping."""

        def rows(found: list[Row], *names: str) -> list[dict[str, Any]]:
            return [
                dict(zip(names, r.key, strict=True))
                | {
                    "before_ms": r.before.ms,
                    "after_ms": r.after.ms,
                    "delta_ms": r.delta_ms,
                    "noise_ms": r.noise_ms,
                    "within_noise": r.within_noise,
                    "launches_before": r.before.launches,
                    "launches_after": r.after.launches,
                    "us_per_launch_before": r.before.us_per_launch,
                    "us_per_launch_after": r.after.us_per_launch,
                }
                for r in found
            ]

        return {
            "schema": "diff/1",
            "before": self.before.label,
            "after": self.after.label,
            "normalised_by": self.normalised_by,
            "work_factor": self.work_factor,
            "work": {"known": self.work.known, "how": self.work.how, "detail": self.work.detail},
            "unsound": [{"side": side.label, "why": why} for side in (self.before, self.after) for why in side.unsound],
            "by_role": self.before.by_role and self.after.by_role,
            "sentence": self.sentence(),
            "classes": rows(self.classes, "class"),
            "weight_types": rows(self.types, "class", "weight_type"),
            "kernels": rows(self.kernels, "class", "name"),
            "direct_ms": self.direct_ms,
            "tax_ms": self.tax_ms,
            "net_ms": self.net_ms,
            "noise_ms": self.noise_ms,
            "comparable": [{"what": w, "same": s, "detail": d} for w, s, d in self.comparable],
            "notes": self.notes,
        }


def _more(rows: list[Row]) -> str:
    return f" and {len(rows) - 3} more" if len(rows) > 3 else ""


def short_name(name: str) -> str:
    """A kernel's function, whole: `flash_fwd_kernel`, `SendRecv`."""
    return classify.short_name(name, None).removeprefix("ncclDevKernel_").removeprefix("ncclKernel_")


# --- sides -------------------------------------------------------------------------------------------------------------


def side_of_decomposition(table: Decomposition, label: str) -> Side:
    """A side from a decomposition: classes and weight types, no kernel names; each class at the median of its passes."""
    passes = _passes(table)
    by_role = table.by_role is table.classes
    return Side(
        label, _parts(table.classes, passes), tokens=table.tokens, regime=table.regime, device=table.device, model=table.model, source=table.source,
        window=str(table.provenance.get("window") or ""), created=table.created, wall_ms=table.wall_ms, named=False,
        levers=table.levers, spread=_spread(passes) if len(passes) > 1 else None,
        roles=_parts(table.by_role, passes if by_role else []) or None, by_role=by_role, prefills=table.prefills, unsound=table.broken(),
    )  # fmt: skip


def _parts(rows: list[ClassRow], passes: list[Pass]) -> dict[tuple[str, str, str, int], Amount]:
    kept = bool(passes) and all(p.class_ms for p in passes)
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.cls] = sums.get(row.cls, 0.0) + row.sum_ms
    parts: dict[tuple[str, str, str, int], Amount] = {}
    for row in rows:
        key = (row.cls, row.weight_type or "-", "", 0)
        scale = 1.0
        if kept and sums[row.cls]:
            scale = median(p.class_ms.get(row.cls, 0.0) for p in passes) / sums[row.cls]
        parts[key] = parts.get(key, Amount()) + Amount(row.sum_ms * scale, row.launches)
    return parts


def _passes(table: Decomposition) -> list[Pass]:
    """The traced passes that speak for the table: those without outlier launches, where there are two; else all."""
    clean = [p for p in table.passes if not p.outliers]
    return clean if len(clean) > 1 else table.passes


def _spread(passes: list[Pass]) -> Spread:
    busy = [p.busy_ms for p in passes]
    spans = None
    if all(p.class_ms for p in passes):
        times = {cls: [p.class_ms.get(cls, 0.0) for p in passes] for cls in {c for p in passes for c in p.class_ms}}
        spans = {cls: max(ms) - min(ms) for cls, ms in times.items()}
    return Spread(max(busy) - min(busy), (max(busy) - min(busy)) / median(busy), spans)


def side_of_launches(
    launches: pd.DataFrame, label: str, *, source: str, tokens: int | None = None, prefills: int | None = None,
    unsound: Sequence[str] = (),
) -> Side:  # fmt: skip
    """A side from a classified launch table, every device in it pooled (and kept apart in the detail).

    tokens: of one prefill; prefills: how many the window holds, where somebody chose it. unsound: the recording's failed checks.
    Raises HarnessError where the rows in grids contradict `tokens`.
    """
    frame = pd.DataFrame(
        {
            "class": launches["class"].replace("", "other"),
            "type": launches["weight_type"],
            "name": launches["name"],
            "device": launches["device"],
            "grid": launches["grid"],
            "block": launches["block"],
            "ms": (launches["end_ns"] - launches["start_ns"]) / 1e6,
        }
    )
    keys = ["class", "type", "name", "device", "grid", "block"]
    grouped = frame.groupby(keys, sort=False, observed=True)["ms"].agg(["sum", "count"])
    parts: dict[tuple[str, str, str, int], Amount] = {}
    shapes: dict[tuple[str, str], Shape] = {}
    for (c, t, n, d, grid, block), total, count in zip(grouped.index, grouped["sum"], grouped["count"], strict=True):
        key, amount = (str(c), str(t), str(n), int(d)), Amount(float(total), int(count))
        parts[key] = parts.get(key, Amount()) + amount
        old = shapes.get((key[0], key[2]), Shape(0.0, 0, 0, {}))
        threads = amount.launches * volume(str(grid)) * volume(str(block))
        old.grids[str(grid)] = old.grids.get(str(grid), Amount()) + amount
        shapes[key[0], key[2]] = Shape(
            old.ms + amount.ms, old.launches + amount.launches, old.threads + threads, old.grids
        )
    devices = sorted({key[3] for key in parts})

    repeats = cache(lambda: find_repeats(launches))  # looked for once, and only where somebody asks

    def count_prefills() -> int | None:
        """Whole prefills that repeat; 1 where a forward stands alone; None where nothing tells."""
        if len(devices) > 1:
            return None
        found = repeats()
        if found.prefills:
            return len(found.prefills)
        return None if found.everything or not len(main_attentions(launches)) else 1

    forwards = find_forwards(launches) if len(devices) == 1 else None
    if tokens is not None:
        if forwards is not None:
            matches = {(str(n), "kernel"): Match(str(c), "-", None) for c, n in shapes}
            alike = repeats().prefills if prefills is None else []
            checked = check_tokens(launches, forwards, matches, tokens, alike)
            if not checked.ok:
                raise HarnessError(
                    f"{label} is not of {tokens} tokens: {checked.detail}; correct --tokens or leave it out."
                )
        if prefills is None:
            prefills = count_prefills()
    return Side(
        label, parts, tokens=tokens and tokens * (prefills or 1), source=source, device=f"devices {', '.join(map(str, devices))}",
        shapes=shapes, prefills=prefills, count_prefills=count_prefills, unsound=list(unsound),
        cut=forwards.cut if forwards else "",
    )  # fmt: skip


# --- comparing ---------------------------------------------------------------------------------------------------------


def diff(before: Side, after: Side, *, across_windows: bool = False, equal_work: bool = False) -> Diff:
    """Compares two sides. `equal_work`: the caller declares that both did the same.

    Raises HarnessError when a side is empty, when absolute figures would be subtracted across two named windows, regimes or
    devices that nobody declared comparable (`across_windows`), and when one prefill would be compared with several, or a
    decomposition with a trace of other work.
    """
    for side in (before, after):
        if not side.parts or side.busy_ms <= 0:
            raise HarnessError(f"{side.label} holds no device time; there is nothing to compare.")
    comparable = compare(before, after)
    by_tokens = bool(before.tokens and after.tokens)
    clash = [what for what, same, _ in comparable if same is False and what in ("window", "regime", "device", "model")]
    if by_tokens and clash and not across_windows:
        details = "; ".join(d for w, s, d in comparable if w in clash)
        raise HarnessError(
            f"{before.label} and {after.label} differ in {' and '.join(clash)} ({details}), and absolute times of two windows are "
            "not subtracted; measure both in one window (`harness ab`), or declare it with --across-windows."
        )
    work = Work("declared", detail="equal work was declared") if equal_work else find_work(before, after)
    factor = work.factor
    cut = [
        f"{side.label} {side.cut} inside a forward, so a part of a prefill is in what is compared"
        for side in (before, after)
        if side.cut
    ]
    notes = [f"{side.label} is unsound: {why}" for side in (before, after) for why in side.unsound[:2]]
    notes += cut
    before, after = _by_role(before, after, notes)
    named = before.named and after.named
    if not work.per_launch:
        if work.how == "tokens" and factor != 1:
            notes.append(
                f"token counts differ ({before.tokens} and {after.tokens}): times are scaled by tokens, which flatters or "
                "punishes attention (quadratic) and every class with a fixed cost; read shares and µs/GMAC instead."
            )
        if not work.known:
            notes.append(f"work unknown: the totals are compared as they are ({work.detail}); {_DECLARE}.")
        classes = _scaled(before.by(0), after.by(0), factor)
        types = _scaled(before.by(0, 1), after.by(0, 1), factor)
        kernels = _scaled(before.by(0, 2), after.by(0, 2), factor) if named else []
    else:
        devices = len({k[3] for k in before.parts})
        fine = _per_launch(before.by(0, 1, 2), after.by(0, 1, 2), factor, devices)
        kernels = _gather(fine, (0, 2)) if named else []
        classes, types = _gather(fine, (0,)), _gather(fine, (0, 1))
        notes.append(
            f"the second window holds {factor:.1%} of the first one's launches: compared per launch, at the first one's count."
        )
    if named:
        notes += _disagreeing_devices(before, after, kernels)
    several = {c for (c,) in before.by(0) if sum(k[0] == c for k in before.by(0, 1) | after.by(0, 1)) > 1}
    if across_windows and clash:
        notes.append(
            f"declared comparable although the {' and '.join(clash)} differ: a difference may be the machine's, not the code's."
        )
    order = [
        _with_noise(r, before, after, factor) for r in sorted(classes, key=lambda r: -max(r.before.ms, r.after.ms))
    ]
    return Diff(
        before, after, work, order,
        [r for r in types if r.key[0] in several], sorted(kernels, key=lambda r: -abs(r.delta_ms)), comparable, notes,
    )  # fmt: skip


_DECLARE = "say what was computed with --tokens A:B, choose one prefill of each with --occurrence A:B or --range, or declare --equal-work"


def find_work(before: Side, after: Side) -> Work:
    """How the work of two sides compares, by what they say or by what did not change.

    Raises HarnessError where one prefill would be compared with several, or a decomposition with a trace whose launches
    are others.
    """
    if before.tokens and after.tokens:
        if (before.prefills or 1) != (after.prefills or 1):
            raise _several(before, after)
        same = before.tokens == after.tokens
        ratio = _rows_ratio(before, after)
        if ratio and abs(after.tokens / before.tokens / ratio - 1) > EDGE:
            raise HarnessError(
                f"the grids of {after.label} hold {ratio:.3g} × the rows of {before.label}'s, not {before.tokens} and {after.tokens} tokens; "
                "correct --tokens or leave it out."
            )
        return Work(
            "tokens", after.tokens / before.tokens,
            detail=f"{before.tokens} tokens on both sides" if same else f"{before.tokens} and {after.tokens} tokens",
        )  # fmt: skip
    if before.shapes and after.shapes:
        found = _equal_by_shapes(before, after) or _repeated(before, after)
        if found:
            return found
        for side in (before, after):
            if side.prefills is None and side.count_prefills:
                side.prefills = side.count_prefills()
        if before.prefills and after.prefills and before.prefills != after.prefills:
            raise _several(before, after)
        ratio = _rows_ratio(before, after)
        rows = f": the second has {ratio:.3g} × the rows" if ratio and abs(ratio - 1) > EDGE else ""
        return Work("totals", detail=f"no launches tell that both sides computed the same{rows}")
    stay, times = _class_counts(before, after)
    if bool(before.shapes) != bool(after.shapes) and stay < 0.5:
        one, other = (before, after) if after.shapes else (after, before)
        raise HarnessError(
            f"{one.label} is a decomposition and {other.label} a trace of another window (their launches differ); decompose "
            f"that window with `harness decompose --trace`, or {_DECLARE}."
        )
    if times is not None or (before.prefills or 1) != (after.prefills or 1):
        raise _several(before, after, times)
    return Work("totals", detail="a side does not say how many tokens it computed")


def _several(before: Side, after: Side, times: float | None = None) -> HarnessError:
    first, second = before.prefills or 1, after.prefills or 1
    if first != second:
        text = f"{before.label} holds {first} prefill{'s' * (first > 1)} and {after.label} {second}"
    else:
        text = f"{after.label} has {times:g} × the launches of {before.label} in every class"
    return HarnessError(f"{text}, and one prefill is not compared with several; {_DECLARE}.")


def _equal_by_shapes(before: Side, after: Side) -> Work | None:
    """Equal work where most of what grows with the rows has as many threads in all. Products and attentions that stay are no
    evidence: a persistent one has as many blocks for any number of rows."""
    growing = [k for k in before.shapes if k in after.shapes and k[0] in GROWS]
    ratio = _rows_ratio(before, after)
    if ratio is not None and abs(ratio - 1) > SAME:
        return None

    def stays(key: tuple[str, str]) -> bool:
        b, a = before.shapes[key], after.shapes[key]
        if b.threads and a.threads:
            return abs(a.threads - b.threads) <= STAYS * max(a.threads, b.threads)
        return a.launches == b.launches

    staying = [k for k in growing if stays(k)]
    # Rows that both looked up, through norms of as many layers: whatever the rest became.
    exact, norms = (_ratio_of(before, after, _a_row(before, after, c)) for c in ("embedding", "norm"))
    sure = exact is not None and abs(exact - 1) <= STAYS and norms is not None and abs(norms - 1) <= SAME
    for side in (before, after):
        ms = sum(side.shapes[k].ms for k in staying)
        if not staying or (not sure and ms < 0.5 * sum(side.shapes[k].ms for k in growing)):
            return None
    counts = [sum(side.shapes[k].launches for k in staying) for side in (before, after)]
    many = f"{counts[0]} launches" if counts[0] == counts[1] else f"{counts[0]} and {counts[1]} launches"
    told = all(side.shapes[k].threads for side in (before, after) for k in staying)
    what = f"as many threads in {many}" if told else many
    return Work("launches", detail=f"equal work: {what} of classes that grow with the rows ({_kinds(staying)})")


def _rows_ratio(before: Side, after: Side) -> float | None:
    """Rows of the second side / rows of the first, over all their forwards; None where grids do not tell.

    By what launches a block a row; else by the families that grow with the rows, where at least two moved by one ratio and
    those are more than the ones that stayed (which may be persistent).
    """
    # A forward looks up its rows once; norms are left out at the end of a chunk whose rows nobody reads.
    told = _ratio_of(before, after, _a_row(before, after, "embedding")) or _ratio_of(
        before, after, _a_row(before, after)
    )
    if told is not None:
        return told
    shared = [k for k in before.shapes if k in after.shapes and k[0] in GROWS]
    ratios = [
        _ratio_of(before, after, [k for k in shared if k[0] == c]) for c in GROWS if any(k[0] == c for k in shared)
    ]
    moved = [r for r in ratios if r is not None and abs(r - 1) > SAME]
    for ratio in moved:
        together = [r for r in moved if abs(r / ratio - 1) <= SAME]
        if len(together) > 1 and len(together) > len(ratios) - len(moved):
            return median(together)
    return None


def _a_row(before: Side, after: Side, *classes: str) -> list[tuple[str, str]]:
    """What both sides launch with a block a row, of these classes or of all."""
    return [
        k
        for k in before.shapes
        if k in after.shapes
        and BLOCK_A_ROW.get(classify.split_name(k[1])[0]) == k[0]
        and (not classes or k[0] in classes)
    ]


def _ratio_of(before: Side, after: Side, keys: list[tuple[str, str]]) -> float | None:
    """Of the threads in all; None where as large grids ran another number of times: more forwards, or a persistent kernel."""
    threads, counts = (
        [sum(getattr(side.shapes[k], what) for k in keys) for side in (before, after)]
        for what in ("threads", "launches")
    )
    if not all(threads):
        return None
    ratio = threads[1] / threads[0]
    same_grids = abs(ratio * counts[0] / counts[1] - 1) <= STAYS
    return None if same_grids and counts[0] != counts[1] else ratio


def _kinds(keys: list[tuple[str, str]]) -> str:
    return ", ".join(dict.fromkeys(c for c, _ in keys))


def _repeated(before: Side, after: Side) -> Work | None:
    """The same launches, as long as before, another number of times: two windows of one length, or more repetitions."""
    b = {
        (k, g): amount
        for k, s in before.shapes.items()
        for g, amount in s.grids.items()
        if k[0] not in ("copy", "memset")
    }
    a = {
        (k, g): amount
        for k, s in after.shapes.items()
        for g, amount in s.grids.items()
        if k[0] not in ("copy", "memset")
    }
    shared = [k for k in b if k in a]
    if not shared or any(sum(side[k].ms for k in shared) < MOST * sum(x.ms for x in side.values()) for side in (b, a)):
        return None
    factor = _work_factor({k: b[k] for k in shared}, a)
    ratio = _rows_ratio(before, after)
    if ratio is not None and abs(ratio / factor - 1) > EDGE:
        return None
    devices = len({k[3] for k in before.parts})
    agree = [
        k
        for k in shared
        if abs(a[k].launches - factor * b[k].launches) <= max(2 * devices, EDGE * factor * b[k].launches)
    ]
    as_long = [k for k in agree if abs((a[k].us_per_launch or 0) / (b[k].us_per_launch or 1) - 1) <= SAME]
    for side in (b, a):
        total = sum(side[k].ms for k in shared)
        if sum(side[k].ms for k in agree) < MOST * total or sum(side[k].ms for k in as_long) < SOME * total:
            return None
    return Work(
        "launches", factor, per_launch=True, detail=f"the same launches {factor:.3f} × as often, {_kinds([k for k, _ in as_long])} as long as before"
    )  # fmt: skip


def _class_counts(before: Side, after: Side) -> tuple[float, float | None]:
    """(part of the time in classes whose launches stay, whole times as many launches of nearly everything or None)."""
    b, a = ({k: x for k, x in side.by(0).items() if k[0] not in ("copy", "memset")} for side in (before, after))
    shared = [k for k in b if k in a and b[k].launches and a[k].launches]
    total = [max(sum(x.ms for x in side.values()), 1e-12) for side in (b, a)]
    stay = min(
        sum(s[k].ms for k in shared if a[k].launches == b[k].launches) / t for s, t in zip((b, a), total, strict=True)
    )
    ratio = _work_factor({k: b[k] for k in shared}, a)
    whole = ratio if ratio >= 1 else 1 / ratio
    exact = [k for k in shared if a[k].launches == ratio * b[k].launches]
    most = all(sum(s[k].ms for k in exact) >= MOST * t for s, t in zip((b, a), total, strict=True))
    return stay, ratio if most and whole > 1.5 and whole == round(whole) else None


def _by_role(before: Side, after: Side, notes: list[str]) -> tuple[Side, Side]:
    """Both sides in classes that both have: by role where both know roles, folded where one is by role and the other not."""
    if before.roles is not None and after.roles is not None:
        return (
            replace(before, parts=before.roles, by_role=True, named=False),
            replace(after, parts=after.roles, by_role=True, named=False),
        )
    if before.by_role == after.by_role:
        return before, after
    notes.append(
        "only one side knows roles, so products are compared together; decompose the other with --gguf to compare by role."
    )
    return _folded(before), _folded(after)


def _folded(side: Side) -> Side:
    parts: dict[tuple[str, str, str, int], Amount] = {}
    for (cls, _, _, device), amount in side.parts.items():
        key = (FOLDED.get(cls, cls), "-", "", device)
        parts[key] = parts.get(key, Amount()) + amount
    spread = side.spread and replace(side.spread, class_ms=None)
    return replace(side, parts=parts, named=False, spread=spread)


def compare(before: Side, after: Side) -> list[tuple[str, bool | None, str]]:
    """(what, same?, detail) for everything that two sides should share. Unknown on either side is None, not True."""
    found: list[tuple[str, bool | None, str]] = []
    for what in ("tokens", "regime", "device", "model", "source"):
        a, b = getattr(before, what), getattr(after, what)
        if not a or not b:
            found.append((what, None, f"{a or 'unknown'} / {b or 'unknown'}"))
        else:
            found.append((what, a == b, str(a) if a == b else f"{a} / {b}"))
    return [*found, ("window", *_same_window(before, after))]


def _same_window(before: Side, after: Side) -> tuple[bool | None, str]:
    if before.window and after.window:
        same = before.window == after.window
        return same, before.window if same else f"{before.window} / {after.window}"
    if not (before.created and after.created):
        return None, "not named by both sides"
    apart = abs(datetime.fromisoformat(after.created) - datetime.fromisoformat(before.created))
    return apart <= timedelta(minutes=WINDOW_MINUTES), f"made {apart} apart"


def _scaled(before: dict[tuple, Amount], after: dict[tuple, Amount], factor: float) -> list[Row]:
    return [
        Row(key, b := before.get(key, Amount()), a := after.get(key, Amount()), a.ms / factor - b.ms)
        for key in _union(before, after)
    ]


def _with_noise(row: Row, before: Side, after: Side, factor: float) -> Row:
    """The class's row with what its passes span on both sides; a side that does not know is taken to span as the other."""
    known = [(side.spread, work) for side, work in ((before, 1.0), (after, factor)) if side.spread]
    if not known:
        return row
    spans = [s.class_ms.get(str(row.key[0]), 0.0) / work for s, work in known if s.class_ms is not None]
    if len(spans) == len(known):
        return replace(row, noise_ms=sum(spans) * 2 / len(spans))
    return replace(row, noise_ms=min(CLASS_SPAN * row.before.ms, max(s.busy_ms / work for s, work in known)))


def _per_launch(before: dict[tuple, Amount], after: dict[tuple, Amount], factor: float, devices: int) -> list[Row]:
    rows = []
    for key in _union(before, after):
        b, a = before.get(key, Amount()), after.get(key, Amount())
        slack = max(2 * devices, EDGE * factor * b.launches)
        if b.launches and a.launches and abs(a.launches - factor * b.launches) <= slack:
            delta = a.ms * b.launches / a.launches - b.ms
            delta = 0.0 if abs(delta) <= 1e-12 * b.ms else delta
        else:
            delta = a.ms / factor - b.ms
        rows.append(Row(key, b, a, delta))
    return rows


def _gather(rows: list[Row], fields: tuple[int, ...]) -> list[Row]:
    sums: dict[tuple, Row] = {}
    for row in rows:
        key = tuple(row.key[i] for i in fields)
        old = sums.get(key, Row(key, Amount(), Amount(), 0.0))
        sums[key] = Row(key, old.before + row.before, old.after + row.after, old.delta_ms + row.delta_ms)
    return list(sums.values())


def _work_factor(before: dict[tuple, Amount], after: dict[tuple, Amount]) -> float:
    """Time-weighted median of after/before launch counts over what both sides have; 1 where they share nothing."""
    ratios = sorted(
        (after[key].launches / b.launches, b.ms) for key, b in before.items() if key in after and b.launches and after[key].launches
    )  # fmt: skip
    half, reached = sum(w for _, w in ratios) / 2, 0.0
    for ratio, weight in ratios:
        reached += weight
        if reached >= half:
            return ratio
    return 1.0


def _union(before: dict[tuple, Amount], after: dict[tuple, Amount]) -> list[tuple]:
    return list(before) + [key for key in after if key not in before]


def _disagreeing_devices(before: Side, after: Side, kernels: list[Row]) -> list[str]:
    """Kernels whose time per launch moved in opposite directions on two devices: they wait for each other."""
    notes = []
    b, a = before.by(0, 2, 3), after.by(0, 2, 3)
    for row in kernels:
        changes = {}
        for key in b:
            if key[:2] == row.key and key in a and (old := b[key].us_per_launch) and (new := a[key].us_per_launch):
                changes[key[2]] = new / old - 1
        if changes and min(changes.values()) < -0.2 and max(changes.values()) > 0.2:
            each = ", ".join(f"device {d} {c:+.0%}" for d, c in sorted(changes.items()))
            notes.append(
                f"{short_name(row.key[1])} moved in opposite directions ({each}): its time is waiting for the other device."
            )
    return notes
