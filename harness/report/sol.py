"""The cross-check as a terminal table and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.titles import title
from harness.attribution.diff import short_name
from harness.report.table import print_table, say

if TYPE_CHECKING:
    from harness.sol.crosscheck import SolRow
    from harness.sol.ncu import Counters


def percent(value: float | None) -> str:
    """A fraction as a percentage, "–" where unknown."""
    return "–" if value is None else f"{value:.1%}"


def quantity(value: float | None) -> str:
    """A count with a decimal prefix: 5860000 → "5.86 M"."""
    if value is None:
        return "–"
    for size, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.3g}"


def print_rows(rows: Sequence[SolRow]) -> None:
    """Three small tables that fit 80 columns: time and bounds, resources, counters per GMAC; then the disagreements."""
    print_table(
        ["class<", "op<", "µs", "bound<", "SOL", "mem", "SM", "DRAM", "occ"],
        [[_label(r), r.op, f"{r.traced_us:.1f}", r.computed_bound, percent(r.computed_sol), percent(r.counted.memory_sol),
          percent(r.counted.sm_sol), percent(r.counted.dram_sol), percent(r.counted.achieved_occupancy)] for r in rows],
        drop=["op", "occ", "DRAM"],
    )  # fmt: skip
    say("SOL: floor by the ledger and the measured ceilings / traced time. mem, SM, DRAM, occ: counted by ncu.", "dim")
    say()
    print_table(
        ["class<", "regs", "smem KB", "blocks/SM", "waits on<"],
        [[_label(r), str(r.counted.registers), f"{r.counted.smem_bytes / 1024:.1f}", str(r.counted.blocks_per_sm), _stalls(r.counted)]
         for r in rows],
        drop=["blocks/SM", "smem KB"],
    )  # fmt: skip
    say()
    print_table(
        ["per GMAC<", "GMAC", "warp instr.", "DRAM B", "L2 B", "smem wavefr."],
        [[_label(r), f"{r.gmac:.3f}", *(quantity(r.per_gmac[k]) for k in _PER_GMAC)] for r in rows if r.gmac],
        drop=["smem wavefr.", "GMAC"],
    )  # fmt: skip
    for row in rows:
        for finding in row.findings:
            say(f"{_label(row)}: {finding}.")


HELD = "occupancy held to"
"""How a finding begins that is a limit of the launch, no disagreement."""

_PER_GMAC = ("warp_instructions", "dram_bytes", "l2_bytes", "shared_wavefronts")


AGREE = 0.10
"""Computed and counted SOL within 10 points of each other agree: one is of a measured ceiling, the other of a nominal peak."""

COLUMNS = (
    "`computed SOL` is the ledger's least time at the ceilings measured on this GPU, over the traced time; `memory SOL`, `SM SOL` and `DRAM` are "
    "ncu's percentages of each unit's nominal peak. Occupancy is resident warps over the most that fit. `waits on` is "
    "the mean number of warps stalled for that reason per issued instruction. Work is per GMAC (10⁹ multiply-accumulates): warp instructions, "
    "bytes of DRAM and of L2, shared-memory wavefronts; k, M and G are 10³, 10⁶ and 10⁹."
)


def conclusion(rows: Sequence[SolRow]) -> str:
    """What the page says, in three sentences: the first (longest) row, the widest distance in SOL, and in bytes."""
    top = rows[0]
    unit = {"compute": "SM", "memory": "memory"}
    said = f"{_label(top)} stands at {percent(top.computed_sol)} of its {top.computed_bound} roof"
    if top.counted_sol is not None:
        off = abs(top.counted_sol - top.computed_sol)
        verdict = "the counters agree" if off <= AGREE else f"the counters differ by {100 * off:.0f} points"
        said += f" and {verdict}: ncu counts {percent(top.counted_sol)} of the {unit[top.computed_bound]} peak"
    parts = [said]
    both = [(abs(r.counted_sol - r.computed_sol), r) for r in rows if r.counted_sol is not None]
    if both:
        close = sum(off <= AGREE for off, _ in both)
        off, widest = max(both, key=lambda pair: pair[0])
        parts.append(
            f"Of {len(both)} kernels {close} agree within {100 * AGREE:.0f} points; the largest disagreement is {_label(widest)}, "
            f"{percent(widest.computed_sol)} computed and {percent(widest.counted_sol)} counted"
        )
    moved = [(abs(r.bytes_off), r) for r in rows if r.bytes_off is not None]
    if moved:
        _, most = max(moved, key=lambda pair: pair[0])
        parts.append(
            f"In bytes it is {_label(most)}: DRAM moved {(most.counted.dram_bytes or 0) / 1e6:.1f} MB where the ledger counts "
            f"{most.ledger_bytes / 1e6:.1f} ({most.bytes_off:+.0%})"
        )
    return ". ".join(parts) + "."


def to_markdown(rows: Sequence[SolRow], about: dict[str, Any]) -> str:
    """The committed form: what it says, a table of bounds, one of resources and work, the disagreements, the provenance."""
    ceilings = about["ceilings"]
    lines = [
        f"# Speed of light, counted: {title(about['model'])}, {about['tokens']} tokens", "",
        f"**{conclusion(rows)}**", "",
        f"{about['device']}, {about['regime']} regime. Ceilings measured there: {ceilings['tflop_per_s']:.0f} TFLOP/s, "
        f"{ceilings['gb_per_s']:.0f} GB/s. One op per class (the median of the shape with most time), profiled by ncu with caches "
        "flushed and clocks as they are.", "",
        COLUMNS, "",
        "| class | op | shape | traced µs | ncu µs | computed bound | computed SOL | memory SOL | SM SOL | DRAM | occupancy |",
        "|---|---|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for r in rows:
        c = r.counted
        lines.append(
            f"| {_label(r)} | {r.op} | {r.shape} | {r.traced_us:.1f} | {c.duration_ns / 1e3:.1f} | {r.computed_bound} "
            f"| {percent(r.computed_sol)} | {percent(c.memory_sol)} | {percent(c.sm_sol)} | {percent(c.dram_sol)} "
            f"| {percent(c.achieved_occupancy)} |"
        )
    lines += [
        "", "| class | kernel | registers | smem KB | blocks/SM | held by | waits on | warp instr./GMAC | DRAM B/GMAC | L2 B/GMAC | smem wavefronts/GMAC |",
        "|---|---|--:|--:|--:|---|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for r in rows:
        c = r.counted
        work = " | ".join(quantity(r.per_gmac[k]) for k in _PER_GMAC)
        lines.append(
            f"| {_label(r)} | `{short_name(c.kernel)}` | {c.registers} | {c.smem_bytes / 1024:.1f} | {c.blocks_per_sm} "
            f"| {', '.join(c.limited_by) or '–'} | {_stalls(c)} | {work} |"
        )
    lines += ["", "## Where counters and ledger disagree", ""]
    held = [(r, f) for r in rows for f in r.findings if f.startswith(HELD)]
    said = [f"- **{_label(r)}**: {finding}." for r in rows for finding in r.findings if not finding.startswith(HELD)]
    lines += said or ["Nowhere beyond the tolerances."]
    if held:
        lines += [
            "",
            "## What holds occupancy",
            "",
            "The most that a launch's resources allow; `occupancy` above is what was achieved.",
            "",
        ]
        lines += [f"- **{_label(r)}**: {finding}." for r, finding in held]
    lines += ["", "## Provenance", ""]
    lines += [f"- {key}: {_plain(value)}" for key, value in about["provenance"].items()]
    return "\n".join(lines) + "\n"


def print_counters(counters: Sequence[Counters]) -> None:
    """What a report says by itself, where no plan is known."""
    print_table(
        ["µs", "mem", "SM", "DRAM", "occ", "regs", "blk/SM", "kernel…"],
        [[f"{c.duration_ns / 1e3:.1f}", percent(c.memory_sol), percent(c.sm_sol), percent(c.dram_sol),
          percent(c.achieved_occupancy), str(c.registers), str(c.blocks_per_sm), c.kernel] for c in counters],
        drop=["blk/SM", "regs", "occ", "DRAM"], short=short_name,
    )  # fmt: skip
    for c in counters:
        held = f"occupancy held by {' and '.join(c.limited_by)}" if c.limited_by else "occupancy limits not collected"
        say(
            f"{short_name(c.kernel)}: grid {c.grid}, block {c.block}, {c.smem_bytes / 1024:.1f} KB of shared memory; {held}; "
            f"waits on {_stalls(c)}."
        )


def counters_to_markdown(counters: Sequence[Counters], name: str, gmac: float | None) -> str:
    """What a report says by itself, one row per launch; `gmac` of each launch gives the work columns their unit."""
    per = "/GMAC" if gmac else ""
    lines = [
        f"# Counters of {name}", "",
        "| kernel | grid | block | µs | memory SOL | SM SOL | DRAM | occupancy | registers | smem KB | blocks/SM | held by | waits on "
        f"| warp instr.{per} | DRAM B{per} | L2 B{per} | smem wavefronts{per} |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|---|--:|--:|--:|--:|",
    ]  # fmt: skip
    for c in counters:
        counted = [getattr(c, key) for key in _PER_GMAC]
        work = " | ".join(quantity(None if v is None else v / (gmac or 1)) for v in counted)
        lines.append(
            f"| `{short_name(c.kernel)}` | {c.grid} | {c.block} | {c.duration_ns / 1e3:.1f} | {percent(c.memory_sol)} | {percent(c.sm_sol)} "
            f"| {percent(c.dram_sol)} | {percent(c.achieved_occupancy)} | {c.registers} | {c.smem_bytes / 1024:.1f} | {c.blocks_per_sm} "
            f"| {', '.join(c.limited_by) or '–'} | {_stalls(c)} | {work} |"
        )
    return "\n".join(lines) + "\n"


def _label(row: SolRow) -> str:
    return row.cls if row.weight_type == "-" else f"{row.cls} {row.weight_type}"


def _stalls(counters: Counters) -> str:
    return ", ".join(f"{reason} {ratio:.1f}" for reason, ratio in counters.stalls) or "not collected"


def _plain(value: Any) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
