"""Copies an nsys export without what identifies its machine: what attribution reads is kept, everything else stays behind.

An export holds the recording process's whole environment, its output, user and host names and the names of every process
of the machine, in a dozen tables that differ between versions. So nothing is deleted: a new file is filled with the
tables and the strings that attribution needs. In those (NVTX ranges and their JSON, the profiler's messages) user and host
names and all that `harness.privacy` knows are replaced; a kernel's name stays as it is.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from harness.errors import HarnessError
from harness.files import replacing
from harness.privacy import GONE, clean
from harness.sources.nsys import GRAPH, KERNEL, MEMCPY, MEMSET, OVERHEAD, PROFILER, RUNTIME, Export

KEPT = (
    KERNEL, MEMCPY, MEMSET, GRAPH, RUNTIME, OVERHEAD, PROFILER, "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION",
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT", "CUDA_GRAPH_NODE_EVENTS", "CUDA_GRAPH_EVENTS", "NVTX_EVENTS", "TARGET_INFO_GPU",
    "TARGET_INFO_CUDA_DEVICE", "ANALYSIS_DETAILS", "DIAGNOSTIC_EVENT",
)  # fmt: skip
"""Tables that are copied whole, in any version of their layout (_V2, _V3), beside the ENUM_* tables."""

META = re.compile(r"EXPORT_(PRODUCT|SCHEMA|PLATFORM|ARCH)")
"""Names of META_DATA_EXPORT rows that are kept."""

KERNEL_NAMES = ("demangledName", "shortName", "mangledName")
OTHER_NAMES = ("nameId", "textId", "jsonTextId")
"""Columns of kept tables that point into StringIds; no other string is copied."""

_IDENTITY_COLUMNS = ("uuid", "luid", "busLocation", "ctxswDevPath", "ctrlDevPath", "pwGpuId")
_HOLDERS = re.compile(
    r"(USER_NAME|WORKING_DIR|DISPLAY_NAME|EXPORT_USER|EXPORT_HOST|^Hostname$|^DeviceName$)", re.IGNORECASE
)
_VARIABLES = re.compile(r"^(USER|LOGNAME|USERNAME|HOSTNAME|HOST|SLURMD_NODENAME|SLURM_JOB_USER)=(.+)$")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=.*", re.DOTALL)  # a text that is one variable of an environment
_COMMON = {
    "root",
    "scrubbed",
    "localhost",
    "local",
    "user",
    "none",
    "unknown",
    "true",
    "false",
    "cuda",
    "host",
    "local (cli)",
}


@dataclass(frozen=True)
class Scrubbed:
    """What a scrub did."""

    tables: int
    strings: int  # of StringIds that were copied
    dropped_tables: int
    names: int  # user and host names that were looked for in the strings that stay


def scrub(source: Path, out: Path) -> Scrubbed:
    """Writes the export `source` (.sqlite or .nsys-rep) to `out` without its environment; `out` appears whole or not at all.

    `out` may be `source`. Raises HarnessError for a file that is no export.
    """
    with Export(source) as export, replacing(out) as part:
        part.unlink(missing_ok=True)
        try:
            return _copy(export, part)
        except sqlite3.Error as error:
            raise HarnessError(f"{source} cannot be scrubbed ({error}); export it again with `nsys export`.") from None


def _copy(export: Export, part: Path) -> Scrubbed:
    secrets = _secrets(export)
    db = sqlite3.connect(part.resolve().as_uri(), uri=True)
    try:
        db.execute("PRAGMA journal_mode = OFF")
        cleaned = lru_cache(maxsize=1 << 16)(partial(_clean, secrets=secrets))
        db.create_function("scrubbed", 1, cleaned, deterministic=True)
        db.execute("ATTACH DATABASE ? AS source", (f"{export.database.resolve().as_uri()}?mode=ro",))
        db.execute("BEGIN")
        enums = [
            r[0] for r in db.execute("SELECT name FROM source.sqlite_master WHERE type = 'table' AND name LIKE 'ENUM%'")
        ]
        kept = [t for t in export.columns if re.sub(r"_V\d+$", "", t) in KEPT]
        for table in [*kept, *enums]:
            _copy_table(db, table)
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if table in export.columns:
                _copy_meta(db, table)
        if "StringIds" in export.columns:
            _copy_strings(db, export, kept)
        db.commit()
        count = "SELECT count(*) FROM {}.sqlite_master WHERE type = 'table'"
        copied, had = (int(db.execute(count.format(name)).fetchone()[0]) for name in ("main", "source"))
        strings = (
            int(db.execute("SELECT count(*) FROM main.StringIds").fetchone()[0]) if "StringIds" in export.columns else 0
        )
        db.execute("DETACH DATABASE source")
        db.execute("VACUUM")
    finally:
        db.close()
    return Scrubbed(copied, strings, had - copied, len(secrets))


def _copy_table(db: sqlite3.Connection, table: str) -> None:
    _create(db, table)
    columns = [row[1] for row in db.execute(f'PRAGMA source.table_info("{table}")')]
    db.execute(f'INSERT INTO main."{table}" SELECT {", ".join(map(_expression, columns))} FROM source."{table}"')


def _copy_meta(db: sqlite3.Connection, table: str) -> None:
    _create(db, table)
    rows = db.execute(f"SELECT name, value FROM source.{table}").fetchall()
    db.executemany(f"INSERT INTO main.{table} (name, value) VALUES (?, ?)", [r for r in rows if META.match(str(r[0]))])


def _copy_strings(db: sqlite3.Connection, export: Export, tables: list[str]) -> None:
    """Strings that the kept tables point to. A kernel's name is what the trace is for, and stays as it is."""
    _create(db, "StringIds")
    for names, value in ((KERNEL_NAMES, "value"), (OTHER_NAMES, _expression("value"))):
        parts = [f'SELECT "{c}" FROM main."{t}"' for t in tables for c in names if c in export.columns[t]]
        if parts:
            db.execute(
                f"INSERT INTO main.StringIds (id, value) SELECT id, {value} FROM source.StringIds "
                f"WHERE id IN ({' UNION '.join(parts)}) AND id NOT IN (SELECT id FROM main.StringIds)"
            )


def _create(db: sqlite3.Connection, table: str) -> None:
    (create,) = db.execute(
        "SELECT sql FROM source.sqlite_master WHERE type = 'table' AND name = ?", (table,)
    ).fetchone()
    db.execute(create)


def _expression(column: str) -> str:
    """Text goes through `scrubbed`, as bytes, because it need not be UTF-8; what names one GPU or machine goes."""
    quoted = f'"{column}"'
    if column in _IDENTITY_COLUMNS:
        return f"CASE WHEN {quoted} IS NULL THEN NULL WHEN typeof({quoted}) = 'integer' THEN 0 ELSE '{GONE}' END"
    return f"CASE typeof({quoted}) WHEN 'text' THEN scrubbed(CAST({quoted} AS BLOB)) WHEN 'blob' THEN NULL ELSE {quoted} END"


def _clean(raw: bytes, secrets: list[re.Pattern[str]]) -> str:
    text = raw.decode("utf-8", "replace")
    if _VARIABLE.fullmatch(text):
        return GONE
    text = clean(text)
    for secret in secrets:
        text = secret.sub(GONE, text)
    return text


def _secrets(export: Export) -> list[re.Pattern[str]]:
    """User and host names that the export tells, as patterns for whole words."""
    found: set[str] = set()
    for table in ("META_DATA_CAPTURE", "META_DATA_EXPORT", "EXPORT_META_DATA", "TARGET_INFO_SYSTEM_ENV"):
        if {"name", "value"} <= set(export.columns.get(table, [])):
            for name, value in export.rows(f"SELECT name, value FROM {table}"):
                found |= _told(str(name), str(value))
    if "StringIds" in export.columns:
        for (value,) in export.rows("SELECT value FROM StringIds WHERE value LIKE '%=%' OR value LIKE '%/home/%'"):
            found |= _told("", str(value))
    words = sorted((w for w in found if len(w) >= 3 and w.lower() not in _COMMON), key=len, reverse=True)
    return [re.compile(rf"(?<![A-Za-z0-9]){re.escape(w)}(?![A-Za-z0-9])") for w in words]


def _told(name: str, value: str) -> set[str]:
    found: set[str] = set()
    for line in value.splitlines():
        if match := _VARIABLES.match(line.strip()):
            found.add(match.group(2).strip())
        found |= set(re.findall(r"/(?:home|Users)/([^/\s\"']+)", line))
    if _HOLDERS.search(name) and "/" not in value:
        found.add(value.strip())
    # A fully qualified host is also known by its first label.
    return found | {f.split(".")[0] for f in found if "." in f}
