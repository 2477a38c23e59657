"""Decompositions under ./reports: the newest one, and whether it still describes the engine (shelf life).

A table expires when a lever lands after it was made (unless the table describes the configuration that landed), when a
landed configuration is promoted to the base, or when the wall of its configuration has moved by more than 5 %.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from harness.attribution.decomposition import SCHEMA, Decomposition, load_decomposition
from harness.errors import HarnessError
from harness.rounds.record import RoundRecord
from harness.rounds.store import RECORD, ROUND_DIR, load_record, reports_dir, round_dirs

BEFORE, AFTER, TABLE = "before.json", "after.json", "decomposition.json"
"""Decompositions in a round's directory: of arm A, of arm B, and of a MEAS-ONLY round."""
MOVED = 0.05
"""A wall that moved by more than this expires the tables drawn before."""


@dataclass(frozen=True)
class Found:
    """A decomposition file, and the round that it belongs to where it belongs to one."""

    path: Path
    table: Decomposition
    round: int | None = None


def newest(reports: Path | None = None) -> Found:
    """The newest decomposition under `reports` that describes a configuration in use. Raises HarnessError for none.

    The table of a lever that did not land is no candidate: it describes an engine that nobody runs. A table under
    sustained load is one only where there is no other: rounds decide in the burst regime unless they are told to. After
    that comes the table of a recorded trace, which says when it was decomposed, not measured, and may be another engine's.
    """
    reports = reports or reports_dir()
    found: list[Found] = []
    inside = set()
    for path in round_dirs(reports / "rounds"):
        record = load_record(path)
        inside.add(path)
        for name in (BEFORE, AFTER, TABLE):
            if (path / name).is_file() and (name != AFTER or record.verdict == "LANDED"):
                found.append(Found(path / name, load_decomposition(path / name), record.round))
    if reports.is_dir():
        for file in sorted(reports.rglob("*.json")):
            if file.parent not in inside and _is_decomposition(file):
                found.append(Found(file, load_decomposition(file)))
    if not found:
        raise HarnessError(
            f"there is no decomposition under {reports}; make one with `harness decompose --json {reports}/decomposition.json`."
        )
    rank = {"sustained": -1, "recorded": -2}
    return max(
        found,
        key=lambda f: (
            rank.get(f.table.regime, 0),
            moment(f.table.created),
            f.round or 0,
            f.path.name == AFTER,
            str(f.path),
        ),
    )


def _is_decomposition(file: Path) -> bool:
    try:
        data = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def moment(text: str) -> datetime:
    """An ISO 8601 moment; the beginning of time where there is none, or no moment. Without a zone it is UTC."""
    if not text:
        return datetime.min.replace(tzinfo=UTC)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def round_of(path: Path) -> int | None:
    """The round whose directory holds a file; None outside the rounds."""
    match = ROUND_DIR.fullmatch(path.resolve().parent.name)
    return int(match[1]) if match and (path.parent / RECORD).is_file() else None


def expired(table: Decomposition, rounds: list[RoundRecord], own: int | None = None) -> str:
    """Why a table no longer steers, as a sentence; "" while it does. Rounds of other models or devices do not count.

    own: the round that drew the table; its own walls, timed in the same window, move nothing.
    """
    made = moment(table.created)
    for record in sorted(rounds, key=lambda r: r.round, reverse=True):
        if record.superseded_by or not _same_engine(table, record):
            continue
        if record.promoted and moment(record.promoted) > made and _levers(record, "B") != table.levers:
            return f"round {record.number} made another configuration the base after it was made"
        if not record.finished or moment(record.finished) <= made:
            continue
        if record.verdict == "LANDED" and _levers(record, "B") != table.levers:
            return f"round {record.number} ({record.slug}) landed after it was made"
        wall = _wall_of(record, table) if record.round != own else None
        if wall is not None and abs(wall / table.wall_ms - 1) > MOVED:
            return f"the wall moved from {table.wall_ms:.2f} to {wall:.2f} ms ({wall / table.wall_ms - 1:+.1%}) by round {record.number}"
    return ""


def _same_engine(table: Decomposition, record: RoundRecord) -> bool:
    pairs = ((table.model, record.model), (table.device, record.device), (table.tokens, record.tokens))
    return all(a == b for a, b in pairs if a and b)


def _levers(record: RoundRecord, arm: str) -> dict | None:
    return record.arms[arm].config.get("levers") if arm in record.arms else None


def _wall_of(record: RoundRecord, table: Decomposition) -> float | None:
    """The round's wall of the table's configuration, in the table's regime; ms."""
    if record.regime != table.regime or record.tokens != table.tokens:
        return None
    for letter, arm in record.arms.items():
        if arm.wall is not None and _levers(record, letter) == table.levers:
            return arm.wall.median_ms
    return None
