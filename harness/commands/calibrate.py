"""`harness calibrate`: how noisy is this machine, and what can a round decide on it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from harness.commands._options import FILE, complete_model, json_option
from harness.errors import Exit

if TYPE_CHECKING:
    from harness.ab.calibration import Calibration


@click.command(short_help="How fine can this machine decide?")
@click.argument("base", type=FILE)
@click.option("--regime", type=click.Choice(["burst", "sustained", "both"]), default="both", show_default=True)
@click.option("--protocol", default="landing", show_default=True, help="landing, landing-strict, or a YAML file.")
@click.option("--pairs", type=click.IntRange(min=6), default=20, show_default=True, help="A/A pairs in each regime.")
@click.option(
    "--inner",
    type=click.IntRange(min=1),
    default=7,
    show_default=True,
    help="Forwards of a half to choose among (odd).",
)
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the prefill.  [default: the config's]")
@click.option("--model", shell_complete=complete_model, help="A GGUF file or a preset.  [default: the config's]")
@click.option("--planted/--no-planted", default=True, show_default=True, help="Check the chain on planted gains.")
@click.option("--boots", type=click.IntRange(min=1), help="Processes per arm.  [default: a fresh one for every half]")
@click.option("--seed", type=int, help="[default: drawn]")
@json_option("the calibrations as JSON")
def command(
    base: Path, regime: str, protocol: str, pairs: int, inner: int, tokens: int | None, model: str | None, planted: bool,
    boots: int | None, seed: int | None, json_path: str | None,
) -> int:  # fmt: skip
    """A/A pairs of BASE choose the half's statistic and `inner`, and give s0, the noise floor and the smallest gain that a
    round can decide; then gains of 0, bar - 0.5 %, bar + 0.5 % and bar + 1 % are planted and must be judged rightly.

    `harness ab` with the same BASE on this machine uses what was found. Exit status 6: a planted gain was judged wrongly.
    """
    from harness.ab.calibrate import calibrate
    from harness.ab.live import Live
    from harness.ab.protocol import LandingProtocol
    from harness.config import load_arm, load_protocol
    from harness.files import emit_json

    if inner % 2 == 0:
        raise click.UsageError("--inner must be odd, so that a median is one of the forwards.")
    changes = {key: value for key, value in (("tokens", tokens), ("model", model)) if value is not None}
    arm = load_arm(base).model_copy(update=changes)
    rules = load_protocol(protocol, LandingProtocol)
    with Live() as voice:
        found = [
            calibrate(arm, rules, each, name=protocol, pairs=pairs, inner=inner, planted=planted, boots=boots, seed=seed, voice=voice)
            for each in (("burst", "sustained") if regime == "both" else (regime,))
        ]  # fmt: skip
    if json_path != "-":
        for calibration in found:
            _print(calibration)
    if json_path:
        emit_json([c.model_dump(mode="json", by_alias=True) for c in found], json_path)
    wrong = any(row["as_it_should"] is False for c in found for row in c.planted)
    return Exit.CHECK_FAILED if wrong else Exit.DONE


def _print(calibration: Calibration) -> None:
    from harness.report.table import print_table, say
    from harness.report.words import percent, span

    c = calibration
    smallest = "nothing" if c.smallest_gain is None else f"{c.smallest_gain:.2%}"
    say(f"{c.regime}: {c.statistic} of {c.inner} forwards, pair sd s0 = {c.s0:.3%} over {c.pairs} A/A pairs")
    say(
        f"noise floor ± {c.noise_floor:.2%}; smallest gain decidable within {c.max_pairs} pairs at bar {c.bar:.1%}: {smallest}"
    )
    rows = [
        [str(k["inner"]), k["statistic"], f"{k['pair_sd']:.3%}"]
        for k in sorted(c.candidates, key=lambda k: k["pair_sd"])[:8]
    ]
    print_table(["inner", "statistic<", "pair sd"], rows)
    if c.planted:
        say()
        words = {True: "as it should", False: "WRONG", None: "invalid window"}
        print_table(
            ["planted", "label<", "verdict<", "estimate", "interval<", "pairs", "judged<"],
            [
                [f"{r['planted']:.2%}", r["label"], r["verdict"] or "–", percent(r["estimate"]), span(r["interval"]), str(r["pairs"]),
                 words[r["as_it_should"]]]
                for r in c.planted
            ],
            drop=["label", "pairs", "interval"],
        )  # fmt: skip
