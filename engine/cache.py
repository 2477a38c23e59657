"""Where this program keeps what is costly to make again: fetched models, hashes, kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$PREFILL_HARNESS_CACHE, else $XDG_CACHE_HOME/prefill-harness, else ~/.cache/prefill-harness. It may not exist yet."""
    if own := os.environ.get("PREFILL_HARNESS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-harness"


def publish(path: Path, data: bytes) -> None:
    """Writes a cache file under its name in one step, so that two processes never read each other's half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
