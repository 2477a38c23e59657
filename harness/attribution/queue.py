"""What is worth doing next: every class by what it could give back, against the landing bars.

    budget   ms × (1 − 1/ratio) where a reference exists (none at ratio ≤ PARITY), else ms × (1 − SOL)
    gain     wall / (wall − saved) − 1: what the landing rule would measure if that much were saved

A share says how large a class is and a ratio how far it is from good; neither ranks alone. A class at parity with its
reference is terrain, however large.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.attribution.decompose import PARITY, budget_ms
from harness.attribution.decomposition import Decomposition
from harness.errors import HarnessError

SHAPE_SLACK = 0.02
"""A ratio read at a token count more than 2 % away from the wall's is another shape's."""


@dataclass(frozen=True)
class Candidate:
    """One class of the table, priced."""

    cls: str
    weight_type: str
    ms: float
    share: float  # of busy
    ratio: float | None
    sol: float | None
    budget_ms: float | None  # None: neither a reference nor a roof is known
    gain: float | None  # of the wall, if the whole budget were saved
    clears: dict[str, bool]  # bar's name → whether that gain reaches it
    note: str = ""

    @property
    def label(self) -> str:
        """Class and weight type, as tables print them."""
        return self.cls if self.weight_type in ("", "-") else f"{self.cls} {self.weight_type}"


@dataclass(frozen=True)
class Claim:
    """A claimed kernel speed-up, priced before any code is written."""

    cls: str
    speed_up: float
    ms: float
    saved_ms: float
    gain: float
    clears: dict[str, bool]
    needed: dict[str, float | None]  # bar's name → speed-up of this class that reaches it; None: no speed-up can
    beyond_roof: bool  # the claim is faster than the class's measured roof


@dataclass
class Queue:
    """The ranked classes of one table."""

    table: Decomposition
    wall_ms: float
    bars: dict[str, float]
    candidates: list[Candidate]
    claims: list[Claim] = field(default_factory=list)
    retries: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The "queue/1" mapping."""
        return {
            "schema": "queue/1",
            "tokens": self.table.tokens,
            "model": self.table.model,
            "wall_ms": self.wall_ms,
            "busy_ms": self.table.busy_ms,
            "bars": self.bars,
            "classes": [
                {
                    "class": c.cls, "weight_type": c.weight_type, "sum_ms": c.ms, "share": c.share, "ratio": c.ratio, "sol": c.sol,
                    "budget_ms": c.budget_ms, "gain": c.gain, "clears": c.clears, "note": c.note,
                }
                for c in self.candidates
            ],
            "claims": [
                {
                    "class": c.cls, "speed_up": c.speed_up, "sum_ms": c.ms, "saved_ms": c.saved_ms, "gain": c.gain, "clears": c.clears,
                    "needed": c.needed, "beyond_roof": c.beyond_roof,
                }
                for c in self.claims
            ],
            "retries": self.retries,
            "warnings": self.warnings,
        }  # fmt: skip


def wall_gain(wall_ms: float, saved_ms: float) -> float:
    """wall_A / wall_B − 1 when `saved_ms` of the wall go away. Raises HarnessError when nothing would be left."""
    if saved_ms >= wall_ms:
        raise HarnessError(f"saving {saved_ms:.3f} ms of a {wall_ms:.3f} ms wall leaves nothing; the table is wrong.")
    return wall_ms / (wall_ms - saved_ms) - 1


def priced_wall(table: Decomposition) -> float:
    """The wall in ms that savings are taken from: the untraced one, unless tracing slowed the work itself (as it does on
    a CPU), so that the classes only fit into the traced one."""
    return table.wall_ms if table.wall_ms >= table.busy_ms else table.traced_wall_ms


def build_queue(table: Decomposition, bars: dict[str, float]) -> Queue:
    """Ranks the classes by budget; classes without any figure to judge by come last, by time."""
    candidates = []
    wall = priced_wall(table)
    for row in table.classes:
        budget, note = budget_ms(row.sum_ms, row.ratio, row.sol), _read_against(row.ratio, row.sol)
        gain = wall_gain(wall, budget) if budget is not None else None
        clears = {name: gain is not None and gain >= bar for name, bar in bars.items()}
        candidates.append(
            Candidate(row.cls, row.weight_type, row.sum_ms, row.share, row.ratio, row.sol, budget, gain, clears, note)
        )
    candidates.sort(key=lambda c: (c.budget_ms is None, -(c.budget_ms or 0.0), -c.ms))
    gap = table.gap_ms
    warnings = shape_warnings(table)
    if wall != table.wall_ms:
        warnings.append(
            f"tracing slowed the work (busy {table.busy_ms:.2f} ms, untraced wall {table.wall_ms:.2f} ms): priced against the traced wall."
        )
    if gap > 0.05 * table.traced_wall_ms:
        warnings.append(
            f"the device waits for {gap:.2f} ms of {table.traced_wall_ms:.2f} ms: launch overhead and the host are worth more "
            "than the table's classes say."
        )
    return Queue(table, wall, bars, candidates, warnings=warnings)


def _read_against(ratio: float | None, sol: float | None) -> str:
    """What a class's budget is read against, where that is not a reference that it has yet to reach."""
    if ratio is not None:
        return f"at parity with the reference ({ratio:.2f}×)" if ratio <= PARITY else ""
    return "to the roofline: no reference" if sol is not None else "no reference, no roof"


def price(table: Decomposition, claim: str, bars: dict[str, float]) -> Claim:
    """A claim such as "attention=2.0" (a kernel speed-up of one class) as a gain of the wall.

    `class/weight_type=…` names one weight type. Raises HarnessError for a class that the table does not have.
    """
    name, _, factor = claim.partition("=")
    try:
        speed_up = float(factor)
    except ValueError:
        speed_up = 0.0
    if not speed_up > 0:
        raise HarnessError(f"claim {claim!r} is not CLASS=FACTOR with a factor above 0; write it as attention=2.0.")
    cls, _, weight_type = name.strip().partition("/")
    rows = [r for r in table.classes if r.cls == cls and weight_type in ("", r.weight_type)]
    if not rows:
        known = ", ".join(dict.fromkeys(r.cls for r in table.classes))
        raise HarnessError(f"the table has no class {name.strip()!r}; it has {known}.")
    ms = sum(r.sum_ms for r in rows)
    saved = ms * (1 - 1 / speed_up)
    wall = priced_wall(table)
    gain = wall_gain(wall, saved)
    floors = [r.least_ms for r in rows]
    floor = sum(f for f in floors if f is not None) if None not in floors else 0.0
    return Claim(
        name.strip(), speed_up, ms, saved, gain, {n: gain >= b for n, b in bars.items()},
        {n: needed_speed_up(wall, ms, b) for n, b in bars.items()}, ms / speed_up < floor,
    )  # fmt: skip


def needed_speed_up(wall_ms: float, ms: float, bar: float) -> float | None:
    """Speed-up of a class of `ms` that moves the wall by `bar`; None when even removing it would not."""
    left = ms - wall_ms * (1 - 1 / (1 + bar))
    return ms / left if left > 0 else None


def shape_warnings(table: Decomposition) -> list[str]:
    """Ratios and SOL read at another token count than the wall's: a short shape dilutes a kernel by its fixed costs."""
    warnings = []
    other = (table.reference or {}).get("tokens")
    if table.tokens and other and abs(other / table.tokens - 1) > SHAPE_SLACK:
        warnings.append(
            f"ratios were read against a reference at {other} tokens, the wall is at {table.tokens}: a shorter shape dilutes kernels "
            "with their prologues, so re-measure at the wall's shape before choosing by them."
        )
    return warnings
