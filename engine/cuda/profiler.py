"""cudaProfilerStart and cudaProfilerStop: what `ncu --profile-from-start off` listens to."""

from __future__ import annotations

from engine.errors import EngineError


def start() -> None:
    """Profiling tools record from here on."""
    _call("cuProfilerStart")


def stop() -> None:
    """Profiling tools stop recording."""
    _call("cuProfilerStop")


def _call(name: str) -> None:
    from cuda.bindings import driver

    (status,) = getattr(driver, name)()
    if status != driver.CUresult.CUDA_SUCCESS:
        raise EngineError(f"{name} failed with {status.name}; is a CUDA context current in this process?")
