"""The NVIDIA driver that is here, and whether it is new enough for the CUDA libraries that the engine is built on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError

NEEDED_CUDA = (13, 0)
NEEDED_DRIVER = 580
"""The first driver branch of that CUDA version."""


@dataclass(frozen=True)
class Driver:
    """A driver's own version ("580.95.05") and the newest CUDA version that it runs, (13, 0)."""

    version: str
    cuda: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.version}, CUDA {self.cuda[0]}.{self.cuda[1]}"

    @property
    def too_old(self) -> str:
        """One sentence with the version that is here and the one that is needed; "" where the driver is new enough."""
        if self.cuda >= NEEDED_CUDA:
            return ""
        need = ".".join(map(str, NEEDED_CUDA))
        return (
            f"the NVIDIA driver {self.version} runs CUDA {self.cuda[0]}.{self.cuda[1]} and the CUDA backend needs "
            f"{need}; install driver {NEEDED_DRIVER} or newer, or use the CPU backend"
        )


def installed_driver(nvml: Any) -> Driver:
    """The driver that an initialised NVML speaks of. Raises NVML's own error."""
    version, cuda = nvml.nvmlSystemGetDriverVersion(), nvml.nvmlSystemGetCudaDriverVersion_v2()
    text = version.decode() if isinstance(version, bytes) else str(version)
    return Driver(text, (cuda // 1000, cuda % 1000 // 10))


def check_driver(nvml: Any = None) -> None:
    """Raises EngineError where the driver is older than the CUDA libraries need, before one of them fails on it.

    Says nothing where there is no NVML to ask: then whoever opens the device says what is missing.
    """
    if nvml is None:
        import pynvml

        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return
    try:
        driver = installed_driver(nvml)
    except nvml.NVMLError:
        return
    finally:
        nvml.nvmlShutdown()
    if driver.too_old:
        raise EngineError(f"{driver.too_old}.")
