"""`harness sol`: is the roofline that the ledger predicts the one that the counters see?"""

from __future__ import annotations

import math
from pathlib import Path

import click

from harness.commands._options import FILE, complete_model, json_option, written_as
from harness.errors import Exit, HarnessError


@click.command(short_help="What bounds a class? Profile it with ncu.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the prefill.  [default: the config's, else 3325]")
@click.option(
    "--model",
    shell_complete=complete_model,
    help="A GGUF file or a geometry preset.  [default: the config's, else the machine's default]",
)
@click.option("--config", type=FILE, help="An arm's YAML (experiments/base.yaml).")
@click.option("--class", "classes", multiple=True, metavar="CLASS", help="Only these classes; may be repeated.")
@click.option("--regime", type=click.Choice(["burst", "sustained"]), default="burst", show_default=True)
@click.option("--ncu-rep", "report", type=FILE, help="Read this report instead; needs no GPU.")
@click.option(
    "--gmac",
    type=click.FloatRange(min=0, min_open=True),
    help="With --ncu-rep: GMAC of each launch, for counters per unit of work.",
)
@click.option(
    "--at-tokens", type=click.IntRange(min=1), help="With --ncu-rep: the token count that it was profiled at."
)
@click.option("--save", type=FILE, default=Path("sol.ncu-rep"), show_default=True, help="Where the .ncu-rep is left.")
@json_option("the rows as JSON")
@click.option(
    "--markdown", type=FILE, callback=written_as("Markdown", ".md", ".markdown"), help="Write them as Markdown."
)
def command(
    tokens: int | None, model: str | None, config: Path | None, classes: tuple[str, ...], regime: str, report: Path | None,
    gmac: float | None, at_tokens: int | None, save: Path, json_path: str | None, markdown: Path | None,
) -> int:  # fmt: skip
    """Profile one launch per class with ncu and compare it with the ledger's roofline.

    Picks the median launch of each class's main shape, counts what it did (memory, SM, occupancy, stalls, instructions and
    bytes per GMAC) and names where that disagrees with what was computed.
    """
    from harness.files import check_writable

    for path in (json_path, markdown):
        check_writable(path)
    if gmac is not None and not math.isfinite(gmac):
        raise click.BadParameter("must be a finite number of GMAC.", param_hint="--gmac")
    if report is not None:
        if classes or model or config:
            raise click.UsageError("--class, --model and --config do not go with --ncu-rep.")
        return _read(report, gmac, at_tokens, tokens, json_path, markdown)
    if gmac is not None or at_tokens is not None:
        raise click.UsageError("--gmac and --at-tokens go with --ncu-rep FILE.")
    from engine.levers import Levers
    from harness.attribution import provenance
    from harness.config import load_arm
    from harness.files import emit_json, write_atomic
    from harness.report.progress import Reporter
    from harness.report.sol import print_rows, to_markdown
    from harness.sol.run import cross_check

    arm = load_arm(config) if config else None
    if arm is not None and arm.engine.kind != "embedded":
        raise HarnessError(f"{config}: only the embedded engine is profiled class by class; profile {arm.engine.kind!r} with ncu and read it with --ncu-rep.")  # fmt: skip
    levers = Levers.from_dict(arm.levers if arm else {})
    chosen_model = model or (arm.model if arm else None)
    length = tokens or (arm.tokens if arm else 3325)
    with Reporter() as progress:
        rows, ceilings, child = cross_check(
            chosen_model, levers, length, report_path=save, classes=classes, regime=regime, progress=progress
        )
    state = provenance.gpu_state()
    about = {
        "schema": "sol/1", "model": child["model"], "tokens": length, "regime": regime,
        "device": str(state.get("gpu") or ceilings.device), "levers": levers.to_dict(),
        "ceilings": {"tflop_per_s": ceilings.tflop_per_s, "gb_per_s": ceilings.gb_per_s, "regime": ceilings.regime},
        "provenance": {"commit": provenance.commit(), **state, "report": save.name},
    }  # fmt: skip
    if json_path:
        emit_json(about | {"classes": [r.to_dict() for r in rows], "engine": child["engine"]}, json_path)
    if markdown:
        write_atomic(markdown, to_markdown(rows, about))
    if json_path != "-":
        print_rows(rows)
    return Exit.DONE


def _read(report: Path, gmac: float | None, at_tokens: int | None, tokens: int | None, json_path: str | None, markdown: Path | None) -> int:  # fmt: skip
    """An existing report: its counters, per GMAC where the work is known."""
    from harness.files import emit_json, write_atomic
    from harness.report.sol import counters_to_markdown, print_counters, quantity
    from harness.report.table import say
    from harness.sol.ncu import WORK_COUNTERS, read_report

    counters = read_report(report)
    diluted = at_tokens is not None and tokens is not None and at_tokens != tokens
    if json_path:
        rows = [c.to_dict() | ({"per_gmac": {k: v / gmac if (v := getattr(c, k)) is not None else None for k in WORK_COUNTERS}} if gmac else {}) for c in counters]  # fmt: skip
        emit_json({"schema": "sol/1", "report": report.name, "at_tokens": at_tokens, "launches": rows}, json_path)
    if markdown:
        write_atomic(markdown, counters_to_markdown(counters, report.name, gmac))
    if json_path != "-":
        print_counters(counters)
        if gmac:
            for c in counters:
                per = ", ".join(
                    f"{k.replace('_', ' ')} {quantity(None if getattr(c, k) is None else getattr(c, k) / gmac)}"
                    for k in WORK_COUNTERS
                )
                say(f"Per GMAC of {c.kernel.split('(')[0]}: {per}.")
        if diluted:
            say(f"Profiled at {at_tokens} tokens, asked about {tokens}: a launch's fixed cost weighs more at a short shape, so no ratio read here holds there.", "yellow")  # fmt: skip
    return Exit.DONE
