"""The quiet-window sentinel: what the GPU and the host did while something was timed, sampled from another process.

It judges nothing by arm or by outcome. Without NVML it still watches the host, and says what it cannot see.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import psutil

THROTTLE_BITS = {
    0x0000000000000001: "idle",
    0x0000000000000002: "application_clocks",
    0x0000000000000004: "sw_power_cap",
    0x0000000000000008: "hw_slowdown",
    0x0000000000000010: "sync_boost",
    0x0000000000000020: "sw_thermal",
    0x0000000000000040: "hw_thermal",
    0x0000000000000080: "hw_power_brake",
    0x0000000000000100: "display_clocks",
}
"""nvmlClocksEventReason* bits by the names that the records use."""
SHORTEST_S = 0.1
"""The kernel counts CPU time in ticks of 10 ms: shares of a shorter time than this are noise."""


class Gpu:
    """One GPU through NVML. `open` returns None where there is no NVML or no GPU."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle
        self.name = _text(nvml.nvmlDeviceGetName(handle))
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.driver = _text(nvml.nvmlSystemGetDriverVersion())

    @classmethod
    def open(cls, device: int = 0) -> Gpu | None:
        """The GPU that CUDA calls `device`."""
        try:
            import pynvml as nvml

            nvml.nvmlInit()
            return cls(nvml, nvml_handle(nvml, device))
        except Exception:  # no library, no driver, no device: each is "cannot see", never a crash
            return None

    def _read(self, name: str, *args: Any) -> Any:
        try:
            return getattr(self._nvml, name)(self._handle, *args)
        except Exception:  # a figure that this GPU or container does not give
            return None

    def sample(self) -> dict[str, Any]:
        """sm_mhz, mem_mhz, power_w, temp_c, throttle (raw bits) at this moment; a missing figure is None."""
        power = self._read("nvmlDeviceGetPowerUsage")
        bits = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return {
            "sm_mhz": self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            "mem_mhz": self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            "power_w": None if power is None else power / 1000,
            "temp_c": self._read("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            "throttle": None if bits is None else int(bits),
        }

    def memory_used_bytes(self) -> int | None:
        """Device memory in use by everyone."""
        info = self._read("nvmlDeviceGetMemoryInfo")
        return None if info is None else int(info.used)

    def utilization(self) -> float | None:
        """Share of the last sampling period in which a kernel ran."""
        rates = self._read("nvmlDeviceGetUtilizationRates")
        return None if rates is None else rates.gpu / 100

    def compute_pids(self) -> set[int] | None:
        """Processes with a compute context, in NVML's own PID namespace."""
        processes = self._read("nvmlDeviceGetComputeRunningProcesses")
        return None if processes is None else {int(p.pid) for p in processes}

    def foreign_pids(self, own: set[int], expected: int) -> list[int]:
        """Compute processes that are not in `own`.

        Inside a container NVML may list PIDs of the host's namespace. Then none of `own` is in the list, and only its
        length can be judged: `expected` entries may be ours.
        """
        pids = self.compute_pids()
        if not pids:
            return []
        if own & pids:
            return sorted(pids - own)
        return sorted(pids)[: max(0, len(pids) - expected)]


def nvml_handle(nvml: Any, device: int) -> Any:
    """NVML's handle of the GPU that CUDA calls `device`: CUDA_VISIBLE_DEVICES picks among NVML's."""
    visible = [v.strip() for v in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if v.strip()]
    chosen = visible[device] if device < len(visible) else str(device)
    return nvml.nvmlDeviceGetHandleByIndex(int(chosen)) if chosen.isdigit() else nvml.nvmlDeviceGetHandleByUUID(chosen)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def throttle_names(bits: int | None) -> list[str]:
    """Names of the throttle bits that say more than "idle"."""
    return [name for bit, name in THROTTLE_BITS.items() if bits and bits & bit and name != "idle"]


@dataclass
class _HostClock:
    """CPU seconds spent by everyone and by our own processes, up to a moment."""

    at: float
    busy: float
    own: float

    @classmethod
    def now(cls) -> _HostClock:
        times = psutil.cpu_times()
        return cls(time.monotonic(), sum(times) - times.idle - getattr(times, "iowait", 0.0), _own_cpu_seconds())


def _own_cpu_seconds() -> float:
    """User and system seconds of this process and its descendants, the finished ones included."""
    me = psutil.Process()
    total = 0.0
    for process in (me, *me.children(recursive=True)):
        try:
            t = process.cpu_times()
        except psutil.Error:
            continue
        total += t.user + t.system + getattr(t, "children_user", 0.0) + getattr(t, "children_system", 0.0)
    return total


class Sentinel:
    """Samples in a thread while it is open; `snapshot` works opened or not.

    device: CUDA ordinal to watch, or None for the host alone. Times are `time.perf_counter_ns`, which on Linux is one
    clock for all processes, so a worker's own stamps index these samples.
    """

    def __init__(self, device: int | None = 0, *, interval_s: float = 0.02, keep_s: float = 900.0) -> None:
        self.gpu = Gpu.open(device) if device is not None else None
        self.unseen = []
        if device is not None and self.gpu is None:
            self.unseen.append("no NVML: clocks, power, temperature, throttling and foreign GPU processes are not seen")
        elif self.gpu is not None and self.gpu.compute_pids() is None:
            self.unseen.append("NVML lists no processes here: foreign GPU processes are not seen")
        self._interval_s, self._keep_ns = interval_s, int(keep_s * 1e9)
        self._samples: list[tuple[int, dict[str, Any]]] = []
        self._peak_memory: int = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._host = _HostClock.now()
        self._shares = {"foreign": 0.0, "own": 0.0}

    def __enter__(self) -> Sentinel:
        if self.gpu is not None:
            self._stop.clear()
            self._thread = threading.Thread(target=self._watch, name="sentinel", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        assert self.gpu is not None
        while not self._stop.wait(self._interval_s):
            stamp, sample = time.perf_counter_ns(), self.gpu.sample()
            memory = self.gpu.memory_used_bytes() or 0
            with self._lock:
                self._samples.append((stamp, sample))
                self._peak_memory = max(self._peak_memory, memory)
                if self._samples[0][0] < stamp - self._keep_ns:
                    self._samples = [s for s in self._samples if s[0] >= stamp - self._keep_ns // 2]

    def snapshot(self) -> dict[str, Any]:
        """The state now: GPU figures (where seen), and the host's load since the last snapshot."""
        state: dict[str, Any] = {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "host": self.host_load()}
        if self.gpu is not None:
            state["gpu"] = self.gpu.sample() | {
                "memory_used_bytes": self.gpu.memory_used_bytes(),
                "utilization": self.gpu.utilization(),
                "foreign": self.foreign_pids(),
            }
        return state

    def host_load(self) -> dict[str, float]:
        """Since the last call: shares of all cores used by others and by us, and the 1-minute load average.

        A call within SHORTEST_S of the last one repeats its shares; the time in between counts in the next.
        """
        now = _HostClock.now()
        elapsed = now.at - self._host.at
        if elapsed >= SHORTEST_S:
            before, self._host = self._host, now
            cores = (psutil.cpu_count() or 1) * elapsed
            own = min(max(now.own - before.own, 0.0) / cores, 1.0)
            busy = min(max(now.busy - before.busy, 0.0) / cores, 1.0)
            self._shares = {"foreign": round(max(busy - own, 0.0), 4), "own": round(own, 4)}
        return self._shares | {"load_1min": os.getloadavg()[0]}

    def during(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        """Over one forward: mean sm_mhz and power_w, highest temp_c, all throttle bits seen.

        A forward shorter than the sampling interval gets the sample nearest to its middle. Empty without NVML.
        """
        with self._lock:
            inside = [s for t, s in self._samples if start_ns <= t <= end_ns]
            if not inside and self._samples:
                middle = (start_ns + end_ns) // 2
                inside = [min(self._samples, key=lambda entry: abs(entry[0] - middle))[1]]
        if not inside:
            return {}

        def seen(key: str) -> list[float]:
            return [s[key] for s in inside if s[key] is not None]

        bits = 0
        for value in seen("throttle"):
            bits |= int(value)
        clocks, power, temperature = seen("sm_mhz"), seen("power_w"), seen("temp_c")
        return {
            "sm_mhz": sum(clocks) / len(clocks) if clocks else None,
            "power_w": round(sum(power) / len(power), 1) if power else None,
            "temp_c": max(temperature) if temperature else None,
            "throttle": bits,
        }

    def foreign_pids(self) -> list[int]:
        """Compute processes on the GPU that are neither this process nor its descendants; [] where not seen."""
        if self.gpu is None:
            return []
        own = own_pids()
        return self.gpu.foreign_pids(own, len(own) - 1)  # this process itself computes nothing on the GPU

    def peak_memory_bytes(self) -> int | None:
        """Highest device memory in use by everyone since the last call; None without NVML."""
        if self.gpu is None:
            return None
        with self._lock:
            peak, self._peak_memory = max(self._peak_memory, self.gpu.memory_used_bytes() or 0), 0
        return peak


def own_pids() -> set[int]:
    """This process and all its descendants."""
    me = psutil.Process()
    return {me.pid, *(child.pid for child in me.children(recursive=True))}
