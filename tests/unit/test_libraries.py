"""The list of libraries that are loaded is complete: every CUDA import and every library opened by name is in it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from engine.cuda import libraries
from engine.cuda.libraries import DRIVER, LOADERS, SYSTEM, Loader, probe
from engine.errors import EngineError
from engine.extras import NAME, requirements

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "engine" / "cuda").glob("*.py")), *sorted((ROOT / "harness" / "sources").glob("*.py"))]


def loaded_by(file: Path) -> set[str]:
    """Dotted modules that a file imports, and sonames that it opens."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "CDLL":
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


def test_every_import_that_the_base_lacks_and_every_soname_is_listed() -> None:
    owners = metadata.packages_distributions()
    base = {
        re.split(r"[\s<>=!~;\[]", line)[0].lower() for line in metadata.requires(NAME) or [] if "extra ==" not in line
    }
    base |= {"pyarrow", "nvtx"}  # other extras' own
    listed = {loader.module for loader in LOADERS}
    used: set[str] = set()
    for file in SOURCES:
        for name in loaded_by(file):
            top = name.split(".")[0]
            ours = top in ("engine", "harness", "protocols") or top in sys.stdlib_module_names
            if ours or name in SYSTEM or any(owner.lower() in base for owner in owners.get(top, [])):
                continue
            loader = next((m for m in listed if f"{name}.".startswith(f"{m}.") or m.startswith(f"{name}.")), None)
            assert loader, f"{file.relative_to(ROOT)} loads {name}, which engine/cuda/libraries.py does not list"
            if file.name != "libraries.py":
                used.add(loader)
    assert used == listed, f"listed and loaded by nobody: {listed - used}"


def test_a_library_that_is_not_there_is_missing_and_never_loaded() -> None:
    def fails() -> None:
        raise RuntimeError("no such\nthing")

    absent = Loader("x", ("libnothing-of-the-kind.so.1",), fails, ("libother.so",))
    first, beside = probe(absent)
    assert (first.state, beside.state) == ("missing", "missing")
    assert first.path and "\n" not in first.path
    silent = Loader("x", ("libnothing-of-the-kind.so.1",), lambda: None)
    assert [f.state for f in probe(silent)] == ["missing"], "a loader that loads something else is no proof"


def test_a_library_that_was_mapped_is_named_by_its_file() -> None:
    (found,) = probe(Loader("python", ("libc.so.6",), lambda: None))
    assert found.state == "loaded" and Path(found.path).is_file()


def test_a_package_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's row has no library of its own to map, so that its import is the proof."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    (found,) = probe(next(loader for loader in LOADERS if loader.module == "cupy.cuda"))
    assert found.state == "missing" and "cupy" in found.path


def test_an_unknown_loader_is_told() -> None:
    with pytest.raises(EngineError, match=r"cufft .* nvmath\.bindings\.cublasLt"):
        libraries.loader_of("cufft")


def test_the_command_exits_1_where_a_library_is_missing() -> None:
    """This environment compiles kernels; unless it has a GPU, it lacks cuDNN."""
    done = subprocess.run([sys.executable, "-m", "engine.cuda.libraries"], capture_output=True, text=True, cwd=ROOT)
    lines = {tuple(line.split()[:3]) for line in done.stdout.splitlines()}
    assert {library for _, library, _ in lines} >= set(DRIVER)
    assert done.returncode == any(state == "missing" for state, *_ in lines), done.stderr
    if not any(row[0] == "loaded" and row[2] == "cuda.core" for row in lines if len(row) == 3):
        pytest.skip("the extra `compile` is not installed: nothing compiles kernels here")
    assert ("loaded", "libnvrtc.so.13", "cuda.core") in lines


def test_libraries_of_cuda_are_bounded_to_its_major_version() -> None:
    for line in requirements("cuda"):
        if re.match(r"(cuda-toolkit|cuda-bindings|cupti|cupy-cuda|nvidia-cu)", line):
            assert "==" in line or "<" in line, f"{line} has no upper bound"
