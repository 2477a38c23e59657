"""Retry conditions: when a lever that did not land is worth another look, as text that the newest table can answer.

A condition is prose, or one or more comparisons joined by "and", each `CLASS.FIELD OP NUMBER` or `FIELD OP NUMBER`:

    attention.share > 0.10 and attention.ratio >= 1.5
    wall_ms < 60

CLASS is a class of the decomposition, optionally with a weight type (`down/q6_K.sum_ms`); FIELD is share, sum_ms,
ratio, sol, us_per_gmac, budget_ms or launches of a class, or wall_ms, busy_ms, gap_ms, tok_per_s of the whole. Numbers may be
written as percentages. Prose is never evaluated: it is shown, to be judged by hand.
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Literal

from harness.attribution.decomposition import Decomposition

OPS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
CLASS_FIELDS = ("share", "sum_ms", "ratio", "sol", "us_per_gmac", "budget_ms", "launches")
WHOLE_FIELDS = ("wall_ms", "busy_ms", "gap_ms", "tok_per_s")
TERM = re.compile(
    r"\s*(?:(?P<cls>[a-z_]+)(?:/(?P<type>[\w+]+))?\.)?(?P<field>[a-z_]+)\s*(?P<op>>=|<=|>|<)\s*(?P<number>[0-9.]+(?:e-?\d+)?)\s*(?P<percent>%?)\s*"
)


@dataclass(frozen=True)
class Answer:
    """What the table says of a condition: met, not met, or left to a person, with the figures read."""

    state: Literal["met", "not met", "by hand"]
    detail: str


def evaluate(condition: str, table: Decomposition) -> Answer:
    """Answers one condition from a table. Anything that is not of the grammar, or not in the table, is "by hand"."""
    answers = [_term(term, table) for term in re.split(r"\band\b", condition)]
    if any(a is None for a in answers):
        return Answer("by hand", "")
    known = [a for a in answers if a is not None]
    return Answer("met" if all(ok for ok, _ in known) else "not met", "; ".join(text for _, text in known))


def _term(term: str, table: Decomposition) -> tuple[bool, str] | None:
    match = TERM.fullmatch(term)
    if match is None:
        return None
    value = _read(table, match["cls"], match["type"], match["field"])
    if value is None:
        return None
    limit = float(match["number"]) / (100 if match["percent"] else 1)
    where = ".".join(filter(None, [match["cls"], match["field"]]))
    return OPS[match["op"]](value, limit), f"{where} is {value:.4g}"


def _read(table: Decomposition, cls: str | None, weight_type: str | None, field: str) -> float | None:
    if cls is None:
        return getattr(table, field) if field in WHOLE_FIELDS else None
    rows = [r for r in table.classes if r.cls == cls and weight_type in (None, r.weight_type)]
    if field not in CLASS_FIELDS:
        return None
    if field in ("share", "sum_ms", "launches"):
        return float(sum(getattr(r, field) for r in rows))
    values = [(getattr(r, field), r.sum_ms) for r in rows if getattr(r, field) is not None]
    if not values:
        return None
    if field == "budget_ms":
        return sum(v for v, _ in values)
    weight = sum(ms for _, ms in values)
    return sum(v * ms for v, ms in values) / weight if weight else None
