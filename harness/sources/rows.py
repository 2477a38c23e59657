"""Columns of integers out of SQLite, as fast as Python allows: big tables are split over two processes.

Run as a script (`python -I rows.py DATABASE SQL LOW HIGH`) this file is the second process; so it imports the standard
library alone at the top.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from array import array
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

SPLIT_ROWS = 200_000
"""Rows from which a second process pays for its start."""


def read_integers(database: Path, table: str, select: list[str]) -> np.ndarray:
    """int64 [rows, len(select)] of integer expressions over a table with rowids, in rowid order.

    Raises sqlite3.Error for a damaged file, and TypeError or OverflowError where a value is no 64-bit integer.
    """
    import numpy as np

    sql = f"SELECT {', '.join(select)} FROM {table} WHERE rowid BETWEEN ? AND ?"
    uri = f"{database.resolve().as_uri()}?mode=ro"
    with sqlite3.connect(uri, uri=True) as db:
        low, high = db.execute(f"SELECT ifnull(min(rowid), 0), ifnull(max(rowid), -1) FROM {table}").fetchone()
    db.close()
    if high - low < SPLIT_ROWS or not sys.executable:
        parts = [_read(uri, sql, low, high)]
    else:
        middle = (low + high) // 2
        command = [sys.executable, "-I", "-S", __file__, uri, sql, str(middle + 1), str(high)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
            assert other.stdout
            first = _read(uri, sql, low, middle)
            second = array("q")
            second.frombytes(other.stdout.read())
        # The second process says only that it failed; reading its half here raises the error itself.
        parts = [first, second if other.returncode == 0 else _read(uri, sql, middle + 1, high)]
    return np.concatenate([np.frombuffer(p, np.int64) for p in parts if len(p)] or [np.empty(0, np.int64)]).reshape(
        -1, len(select)
    )


def _read(uri: str, sql: str, low: int, high: int) -> array[int]:
    values = array("q")
    db = sqlite3.connect(uri, uri=True)
    try:
        cursor = db.execute(sql, (low, high))
        while rows := cursor.fetchmany(8192):
            values.extend(chain.from_iterable(rows))
    finally:
        db.close()
    return values


if __name__ == "__main__":
    sys.stdout.buffer.write(_read(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
