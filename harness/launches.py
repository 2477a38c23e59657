"""The launch table: one schema for every source, one row per launch on a device (or per op span on the host).

Times are integer nanoseconds from the window's start, which is the first activity unless a source names another.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel, Field, ValidationError

from engine.extras import require
from engine.plan import ROLES
from harness.errors import HarnessError, one_line
from harness.files import write_atomic

KINDS = ("kernel", "memcpy", "memset", "graph", "host")
"""What a row is. `graph`: a whole CUDA graph traced as one; `host`: an op's span on the CPU backend."""

FAMILIES = (
    "gemm", "gemm_fixup", "gemv", "attention", "quantize", "dequantize", "convert", "norm", "rope", "swiglu",
    "elementwise", "kv_store", "embedding", "sampling", "communication", "copy", "memset", "graph", "other",
)  # fmt: skip
"""The closed list of classes where names are all there is. With a plan, classes are `engine.plan.ROLES`."""

COLUMNS = {
    "name": "string",  # demangled kernel name, "[CUDA memcpy HtoD]", "[CUDA memset]", or the op's name
    "kind": "category",  # one of KINDS
    "start_ns": "int64",
    "end_ns": "int64",
    "device": "int32",  # CUDA ordinal; −1 the host
    "stream": "int64",
    "graph_node": "Int64",  # <NA> outside a graph
    "grid": "string",  # "x,y,z" blocks; "" where there is none
    "block": "string",  # "x,y,z" threads
    "registers": "Int32",  # per thread
    "smem_bytes": "Int64",  # static + dynamic shared memory of a block
    "shape": "string",  # "M,N,K" of a matrix product, where the source tells; ""
    "op": "Int32",  # index into the plan; <NA> where no plan op owns it
    "class": "string",  # "" before classification
    "weight_type": "string",  # "-" where none
    "layer": "Int32",  # <NA> outside the layers or unknown
    "macs": "Int64",  # of this launch; <NA> unknown
    "bytes": "Int64",  # read and written by this launch, by the ledger (copies: bytes copied); <NA> unknown
}
"""Column → pandas dtype. A source fills what it knows; `from_columns` fills the rest."""

TEXTS = tuple(name for name, dtype in COLUMNS.items() if dtype in ("string", "category"))
"""Columns that every row has a text in, if an empty one."""

_EMPTY = {"string": "", "category": "kernel", "Int64": pd.NA, "Int32": pd.NA, "int64": 0, "int32": 0}


def from_columns(**columns: object) -> pd.DataFrame:
    """A valid launch table from the columns that a source knows; absent ones get their empty value.

    Rows are sorted by (start_ns, end_ns), stably. Raises HarnessError as `check` does.
    """
    size = max((len(c) for c in columns.values() if hasattr(c, "__len__") and not isinstance(c, str)), default=0)
    data = {}
    for name, dtype in COLUMNS.items():
        default = "-" if name == "weight_type" else _EMPTY[dtype]
        values = columns.pop(name, default)
        if not hasattr(values, "__len__") or isinstance(values, str):
            series = pd.Series(values, index=range(size), dtype=None if dtype == "category" else dtype)
        else:
            series = pd.Series(values)
        if dtype == "category":
            data[name] = pd.Categorical(series, categories=list(KINDS))
        elif str(series.dtype) == dtype:
            # As it came: a source may share one str among a million rows, which a conversion would copy for each.
            data[name] = series.reset_index(drop=True)
        else:
            data[name] = series.reset_index(drop=True).astype(dtype)
    if columns:
        raise TypeError(f"no such launch-table columns: {', '.join(columns)}")
    table = pd.DataFrame(data, copy=False)
    start, end = table["start_ns"].to_numpy(), table["end_ns"].to_numpy()
    if not ((start[1:] > start[:-1]) | ((start[1:] == start[:-1]) & (end[1:] >= end[:-1]))).all():
        table = table.sort_values(["start_ns", "end_ns"], kind="stable", ignore_index=True)
    return check(table)


def nullable(values: np.ndarray | list[int], dtype: str) -> pd.Series:
    """An integer column of a nullable dtype ("Int32", "Int64") from integers of which the negative ones are unknown."""
    array = np.asarray(values, np.int64)
    unknown = array < 0
    known = np.where(unknown, 0, array) if unknown.any() else array
    return pd.Series(pd.arrays.IntegerArray(known.astype(dtype.lower()), unknown))


def text_codes(column: pd.Series, empty: str = "") -> tuple[np.ndarray, np.ndarray]:
    """(code from 0 of every row, the distinct texts) of a text column; `empty` stands for "" and for a missing text.

    Where a million rows share some sixty str objects, their addresses are told apart, and then the few texts behind them: ten
    times faster than hashing the text of every row. Arrow and categories have no such objects, and are fast by themselves.
    """
    if len(column) == 0:
        return np.empty(0, np.int64), np.empty(0, object)
    if isinstance(column.dtype, pd.CategoricalDtype) or getattr(column.dtype, "storage", "python") != "python":
        code, distinct = pd.factorize(column, use_na_sentinel=False)
        found = np.asarray(distinct, object)
    else:
        values = np.ascontiguousarray(column.to_numpy(object))
        # An array of objects is an array of pointers, which `values` keeps alive here.
        addresses = np.ctypeslib.as_array((ctypes.c_ssize_t * len(values)).from_address(values.ctypes.data))
        code, distinct = pd.factorize(addresses)
        first = np.zeros(len(distinct), np.int64)
        first[code[::-1]] = np.arange(len(code) - 1, -1, -1)
        found = values[first]
    known = [empty if text is pd.NA or text is None or text == "" else text for text in found]
    inner, texts = pd.factorize(np.array(known, object))
    return inner[code], texts


def check(table: pd.DataFrame) -> pd.DataFrame:
    """The table itself if it has the schema; otherwise HarnessError names the first column or row that does not."""
    if list(table.columns) != list(COLUMNS):
        missing = [c for c in COLUMNS if c not in table.columns]
        extra = [c for c in table.columns if c not in COLUMNS]
        raise HarnessError(
            f"the launch table has the wrong columns (missing: {missing}, unknown: {extra}); re-record the trace."
        )
    for name, dtype in COLUMNS.items():
        if str(table[name].dtype) != dtype:
            raise HarnessError(
                f"launch-table column {name!r} is {table[name].dtype}, not {dtype}; re-record the trace."
            )
    backwards = table["end_ns"] < table["start_ns"]
    if backwards.any():
        row = table[backwards].iloc[0]
        raise HarnessError(
            f"launch {row['name']!r} at {row['start_ns']} ns ends before it starts; the trace is damaged, re-record it."
        )
    return table


def union_ns(start_ns: pd.Series, end_ns: pd.Series) -> int:
    """Length of the union of half-open intervals [start, end) in ns; 0 for none. Inputs need no order."""
    if len(start_ns) == 0:
        return 0
    order = start_ns.to_numpy().argsort(kind="stable")
    start, end = start_ns.to_numpy()[order], end_ns.to_numpy()[order]
    reach = pd.Series(end).cummax().to_numpy()
    gaps = (start[1:] - reach[:-1]).clip(min=0).sum()
    return int(reach[-1] - start[0] - gaps)


def arrow(what: str) -> None:
    """Raises EngineError, with the line that brings it, where Arrow is not installed, which `what` needs."""
    require("pyarrow", "parquet", what)


class Saved(BaseModel):
    """What a saved table describes: with it, reading the table again gives the wall, the tok/s and the heading of the run."""

    tokens: int | None = None
    model: str = ""
    source: str = ""  # host, cupti, nsys, kineto
    device: str = ""  # the device's name
    regime: str = "recorded"
    levers: dict[str, Any] = {}
    wall_ns: int | None = Field(default=None, gt=0)  # of the traced pass that the table holds
    walls_ns: list[int] = []  # of the untraced runs
    structure: str = ""
    ceilings: dict[str, Any] | None = None
    provenance: dict[str, Any] = {}
    notes: list[str] = []
    gap_parts_ms: dict[str, float] = {}


_KEY = "harness"
"""Of `DataFrame.attrs`, which pandas keeps in a Parquet file's metadata under "PANDAS_ATTRS"."""


def save(table: pd.DataFrame, path: Path, about: Saved | None = None) -> None:
    """Writes Parquet whole or not at all: a killed run leaves the old file or none. Raises HarnessError, and as `arrow`."""
    arrow(f"writing {path.name}")
    stamped = check(table).copy(deep=False)
    stamped.attrs = {_KEY: about.model_dump(mode="json")} if about else {}
    write_atomic(path, stamped.to_parquet(None, index=False))


def load(path: Path) -> pd.DataFrame:
    """A launch table from Parquet. Raises HarnessError for a file that is none, or whose texts or classes are none."""
    return load_saved(path)[0]


def load_saved(path: Path) -> tuple[pd.DataFrame, Saved | None]:
    """A launch table from Parquet, and what it describes where the file says so. Raises HarnessError as `load` does, and as `arrow`."""
    arrow(f"reading {path.name}")
    from pyarrow import parquet

    try:
        stored = parquet.read_table(path)
        for name in TEXTS:
            if name in stored.column_names:
                stored[name].validate(full=True)  # UTF-8, which a conversion would take on trust
        table = stored.to_pandas()
    except FileNotFoundError:
        raise HarnessError(f"{path} does not exist; give a launch table saved by `harness decompose --save`.") from None
    except Exception as error:
        raise HarnessError(
            f"{path} is not a readable Parquet launch table ({one_line(error)}); re-record it."
        ) from None
    table.attrs = {}
    if "shape" not in table and "smem_bytes" in table:  # saved before there was one
        table.insert(list(COLUMNS).index("shape"), "shape", pd.array([""] * len(table), dtype=COLUMNS["shape"]))
    table = check(table)
    for name in TEXTS:
        if (gone := table[name].isna()).any():
            raise HarnessError(
                f"{path}: row {int(gone.to_numpy().argmax())} has no {name!r}; the launch table is damaged, re-record it."
            )
    if unknown := sorted(set(table["class"].unique()) - set(FAMILIES) - set(ROLES) - {""}):
        raise HarnessError(
            f"{path}: {unknown[0]!r} is no class of this program ({len(unknown)} such); re-record the trace, or decompose it again."
        )
    try:
        described = json.loads((stored.schema.metadata or {}).get(b"PANDAS_ATTRS", b"{}")).get(_KEY)
        about = Saved.model_validate(described) if described is not None else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise HarnessError(f"{path}: its description is damaged ({where}: {first['msg']}); save it again.") from None
    except (ValueError, AttributeError) as error:
        raise HarnessError(f"{path}: its description is damaged ({one_line(error)}); save it again.") from None
    return table, about
