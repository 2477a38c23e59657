"""Nsight Compute: finds it, profiles chosen ops of our engine, reads `.ncu-rep` files (no GPU needed to read)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.extras import require
from harness.errors import HarnessError, last_words

SECTIONS = ("SpeedOfLight", "Occupancy", "LaunchStats", "WarpStateStats")
WORK_COUNTERS = {
    "warp_instructions": "smsp__inst_executed.sum",
    "dram_bytes": "dram__bytes.sum",
    "l2_bytes": "lts__t_bytes.sum",
    "shared_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
}
"""Counters that are worth reading per unit of work: ours → ncu's metric."""

_STALL = "smsp__average_warps_issue_stalled_"
_LIMITS = {
    "registers": "launch__occupancy_limit_registers",
    "shared memory": "launch__occupancy_limit_shared_mem",
    "warps": "launch__occupancy_limit_warps",
    "blocks": "launch__occupancy_limit_blocks",
    "barriers": "launch__occupancy_limit_barriers",
}
_INSTALL = "install Nsight Compute (`apt-get install nsight-compute`, or the CUDA toolkit) or set HARNESS_NCU"


@dataclass(frozen=True)
class Counters:
    """One profiled launch. Percentages are fractions of the sustained peak; None where the report holds no such metric."""

    kernel: str
    duration_ns: float
    memory_sol: float | None
    sm_sol: float | None
    dram_sol: float | None
    tensor_sol: float | None
    achieved_occupancy: float | None
    theoretical_occupancy: float | None
    registers: int
    smem_bytes: int
    blocks_per_sm: int
    limited_by: tuple[str, ...]  # what allows the fewest blocks on a multiprocessor
    grid: str
    block: str
    waves: float | None
    stalls: tuple[tuple[str, float], ...]  # (reason, mean warps stalled on it per issued instruction), largest first
    warp_instructions: float | None
    dram_bytes: float | None
    l2_bytes: float | None
    shared_wavefronts: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def find_ncu() -> Path:
    """`ncu` on PATH, else below CUDA's and Nsight Compute's usual folders; HARNESS_NCU names one by hand."""
    named = os.environ.get("HARNESS_NCU")
    if named:
        if not Path(named).is_file():
            raise HarnessError(f"HARNESS_NCU names {named}, which is no file; correct it or unset it.")
        return Path(named)
    on_path = shutil.which("ncu")
    if on_path:
        return Path(on_path)
    for pattern in ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu"):
        found = sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
        if found:
            return found[0]
    raise HarnessError(f"ncu is not on PATH nor in the usual folders; {_INSTALL}.")


def profile(spec: dict[str, Any], report: Path, *, timeout_s: float = 540) -> dict[str, Any]:
    """Runs `harness.sources.profiled_child` under ncu; leaves the `.ncu-rep` at `report`, returns the child's own report.

    Clocks are left as they are (`--clock-control none`); only the launches inside the spec's `profile_ops` are profiled.
    Caches are flushed before every replay (ncu's default), so DRAM bytes are those of a cold L2.
    """
    report.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".ncu-", dir=report.parent) as scratch:
        child_report = Path(scratch) / "child.json"
        spec_file = Path(scratch) / "spec.json"
        spec_file.write_text(json.dumps(spec | {"report": str(child_report)}))
        part = Path(scratch) / "report.ncu-rep"
        command = [str(find_ncu()), "--clock-control", "none", "--profile-from-start", "off", "--force-overwrite",
                   *(word for section in SECTIONS for word in ("--section", section)),
                   "--metrics", ",".join([*WORK_COUNTERS.values(), "gpu__time_duration.sum"]),
                   "--export", str(part), sys.executable, "-m", "harness.sources.profiled_child", str(spec_file)]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise HarnessError(
                f"ncu did not end within {timeout_s:.0f} s; profile fewer classes with --class."
            ) from None
        if done.returncode != 0 or not part.exists() or not child_report.exists():
            refused = "ERR_NVGPUCTRPERM" in done.stdout + done.stderr
            hint = "; see https://developer.nvidia.com/ERR_NVGPUCTRPERM" if refused else ""
            raise HarnessError(f"ncu ended with status {done.returncode}{hint}: {last_words(done.stdout, done.stderr)}")
        part.replace(report)
        return json.loads(child_report.read_text())


def reader() -> ModuleType:
    """NVIDIA's package that reads reports. Raises EngineError, with the line that brings it, where it is not installed."""
    return require("ncu_report", "ncu", "reading an .ncu-rep")


def read_report(path: Path) -> list[Counters]:
    """Every profiled launch of an `.ncu-rep`, in launch order.

    Raises HarnessError for a file that does not exist, is no report, is cut short, or holds no launches, and EngineError
    where NVIDIA's reader is not installed.
    """
    if not path.is_file():
        raise HarnessError(f"{path} does not exist; give an .ncu-rep written by `ncu --export`.")
    module = reader()
    try:
        context = module.load_report(str(path))
        actions = [action for i in range(context.num_ranges()) for action in context.range_by_idx(i)]
    except Exception as error:
        raise HarnessError(f"{path} cannot be read as an ncu report ({error}); record it again.") from None
    if not actions:
        raise HarnessError(
            f"{path} holds no profiled launch: it is no ncu report, or it was cut short; record it again."
        )
    return [_counters(action, path) for action in actions]


def _counters(action: Any, path: Path) -> Counters:
    def number(metric: str) -> float | None:
        value = action.metric_by_name(metric)
        return None if value is None else float(value.as_double())

    def fraction(metric: str) -> float | None:
        value = number(metric)
        return None if value is None else value / 100

    name = action.name(action.NameBase_DEMANGLED) or action.name()
    duration = number("gpu__time_duration.sum")
    if duration is None:
        raise HarnessError(
            f"{path} lacks gpu__time_duration for {name or 'its launch'}: the file was cut short, or was recorded without `--section SpeedOfLight`; record it again."
        )
    limits = {what: limit for what, metric in _LIMITS.items() if (limit := number(metric)) is not None}
    fewest = min(limits.values(), default=0)
    dims = [[int(number(f"launch__{kind}_dim_{axis}") or 0) for axis in "xyz"] for kind in ("grid", "block")]
    return Counters(
        kernel=name, duration_ns=duration,
        memory_sol=fraction("gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"),
        sm_sol=fraction("sm__throughput.avg.pct_of_peak_sustained_elapsed"),
        dram_sol=fraction("gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
        tensor_sol=fraction("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"),
        achieved_occupancy=fraction("sm__warps_active.avg.pct_of_peak_sustained_active"),
        theoretical_occupancy=fraction("sm__maximum_warps_per_active_cycle_pct"),
        registers=int(number("launch__registers_per_thread") or 0),
        smem_bytes=int(number("launch__shared_mem_per_block") or 0),
        blocks_per_sm=int(fewest), limited_by=tuple(what for what, limit in limits.items() if limit == fewest),
        grid=",".join(map(str, dims[0])), block=",".join(map(str, dims[1])),
        waves=number("launch__waves_per_multiprocessor"), stalls=_stalls(action),
        **{ours: number(metric) for ours, metric in WORK_COUNTERS.items()},
    )  # fmt: skip


def _stalls(action: Any, most: int = 3) -> tuple[tuple[str, float], ...]:
    """The top stall reasons, largest first; "selected" is issuing, not stalling."""
    found: dict[str, float] = {}
    for metric in action.metric_names():
        if metric.startswith(_STALL) and metric.endswith("_per_issue_active.ratio"):
            reason = metric.removeprefix(_STALL).removesuffix("_per_issue_active.ratio")
            if reason != "selected" and not reason.endswith("not_issued"):
                found[reason.replace("_", " ")] = float(action.metric_by_name(metric).as_double())
    return tuple(sorted(found.items(), key=lambda item: -item[1])[:most])


def combine(launches: Sequence[Counters]) -> Counters:
    """An op's launches as one: percentages of its longest launch, work counters and durations summed.

    A split-k GEMM and its reduction are one op's work; its bound is its main kernel's.
    """
    main = max(launches, key=lambda c: c.duration_ns)

    def total(field: str) -> float | None:
        values = [getattr(c, field) for c in launches]
        return None if any(v is None for v in values) else float(sum(values))

    sums: dict[str, Any] = {field: total(field) for field in ("duration_ns", *WORK_COUNTERS)}
    return replace(main, **sums)
