"""The decomposition of one wall, as written to JSON ("decomposition/1") and read back.

Fractions are fractions; `ratio` is ours / reference; times are ms unless a name says otherwise. `wall_ms` is the
untraced median, `gap_ms` the traced wall minus busy, and Σ `sum_ms` = busy + overlap.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from harness.errors import HarnessError

SCHEMA = "decomposition/1"


class _Model(BaseModel):
    model_config = ConfigDict(populate_by_name=True, extra="ignore", ser_json_inf_nan="null")


class ClassRow(_Model):
    """One arithmetic class of one weight type."""

    cls: str = Field(validation_alias=AliasChoices("class", "cls"), serialization_alias="class")
    weight_type: str
    launches: int
    sum_ms: float  # Σ durations: two launches at once count twice
    union_ms: float  # time with at least one of its launches running
    share: float  # sum_ms / busy
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
    tokens: int | None = None
    prefills: int | None = None  # that the tokens are of, in a recorded window; None: one, or nobody knows
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
    launches: int
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
    roles: list[ClassRow] = []  # the same launches by role, where a foreign engine's launch order told them

    @property
    def ok(self) -> bool:
        """True when every check passed."""
        return all(check.ok for check in self.checks)

    def check(self, name: str) -> Check:
        """The check of that name. Raises KeyError."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def by_class(self) -> dict[str, float]:
        """Class → Σ ms over its weight types, largest first."""
        sums: dict[str, float] = {}
        for row in self.classes:
            sums[row.cls] = sums.get(row.cls, 0.0) + row.sum_ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def to_dict(self) -> dict[str, Any]:
        """As in JSON: aliases, no NaN or infinity."""
        return self.model_dump(mode="json", by_alias=True)


def load_decomposition(path: Path | str) -> Decomposition:
    """A decomposition from its JSON. Raises HarnessError: one sentence naming the file and the first bad field."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HarnessError(
            f"{path} does not exist; write one with `harness decompose --tokens N --json {path}`."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise HarnessError(
            f"{path} is not readable JSON ({error}); write it again with `harness decompose --json`."
        ) from None
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        raise HarnessError(
            f"{path} has schema {found!r}, not {SCHEMA!r}; give a file written by `harness decompose --json`."
        )
    try:
        return Decomposition.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HarnessError(
            f"{path} is no decomposition: {where}: {first['msg']}; write it again with `harness decompose --json`."
        ) from None
