"""Who may import whom, and how fast `--help` answers."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CUDA_PACKAGES = {"cupy", "cuda", "nvmath", "cupti", "cudnn"}
HELP_SECONDS = 0.3
SLACK = 2.0  # a CI machine with two shared cores is no laptop


def imports(file: Path, *, top_level: bool = False) -> Iterator[str]:
    """Modules that a file imports, lazily too unless `top_level`; those for the type checker alone are left out."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not (top_level and isinstance(node, ast.FunctionDef)):
            pending += ast.iter_child_nodes(node)


def files(*rooms: str) -> list[Path]:
    return [file for room in rooms for file in sorted((ROOT / room).rglob("*.py"))]


def test_the_engine_never_imports_the_harness() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in files("engine")
        for module in imports(file)
        if module.split(".")[0] == "harness"
    ]
    assert wrong == []


def test_cuda_packages_are_imported_in_two_places_only() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in files("engine", "harness")
        for module in imports(file)
        if module.split(".")[0] in CUDA_PACKAGES
        and ROOT / "engine" / "cuda" not in file.parents
        and file != ROOT / "harness" / "sources" / "cupti.py"
    ]
    assert wrong == []


def test_no_module_needs_a_cuda_package_to_be_imported() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {module}"
        for file in files("engine", "harness")
        for module in imports(file, top_level=True)
        if module.split(".")[0] in CUDA_PACKAGES
    ]
    assert wrong == []


@pytest.mark.parametrize("file", files("harness/commands"), ids=lambda file: file.stem)
def test_a_command_imports_nothing_heavy_before_it_runs(file: Path) -> None:
    light = {*sys.stdlib_module_names, "click"}
    heavy = [
        module
        for module in imports(file, top_level=True)
        if module.split(".")[0] not in light and module not in ("harness.errors", "harness.commands._options")
    ]
    assert heavy == []


def test_help_answers_at_once() -> None:
    """The best of five processes: how long the program takes, not how busy the machine is."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "harness.cli", "--help"], check=True, capture_output=True, cwd=ROOT)
        best = min(best, time.perf_counter() - start)
    assert best < HELP_SECONDS * SLACK, f"harness --help took {best:.2f} s"
