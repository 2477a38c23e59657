"""`harness doctor`: what this machine offers, what is missing, and the command that installs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from harness.commands._options import json_option
from harness.errors import Exit

if TYPE_CHECKING:
    from harness.attribution.roofline import Ceilings


@click.command(short_help="What is here, what is missing, what installs it.")
@click.option("--ceilings", is_flag=True, help="Also measure this machine's ceilings (GEMM, memory) and cache them.")
@click.option(
    "--regime",
    type=click.Choice(["burst", "sustained", "both"]),
    default="both",
    show_default=True,
    help="With --ceilings: the regime to measure in.",
)
@click.option(
    "--backend",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="With --ceilings: what to measure.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    default=0,
    help="With --ceilings on the CPU: threads.  [default: every core]",
)
@json_option("the findings as JSON")
def command(ceilings: bool, regime: str, backend: str, threads: int, json_path: str | None) -> int:  # fmt: skip
    """Examine the machine: GPU, driver, packages, profilers, clocks, who else computes here.

    Always exits 0: a missing GPU or profiler is a finding. Ceilings are measured here, never read from a datasheet, and
    kept per device and driver; `harness decompose` measures them itself where they are not there yet.
    """
    from harness import doctor
    from harness.files import emit_json

    findings = doctor.examine()
    measured = _ceilings(regime, backend, threads) if ceilings else []
    if json_path:
        emit_json(doctor.to_dict(findings) | {"ceilings": [c.to_dict() for c in measured]}, json_path)
    if json_path != "-":
        _print(findings, measured)
    return Exit.DONE


def _ceilings(regime: str, backend: Any, threads: int) -> list[Ceilings]:
    from engine.open import choose
    from harness.attribution.roofline import ceilings_for
    from harness.report.progress import Reporter

    chosen = choose(backend)
    regimes = ["burst", "sustained"] if regime == "both" else [regime]
    with Reporter() as report:
        return [ceilings_for(chosen, r, threads=threads, report=report, fresh=True) for r in regimes]


def _print(findings: list[Any], measured: list[Ceilings]) -> None:
    from rich.text import Text

    from harness.report.decomposition import figure
    from harness.report.table import paste, print_table, say

    styles = {"ok": "green", "missing": "yellow", "warning": "bold yellow", "absent": "dim"}
    rows: list[list[Text]] = []
    commands: dict[str, list[str]] = {}
    area = ""
    for f in findings:
        head = Text(f.area if f.area != area else "", style="bold")
        text = f"{f.found}; {f.fix}" if f.fix else f.found
        rows.append([head, Text(f.name), Text(f.state, style=styles[f.state]), Text(text)])
        if f.command:
            commands.setdefault(f.command, []).append(f.name)
        area = f.area
    print_table(["<", "<", "<", "<"], rows)
    for line, names in commands.items():
        say(f"\n{', '.join(names)}:")
        paste(line)
    for c in measured:
        shape = max(c.gemm, key=lambda g: g["tflop_per_s"])
        say(
            f"ceilings ({c.regime}) on {c.device}: {c.precision} GEMM {figure(c.tflop_per_s)} TFLOP/s "
            f"(at {shape['m']:.0f} × {shape['n']:.0f} × {shape['k']:.0f}), memory {figure(c.gb_per_s)} GB/s read + written, "
            f"from cache {figure(c.cache_gb_per_s)} GB/s"
        )
