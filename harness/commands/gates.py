"""`harness gates`: does the lever still compute the same?"""

from __future__ import annotations

from pathlib import Path

import click

from harness.commands._options import FILE, complete_model, json_option
from harness.errors import Exit, HarnessError


@click.command(short_help="Does the lever still compute the same?")
@click.argument("base", type=FILE)
@click.argument("lever", type=FILE)
@click.option("--protocol", default="gates", show_default=True, help="Limits: a protocol's name or a YAML file.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the timed shape.  [default: the configs']")
@click.option("--model", shell_complete=complete_model, help="A GGUF file or a preset.  [default: the configs']")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random tokens.")
@json_option("the results as JSON")
def command(
    base: Path, lever: Path, protocol: str, tokens: int | None, model: str | None, seed: int, json_path: str | None
) -> int:
    """Runs every gate of LEVER against BASE, and times nothing: parity at the timed shape and against the CPU oracle, greedy
    identity on real weights, bitwise identity where it is claimed, determinism.

    A gate that does not apply says why and is never counted as passed. Exit status: 0 none failed, 5 one failed.
    """
    from harness.ab.live import Live
    from harness.ab.process import WorkerFailure
    from harness.ab.protocol import LandingProtocol
    from harness.ab.start import Request, opened_setup
    from harness.commands.ab import print_gates
    from harness.config import load_arm, load_protocol
    from harness.files import emit_json
    from harness.gates.suite import run_gates
    from harness.report.table import say

    changes = {key: value for key, value in (("tokens", tokens), ("model", model)) if value is not None}
    arms = {letter: load_arm(path).model_copy(update=changes) for letter, path in (("A", base), ("B", lever))}
    with Live() as voice:
        request = Request(arms=arms, gates=protocol)
        with opened_setup(request, load_protocol("landing", LandingProtocol), voice) as setup:
            try:
                report = run_gates(
                    arms["A"], arms["B"], launch=setup.launch, limits=setup.gates, seed=seed, say=voice.say
                )
            except WorkerFailure as failure:
                for line in failure.tail:
                    voice.say(f"  | {line}")
                raise HarnessError(f"the gates could not run: {failure}.") from None
    if json_path != "-":
        print_gates(report.gates)
        if report.failed:
            say(f"gate {report.failed.name!r} failed: {report.failed.detail}")
    if json_path:
        emit_json({"schema": "gates/1", "gates": [g.model_dump(mode="json") for g in report.gates]}, json_path)
    return Exit.GATE_FAILED if report.failed else Exit.DONE
