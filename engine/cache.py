"""Where this program keeps what is costly to make again: fetched models, hashes, kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """$PREFILL_HARNESS_CACHE, else $XDG_CACHE_HOME/prefill-harness, else ~/.cache/prefill-harness. It may not exist yet."""
    if own := os.environ.get("PREFILL_HARNESS_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefill-harness"
