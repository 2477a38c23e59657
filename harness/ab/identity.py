"""Identity by content: what a binary, a file or the engine *is*, not what it is called (a stale build has another hash)."""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def engine_sha256() -> str:
    """Of the embedded engine's sources: every .py, .cu and .cuh with its path."""
    import engine

    room = Path(engine.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(p for p in room.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h")):
        digest.update(f"{file.relative_to(room)}\0{sha256_of(file)}\n".encode())
    return digest.hexdigest()


def command_files(arm: dict[str, Any], directory: Path) -> dict[str, str]:
    """argv part → SHA-256, for the program and for every argument that is a file of at most 256 MB.

    A larger one (a model) is identified by its size and time of change.
    """
    found: dict[str, str] = {}
    for i, part in enumerate((*arm["engine"]["argv"], arm["model"] or "")):
        path = directory / part if part else None
        if i == 0 and "/" not in part and (on_path := shutil.which(part)):
            path = Path(on_path)
        if path is None or not path.is_file():
            continue
        status = path.stat()
        small = status.st_size <= 256 << 20
        found[part] = sha256_of(path) if small else f"size {status.st_size}, changed {status.st_mtime_ns}"
    return found


def arm_identity(config_sha256: str, described: dict[str, Any], machine: dict[str, Any]) -> str:
    """Hash of everything that decides an arm's speed: config, engine's code, model, kernels, device and driver.

    Two records with one identity must show one wall (to the anchor's 3 %).
    """
    parts = {
        "config": config_sha256,
        "engine": engine_sha256() if "model_sha256" in described else None,
        "described": described,
        "machine": machine,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
