"""Which backend runs a model: CUDA where there is a GPU and the packages for it, the CPU otherwise."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Literal

from engine.backend import Engine, Progress
from engine.errors import EngineError
from engine.extras import install_line
from engine.extras import installed as _installed
from engine.levers import Levers
from engine.tensors import Model

Backend = Literal["auto", "cpu", "cuda"]

CUDA_PACKAGES = ("cupy", "cuda.core", "nvmath")


def open_engine(model: Model, levers: Levers, *, backend: Backend = "auto", progress: Progress | None = None) -> Engine:
    """A loaded engine on the backend that `choose` names. Raises EngineError as `choose` and as the backend's loading."""
    if choose(backend) == "cuda":
        from engine.cuda.run import CudaEngine

        return CudaEngine(model, levers, progress)
    from engine.cpu.run import CpuEngine

    return CpuEngine(model, levers, progress)


def choose(backend: Backend = "auto") -> Literal["cpu", "cuda"]:
    """The backend that `backend` means on this machine; nothing is loaded or compiled.

    `auto` is CUDA where a GPU and the CUDA packages are there. Raises EngineError where "cuda" is asked for and either
    is missing, and for a name that is no backend.
    """
    if backend not in ("auto", "cpu", "cuda"):
        raise EngineError(f"backend {backend!r} does not exist; use auto, cpu or cuda.")
    if backend == "cpu":
        return "cpu"
    missing = [name for name in CUDA_PACKAGES if not _installed(name)]
    gpu = gpu_available()
    if gpu and not missing:
        return "cuda"
    if backend == "auto":
        return "cpu"
    if missing:
        raise EngineError(
            f"backend 'cuda' needs {', '.join(missing)}, which this Python lacks; run {install_line('cuda')}."
        )
    raise EngineError(
        "backend 'cuda' finds no NVIDIA GPU that this process can use; check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or use backend 'cpu'."
    )


@cache
def gpu_available() -> bool:
    """True where the CUDA driver names at least one device visible to this process. Imports no CUDA package."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
