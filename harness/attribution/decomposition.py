"""The decomposition of one wall, as written to JSON ("decomposition/1") and read back.

Fractions are fractions; `ratio` is ours / reference; times are ms unless a name says otherwise. `wall_ms` is the
untraced median, `gap_ms` the traced wall minus busy, and Σ `sum_ms` = busy + overlap.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from harness.errors import HarnessError
from harness.files import read_json

SCHEMA = "decomposition/1"
MOST_LAUNCHES = 2**53
"""No count is beyond what a float holds exactly."""
ROLES_ALONE = ("gate_up", "down", "q_o", "k_v", "lm_head", "rope_kv", "tail")
"""Classes that only a plan, or a launch order that fits one, can tell: a table that has one is by role."""


class _Model(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="ignore", ser_json_inf_nan="null")


class Spent(_Model):
    """What one class of one weight type took."""

    cls: str = Field(validation_alias=AliasChoices("class", "cls"), serialization_alias="class")
    weight_type: str
    launches: int = Field(le=MOST_LAUNCHES)
    sum_ms: float  # Σ durations: two launches at once count twice
    union_ms: float  # time with at least one of its launches running
    share: float  # sum_ms / busy


class ClassRow(Spent):
    """One arithmetic class of one weight type."""

    gmac: float | None = None  # 10⁹ multiply-accumulates; None where nobody knows
    gbytes: float | None = None  # 10⁹ bytes that must cross memory once, by the ledger (copies: bytes copied)
    us_per_gmac: float | None = None
    tflop_per_s: float | None = None
    gb_per_s: float | None = None
    bound: Literal["compute", "memory"] | None = None  # the roof that its floor stands under
    floor_ms: float | None = None  # Σ over launches of max(FLOP / compute ceiling, bytes / memory ceiling)
    sol: float | None = None  # floor_ms / sum_ms
    ref_us_per_gmac: float | None = None
    ref_ms: float | None = None
    ratio: float | None = None  # ours / reference: µs/GMAC, or ms per token where there are no MACs
    budget_ms: float | None = None  # what reaching the reference (else the roofline) would save

    @property
    def least_ms(self) -> float | None:
        """Its floor, also of a table that carries the SOL alone; None where neither is known."""
        return self.floor_ms if self.floor_ms is not None else self.sum_ms * self.sol if self.sol is not None else None


class RangeRow(_Model):
    """What one named range submitted itself, without what the ranges inside it did; every range of one path is one row."""

    kind: Literal["range", "outside", "no_call"] = "range"  # outside any range; the call of the launch was not recorded
    path: list[str] = []  # the ranges around it and itself, outermost first
    instances: int = 0  # ranges of this path that submitted launches
    launches: int = Field(le=MOST_LAUNCHES)
    sum_ms: float
    union_ms: float
    share: float  # sum_ms / busy
    classes: list[Spent]


class Check(_Model):
    """One check: `value` against `limit`, and a sentence that names what it found."""

    name: str
    ok: bool
    value: float | None = None
    limit: float | None = None
    detail: str = ""


class Outlier(_Model):
    """A launch far above the median of its own kind."""

    name: str
    cls: str = Field(validation_alias=AliasChoices("class", "cls"), serialization_alias="class")
    ms: float
    median_ms: float
    start_ms: float


class Idle(_Model):
    """An interval in which the device ran nothing."""

    ms: float
    start_ms: float  # from the window's start
    before: str  # the launch that ended last
    after: str  # the launch that ended the wait
    cause: str = ""  # one of `gaps.CAUSES`, where calls were recorded


def is_hole(longest: float, next_longest: float, wall: float) -> bool:
    """True for a wait above half the wall and ten times the next one: nobody launches so, something ended or is missing."""
    return longest > wall / 2 and longest > 10 * next_longest


class Pass(_Model):
    """One traced forward. None is ever deleted; `table` marks the one that the rows describe."""

    wall_ms: float
    busy_ms: float
    launches: int
    outliers: list[Outlier] = []
    table: bool = False
    class_ms: dict[str, float] = {}  # class → Σ durations in this pass; {} in tables made before it was kept


class Decomposition(_Model):
    """Where a wall went: rows per class, the checks that make them believable, and what they were measured on."""

    schema_: Literal["decomposition/1"] = Field(default="decomposition/1", alias="schema")
    tokens: int | None = Field(default=None, gt=0, le=MOST_LAUNCHES)
    prefills: int | None = Field(
        default=None, gt=0, le=MOST_LAUNCHES
    )  # that the tokens are of, in a recorded window; None: one, or nobody knows
    model: str = ""
    source: str = ""  # host, cupti, nsys, kineto
    device: str = ""
    regime: str = "burst"  # burst, sustained, recorded
    levers: dict[str, Any] = {}
    wall_ms: float = Field(gt=0)
    traced_wall_ms: float = Field(gt=0)
    busy_ms: float = Field(ge=0)
    gap_ms: float
    overlap_ms: float
    tok_per_s: float | None = None  # of one prefill
    band_tok_per_s: list[float] | None = None  # [slowest, fastest] untraced run
    launches: int = Field(le=MOST_LAUNCHES)
    classes: list[ClassRow]
    checks: list[Check]
    provenance: dict[str, Any] = {}
    # Beside the contract's fields:
    walls_ms: list[float] = []  # every untraced run, in order
    trace_overhead: float | None = None  # traced wall / untraced median − 1
    passes: list[Pass] = []
    floor_ms: float | None = None  # Σ of the rows' floors
    vs_reference: float | None = None  # reference wall / ours
    reference: dict[str, Any] | None = None
    ceilings: dict[str, Any] | None = None
    structure: str = ""  # "27 full layers + one-row tail …"
    config_hash: str = ""  # identity of what it describes: model, tokens, levers, backend, device, regime
    created: str = ""
    notes: list[str] = []
    gap_parts_ms: dict[str, float] = {}  # of the gap: what tracer and driver took, by name; the rest is the host's
    idle: list[Idle] = []  # the longest waits of the device, the longest first
    gap_causes_ms: dict[str, float] = {}  # the gap by cause (`gaps.CAUSES`), where calls were recorded
    roles: list[ClassRow] = []  # the same launches by role, where a foreign engine's launch order told them
    ranges: list[RangeRow] = []  # the same launches by the named range that submitted them, where it was asked for

    @field_validator("created")
    @classmethod
    def _a_moment(cls, value: str) -> str:
        if value:
            datetime.fromisoformat(value)  # its ValueError is the message
        return value

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(check.ok for check in self.checks)

    @property
    def hole(self) -> Idle | None:
        """The device's longest wait where it is a hole (`is_hole`), else None."""
        waits = [idle.ms for idle in self.idle[:2]]
        return (
            self.idle[0]
            if waits and is_hole(waits[0], waits[1] if len(waits) > 1 else 0.0, self.traced_wall_ms)
            else None
        )

    def broken(self) -> list[str]:
        """Why these figures are not to be built on: checks that failed, and sums that no longer hold. [] where they are.

        Every figure that follows from others in the table is derived again, so that an edited one shows.
        """
        found = [f"its check {c.name} failed ({c.detail})" for c in self.checks if not c.ok]
        if not self.checks:
            found.append("it has no checks")
        for traced in self.passes:
            if traced.table:
                found += _differs("its pass was busy for", traced.busy_ms, self.busy_ms, "its busy")
                sums = self.by_class()
                for cls, ms in traced.class_ms.items():
                    found += _differs(f"its pass has {cls} at", ms, sums.get(cls, 0.0), "its class")
        total = self.busy_ms + self.overlap_ms
        for what, rows in (("classes", self.classes), ("roles", self.roles)):
            if rows or what == "classes":
                found += _differs(f"its {what} sum to", sum(r.sum_ms for r in rows), total, "busy + overlap", SUMS)
            if rows and sum(r.launches for r in rows) != self.launches:
                found.append(f"its {what} have {sum(r.launches for r in rows)} launches, the table {self.launches}")
            for row in rows:
                found += _row_broken(row, self.busy_ms)
        found += _ranges_broken(self.ranges, self.classes, self.busy_ms)
        found += _differs("busy + gap is", self.busy_ms + self.gap_ms, self.traced_wall_ms, "the traced wall", SUMS)
        if self.overlap_ms < -1e-6:
            found.append(f"its overlap is {self.overlap_ms:.6g} ms")
        if self.walls_ms:
            found += _differs("the median of its walls is", median(self.walls_ms), self.wall_ms, "its wall")
        if self.tok_per_s and self.tokens and self.walls_ms:
            found += _differs("tokens / wall is", self.tokens / self.wall_ms * 1e3, self.tok_per_s, "its tok/s")
        if self.floor_ms is not None:
            found += _differs(
                "its floors sum to", sum(r.floor_ms or 0.0 for r in self.classes), self.floor_ms, "its floor"
            )
        return found

    def check(self, name: str) -> Check:
        """The check of that name. Raises KeyError."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    @property
    def by_role(self) -> list[ClassRow]:
        """The rows by role: the second view of a foreign trace, or the classes where a plan made them; [] where neither."""
        return self.roles or (self.classes if any(r.cls in ROLES_ALONE for r in self.classes) else [])

    def by_class(self) -> dict[str, float]:
        """Class → Σ ms over its weight types, largest first."""
        sums: dict[str, float] = {}
        for row in self.classes:
            sums[row.cls] = sums.get(row.cls, 0.0) + row.sum_ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """As in JSON: aliases, no NaN or infinity."""
        return self.model_dump(mode="json", by_alias=True)


SUMS, ROUNDING = 1e-6, 1e-4
"""How far a sum, and a figure derived from others, may differ from what its table says, relative."""


def _differs(what: str, derived: float, said: float, name: str, limit: float = ROUNDING) -> list[str]:
    if abs(derived - said) <= max(limit * abs(said), 1e-6):
        return []
    return [f"{what} {derived:.6g}, not {name} {said:.6g}"]


def _spent_broken(row: Spent, busy_ms: float) -> list[str]:
    label = f"{row.cls} {row.weight_type}".removesuffix(" -")
    found = []
    if row.sum_ms < 0 or row.union_ms < 0 or row.launches < 0 or row.union_ms > row.sum_ms * (1 + ROUNDING) + 1e-6:
        found.append(f"{label} has {row.launches} launches, {row.sum_ms:.6g} ms, {row.union_ms:.6g} ms of union")
    if busy_ms:
        found += _differs(f"{label}'s share is", row.sum_ms / busy_ms, row.share, "what it says,")
    return found


def _row_broken(row: ClassRow, busy_ms: float) -> list[str]:
    """A row's own figures against each other."""
    label = f"{row.cls} {row.weight_type}".removesuffix(" -")
    found = _spent_broken(row, busy_ms)
    if not row.gmac and (row.us_per_gmac or row.tflop_per_s):
        found.append(f"{label} has a rate and no GMAC")
    if row.gmac and row.us_per_gmac is not None:
        found += _differs(f"{label}'s µs/GMAC is", row.sum_ms * 1e3 / row.gmac, row.us_per_gmac, "what it says,")
    if row.gmac and row.sum_ms and row.tflop_per_s is not None:
        found += _differs(f"{label}'s TFLOP/s is", 2 * row.gmac / row.sum_ms, row.tflop_per_s, "what it says,")
    if row.floor_ms is not None and row.sol is not None and row.sum_ms:
        found += _differs(f"{label}'s SOL is", row.floor_ms / row.sum_ms, row.sol, "what it says,")
    if row.ratio and row.ref_us_per_gmac and row.us_per_gmac:
        found += _differs(f"{label}'s ratio is", row.us_per_gmac / row.ref_us_per_gmac, row.ratio, "what it says,")
    return found


def _ranges_broken(ranges: list[RangeRow], classes: list[ClassRow], busy_ms: float) -> list[str]:
    """The ranges against the classes: launches, and Σ durations to the nanosecond. [] where there are none."""
    if not ranges:
        return []
    found = []
    want = {(r.cls, r.weight_type): (r.launches, round(r.sum_ms * 1e6)) for r in classes}
    have: dict[tuple[str, str], tuple[int, int]] = dict.fromkeys(want, (0, 0))
    for row in ranges:
        name = " / ".join(row.path) or row.kind
        ns = 0
        for part in row.classes:
            own, key = round(part.sum_ms * 1e6), (part.cls, part.weight_type)
            count, before = have.get(key, (0, 0))
            have[key], ns = (count + part.launches, before + own), ns + own
            found += [f"in the range {name} {why}" for why in _spent_broken(part, busy_ms)]
        if row.launches != sum(p.launches for p in row.classes) or round(row.sum_ms * 1e6) != ns:
            found.append(f"the range {name} has {row.launches} launches of {row.sum_ms:.6f} ms, and its classes others")
        longest = max((p.union_ms for p in row.classes), default=0.0)
        if not longest - 1e-6 <= row.union_ms <= row.sum_ms + 1e-6:
            found.append(f"the range {name} was busy for {row.union_ms:.6g} ms, which its classes contradict")
        if busy_ms:
            found += _differs(f"the range {name}'s share is", row.sum_ms / busy_ms, row.share, "what it says,")
    for (cls, weight_type), got in have.items():
        said = want.get((cls, weight_type), (0, 0))
        if got != said:
            label = f"{cls} {weight_type}".removesuffix(" -")
            found.append(
                f"its ranges hold {got[0]} launches, {got[1]} ns of {label}, the table {said[0]} launches, {said[1]} ns"
            )
    return found


def load_decomposition(path: Path | str) -> Decomposition:
    """A decomposition from its JSON. Raises HarnessError: one sentence naming the file and the first bad field."""
    path = Path(path)
    data = read_json(path, f"write it with `harness decompose --tokens N --json {path}`")
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise HarnessError(
            f"{path} has schema {found!r}, not {SCHEMA!r}; give a file written by `harness decompose --json`."
        )
    try:
        return Decomposition.model_validate(data)
    except (ValidationError, OverflowError) as error:
        if isinstance(error, OverflowError):
            raise HarnessError(
                f"{path} is no decomposition: {error}; write it again with `harness decompose --json`."
            ) from None
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HarnessError(
            f"{path} is no decomposition: {where}: {first['msg']}; write it again with `harness decompose --json`."
        ) from None


def sound(table: Decomposition, path: Path | str, what: str) -> Decomposition:
    """The table itself. Raises HarnessError where its checks failed or its sums do not hold; `what`: what needs it."""
    if why := table.broken():
        raise HarnessError(
            f"{path} is not to be built on: {why[0]}; {what} needs a table whose checks pass, make it again."
        )
    return table
