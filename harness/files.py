"""Writing so that nothing is lost: whole files through a temporary name, samples by append and fsync."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replaces `path` in one step: a reader, or a kill at any moment, sees the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    raw = data.encode() if isinstance(data, str) else data
    try:
        with part.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON object and a newline, and fsyncs: what returned is on disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def to_json(value: Any) -> str:
    """JSON as the project writes it: two spaces, keys in their order, no NaN."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def emit_json(value: Any, target: str) -> None:
    """The value of a `--json PATH` option: to the file, or to stdout for "-" (and then nothing else goes there)."""
    if target == "-":
        sys.stdout.write(to_json(value))
        sys.stdout.flush()
    else:
        write_atomic(Path(target), to_json(value))
