"""Optional packages: what needs one asks here, and a person reads which `pip install` line brings it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

from engine.errors import EngineError

NAME = "prefill-harness"
ROOT = Path(__file__).parents[1]


def installed(module: str) -> bool:
    """True where a module can be found; nothing is imported but its parents."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def require(module: str, extra: str, what: str) -> ModuleType:
    """The module, imported. Raises EngineError: what needs it, and the line that brings it."""
    if not installed(module):
        raise EngineError(f"{what} needs {module}, which is not installed; run {install_line(extra)}.")
    return import_module(module)


def install_line(extra: str) -> str:
    """The line that adds an extra to this installation, for a shell in the current directory.

    From a checkout or a wheel that is still there it names that; otherwise it names the extra's packages, which any
    index has.
    """
    path, editable = _origin()
    if path is None:
        targets = requirements(extra) or [f"{NAME}[{extra}]"]
    else:
        here = path == Path.cwd()
        targets = [f"{'.' if here else path}[{extra}]"]
    quoted = " ".join(
        f"'{target}'" if target.isprintable() and "'" not in target else shlex.quote(target) for target in targets
    )
    return f"{_pip()} install {'-e ' if editable else ''}{quoted}"


def requirements(extra: str, seen: frozenset[str] = frozenset()) -> list[str]:
    """An extra's packages with their bounds, as this installation's metadata has them; our extras in it are opened up."""
    found: list[str] = []
    for line in _requires():
        requirement, _, marker = line.partition(";")
        if not re.search(rf"extra\s*==\s*['\"]{re.escape(extra)}['\"]", marker):
            continue
        inner = re.fullmatch(rf"{NAME}\[([\w,\s-]+)\]", requirement.strip())
        if inner is None:
            found.append(requirement.strip())
            continue
        for name in re.split(r"\s*,\s*", inner[1]):
            if name not in seen:
                found += requirements(name, seen | {extra})
    return found


def _requires() -> list[str]:
    try:
        return metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return []


@cache
def _origin() -> tuple[Path | None, bool]:
    """(checkout or wheel that this was installed from, whether the code runs from it); (None, False) where it is gone."""
    if (ROOT / "pyproject.toml").is_file():
        return ROOT, True
    try:
        record = json.loads(metadata.distribution(NAME).read_text("direct_url.json") or "{}")  # PEP 610
        url = urlsplit(record.get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None, False
    path = Path(unquote(url.path))
    usable = url.scheme == "file" and (path.is_file() or (path / "pyproject.toml").is_file())
    return (path, False) if usable else (None, False)


def _pip() -> str:
    """`pip` where the shell's is this Python's, else this Python's own."""
    found = shutil.which("pip")
    if found and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    python = Path(sys.executable)
    shown = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return f"{shlex.quote(str(shown))} -m pip"
