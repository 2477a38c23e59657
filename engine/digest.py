"""SHA-256 of large files, remembered per (path, size, mtime): a 5 GB model is hashed once, not once per process."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from engine.cache import cache_dir


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    status = path.stat()
    identity = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    memo = cache_dir() / "sha256" / (hashlib.sha256(identity[0].encode()).hexdigest()[:32] + ".json")  # type: ignore[attr-defined]
    try:
        known = json.loads(memo.read_text())
        if known["identity"] == identity:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never hashed, or the memo is damaged: hash it
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _remember(memo, {"identity": identity, "sha256": digest})
    return digest


def _remember(memo: Path, value: dict[str, object]) -> None:
    """Best effort: a cache that cannot be written costs time, not correctness."""
    part = memo.with_name(f".{memo.name}.{os.getpid()}.part")
    try:
        memo.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(value))
        part.replace(memo)
    except OSError:
        part.unlink(missing_ok=True)
