"""Computed against counted: one representative op per class, its roofline from the ledger and its counters from ncu."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import pandas as pd

from engine.plan import Op, Plan
from harness.errors import HarnessError
from harness.sol.ncu import WORK_COUNTERS, Counters

BYTES_TOLERANCE = 0.25
"""Bytes that DRAM moved may differ from the ledger's by this fraction before it is named."""
BOUND_AT = 0.60
"""A launch below this fraction of both memory and SM peak is bound by neither: it waits (latency, occupancy, tail)."""
TIME_TOLERANCE = 0.25
"""ncu's duration may differ from the traced one by this fraction (replay, cold caches, clocks) before it is named."""


@dataclass(frozen=True)
class Representative:
    """The op that stands for a class: median duration within the shape that takes most of the class's time."""

    cls: str
    weight_type: str
    op: int
    traced_ns: int  # that op's launches, summed
    kernels: tuple[str, ...]  # their names, in order


@dataclass(frozen=True)
class SolRow:
    """A class's cross-check. Fractions are fractions; per-GMAC figures are None where the op has no MACs."""

    cls: str
    weight_type: str
    op: str
    shape: str
    traced_us: float
    gmac: float
    ledger_bytes: int
    computed_bound: Literal["compute", "memory"]
    computed_sol: float
    counted: Counters
    per_gmac: dict[str, float | None]
    findings: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with `class` for `cls`."""
        values = asdict(self)
        return {"class": values.pop("cls"), **values}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SolRow:
        """What `to_dict` gave, from JSON. Raises KeyError or TypeError where a field is missing or unknown."""
        rest = dict(values)
        counted = dict(rest.pop("counted"))
        counted["limited_by"] = tuple(counted["limited_by"])
        counted["stalls"] = tuple((reason, ratio) for reason, ratio in counted["stalls"])
        rest["findings"] = tuple(rest["findings"])
        return cls(cls=rest.pop("class"), counted=Counters(**counted), **rest)

    @property
    def counted_sol(self) -> float | None:
        """ncu's figure for the roof that the ledger names: of the SM's peak where compute bounds it, else of memory's."""
        return self.counted.sm_sol if self.computed_bound == "compute" else self.counted.memory_sol

    @property
    def bytes_off(self) -> float | None:
        """Bytes that DRAM moved over the ledger's, minus 1; None where either is unknown."""
        moved = self.counted.dram_bytes
        return moved / self.ledger_bytes - 1 if moved is not None and self.ledger_bytes else None


def representatives(launches: pd.DataFrame, plan: Plan) -> list[Representative]:
    """One op per (class, weight type) of a traced prefill, biggest class first.

    `launches` is a launch table whose kernels carry their op; copies and memsets have no counters and are left out.
    """
    kernels = launches[(launches["kind"] == "kernel") & launches["op"].notna()]
    if kernels.empty:
        raise HarnessError("the trace has no kernel that belongs to a plan op; trace the embedded CUDA engine.")
    per_op = (
        kernels.assign(ns=kernels["end_ns"] - kernels["start_ns"])
        .groupby("op")
        .agg(ns=("ns", "sum"), names=("name", tuple))
    )
    rows = []
    for index, ns, names in per_op.itertuples():
        op = plan.ops[int(index)]
        rows.append((op.cls, op.weight_type, (op.kind, op.m, op.n, op.k), int(index), int(ns), names))
    frame = pd.DataFrame(rows, columns=["cls", "weight_type", "shape", "op", "ns", "names"])
    chosen = []
    for (cls, weight_type), group in frame.groupby(["cls", "weight_type"], sort=False):
        by_shape = group.groupby("shape")["ns"].sum()
        main = group[group["shape"] == by_shape.idxmax()].sort_values("ns", kind="stable")
        row = main.iloc[len(main) // 2]
        chosen.append(
            (
                int(group["ns"].sum()),
                Representative(cls, weight_type, int(row["op"]), int(row["ns"]), tuple(row["names"])),
            )
        )
    return [r for _, r in sorted(chosen, key=lambda pair: -pair[0])]


def match(chosen: list[Representative], counted: list[Counters]) -> dict[int, list[Counters]]:
    """Op → its profiled launches: the report holds them in launch order, as many per op as the trace saw.

    Raises HarnessError when the profiled process ran other kernels than the traced one.
    """
    in_order = sorted(chosen, key=lambda r: r.op)
    expected = [(r.op, name) for r in in_order for name in r.kernels]
    if len(expected) != len(counted):
        raise HarnessError(f"ncu profiled {len(counted)} launches where the trace has {len(expected)} in the chosen ops; the process under ncu took another path, compare its levers.")  # fmt: skip
    found: dict[int, list[Counters]] = {}
    for (op, name), counters in zip(expected, counted, strict=True):
        if _stem(name) != _stem(counters.kernel):
            raise HarnessError(f"under ncu op {op} ran {_stem(counters.kernel)!r}, in the trace {_stem(name)!r}; the process under ncu took another path, compare its levers.")  # fmt: skip
        found.setdefault(op, []).append(counters)
    return found


def _stem(name: str) -> str:
    """A kernel's name without return type, namespaces, template and call arguments: tools print those differently."""
    head = name.split("<")[0].split("(")[0].strip()
    return head.split()[-1].split("::")[-1] if head else name


def check(
    op: Op,
    counted: Counters,
    *,
    traced_ns: float,
    compute_tflop_s: float,
    copy_gb_s: float,
    weight_type: str | None = None,
) -> SolRow:
    """The cross-check of one op.

    `compute_tflop_s` and `copy_gb_s` are ceilings measured on the machine in the regime of the trace; the roofline is
    max(2 · MACs / compute, bytes / bandwidth) (Williams, Waterman, Patterson 2009).
    """
    compute_ns = 2 * op.macs / (compute_tflop_s * 1e3)
    memory_ns = op.bytes / copy_gb_s
    gmac = op.macs / 1e9
    per_gmac = {f: (v / gmac if gmac and (v := getattr(counted, f)) is not None else None) for f in WORK_COUNTERS}
    row = SolRow(
        op.cls, weight_type or op.weight_type, op.name, f"{op.m} × {op.n}" + (f" × {op.k}" if op.k else ""), traced_ns / 1e3, gmac,
        op.bytes, "compute" if compute_ns >= memory_ns else "memory", max(compute_ns, memory_ns) / traced_ns, counted, per_gmac, (),
    )  # fmt: skip
    return replace(row, findings=tuple(findings(row)))


def findings(row: SolRow) -> list[str]:
    """Where the counters disagree with the ledger's roofline, or say what holds the kernel back."""
    counted, said = row.counted, []
    moved = row.bytes_off
    if moved is not None and abs(moved) > BYTES_TOLERANCE:
        why = "re-reads or spills" if moved > 0 else "part of it stays in L2 (writes are not flushed inside the launch)"
        said.append(
            f"DRAM moved {(counted.dram_bytes or 0) / 1e6:.1f} MB, the ledger counts {row.ledger_bytes / 1e6:.1f} ({moved:+.0%}): {why}"
        )
    if counted.memory_sol is not None and counted.sm_sol is not None:
        if max(counted.memory_sol, counted.sm_sol) < BOUND_AT:
            stall = f"; warps wait on {counted.stalls[0][0]}" if counted.stalls else ""
            said.append(f"neither memory- ({counted.memory_sol:.0%}) nor compute-bound ({counted.sm_sol:.0%}){stall}")
        counted_bound = "memory" if counted.memory_sol > counted.sm_sol else "compute"
        if counted_bound != row.computed_bound and max(counted.memory_sol, counted.sm_sol) >= BOUND_AT:
            said.append(f"the ledger says {row.computed_bound}-bound, the counters {counted_bound}-bound")
    if counted.theoretical_occupancy is not None and counted.theoretical_occupancy < 0.5 and counted.limited_by:
        blocks = f"{counted.blocks_per_sm} block{'s' if counted.blocks_per_sm != 1 else ''}/SM"
        said.append(
            f"occupancy held to {counted.theoretical_occupancy:.0%} ({blocks}) by {' and '.join(counted.limited_by)}"
        )
    off = counted.duration_ns / 1e3 / row.traced_us - 1
    if abs(off) > TIME_TOLERANCE:
        said.append(f"{counted.duration_ns / 1e3:.1f} µs under ncu, {row.traced_us:.1f} µs in the trace ({off:+.0%})")
    if row.computed_sol > 1.02:
        said.append(
            f"at {row.computed_sol:.0%} of its roofline it is faster than the measured ceiling allows: check that it does all its work"
        )
    return said
