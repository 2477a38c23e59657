"""In a fresh environment, `[cuda]` brings every library that the engine and the sources load: no GPU and no driver needed.

nvmath and CUPTI ask the driver for its version before they load anything. A stand-in answers that one question, so that
their own loaders run, as they do on a GPU.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

STAND_IN = "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"


@pytest.fixture(scope="module")
def cuda(fresh: Callable, wheel: Path):  # type: ignore[no-untyped-def]  # an Environment
    environment = fresh("cuda")
    environment.pip("install", "--no-compile", f"{wheel}[cuda]")
    return environment


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1 that says CUDA 13.0 and nothing else."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "the stand-in for a driver needs a C compiler"
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(STAND_IN)
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "cuda.c"], cwd=folder, check=True)  # fmt: skip
    return folder


def rows(out: str) -> list[list[str]]:
    return [line.split(maxsplit=3) for line in out.splitlines()]


def test_every_loader_finds_its_libraries_in_this_environment(cuda, driver: Path) -> None:  # type: ignore[no-untyped-def]
    done = cuda.run("python", "-m", "engine.cuda.libraries", LD_LIBRARY_PATH=str(driver))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    for state, library, loader, *path in rows(done.stdout):
        if library == "-":
            assert state == "loaded", loader
        elif library == "libcuda.so.1":
            assert path == [str(driver / library)]
        else:
            assert state == "loaded", f"{library} through {loader}: {path}"
            assert cuda.folder in Path(path[0]).parents, f"{library} was found outside of the environment: {path[0]}"


def test_without_a_driver_the_libraries_are_found_and_what_is_not_loaded_says_so(cuda) -> None:  # type: ignore[no-untyped-def]
    done = cuda.run("python", "-m", "engine.cuda.libraries")
    found = {(library, loader): state for state, library, loader, *_ in rows(done.stdout)}
    assert done.returncode == 0, done.stdout
    if found["libcuda.so.1", "libcuda.so.1"] == "driver":
        assert found["libcublasLt.so.13", "nvmath.bindings.cublasLt"] == "found"


def test_a_library_that_an_extra_forgets_is_missed(cuda, driver: Path) -> None:  # type: ignore[no-untyped-def]
    """What the check is for: the same environment with one wheel taken away."""
    folder = cuda.site_packages / "nvidia" / "cu13" / "lib"
    hidden = folder.with_name("hidden")
    folder.rename(hidden)
    try:
        done = cuda.run("python", "-m", "engine.cuda.libraries", LD_LIBRARY_PATH=str(driver))
    finally:
        hidden.rename(folder)
    missing = {library for state, library, *_ in rows(done.stdout) if state == "missing"}
    assert done.returncode == 1 and "libcublasLt.so.13" in missing


def test_the_packages_of_the_extra_agree_with_one_another(cuda) -> None:  # type: ignore[no-untyped-def]
    done = cuda.run("python", "-m", "pip", "check")
    assert done.returncode == 0, done.stdout


def test_doctor_sees_what_is_there(cuda) -> None:  # type: ignore[no-untyped-def]
    import json

    done = cuda.run("harness", "doctor", "--json", "-")
    packages = {f["name"]: f for f in json.loads(done.stdout)["findings"] if f["area"] == "package"}
    assert {name for name, f in packages.items() if f["state"] != "ok"} == set(), packages
