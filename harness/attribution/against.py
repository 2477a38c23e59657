"""Ours against other engines' recorded prefills, role by role: "against/1".

A role's ratio is ours / theirs, in µs per GMAC where the role has MACs and in ms at equal tokens where it has none (see
`decompose.compare`). Weight types are summed: two engines may hold the same weights in different formats.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from harness.attribution.decompose import compare
from harness.attribution.decomposition import ClassRow, Decomposition
from harness.attribution.diff import WINDOW_MINUTES
from harness.errors import HarnessError

SCHEMA = "against/1"


def against(
    ours: tuple[str, Decomposition], references: Sequence[tuple[str, Decomposition]], *, across_windows: bool = False
) -> dict[str, Any]:
    """The record of a comparison; `ours` and `references` are (name, table).

    Raises HarnessError: another token count, or another window that was not declared with `across_windows`.
    """
    name, table = ours
    if not table.tokens:
        raise HarnessError(f"{name} does not say how many tokens it prefilled; decompose it with --tokens.")
    mine = by_role(table)
    held = []
    for other, reference in references:
        if reference.tokens != table.tokens:
            raise HarnessError(f"{other} prefilled {reference.tokens or 'an unknown number of'} tokens and {name} {table.tokens}; compare equal prefills.")  # fmt: skip
        together = one_window(table, reference)
        if not together and not across_windows:
            raise HarnessError(f"{other} is of another window than {name}; measure both within {WINDOW_MINUTES} minutes, or declare it with --across-windows (its ratios are then marked).")  # fmt: skip
        theirs = {row.cls: row for row in by_role(reference)}
        rated = [row.model_copy() for row in mine]
        compare(rated, reference.model_copy(update={"classes": list(theirs.values())}), table.tokens)
        known = {row.cls: row for row in rated}
        roles = [_role(cls, known.get(cls), theirs.get(cls)) for cls in dict.fromkeys([*known, *theirs])]
        held.append(
            facts(other, reference)
            | {
                "one_window": together,
                "busy_ratio": table.busy_ms / reference.busy_ms,
                "wall_ratio": table.traced_wall_ms / reference.traced_wall_ms,
                "roles": roles,
            }
        )
    return {"schema": SCHEMA, "tokens": table.tokens, "ours": facts(name, table), "references": held}


def one_window(a: Decomposition, b: Decomposition) -> bool:
    """Whether two tables were measured together. A recorded trace does not say when it was recorded."""
    if "recorded" in (a.regime, b.regime) or not a.created or not b.created:
        return False
    apart = datetime.fromisoformat(a.created) - datetime.fromisoformat(b.created)
    return abs(apart) <= timedelta(minutes=WINDOW_MINUTES)


def by_role(table: Decomposition) -> list[ClassRow]:
    """The table's rows by role where it has that view, else by class; one a role, its weight types summed, longest first."""
    rows: dict[str, ClassRow] = {}
    for row in table.by_role or table.classes:
        sums = rows.setdefault(
            row.cls, ClassRow(cls=row.cls, weight_type="-", launches=0, sum_ms=0.0, union_ms=0.0, share=0.0)
        )
        sums.launches += row.launches
        sums.sum_ms += row.sum_ms
        sums.union_ms += row.union_ms
        sums.share += row.share
        if row.gmac is not None:
            sums.gmac = (sums.gmac or 0.0) + row.gmac
    for row in rows.values():
        row.us_per_gmac = row.sum_ms * 1e3 / row.gmac if row.gmac else None
    return sorted(rows.values(), key=lambda row: -row.sum_ms)


def facts(name: str, table: Decomposition) -> dict[str, Any]:
    """What a table says of itself, without its rows."""
    return {
        "name": name, "model": table.model, "device": table.device, "source": table.source, "regime": table.regime,
        "busy_ms": table.busy_ms, "gap_ms": table.gap_ms, "traced_wall_ms": table.traced_wall_ms,
        "gmac": sum(row.gmac or 0.0 for row in by_role(table)),
        "config_hash": table.config_hash, "tail": table.levers.get("tail"), "trace": table.provenance.get("trace"), "trace_sha256": table.provenance.get("trace_sha256"),
        "ok": table.ok, "notes": table.notes,
    }  # fmt: skip


def _role(cls: str, ours: ClassRow | None, theirs: ClassRow | None) -> dict[str, Any]:
    return {
        "role": cls,
        "ours_ms": ours.sum_ms if ours else None,
        "theirs_ms": theirs.sum_ms if theirs else None,
        "ours_us_per_gmac": ours.us_per_gmac if ours else None,
        "theirs_us_per_gmac": theirs.us_per_gmac if theirs else None,
        "ratio": ours.ratio if ours else None,
    }
