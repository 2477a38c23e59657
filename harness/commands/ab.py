"""`harness ab`: did the lever work?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands._options import FILE, complete_model, complete_round, json_option
from harness.errors import Exit

if TYPE_CHECKING:
    from harness.config import ArmConfig
    from harness.rounds.record import RoundRecord


@click.command(short_help="Did the lever work? Gates, then pairs.")
@click.argument("configs", nargs=-1, type=FILE)
@click.option("--aa", is_flag=True, help="Run BASE against itself: it should never land.")
@click.option("--basket", is_flag=True, help="BASE A B: base, A, B and A+B in one window (2 × 2), decided on A+B.")
@click.option(
    "--resume",
    shell_complete=complete_round,
    metavar="NNNN",
    help="Continue a round; its evidence is kept (another window multiplies it).",
)
@click.option("--protocol", default="landing", show_default=True, help="landing, landing-strict, or a YAML file.")
@click.option("--strict", is_flag=True, help="Short for --protocol landing-strict (bar 3 %, alpha 1 %).")
@click.option(
    "--tokens", type=click.IntRange(min=1), help="Tokens of the prefill, in both arms.  [default: the config's]"
)
@click.option(
    "--model", shell_complete=complete_model, help="A GGUF file or a preset, in both arms.  [default: the config's]"
)
@click.option("--regime", type=click.Choice(["burst", "sustained"]), help="[default: the protocol's, burst]")
@click.option(
    "--inner", type=click.IntRange(min=1), help="Timed forwards of a half (odd).  [default: calibrated, else 5]"
)
@click.option(
    "--statistic",
    type=click.Choice(["median", "midmean", "lower_quartile", "minimum"]),
    help="Of a half's forwards.  [default: calibrated, else median]",
)
@click.option("--max-pairs", type=click.IntRange(min=1), help="[default: the protocol's, 40]")
@click.option("--boots", type=click.IntRange(min=1), help="Processes per arm.  [default: a fresh one for every half]")
@click.option("--seed", type=int, help="Of the pair orders and the tokens.  [default: drawn, and recorded]")
@click.option("--title", default="", help="Title of the round's record.")
@click.option("--no-anchor", metavar="REASON", default="", help="Accept a base wall off its last record.")
@click.option("--land-sub-bar", metavar="REASON", default="", help="Keep a gain below the bar, if it is one.")
@click.option("--no-mechanism", is_flag=True, help="Leave out the traced passes; the record says so.")
@json_option('the record as JSON ("round/1")')
def command(
    configs: tuple[Path, ...], aa: bool, basket: bool, resume: str | None, protocol: str, strict: bool, tokens: int | None,
    model: str | None, regime: str | None, inner: int | None, statistic: str | None, max_pairs: int | None, boots: int | None,
    seed: int | None, title: str, no_anchor: str, land_sub_bar: str, no_mechanism: bool, json_path: str | None,
) -> int:  # fmt: skip
    """Gates, then interleaved pairs of BASE and LEVER until the landing rule decides: LANDED, REVERTED or INCONCLUSIVE.

    \b
    harness ab experiments/base.yaml \\
        experiments/levers/concat.yaml
    harness ab --aa experiments/base.yaml
    harness ab --basket experiments/base.yaml a.yaml b.yaml

    Every round leaves a record in reports/rounds/. Exit status: 0 LANDED, 2 REVERTED, 3 INCONCLUSIVE, 4 invalid window,
    5 a gate failed. Where the rule does not hold, and what to do about it: docs/landing.md.
    """
    if inner is not None and inner % 2 == 0:
        raise click.UsageError("--inner must be odd, so that a median is one of the forwards.")
    _count(configs, aa=aa, basket=basket, resume=resume is not None)
    from harness.ab.live import Live
    from harness.ab.start import Request, run
    from harness.files import emit_json
    from harness.rounds.store import find_round

    arms, paths, warnings = _arms(configs, aa=aa, basket=basket, resume=resume is not None, tokens=tokens, model=model)
    request = Request(
        arms=arms, protocol="landing-strict" if strict else protocol, aa=aa, regime=regime, statistic=statistic, inner=inner,
        max_pairs=max_pairs, boots=boots, seed=seed, title=title, no_anchor=no_anchor, land_sub_bar=land_sub_bar,
        with_mechanism=not no_mechanism, paths=paths, warnings=warnings,
    )  # fmt: skip
    with Live() as voice:
        path, record = run(request, resume=find_round(resume) if resume else None, voice=voice)
    from harness.report.rounds import render_round  # draws figures: not worth waiting for before the round

    render_round(path)
    if json_path != "-":
        _print(path, record)
    if json_path:
        emit_json(record.to_json(), json_path)
    return exit_status(record)


def _count(configs: tuple[Path, ...], *, aa: bool, basket: bool, resume: bool) -> None:
    """Usage error for a wrong number of configs."""
    if aa and basket:
        raise click.UsageError("--aa and --basket are two different rounds; choose one.")
    wanted = 1 if aa else 3 if basket else 2
    if len(configs) != wanted and not (resume and not configs):
        shape = (
            "--aa BASE" if aa else "--basket BASE A B" if basket else "BASE LEVER (or --aa BASE, or --basket BASE A B)"
        )
        raise click.UsageError(f"give {wanted} config file(s): harness ab {shape}.")


def _arms(
    configs: tuple[Path, ...], *, aa: bool, basket: bool, resume: bool, tokens: int | None, model: str | None
) -> tuple[dict[str, ArmConfig], dict[str, str], list[str]]:
    """The arms by letter, their paths, and notes for the record."""
    from harness.ab.start import basket as basket_arms
    from harness.config import load_arm

    if resume and not configs:
        return {}, {}, []
    changes: dict[str, Any] = {k: v for k, v in (("tokens", tokens), ("model", model)) if v is not None}
    loaded = [load_arm(path).model_copy(update=changes) for path in configs]
    notes = [f"{key} set to {value} on the command line, in every arm" for key, value in changes.items()]
    if aa:
        return {"A": loaded[0], "B": loaded[0]}, {"A": str(configs[0]), "B": str(configs[0])}, notes
    if basket:
        paths = {"A": str(configs[0]), "B": str(configs[0]), "C": str(configs[1]), "D": str(configs[2])}
        return basket_arms(*loaded), paths, notes
    return dict(zip("AB", loaded, strict=True)), dict(zip("AB", map(str, configs), strict=True)), notes


def exit_status(record: RoundRecord) -> int:
    """The exit status that a verdict has."""
    if record.outcome == "gate-failed":
        return Exit.GATE_FAILED
    return {
        "LANDED": Exit.DONE,
        "MEAS-ONLY": Exit.DONE,
        "REVERTED": Exit.REVERTED,
        "INCONCLUSIVE": Exit.INCONCLUSIVE,
        "INVALID": Exit.WINDOW_INVALID,
    }.get(record.verdict or "", Exit.ERROR)


def _print(path: Path, record: RoundRecord) -> None:
    """Arms, gates, walls and the verdict, for a person."""
    from harness.report.table import print_table, say
    from harness.report.words import gigabytes, headline

    if record.diff:
        say("The arms differ in")
        print_table(["key<", "A<", "B<"], [[d.key, _text(d.before), _text(d.after)] for d in record.diff])
        say()
    print_gates(record.gates)
    walls = [
        [letter, arm.name, f"{w.median_ms:.3f}", f"{w.mean_ms:.3f}", f"{w.p95_ms:.3f}", f"{w.spread:.2%}", gigabytes(arm.device_memory_bytes)]
        for letter, arm in sorted(record.arms.items())
        if (w := arm.wall) is not None
    ]  # fmt: skip
    if walls:
        say()
        print_table(
            ["arm<", "name<", "median ms", "mean", "p95", "spread", "memory"],
            walls,
            drop=["mean", "p95", "memory"],
        )
    if record.basket:
        say()
        effects = {
            record.arms["C"].name: record.basket.a,
            record.arms["D"].name: record.basket.b,
            "both": record.basket.both,
            "interaction": record.basket.interaction,
        }
        print_table(
            ["effect<", "estimate", "interval"],
            [
                [name, f"{e.estimate:+.2%}", f"[{e.interval[0]:+.2%}, {e.interval[1]:+.2%}]"]
                for name, e in effects.items()
            ],
        )
    say()
    for window in record.windows:
        if window.disturbed_by:
            say(f"window {window.window} was not quiet: {'; '.join(window.disturbed_by)}")
    for warning in record.warnings:
        say(f"warning: {warning}")
    for line in record.stderr_tail:
        say(f"  | {line}")
    say(headline(record))
    if record.reason:
        say(f"{record.outcome}: {record.reason}")
    if record.mechanism.detail:
        say(f"mechanism: {record.mechanism.found}. {record.mechanism.detail}")
    if record.next_step:
        say(f"next: {record.next_step}")
    say(f"record: {path}/README.md")


LONGEST_FIGURE = 9
"""Signs of a gate's value or limit that has a column; "every bit" is the longest."""


def print_gates(gates: Any) -> None:
    """One row per gate."""
    from harness.report.table import print_table

    words = {True: "passed", False: "FAILED", None: "n/a"}
    rows = []
    for g in gates:
        value, limit, detail = _figure(g.value), _figure(g.limit), g.detail
        if max(len(value), len(limit)) > LONGEST_FIGURE:  # a pattern, a name: words of the detail
            detail = "; ".join(filter(None, [value, limit and f"limit {limit}", detail]))
            value = limit = ""
        rows.append([g.name, words[g.ok], value, limit, detail])
    if rows:
        print_table(
            ["gate<", "result<", "value", "limit", "detail<"],
            rows,
            styles=["bold red" if g.ok is False else "" for g in gates],
        )


def _figure(value: float | str | None) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else value


def _text(value: Any) -> str:
    return "–" if value is None else str(value)
