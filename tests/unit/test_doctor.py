"""`harness doctor` on a machine with a GPU, through a stand-in for NVML."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness import doctor


class Nvml:
    """One H200 with some compute processes; what it is not asked for in a test raises as NVML does."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    def __init__(self, pids: list[int]) -> None:
        self.pids = pids

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, h: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, h: int) -> bytes:
        return b"GPU-0"

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.95"

    def nvmlDeviceGetClockInfo(self, h: int, which: int) -> int:
        return 1965 if which == self.NVML_CLOCK_SM else 3201

    def nvmlDeviceGetMaxClockInfo(self, h: int, which: int) -> int:
        return 1980

    def nvmlDeviceGetPowerUsage(self, h: int) -> int:
        return 75_000

    def nvmlDeviceGetEnforcedPowerLimit(self, h: int) -> int:
        return 700_000

    def nvmlDeviceGetTemperature(self, h: int, which: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, h: int) -> int:
        return 0x1

    def nvmlDeviceGetMemoryInfo(self, h: int) -> SimpleNamespace:
        return SimpleNamespace(used=1_000_000_000, free=149_000_000_000, total=150_000_000_000)

    def nvmlDeviceGetCudaComputeCapability(self, h: int) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetComputeRunningProcesses(self, h: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=p) for p in self.pids]


def findings(nvml: Any) -> dict[str, doctor.Finding]:
    return {f.name: f for f in doctor._device(nvml, 0)}


def test_a_gpu_is_named_with_its_memory_clocks_and_power() -> None:
    found = findings(Nvml([]))
    assert found["device"].found == "NVIDIA H200, sm_90, 149.0 of 150.0 GB free"
    assert "1965 of 1980 MHz" in found["clocks"].found
    assert found["power"].found == "75.0 of 700.0 W, 41 °C"


@pytest.mark.parametrize(("pids", "state"), [([], "ok"), ([2**22 + 1], "warning")])
def test_whoever_else_computes_there_is_named(pids: list[int], state: str) -> None:
    found = findings(Nvml(pids))["processes"]
    assert found.state == state and all(str(p) in found.found for p in pids)
