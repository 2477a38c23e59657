"""Columns of integers out of SQLite: read by Arrow's driver, without a Python object for every value, in two threads.

Where a value is none, `read_columns` reads the table a second time, row by row, and leaves out only what is bad.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from nanoarrow.c_array import CArray

SPLIT_ROWS = 100_000
"""Rows from which a second thread pays for its connection."""
BATCH_ROWS = 65_536


@dataclass
class Rows:
    """Columns of one table, and what could not be read of it."""

    columns: dict[str, np.ndarray]  # int64, one value a row that is kept
    bad_rows: list[tuple[int, str]]  # (rowid, column) of rows without a value that they need
    bad_values: list[tuple[int, str]]  # (rowid, column) of values that were replaced by the column's default


def read_columns(
    database: Path,
    table: str,
    wanted: Mapping[str, int | None],
    where: str = "",
    packs: Sequence[dict[str, int]] = (),
) -> Rows:
    """Integer columns of a table in rowid order. wanted: column → what stands for a missing or wrong value; None: a row
    without a whole number there is left out.

    A whole number is an integer of 64 bits, also spelled as text or as a real. packs: columns that travel as one number,
    with the bits that each has (by the hardware's own limits), the first in the highest: fewer values are a faster read.
    Raises sqlite3.DatabaseError for a damaged file.
    """
    packs = [pack for pack in packs if set(pack) <= set(wanted)]
    alone = [name for name in wanted if not any(name in pack for pack in packs)]
    try:
        values = read_integers(
            database, table, [_or_default(n, wanted[n]) for n in alone] + [_packed(p) for p in packs], where
        )
        columns = dict(zip(alone, values, strict=False))
        for pack, code in zip(packs, values[len(alone) :], strict=True):
            columns |= _unpacked(pack, code)
        return Rows(columns, [], [])
    except TypeError:
        return _row_by_row(database, table, wanted, where)


def _or_default(column: str, default: int | None) -> str:
    return f'"{column}"' if default is None else f'ifnull("{column}", {default})'


def _packed(pack: dict[str, int]) -> str:
    """One number of several: a product and a sum, which are no integer where a value is none, is missing or overflows."""
    shift, terms = 0, []
    for name, bits in reversed(pack.items()):
        terms.append(f'"{name}" * {1 << shift}')
        shift += bits
    return " + ".join(terms)


def _unpacked(pack: dict[str, int], code: np.ndarray) -> dict[str, np.ndarray]:
    found, shift, first = {}, 0, next(iter(pack))
    for name, bits in reversed(pack.items()):
        found[name] = code >> shift if name == first else (code >> shift) & ((1 << bits) - 1)
        shift += bits
    return found


def read_integers(database: Path, table: str, select: list[str], where: str = "") -> list[np.ndarray]:
    """One int64 array per integer expression over a table with rowids, in rowid order.

    Raises sqlite3.DatabaseError for a damaged file, and TypeError where a value is no integer.
    """
    uri = _uri(database)
    db = sqlite3.connect(uri, uri=True)
    try:
        # One aggregate a query: SQLite answers it from the tree's edge, two together by a scan.
        edges = ", ".join(f'(SELECT {end}(rowid) FROM "{table}")' for end in ("min", "max"))
        low, high = db.execute(f"SELECT {edges}").fetchone()
        if low is None:
            return [np.empty(0, np.int64) for _ in select]
        middle = (low + high) // 2 if high - low >= SPLIT_ROWS else high
        parts = [(low, middle), (middle + 1, high)] if middle < high else [(low, high)]
        within = f'FROM "{table}" WHERE rowid BETWEEN {{}} AND {{}}' + (f" AND {where}" if where else "")
        # From the end backwards to the first row that counts.
        last = [
            db.execute(f"SELECT rowid {within.format(*part)} ORDER BY rowid DESC LIMIT 1").fetchone() for part in parts
        ]
    finally:
        db.close()
    ends = [row[0] for row in last if row]
    parts = [part for part, row in zip(parts, last, strict=True) if row]
    if not parts:
        return [np.empty(0, np.int64) for _ in select]
    sql = f"SELECT {', '.join(select)}, rowid {within} ORDER BY rowid"
    with ThreadPoolExecutor(len(parts)) as threads:
        found = list(threads.map(lambda part: _read(uri, sql.format(*part)), parts))
    for batches, end in zip(found, ends, strict=True):
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
        raise sqlite3.DatabaseError(first_line(error)) from None
    except RuntimeError as error:  # nanoarrow's: a batch that the driver could not make
        text = first_line(error)
        # The driver's words for a column whose first rows had another type than a later one.
        raise (TypeError(text) if "Type mismatch" in text else sqlite3.DatabaseError(text)) from None


def _row_by_row(database: Path, table: str, wanted: Mapping[str, int | None], where: str) -> Rows:
    """The same through the standard library's driver, value by value."""
    names = ", ".join(f'"{name}"' for name in wanted)
    kept: list[list[int]] = []
    rows = Rows({}, [], [])
    db = sqlite3.connect(_uri(database), uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "replace")
    try:
        for rowid, *values in db.execute(
            f'SELECT rowid, {names} FROM "{table}"' + (f" WHERE {where}" if where else "")
        ):
            numbers = []
            for (name, default), value in zip(wanted.items(), values, strict=True):
                number = _whole(value)
                if number is None and default is None:
                    rows.bad_rows.append((rowid, name))
                    break
                if number is None:
                    if value is not None:
                        rows.bad_values.append((rowid, name))
                    number = default
                numbers.append(number)
            else:
                kept.append(numbers)  # type: ignore[arg-type]
    finally:
        db.close()
    table_ = np.array(kept, np.int64).reshape(len(kept), len(wanted))
    rows.columns = {name: np.ascontiguousarray(table_[:, i]) for i, name in enumerate(wanted)}
    return rows


def _whole(value: object) -> int | None:
    """The value as an integer of 64 bits, or None."""
    if isinstance(value, str):
        try:
            value = int(value) if len(value) < 32 else None
        except ValueError:
            return None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None  # infinity and NaN are no integers either
    return value if isinstance(value, int) and -(2**63) <= value < 2**63 else None


def _uri(database: Path) -> str:
    return f"{database.resolve().as_uri()}?mode=ro"


def first_line(error: Exception) -> str:
    """An error of SQLite or Arrow, which may span lines, on one."""
    return (str(error).splitlines() or [type(error).__name__])[0].split("[SQLite] ")[-1]
