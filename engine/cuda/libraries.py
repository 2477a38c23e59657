"""Every NVIDIA library that the engine and the sources load, by the import that loads it, and a proof that each is found.

`python -m engine.cuda.libraries` calls each loader as our code does, in a process of its own, and prints the file that
the dynamic linker mapped. Exit status 1 where one is missing. It needs no GPU. nvmath and CUPTI ask the driver for its
version before they load anything: without a driver, their libraries are looked for and loaded by `cuda.pathfinder`, not by
them, which the table says ("found"). CI shows them a stand-in for a driver that answers that one question.

A new CUDA import or `CDLL` in `engine/cuda` or `harness/sources` must be listed here: tests/unit/test_libraries.py reads both.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from engine.errors import EngineError

State = Literal["loaded", "found", "missing", "driver"]
"""loaded: by its own loader; found: on disk, where that loader will look; driver: absent, and no package brings it."""
PROBE_SECONDS = 120


def _nvrtc() -> None:
    from cuda.bindings import nvrtc

    nvrtc.nvrtcVersion()


def _cublaslt() -> None:
    from nvmath.bindings import cublasLt

    cublasLt.get_version()


def _cudnn() -> None:
    from engine.cuda import cudnn_attention

    cudnn_attention.version()


def _cupti() -> None:
    from cupti import cupti

    cupti.get_timestamp()


def _cupy() -> None:
    importlib.import_module("cupy.cuda")


def _cuda_core() -> None:
    from cuda.core import Program, ProgramOptions

    Program('extern "C" __global__ void empty() {}', "c++", ProgramOptions(arch="sm_90")).compile("cubin")


def _headers() -> None:
    from engine.cuda import jit

    jit.cuda_headers()


def _driver() -> None:
    ctypes.CDLL("libcuda.so.1")


def _driver_bindings() -> None:
    from cuda.bindings import driver

    driver.cuDriverGetVersion()


@dataclass(frozen=True)
class Loader:
    """An import of ours (or a library that we load by its name), and the libraries or headers that a call through it needs."""

    module: str
    libraries: tuple[str, ...]
    call: Callable[[], None]
    beside: tuple[str, ...] = ()
    """Libraries that the first one loads from its own directory when it needs them."""


LOADERS = (
    Loader("cupy.cuda", (), _cupy),  # its CUDA runtime is linked in; it loads the driver
    Loader("cuda.core", ("libnvrtc.so.13", "libnvrtc-builtins.so.13"), _cuda_core),
    Loader("cuda.bindings.nvrtc", ("libnvrtc.so.13",), _nvrtc),
    Loader("cuda.pathfinder", ("cuda_fp16.h", "crt/host_defines.h", "nv/target"), _headers),  # what kernels include
    Loader("nvmath.bindings.cublasLt", ("libcublasLt.so.13", "libnvJitLink.so.13"), _cublaslt),
    Loader("cudnn", ("libcudnn.so.9", "libcudnn_graph.so.9"), _cudnn, ("libcudnn_engines_runtime_compiled.so.9",)),
    Loader("cupti.cupti", ("libcupti.so.13",), _cupti),
    Loader("cuda.bindings.driver", ("libcuda.so.1",), _driver_bindings),
    Loader("libcuda.so.1", ("libcuda.so.1",), _driver),
)
DRIVER = ("libcuda.so.1",)
"""Of the driver: no package brings them."""
SYSTEM = ("libstdc++.so.6",)
"""Of the operating system, loaded by name for what they offer beside CUDA."""


@dataclass(frozen=True)
class Found:
    """One library through one loader. `path` is a file, or why there is none."""

    library: str
    loader: str
    state: State
    path: str


def probe(loader: Loader) -> list[Found]:
    """What a call through this loader maps into this process, which should have loaded nothing before."""
    reason = ""
    try:
        loader.call()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
    if not loader.libraries:
        return [Found("-", loader.module, "missing" if reason else "loaded", reason)]
    found = [_mapped(library, loader, reason) for library in loader.libraries]
    first = found[0]
    for library in loader.beside:
        path = Path(first.path).parent / library
        if first.state == "missing" or not path.is_file():
            found.append(Found(library, loader.module, "missing", f"not beside {first.library}"))
            continue
        try:
            ctypes.CDLL(str(path))
            state: State = "loaded"
        except OSError:
            state = "found"
        found.append(Found(library, loader.module, state, str(path)))
    return found


def _mapped(library: str, loader: Loader, reason: str) -> Found:
    if path := _in_memory(library) if ".so" in library else _header(library):
        return Found(library, loader.module, "found" if reason else "loaded", path)
    if library in DRIVER:
        return Found(library, loader.module, "driver", reason)
    if reason and not _driver_is_here():
        from cuda import pathfinder

        try:
            path = pathfinder.load_nvidia_dynamic_lib(library.removeprefix("lib").split(".so")[0]).abs_path
        except Exception as error:
            reason = " ".join(str(error).split())
        else:
            return Found(library, loader.module, "found", str(path))
    return Found(library, loader.module, "missing", reason or f"{loader.module} did not load it")


def _in_memory(library: str) -> str | None:
    """The file of a library that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        name = path.rpartition("/")[2]
        if name == library or name.startswith(f"{library}."):
            return f"/{path}"
    return None


def _header(name: str) -> str | None:
    """The file that `#include <name>` takes in a kernel of ours."""
    from engine.cuda import jit

    try:
        directories = jit.cuda_headers()
    except EngineError:
        return None
    return next((str(Path(d, name)) for d in directories if Path(d, name).is_file()), None)


def _driver_is_here() -> bool:
    try:
        _driver()
    except OSError:
        return False
    return True


def examine(module: str) -> list[Found]:
    """`probe` of the loader of that import, in a fresh process of this Python: a broken library may crash it."""
    command = [sys.executable, "-m", "engine.cuda.libraries", "--probe", module]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return [Found("-", module, "missing", f"it takes more than {PROBE_SECONDS} s")]
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return [Found("-", module, "missing", said)]
    return [Found(**entry) for entry in json.loads(done.stdout.splitlines()[-1])]


def loader_of(module: str) -> Loader:
    """The loader of an import. Raises EngineError for one that is not listed."""
    for loader in LOADERS:
        if loader.module == module:
            return loader
    raise EngineError(f"{module} loads no library that is listed; give one of {', '.join(x.module for x in LOADERS)}.")


def main() -> int:
    """Prints where every library was found. Exit status 1 where one is missing."""
    parser = argparse.ArgumentParser(prog="python -m engine.cuda.libraries", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--probe", metavar="MODULE", help="one loader, in this process, as JSON")
    one = parser.parse_args().probe
    if one:
        print(json.dumps([asdict(f) for f in probe(loader_of(one))]))
        return 0
    missing = False
    for loader in LOADERS:
        for found in examine(loader.module):
            missing |= found.state == "missing"
            print(f"{found.state:8} {found.library:38} {found.loader:24} {found.path}")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main())
