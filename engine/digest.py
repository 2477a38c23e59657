"""SHA-256 of large files, remembered per (path, size, mtime): a 5 GB model is hashed once, not once per process."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from engine.cache import cache_dir, publish


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content, read now."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_sha256(path: Path) -> str:
    """The same, remembered for as long as the file keeps its size and time."""
    status = path.stat()
    identity = [str(path.resolve()), status.st_size, status.st_mtime_ns]
    memo = cache_dir() / "sha256" / (hashlib.sha256(identity[0].encode()).hexdigest()[:32] + ".json")  # type: ignore[attr-defined]
    try:
        known = json.loads(memo.read_text())
        if known["identity"] == identity:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never hashed, or the memo is damaged: hash it
    digest = sha256_of(path)
    with suppress(OSError):  # a cache that cannot be written costs time, not correctness
        publish(memo, json.dumps({"identity": identity, "sha256": digest}).encode())
    return digest
