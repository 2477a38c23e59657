"""What this machine offers to measure with, what is missing, and the command that installs it. Nothing here fails."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from engine.driver import installed_driver
from engine.extras import install_line
from harness.errors import HarnessError

State = Literal["ok", "missing", "warning", "absent"]
"""`missing`: a command installs it; `warning`: there, but it spoils figures; `absent`: not on this machine (no GPU)."""

COMPUTE_SANITIZER = ("usr/local/cuda*/bin/compute-sanitizer", "usr/local/cuda*/compute-sanitizer/compute-sanitizer",
                     "opt/nvidia/nsight-compute/*/compute-sanitizer/compute-sanitizer")  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One line of the examination."""

    area: str
    name: str
    state: State
    found: str
    fix: str = ""
    command: str = ""
    """What to paste into a shell; `fix` is for a person to read."""


def examine() -> list[Finding]:
    """Every finding, in reading order: host, GPU, Python packages, tools, where things are kept."""
    return [*_host(), *_gpu(), *_packages(), *_tools(), *_places()]


def to_dict(findings: list[Finding]) -> dict[str, Any]:
    """As `--json` writes it."""
    return {"schema": "doctor/1", "findings": [asdict(f) for f in findings]}


def _host() -> list[Finding]:
    from engine.cpu.run import cpu_name
    from engine.cpu.threads import Threads, usable_cores

    pool = Threads(1)
    blas = ", ".join(f"{b['name']} {b['version']} ({b['architecture']})" for b in pool.blas()) or "none found"
    pool.close()
    memory = psutil.virtual_memory()
    load = psutil.cpu_percent(interval=0.3) / 100
    return [
        Finding("host", "CPU", "ok", f"{cpu_name()}, {usable_cores()} usable cores"),
        Finding("host", "memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB available"),
        Finding("host", "BLAS", "ok", blas),
        Finding("host", "load", "ok" if load < 0.25 else "warning", f"{load:.0%} of all cores busy",
                "" if load < 0.25 else "wait for a quiet moment: figures taken now are slow and spread"),
        Finding("host", "Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
    ]  # fmt: skip


def _gpu() -> list[Finding]:
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        text = "no NVIDIA driver" if "Not Found" in str(error) else str(error)
        return [
            Finding(
                "GPU", "driver", "absent", text, "the CPU backend runs without one; for a GPU install NVIDIA's driver"
            )
        ]
    try:
        findings = [Finding("GPU", "driver", *_driver(nvml))]
        for index in range(nvml.nvmlDeviceGetCount()):
            findings += _device(nvml, index)
        return findings
    finally:
        nvml.nvmlShutdown()


def _driver(nvml: Any) -> tuple[State, str, str]:
    driver = installed_driver(nvml)
    return ("warning" if driver.too_old else "ok"), str(driver), driver.too_old


def _device(nvml: Any, index: int) -> list[Finding]:
    from harness.window.sentinel import Gpu, own_pids, throttle_names

    area = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu = Gpu(nvml, handle)
        state = gpu.sample()
    except nvml.NVMLError as error:
        return [
            Finding(area, "device", "warning", f"NVML does not answer for it: {error}", "nvidia-smi -L may say why")
        ]

    def ask(name: str, *args: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *args)
        except nvml.NVMLError:
            return None

    def told(value: Any) -> Any:
        return "?" if value is None else value

    memory, limit = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetEnforcedPowerLimit")
    major, minor = ask("nvmlDeviceGetCudaComputeCapability") or ("?", "?")
    findings = [
        Finding(
            area, "device", "ok",
            f"{gpu.name}, sm_{major}{minor}" + (f", {memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free" if memory else ""),
        ),
        Finding(
            area, "clocks", "ok",
            f"SM {told(state['sm_mhz'])} of {told(ask('nvmlDeviceGetMaxClockInfo', nvml.NVML_CLOCK_SM))} MHz, memory {told(state['mem_mhz'])} MHz",
        ),
        Finding(
            area, "power", "ok",
            f"{told(state['power_w'])} of {limit / 1e3 if limit else '?'} W, {told(state['temp_c'])} °C"
            + (f", throttled: {', '.join(names)}" if (names := throttle_names(state["throttle"])) else ""),
        ),
    ]  # fmt: skip
    pids = gpu.compute_pids()
    if pids is None:
        findings.append(
            Finding(area, "processes", "warning", "NVML lists none here", "foreign processes cannot be seen")
        )
    else:
        own = own_pids()
        foreign = gpu.foreign_pids(own, len(own) - 1)  # this process itself computes nothing on the GPU
        found = f"foreign compute processes {', '.join(map(str, foreign))}" if foreign else "nobody else computes here"
        findings.append(
            Finding(area, "processes", "warning" if foreign else "ok", found, "end them, or wait" if foreign else "")
        )
    return findings


def _packages() -> list[Finding]:
    """The extras: installed, and does each CUDA package find the libraries that it loads?"""
    on_gpu = {
        "CuPy": ("cupy-cuda13x", "cupy.cuda"),
        "cuda.core": ("cuda-core", "cuda.core"),
        "CUDA headers": ("nvidia-cuda-runtime", "cuda.pathfinder"),
        "cublasLt": ("nvmath-python", "nvmath.bindings.cublasLt"),
        "cuDNN": ("nvidia-cudnn-frontend", "cudnn"),
        "CUPTI": ("cupti-python", "cupti.cupti"),
        "NVTX": ("nvtx", ""),
    }
    anywhere = {"ncu-report": "ncu", "pyarrow": "parquet", "tokenizers": "tokenizer"}
    return [
        *(
            _package(name, distribution, install_line("cuda"), loader)
            for name, (distribution, loader) in on_gpu.items()
        ),
        *(_package(name, name, install_line(extra)) for name, extra in anywhere.items()),
    ]


def _package(name: str, distribution: str, command: str, loader: str = "") -> Finding:
    """loader: the import whose libraries are looked for, in a process of its own; "" for a package that has none."""
    try:
        version = metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return Finding("package", name, "missing", f"{distribution} is not installed", command=command)
    text = f"{distribution} {version}"
    if not loader:
        return Finding("package", name, "ok", text)
    from engine.cuda.libraries import examine

    found = examine(loader)
    if wrong := next((f for f in found if f.state == "missing"), None):
        what = wrong.library if wrong.library != "-" else loader
        return Finding("package", name, "missing", f"{text}, but not {what}: {wrong.path[:160]}", command=command)
    if waiting := [f.library for f in found if f.state == "found"]:
        text += f"; {', '.join(waiting)} found, to be loaded with a driver"
    return Finding("package", name, "ok", text)


def _tools() -> list[Finding]:
    from harness.sol.ncu import find_ncu
    from harness.sources.nsys_driver import find_nsys

    findings = [
        _tool("nsys", lambda: _nsys_text(find_nsys()), "apt-get install nsight-systems-cli"),
        _tool("ncu", lambda: str(find_ncu()), "apt-get install nsight-compute"),
        _tool("compute-sanitizer", _compute_sanitizer, "apt-get install cuda-sanitizer-13-0"),
    ]
    parameters = Path("/proc/driver/nvidia/params")
    if parameters.exists() and "RmProfilingAdminOnly: 1" in parameters.read_text() and os.geteuid() != 0:
        findings.append(
            Finding("tool", "counters", "warning", "the driver lets only root read performance counters",
                    "reboot after it", "echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf")
        )  # fmt: skip
    git = shutil.which("git")
    findings.append(
        Finding("tool", "git", "ok", git) if git
        else Finding("tool", "git", "missing", "records will name the installed version, no commit", command="apt-get install git")
    )  # fmt: skip
    return findings


def _tool(name: str, find: Callable[[], str], command: str) -> Finding:
    try:
        return Finding("tool", name, "ok", find())
    except HarnessError as error:
        return Finding(
            "tool", name, "missing", str(error).split(";")[0], "it is in NVIDIA's package repository", command
        )


def _nsys_text(nsys: Any) -> str:
    if not nsys.bundled:
        return str(nsys.nsys)
    return f"{nsys.nsys} (inside Nsight Compute, importer {'found' if nsys.importer else 'missing'})"


def _compute_sanitizer() -> str:
    on_path = shutil.which("compute-sanitizer")
    found = (
        [on_path] if on_path else sorted((str(p) for g in COMPUTE_SANITIZER for p in Path("/").glob(g)), reverse=True)
    )
    if not found:
        raise HarnessError("compute-sanitizer is not on PATH nor in CUDA's usual folders")
    return found[0]


def _places() -> list[Finding]:
    from engine.cache import cache_dir
    from harness.attribution.provenance import commit

    place = cache_dir()
    existing = next(p for p in (place, *place.parents) if p.exists())
    free = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK)
    return [
        Finding("place", "cache", "ok" if writable else "warning", f"{place}, {free:.1f} GB free",
                "" if writable else "set PREFILL_HARNESS_CACHE to a directory that you may write"),
        Finding("place", "engine", "ok", commit()),
    ]  # fmt: skip
