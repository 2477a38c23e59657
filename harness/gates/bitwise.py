"""Bitwise identity of two results, and its use on one arm twice: determinism."""

from __future__ import annotations

import numpy as np

from harness.gates.parity import rel_l2
from harness.rounds.record import Gate


def first_difference(base: np.ndarray, other: np.ndarray) -> tuple[int, ...] | None:
    """Coordinates of the first element whose bits differ, or None. Shapes must agree."""
    a, b = (np.ascontiguousarray(x, dtype=np.float32).view(np.uint32) for x in (base, other))
    where = np.argwhere(a != b)
    return tuple(int(i) for i in where[0]) if len(where) else None


def bitwise(base: np.ndarray, other: np.ndarray, *, claimed: bool) -> Gate:
    """Equal bits where the lever claims them; otherwise reported as not applicable, with what was found."""
    name, limit = "bitwise", "every bit"
    if base.shape != other.shape:
        return Gate(
            name=name, ok=False if claimed else None, limit=limit, detail=f"shapes {base.shape} and {other.shape}"
        )
    where = first_difference(base, other)
    if where is None:
        return Gate(name=name, ok=True if claimed else None, value="identical", limit=limit,
                    detail="" if claimed else "not claimed by this lever, and identical all the same")  # fmt: skip
    count = int((np.asarray(base) != np.asarray(other)).sum())
    detail = f"first differs at {list(where)}: {float(base[where])!r} and {float(other[where])!r}; {count} of {base.size} differ"
    return Gate(name=name, ok=False if claimed else None, value=str(list(where)), limit=limit,
                detail=detail if claimed else f"not claimed by this lever; {detail}")  # fmt: skip


def determinism(first: np.ndarray, second: np.ndarray, *, arm: str, limit: float) -> Gate:
    """One arm twice on the same tokens: relative L2 at most `limit` (0: every bit)."""
    l2 = rel_l2(first, second)
    where = first_difference(first, second) if first.shape == second.shape else None
    ok = where is None if limit == 0 else l2 <= limit
    detail = "identical" if where is None else f"first differs at {list(where)}"
    return Gate(name=f"determinism of {arm}", ok=ok, value=l2 if np.isfinite(l2) else "not finite", limit=limit, detail=detail)  # fmt: skip
