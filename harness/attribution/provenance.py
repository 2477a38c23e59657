"""What a figure was measured on: device, driver, clocks, commit, versions. Nothing here needs a GPU or git."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import engine
from harness.window.sentinel import nvml_handle


@cache
def commit() -> str:
    """The engine's commit ("-dirty" where tracked files differ), or the installed version outside a checkout.

    HARNESS_COMMIT says it where the tree was copied without its `.git`, as to a GPU machine.
    """
    if said := os.environ.get("HARNESS_COMMIT"):
        return said
    room = Path(engine.__file__).parent
    try:
        described = subprocess.run(
            ["git", "-C", str(room), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True, text=True, timeout=10, check=True,
        ).stdout.strip()  # fmt: skip
        tracked = subprocess.run(
            ["git", "-C", str(room), "ls-files", "--error-unmatch", "plan.py"], capture_output=True, timeout=10
        )
        if described and tracked.returncode == 0:
            return described
    except (OSError, subprocess.SubprocessError):
        pass
    try:
        return f"prefill-harness {metadata.version('prefill-harness')}"
    except metadata.PackageNotFoundError:
        return "unknown"


def gpu_state(device: int = 0) -> dict[str, Any]:
    """Of the GPU that CUDA calls `device`: name, driver, clocks (MHz), power (W) and temperature (°C), through NVML.

    Empty without NVML or a GPU.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        handle = nvml_handle(pynvml, device)

        def ask(function: Any, *args: Any) -> Any:
            try:
                value = function(handle, *args)
                return value.decode() if isinstance(value, bytes) else value
            except pynvml.NVMLError:
                return None

        driver = pynvml.nvmlSystemGetDriverVersion()
        power, limit = ask(pynvml.nvmlDeviceGetPowerUsage), ask(pynvml.nvmlDeviceGetEnforcedPowerLimit)
        return {
            "gpu": ask(pynvml.nvmlDeviceGetName),
            "driver": driver.decode() if isinstance(driver, bytes) else driver,
            "clocks": {
                "sm_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_SM),
                "sm_max_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, pynvml.NVML_CLOCK_SM),
                "memory_mhz": ask(pynvml.nvmlDeviceGetClockInfo, pynvml.NVML_CLOCK_MEM),
            },
            "power_w": power / 1e3 if power is not None else None,
            "power_limit_w": limit / 1e3 if limit is not None else None,
            "temperature_c": ask(pynvml.nvmlDeviceGetTemperature, pynvml.NVML_TEMPERATURE_GPU),
        }
    except pynvml.NVMLError:
        return {}
    finally:
        pynvml.nvmlShutdown()
