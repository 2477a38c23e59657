"""Columns of integers out of SQLite: read by Arrow's driver, without a Python object for every value, in two threads."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nanoarrow.c_array import CArray

SPLIT_ROWS = 100_000
"""Rows from which a second thread pays for its connection."""
BATCH_ROWS = 65_536


def read_integers(database: Path, table: str, select: list[str]) -> list[np.ndarray]:
    """One int64 array per integer expression over a table with rowids, in rowid order.

    Raises sqlite3.DatabaseError for a damaged file, and TypeError where a value is no integer.
    """
    uri = f"{database.resolve().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True)
    try:
        # One aggregate a query: SQLite answers it from the tree's edge, two together by a scan.
        edges = ", ".join(f"(SELECT {end}(rowid) FROM {table})" for end in ("min", "max"))
        low, high = db.execute(f"SELECT {edges}").fetchone()
        if low is None:
            return [np.empty(0, np.int64) for _ in select]
        middle = (low + high) // 2 if high - low >= SPLIT_ROWS else high
        (last,) = db.execute(f"SELECT max(rowid) FROM {table} WHERE rowid <= {middle}").fetchone()
    finally:
        db.close()
    parts = [(low, last), (last + 1, high)] if last < high else [(low, high)]
    sql = f"SELECT {', '.join(select)}, rowid FROM {table} WHERE rowid BETWEEN {{}} AND {{}}"
    with ThreadPoolExecutor(len(parts)) as threads:
        found = list(threads.map(lambda part: _read(uri, sql.format(*part)), parts))
    for batches, (_, end) in zip(found, parts, strict=True):
        # The driver may take a damaged page for the end of the rows, and not say so.
        if not batches or _values(batches[-1].child(len(select)))[-1] != end:
            raise sqlite3.DatabaseError("database disk image is malformed")
    columns = []
    for i in range(len(select)):
        chunks = [batch.child(i) for part in found for batch in part]
        if any(chunk.schema.format != _INT64 or chunk.view().null_count for chunk in chunks):
            raise TypeError(f"{select[i]} of {table} is no whole number in every row")
        columns.append(np.concatenate([_values(chunk) for chunk in chunks]))
    return columns


_INT64 = "l"
"""int64 in the C data interface's format strings."""


def _values(chunk: CArray) -> np.ndarray:
    """int64 [rows] of an array without nulls: a view of its second buffer (the first says which values are null)."""
    return np.frombuffer(chunk.view().buffer(1), np.int64)[chunk.offset : chunk.offset + len(chunk)]


def _read(uri: str, sql: str) -> list[CArray]:
    """The batches of a query that hold rows."""
    import adbc_driver_sqlite.dbapi as adbc
    from nanoarrow import c_array_stream

    try:
        with adbc.connect(uri) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(sql)
            return [batch for batch in c_array_stream(cursor.fetch_arrow()) if len(batch)]
    except adbc.Error as error:
        raise sqlite3.DatabaseError(_first_line(error)) from None
    except RuntimeError as error:  # nanoarrow's: a batch that the driver could not make
        text = _first_line(error)
        # The driver's words for a column whose first rows had another type than a later one.
        raise (TypeError(text) if "Type mismatch" in text else sqlite3.DatabaseError(text)) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].split("[SQLite] ")[-1]
