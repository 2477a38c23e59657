"""The window's rules are blind to arms and walls; the sentinel works without a GPU and says what it cannot see."""

from __future__ import annotations

import inspect
import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness.config import load_protocol
from harness.window.rules import QuietWindow, disturbances, drop_reason
from harness.window.sentinel import SHORTEST_S, Gpu, Sentinel, nvml_handle, throttle_names

RULES = load_protocol("quiet-window", QuietWindow)


def forward(clock: float | None = 1965, throttle: int = 0x4) -> dict[str, Any]:
    return {"sm_mhz": clock, "throttle": throttle}


def test_the_software_power_cap_is_recorded_and_not_held_against_a_run() -> None:
    assert drop_reason([forward(throttle=0x4 | 0x1)], [], [], RULES) is None
    assert throttle_names(0x4 | 0x1) == ["sw_power_cap"]


@pytest.mark.parametrize(("bit", "name"), [(0x8, "hw_slowdown"), (0x40, "hw_thermal"), (0x80, "hw_power_brake")])
def test_hardware_throttling_in_any_forward_drops_the_half(bit: int, name: str) -> None:
    reason = drop_reason([forward(), forward(throttle=bit), forward()], [], [], RULES)
    assert reason is not None and name in reason


def test_a_foreign_process_drops_the_half() -> None:
    assert "4711" in (drop_reason([forward()], [4711], [], RULES) or "")


def test_a_clock_off_its_own_arms_running_median_drops_the_half() -> None:
    earlier = [1960.0, 1965.0, 1970.0]
    assert drop_reason([forward(1930)], [], earlier, RULES) is None
    assert "1395 MHz" in (drop_reason([forward(1395)], [], earlier, RULES) or "")
    assert drop_reason([forward(1395)], [], earlier[:2], RULES) is None, "two halves make no median"
    assert drop_reason([forward(None)], [], earlier, RULES) is None


def test_no_rule_can_see_a_wall_or_an_arm() -> None:
    assert set(inspect.signature(drop_reason).parameters) == {"forwards", "foreign", "earlier_clocks", "rules"}


def test_disturbances_are_named() -> None:
    quiet = {"host": {"foreign": 0.01}, "gpu": {"foreign": [], "utilization": 0.0, "throttle": 0x4}}
    assert disturbances(quiet, RULES, idle=True) == []
    loud = {"host": {"foreign": 0.9}, "gpu": {"foreign": [7], "utilization": 0.4, "throttle": 0x40}}
    assert len(disturbances(loud, RULES, idle=True)) == 4
    assert len(disturbances(loud, RULES, idle=False)) == 3


def test_without_nvml_the_sentinel_watches_the_host_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gpu, "open", classmethod(lambda cls, device=0: None))
    with Sentinel(0) as sentinel:
        snapshot = sentinel.snapshot()
        assert "gpu" not in snapshot and 0 <= snapshot["host"]["foreign"] <= 1
        assert sentinel.during(0, 1) == {} and sentinel.foreign_pids() == [] and sentinel.peak_memory_bytes() is None
    assert any("no NVML" in text for text in sentinel.unseen)
    assert Sentinel(None).unseen == []


class FakeNvml(SimpleNamespace):
    """As much of pynvml as a Gpu calls; two figures are refused, as containers do."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(self, pids: list[int]) -> None:
        super().__init__(pids=pids, clock=1965)

    def nvmlDeviceGetName(self, h: int) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetUUID(self, h: int) -> str:
        return "GPU-1"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.1"

    def nvmlDeviceGetClockInfo(self, h: int, kind: int) -> int:
        if kind == self.NVML_CLOCK_MEM:
            raise RuntimeError("not supported")
        return self.clock

    def nvmlDeviceGetPowerUsage(self, h: int) -> int:
        return 693000

    def nvmlDeviceGetTemperature(self, h: int, sensor: int) -> int:
        return 61

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, h: int) -> int:
        return 0x4

    def nvmlDeviceGetMemoryInfo(self, h: int) -> SimpleNamespace:
        return SimpleNamespace(used=5_000_000_000)

    def nvmlDeviceGetUtilizationRates(self, h: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetComputeRunningProcesses(self, h: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=p) for p in self.pids]


def test_a_missing_figure_is_none_and_the_others_are_there() -> None:
    sample = Gpu(FakeNvml([]), 0).sample()
    assert sample == {"sm_mhz": 1965, "mem_mhz": None, "power_w": 693.0, "temp_c": 61, "throttle": 4}


@pytest.mark.parametrize(
    ("listed", "own", "foreign"),
    [
        ([10, 11], {10}, [11]),
        ([10], {10, 99}, []),
        ([], {10}, []),
        ([70001], {10}, []),  # a container: one entry of another PID namespace is ours
        ([70001, 70002], {10}, [70001]),  # … and one too many is somebody's
    ],
)
def test_foreign_processes_in_and_out_of_containers(listed: list[int], own: set[int], foreign: list[int]) -> None:
    assert Gpu(FakeNvml(listed), 0).foreign_pids(own, 1) == foreign


def test_samples_are_charged_to_the_forward_that_they_fall_into(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml([])
    monkeypatch.setattr(Gpu, "open", classmethod(lambda cls, device=0: Gpu(nvml, 0)))
    with Sentinel(0, interval_s=0.002) as sentinel:
        start = time.perf_counter_ns()
        time.sleep(0.05)
        middle = time.perf_counter_ns()
        nvml.clock = 1395
        time.sleep(0.05)
        end = time.perf_counter_ns()
        first, second = sentinel.during(start, middle), sentinel.during(middle + 5_000_000, end)
    assert first["sm_mhz"] == 1965 and second["sm_mhz"] == pytest.approx(1395, abs=60)
    assert second["throttle"] == 4 and second["power_w"] == 693.0
    assert sentinel.during(end, end)["sm_mhz"] == 1395, "a forward shorter than the interval gets the nearest sample"


@pytest.mark.parametrize(("visible", "handle"), [("", 0), ("3,1", 3), ("GPU-7f", "GPU-7f")])
def test_the_gpu_that_is_watched_is_the_one_that_cuda_uses(
    monkeypatch: pytest.MonkeyPatch, visible: str, handle: int | str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = SimpleNamespace(nvmlDeviceGetHandleByIndex=lambda i: i, nvmlDeviceGetHandleByUUID=lambda u: u)
    assert nvml_handle(nvml, 0) == handle


def test_a_moment_too_short_for_the_kernels_ticks_says_nothing_of_the_host() -> None:
    sentinel = Sentinel(None)
    began = sentinel._host
    assert all(sentinel.host_load()["foreign"] == 0.0 for _ in range(3)), "no tick of somebody's can be a share here"
    assert sentinel._host is began, "and its time counts in the next answer"
    time.sleep(SHORTEST_S)
    load = sentinel.host_load()
    assert 0 <= load["foreign"] <= 1 and 0 <= load["own"] <= 1 and sentinel._host is not began
