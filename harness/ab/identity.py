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
    """Hash of everything that decides an arm's speed: config, engine's code, model, GEMM algorithms, device and driver.

    Two records with one identity must show one wall (to the anchor's 3 %). Cubins are left out: code, compiler and
    device imply them, and which ones a process happened to load differs between a first run and a cached one.
    """
    parts = {
        "config": config_sha256,
        "engine": engine_sha256() if "model_sha256" in described else None,
        "described": {k: v for k, v in flatten(what_decides(described)).items() if ".kernels." not in f".{k}."},
        "machine": machine,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def what_decides(described: Any) -> Any:
    """An engine's description without how a choice came about ("how": timed now, or read from the cache)."""
    if isinstance(described, dict):
        return {k: what_decides(v) for k, v in described.items() if k != "how"}
    return described


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; an empty mapping vanishes."""
    if not isinstance(value, dict):
        return {prefix: value}
    return {
        k: v
        for key, inner in value.items()
        for k, v in flatten(inner, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def drifted(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Dotted keys that both descriptions of one arm have, with different values: it is not the same arm any more."""
    old, new = flatten(what_decides(before)), flatten(what_decides(now))
    return sorted(key for key in old.keys() & new.keys() if old[key] != new[key])
