"""`harness round`: the ledger of rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from harness.commands._options import FILE, complete_round, json_option
from harness.errors import Exit, HarnessError


@click.group(short_help="The ledger of rounds.")
def command() -> None:
    """The ledger of rounds: what was tried, what it gave, when it is worth another look."""


@command.command(context_settings={"ignore_unknown_options": False}, short_help="Make a round without an A/B.")
@click.option("--meas-only", is_flag=True, help="A round that holds a decomposition and no lever.")
@click.option(
    "--analysis-negative",
    is_flag=True,
    help="A round that arithmetic decides: the class's roofline is too close for the bar.",
)
@click.option("--title", help="What the round is about.  [default: from the table]")
@click.option(
    "--from",
    "table_path",
    type=FILE,
    help="The decomposition's JSON.  [default: --meas-only measures now, --analysis-negative reads the newest]",
)
@click.option("--class", "cls", help="With --analysis-negative: the class that the lever would make faster.")
@click.option(
    "--claim", type=float, help="With --analysis-negative: the class's best speed-up, instead of its roofline."
)
@click.option(
    "--bar",
    type=click.FloatRange(0, 1, min_open=True),
    help="With --analysis-negative: the bar, as a fraction.  [default: landing's]",
)
@click.option("--hypothesis", default="", help="With --analysis-negative: what the lever would have done.")
@click.argument("decompose_args", nargs=-1, type=click.UNPROCESSED)
@json_option("the record as JSON")
def new(
    meas_only: bool, analysis_negative: bool, title: str | None, table_path: Path | None, cls: str | None, claim: float | None,
    bar: float | None, hypothesis: str, decompose_args: tuple[str, ...], json_path: str | None,
) -> int:  # fmt: skip
    """Make a round without an A/B (`harness ab` makes those that have one).

    With --meas-only and no --from, a decomposition is measured now; arguments after -- go to `harness decompose`.
    """
    from harness.attribution.decomposition import load_decomposition
    from harness.report.decomposition import titled
    from harness.report.rounds import render_round
    from harness.rounds import make
    from harness.rounds.tables import newest

    if meas_only == analysis_negative:
        raise click.UsageError(
            "give one of --meas-only and --analysis-negative; `harness ab` makes rounds with two arms."
        )
    if analysis_negative:
        if cls is None:
            raise click.UsageError("--analysis-negative needs --class, the class that the lever would make faster.")
        from harness.commands.queue import landing_bars

        source = table_path or newest().path
        path = make.analysis_negative(
            load_decomposition(source), str(source), cls, title or f"{cls} analysis", bar=bar or landing_bars()["landing"], claimed=claim,
            hypothesis=hypothesis,
        )  # fmt: skip
        status = Exit.DONE
    else:
        table = load_decomposition(table_path) if table_path else _decompose_now(decompose_args)
        name = title or f"decomposition of {titled(table)}" + (f" at {table.tokens} tokens" if table.tokens else "")
        path = make.measured_round(table, name)
        status = Exit.DONE if table.ok else Exit.CHECK_FAILED
    render_round(path)
    _tell(path, json_path)
    return status


def _decompose_now(arguments: tuple[str, ...]) -> Any:
    """Runs `harness decompose` in this process and reads what it wrote, also when one of its checks failed."""
    import tempfile

    from harness.attribution.decomposition import load_decomposition
    from harness.commands.decompose import command as decompose

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "decomposition.json"
        decompose.main([*arguments, "--json", str(file)], prog_name="harness decompose", standalone_mode=False)
        return load_decomposition(file)


@command.command()
@click.argument("number", shell_complete=complete_round)
@json_option("the record as JSON")
def show(number: str, json_path: str | None) -> int:
    """Print one round."""
    from harness.rounds.store import find_round

    _tell(find_round(number), json_path, whole=True)
    return Exit.DONE


def _tell(path: Path, json_path: str | None, *, whole: bool = False) -> None:
    """A round in a few lines, or its JSON."""
    from harness.commands.ab import print_gates
    from harness.files import emit_json
    from harness.report.table import print_table, say
    from harness.report.words import gigabytes, headline, ms, percent, span
    from harness.rounds.store import load_record

    record = load_record(path)
    if json_path:
        emit_json(record.to_json(), json_path)
    if json_path == "-":
        return
    say(f"{record.number} {record.title or record.slug}", "bold")
    say(headline(record))
    if whole:
        if record.superseded_by:
            say(f"superseded by round {record.superseded_by:04d}", "yellow")
        if record.diff:
            say()
            print_table(["key<", "A<", "B<"], [[d.key, str(d.before), str(d.after)] for d in record.diff])
        walls = [
            [f"{letter} {a.name}", str(a.wall.forwards), ms(a.wall.median_ms), ms(a.wall.mean_ms), ms(a.wall.p95_ms),
             f"{a.wall.spread:.2%}", gigabytes(a.device_memory_bytes)]
            for letter, a in sorted(record.arms.items()) if a.wall is not None
        ]  # fmt: skip
        if walls:
            say()
            print_table(
                ["arm<", "forwards", "median ms", "mean", "p95", "spread", "memory"],
                walls,
                drop=["forwards", "mean", "p95"],
            )
        if record.gates:
            say()
            print_gates(record.gates)
        if record.prediction is not None:
            say(f"predicted {percent(record.prediction)}, estimate {percent(record.estimate)} {span(record.interval)}")
        for warning in record.warnings:
            say(f"warning: {warning}", "yellow")
        for name, text in (("lessons", record.lessons), ("next step", record.next_step)):
            if text:
                say(f"{name}: {text}")
        for condition in record.retry_conditions:
            say(f"retry when: {condition}")
    say(str(path / "README.md"), "dim")


@command.command("list")
@json_option("the records as JSON")
def list_(json_path: str | None) -> int:
    """Print every round on a line."""
    from harness.files import emit_json
    from harness.report.index import control_of, counted, verdict_said, wall_after
    from harness.report.table import print_table, say
    from harness.report.words import gain_of, ms, percent, span
    from harness.rounds.store import load_record, round_dirs

    paths = round_dirs()
    records = [load_record(p) for p in paths]
    if json_path:
        emit_json({"schema": "rounds/1", "rounds": [r.to_json() for r in records]}, json_path)
    if json_path == "-":
        return Exit.DONE
    if not records:
        say("No round was run yet: `harness ab base.yaml lever.yaml` makes the first.")
        return Exit.DONE
    rows, styles = [], []
    for r, path in zip(records, paths, strict=True):
        gain = percent(gain_of(r)) if r.analysis is None else f"≤ {percent(r.analysis.best_gain)}"
        control = control_of(r)
        name = (r.title or r.slug) + (f" (superseded by {r.superseded_by:04d})" if r.superseded_by else "")
        rows.append(
            [
                r.number,
                name,
                verdict_said(r),
                gain,
                span(r.interval) if r.confirmed is None else "confirmed",
                ms(wall_after(r, path)),
            ]
        )
        styles.append(
            "strike dim"
            if r.superseded_by
            else "dim"
            if control
            else {"LANDED": "green", "REVERTED": "red", "INCONCLUSIVE": "yellow"}.get(r.verdict or "", "")
        )
    print_table(
        ["round<", "what<", "verdict<", "gain", "interval", "wall ms"],
        rows,
        styles=styles,
        drop=["interval", "wall ms"],
    )
    say(counted(records))
    return Exit.DONE


@command.command(short_help="Recompute rounds from their samples.")
@click.argument("numbers", nargs=-1, shell_complete=complete_round)
@json_option("what was found as JSON")
def verify(numbers: tuple[str, ...], json_path: str | None) -> int:
    """Recompute everything that a round concludes from its samples; without NUMBERS, every finished round.

    Exit status 6, and one sentence, when a figure, a file or the preregistration differs.
    """
    from harness.files import emit_json
    from harness.rounds.store import find_round, load_record, round_dirs
    from harness.rounds.verify import verify as check

    paths = [find_round(n) for n in numbers] or [p for p in round_dirs() if load_record(p).verdict is not None]
    found = {path.name: check(path) for path in paths}
    if json_path:
        emit_json(
            {"schema": "verify/1", "rounds": [{"round": n, "ok": not d, "differs": d} for n, d in found.items()]},
            json_path,
        )
    if json_path != "-":
        for path in paths:
            if not found[path.name]:
                timed = bool(load_record(path).samples_sha256)
                agreed = (
                    "every figure agrees with its samples"
                    if timed
                    else "no samples; its files are those it was closed with"
                )
                click.echo(f"{path.name}: {agreed}")
        if not found:
            click.echo("There is no finished round to verify.")
    wrong = {name: differs for name, differs in found.items() if differs}
    if wrong:
        said = "; ".join(
            f"round {name}: {differs[0]}" + (f" (and {len(differs) - 1} more)" if differs[1:] else "")
            for name, differs in wrong.items()
        )
        raise HarnessError(
            f"{said}; restore the files, or correct the round with `harness round correct`.",
            exit_status=Exit.CHECK_FAILED,
        )
    return Exit.DONE


@command.command(short_help="Write a round's lessons and conditions.")
@click.argument("number", shell_complete=complete_round)
@click.option("--lessons", help="What the next round should know.")
@click.option("--background", help="Why this round, and why now.")
@click.option(
    "--retry",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help='When to look again, such as "attention.share > 0.10"; may be repeated.',
)
@click.option("--keep-below-bar", metavar="REASON", help="Land a gain below the bar, for this written reason.")
def close(
    number: str, lessons: str | None, background: str | None, conditions: tuple[str, ...], keep_below_bar: str | None
) -> int:
    """Write a finished round's lessons and retry conditions."""
    from harness.report.rounds import render_round
    from harness.rounds.edits import absorb
    from harness.rounds.make import keep_below_bar as keep
    from harness.rounds.store import README, find_round, load_record, save_record

    path = find_round(number)
    record = load_record(path)
    if record.verdict is None:
        raise HarnessError(f"round {record.number} has no verdict yet; finish it with `harness ab --resume` first.")
    absorb(record, path / README)
    if keep_below_bar is not None:
        if not keep_below_bar.strip():
            raise HarnessError("--keep-below-bar needs its reason in words.")
        keep(record, keep_below_bar.strip())
    if lessons is not None:
        record.lessons = lessons
    if background is not None:
        record.background = background
    if conditions:
        record.retry_conditions = list(conditions)
    if not record.lessons:
        raise HarnessError(
            f"round {record.number} has no lessons yet; write them with --lessons, or in its README between the comments."
        )
    record.status = "closed"
    save_record(path, record)
    render_round(path, figures=keep_below_bar is not None, take_edits=False)
    _tell(path, None)
    return Exit.DONE


@command.command(short_help="Supersede a round's figure.")
@click.argument("number", shell_complete=complete_round)
@click.option("--by", shell_complete=complete_round, metavar="NUMBER", help="The later round whose figure takes over.")
@click.option("--why", required=True, help="What was wrong with the old figure.")
def correct(number: str, by: str | None, why: str) -> int:
    """Supersede a round's figure by a newer round's; the old one stays, struck through in the index.

    Without --by, a new round is made from the old one's samples by the rule as it stands.
    """
    from harness.report.index import render_index
    from harness.report.rounds import render_round
    from harness.rounds.make import correct_by, recompute

    old, new_path = correct_by(number, by, why) if by else recompute(number, why)
    render_round(old, figures=False, index=False)
    render_round(new_path, figures=False)
    render_index(new_path.parent.parent)
    _tell(new_path, None)
    return Exit.DONE


@command.command(short_help="Make what landed the new base.")
@click.argument("number", shell_complete=complete_round)
@click.option(
    "--base",
    type=FILE,
    default=Path("experiments/base.yaml"),
    show_default=True,
    help="The base arm's YAML, rewritten in place.",
)
def promote(number: str, base: Path) -> int:
    """Make a landed configuration the new base, and expire the tables that describe the old one."""
    from harness.report.rounds import render_round
    from harness.rounds.promote import promote as rewrite
    from harness.rounds.store import find_round, load_record, save_record

    path = find_round(number)
    record = load_record(path)
    changes = rewrite(record, base)
    save_record(path, record)
    render_round(path, figures=False)
    click.echo(f"{base}: " + ("; ".join(changes) or "already so"))
    click.echo("Tables of the old base have expired; `harness round new --meas-only` draws the next.")
    return Exit.DONE
