"""Columns of integers out of SQLite: read by Arrow's driver, without a Python object for every value, in two threads."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

SPLIT_ROWS = 100_000
"""Rows from which a second thread pays for its connection."""
BATCH_ROWS = 65_536


def read_integers(database: Path, table: str, select: list[str]) -> list[np.ndarray]:
    """One int64 array per integer expression over a table with rowids, in rowid order.

    Raises sqlite3.DatabaseError for a damaged file, and TypeError where a value is no integer.
    """
    import pyarrow as pa

    uri = f"{database.resolve().as_uri()}?mode=ro"
    db = sqlite3.connect(uri, uri=True)
    try:
        # One aggregate a query: SQLite answers it from the tree's edge, two together by a scan.
        edges = ", ".join(f"(SELECT {end}(rowid) FROM {table})" for end in ("min", "max"))
        low, high = db.execute(f"SELECT {edges}").fetchone()
    finally:
        db.close()
    if low is None:
        return [np.empty(0, np.int64) for _ in select]
    middle = (low + high) // 2 if high - low >= SPLIT_ROWS else high
    parts = [(low, middle), (middle + 1, high)] if middle < high else [(low, high)]
    sql = f"SELECT {', '.join(select)} FROM {table} WHERE rowid BETWEEN {{}} AND {{}}"
    with ThreadPoolExecutor(len(parts)) as threads:
        found = list(threads.map(lambda part: _read(uri, sql.format(*part)), parts))
    columns = []
    for i in range(len(select)):
        column = pa.chunked_array([chunk for p in found if p.num_rows for chunk in p.column(i).chunks])
        if column.type != pa.int64() or column.null_count:
            raise TypeError(f"{select[i]} of {table} is no whole number in every row")
        columns.append(column.to_numpy())
    return columns


def _read(uri: str, sql: str):  # type: ignore[no-untyped-def]  # -> pa.Table
    import adbc_driver_sqlite.dbapi as adbc

    try:
        with adbc.connect(uri) as connection, connection.cursor() as cursor:
            cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
            cursor.execute(sql)
            return cursor.fetch_arrow_table()
    except adbc.Error as error:
        raise sqlite3.DatabaseError(_first_line(error)) from None
    except OSError as error:
        # The driver's words for a column whose first rows had another type than a later one.
        raise TypeError(_first_line(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].replace("[SQLite] ", "")
