"""`harness decompose`: where does the wall of a prefill go?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands._options import (
    FILE,
    FOLDER,
    TAIL,
    complete_lever,
    complete_model,
    json_option,
    lever_values,
    written_as,
)
from harness.errors import Exit, HarnessError

if TYPE_CHECKING:
    import pandas as pd

    from harness.attribution.decompose import Decomposition
    from harness.launches import Saved


@click.command(short_help="Where does the wall of a prefill go?")
@click.argument("file", required=False, type=FILE)
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens of the prefill.  [default: the config's, else 3325]")
@click.option(
    "--model",
    shell_complete=complete_model,
    help="A GGUF file or a geometry preset.  [default: the config's, else the machine's default]",
)
@click.option("--config", type=FILE, help="An arm's YAML (experiments/base.yaml).")
@click.option("--backend", type=click.Choice(["auto", "cpu", "cuda"]), help="[default: the config's, else auto]")
@click.option(
    "--set",
    "settings",
    shell_complete=complete_lever,
    multiple=True,
    metavar="LEVER=VALUE",
    help="Turn a lever; may be repeated.",
)
@click.option("--regime", type=click.Choice(["burst", "sustained"]), help="[default: the protocol's, burst]")
@click.option("--runs", type=click.IntRange(min=1), help="Untraced runs.  [default: the protocol's, GPU 7, CPU 3]")
@click.option("--protocol", default="decompose", show_default=True, help="A protocol's name or YAML file.")
@click.option("--reference", type=FILE, help="Another engine's decomposition: adds ratios.")
@click.option(
    "--across-windows", is_flag=True, help="The reference is of another window, knowingly: its ratios are marked."
)
@click.option(
    "--ceilings",
    "ceilings_path",
    type=FILE,
    help="Ceilings for bound and SOL, as `harness doctor --ceilings --json FILE` writes them.  [default: our own engine's "
    "are measured, or read cached; a trace has none]",
)
@click.option("--no-ceilings", is_flag=True, help="Measure none.")
@json_option("the decomposition as JSON")
@click.option(
    "--markdown", type=FILE, callback=written_as("Markdown", ".md", ".markdown"), help="Write it as Markdown."
)
@click.option("--plot", type=FILE, help="Write the figure (PNG, SVG or PDF).")
@click.option("--save", type=FOLDER, help="Write JSON, Markdown, PNG and launches.parquet there.")
@click.option(
    "--source",
    type=click.Choice(["auto", "host", "cupti", "nsys", "kineto"]),
    default="auto",
    show_default=True,
    help="What traces the forward (auto: host on CPU, cupti on CUDA), or what --trace is.",
)
@click.option(
    "--trace",
    "trace_path",
    type=FILE,
    help="Decompose a recorded trace: nsys .sqlite or .nsys-rep, Kineto .json or .json.gz, launches.parquet.",
)
@click.option("--device", type=int, help="With --trace: the device's ordinal, where it holds several.")
@click.option("--rules", type=FILE, multiple=True, help="With --trace: a rule file, tried before the packaged ones.")
@click.option(
    "--gguf", shell_complete=complete_model, help="With --trace: the model's GGUF (or a preset), for GMAC and roles."
)
@click.option("--range", "range_", metavar="NVTX", help="With --trace: the window is this NVTX range.")
@click.option(
    "--occurrence", type=click.IntRange(min=1), help="With --trace: the K-th prefill, by the repeating launches."
)
@click.option(
    "--by",
    type=click.Choice(["nvtx"]),
    help="With --trace: the classes of every named range, too (NVTX, or a profiler's annotations): each launch is charged to the "
    "innermost range that was open on its thread when its launch call began.",
)
@click.option(
    "--csv",
    "csv_path",
    type=FILE,
    callback=written_as("CSV", ".csv"),
    help="With --by: write every range and class as CSV.",
)
@click.option("--tail", type=TAIL, help="With --gguf: what the last layer computes.")
@click.option("--with-upload", is_flag=True, help="With --gguf: keep the model's upload in the window.")
def command(file: Path | None, json_path: str | None, markdown: Path | None, plot: Path | None, save: Path | None, trace_path: Path | None,
            device: int | None, rules: tuple[Path, ...], gguf: str | None, range_: str | None, occurrence: int | None,
            tail: str | None, with_upload: bool, by: str | None, csv_path: Path | None, **options: Any) -> int:  # fmt: skip
    """Run a full prefill and say where its wall goes; with FILE, the same of a recorded trace (as --trace FILE).

    The wall is the median of untraced runs; the table is a traced pass of its own. Every launch is charged to one class,
    and the checks under the table say whether to believe it. Exit status 6: a check failed (files are written anyway).
    """
    from harness.files import check_writable

    if file is not None:
        if trace_path is not None:
            raise click.UsageError(f"{file} and --trace {trace_path} are two traces; give one.")
        trace_path = _trace(file)
    if plot:
        from harness.report.style import figure_format

        figure_format(plot)
    if csv_path and not by:
        raise click.UsageError("--csv goes with --by nvtx.")
    for path in (json_path, markdown, plot, csv_path, save and save / "decomposition.json"):
        check_writable(path)
    if save and (missing := _without_parquet()):
        click.echo(f"note: launches.parquet is left out: {missing}", err=True)
    recorded = {
        "device": device,
        "rules": rules or None,
        "gguf": gguf,
        "range_": range_,
        "occurrence": occurrence,
        "tail": tail,
        "with_upload": with_upload or None,
        "by": by,
    }
    if options["ceilings_path"] and options["no_ceilings"]:
        raise click.UsageError("--ceilings FILE does not go with --no-ceilings.")
    if trace_path is not None:
        _refuse(("model", "config", "backend", "settings", "regime", "runs"), options)
        if (tail or with_upload) and not gguf:
            raise click.UsageError(f"--{'tail' if tail else 'with-upload'} goes with --gguf.")
        recorded["with_upload"] = with_upload
        result, launches = _recorded(trace_path, recorded, options)
    else:
        if given := next((name for name, value in recorded.items() if value is not None), None):
            raise click.UsageError(f"--{given.rstrip('_').replace('_', '-')} goes with --trace FILE.")
        result, launches = _measured(options)
    _write(result, launches, json_path, markdown, plot, save)
    if csv_path:
        from harness.files import write_atomic
        from harness.report.by_range import to_csv

        write_atomic(csv_path, to_csv(result))
    if json_path != "-":
        from harness.report.decomposition import print_decomposition

        print_decomposition(result)
    return Exit.DONE if result.ok else Exit.CHECK_FAILED


def _trace(file: Path) -> Path:
    """The trace that was named without --trace. A usage error says which option a token count, a model or a config goes with."""
    from engine.models import known

    name = str(file)
    if file.exists() and file.suffix not in (".gguf", ".yaml", ".yml"):
        with file.open("rb") as opened:
            if b'"decomposition/1"' in opened.read(200):
                raise click.UsageError(
                    f"{name} is a decomposition already; `harness queue {name}` ranks it, `harness diff` compares two."
                )
        return file
    if name.replace("_", "").isdecimal():
        meant = f"a token count goes with --tokens {name}"
    elif file.suffix == ".gguf" or name in (n for n, _ in known()):
        meant = f"a model goes with --model {name} (of a recorded trace: --gguf {name})"
    elif file.suffix in (".yaml", ".yml"):
        meant = f"an arm's config goes with --config {name}"
    else:
        return file
    raise click.UsageError(f"{name} is no trace; {meant}.")


def _refuse(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """A usage error for options of our own engine beside a recorded trace: they would change nothing."""
    if given := next((name for name in names if options[name]), None):
        hint = "; name the trace's model with --gguf" if given == "model" else ""
        raise click.UsageError(
            f"--{'set' if given == 'settings' else given} does not go with a recorded trace (--trace){hint}."
        )


def _measured(options: dict[str, Any]) -> tuple[Decomposition, pd.DataFrame]:
    """Our own engine, traced in this process (or by nsys in one of its own)."""
    from engine.levers import Levers
    from harness.attribution.embedded import decompose_prefill
    from harness.attribution.measure import DecomposeProtocol
    from harness.config import load_arm, load_protocol
    from harness.report.progress import Reporter

    arm = load_arm(options["config"]) if options["config"] else None
    if arm is not None and arm.engine.kind != "embedded":
        raise HarnessError(
            f"{options['config']}: engine {arm.engine.kind!r} cannot be traced in process; record it with "
            "`harness trace record -- …` and give the file to `harness decompose --trace`."
        )
    reference = _reference(options["reference"], same_window=not options["across_windows"])
    levers = Levers.from_dict((arm.levers if arm else {}) | lever_values(options["settings"], "--set"))
    protocol = load_protocol(options["protocol"], DecomposeProtocol)
    arguments: dict[str, Any] = {
        "model": options["model"] or (arm.model if arm else None),
        "tokens": options["tokens"] or (arm.tokens if arm else 3325),
        "levers": levers,
        "protocol": protocol,
        "backend": options["backend"] or (getattr(arm.engine, "backend", "auto") if arm else "auto"),
        "regime": options["regime"],
        "runs": options["runs"],
        "reference": reference,
        "one_window": not options["across_windows"],
        "with_ceilings": not options["no_ceilings"],
        "ceilings_path": options["ceilings_path"],
        "source": options["source"],
    }
    with Reporter() as report:
        result = decompose_prefill(**arguments, report=report)
    return result.decomposition, result.launches


def _recorded(path: Path, recorded: dict[str, Any], options: dict[str, Any]) -> tuple[Decomposition, pd.DataFrame]:
    """A trace that somebody else recorded: its wall is the window that was named, else first to last activity."""
    from harness.attribution.decompose import decompose
    from harness.attribution.recorded import load_recorded
    from harness.attribution.roofline import load_ceilings

    loaded = load_recorded(path, tokens=options["tokens"], source=options["source"], **recorded)
    if at := options["ceilings_path"]:
        loaded.about["ceilings"] = load_ceilings(at, "recorded", loaded.about["device"])
    result = decompose(
        loaded.launches,
        wall_ns=loaded.wall_ns,
        reference=_reference(options["reference"], same_window=False),
        one_window=False,
        roles=loaded.roles,
        **loaded.about,
    )
    if loaded.ranges is not None:
        from harness.attribution.by_range import range_rows

        result.ranges = range_rows(loaded.launches, loaded.ranges, result.busy_ms)
    return result, loaded.launches


def _reference(path: Path | None, *, same_window: bool) -> Decomposition | None:
    """The reference, which must be of this window unless it is declared not to be."""
    if path is None:
        return None
    from datetime import UTC, datetime, timedelta

    from harness.attribution.decompose import load_decomposition, sound
    from harness.attribution.diff import WINDOW_MINUTES

    reference = sound(load_decomposition(path), path, "a reference")
    if same_window:
        age = datetime.now(UTC) - datetime.fromisoformat(reference.created) if reference.created else None
        if age is None or age > timedelta(minutes=WINDOW_MINUTES):
            when = f"{age.total_seconds() / 60:.0f} minutes ago" if age is not None else "at a time it does not name"
            raise HarnessError(
                f"{path} was measured {when}, in another window; measure the reference again now, or declare it with "
                "--across-windows (its ratios are then marked)."
            )
    return reference


def _saved(result: Decomposition) -> Saved:
    """What `--trace launches.parquet` needs to give this heading again."""
    from harness.launches import Saved

    kept = {key: value for key, value in result.to_dict().items() if key in Saved.model_fields}
    walls = [round(wall * 1e6) for wall in result.walls_ms]
    return Saved.model_validate(kept | {"wall_ns": round(result.traced_wall_ms * 1e6), "walls_ns": walls})


def _without_parquet() -> str:
    """Why `--save` leaves out the launch table, or ""; everything else is saved."""
    from engine.errors import EngineError
    from harness.launches import arrow

    try:
        arrow("writing Parquet")
    except EngineError as error:
        return str(error)
    return ""


def _write(result: Decomposition, launches: pd.DataFrame, json_path: str | None, markdown: Path | None,
           plot: Path | None, save: Path | None) -> None:  # fmt: skip
    """Every file that was asked for, also when a check failed: each appears whole or not at all."""
    from harness import launches as table
    from harness.files import emit_json, write_atomic
    from harness.privacy import clean_json
    from harness.report.decomposition import to_markdown

    if save or plot:
        from harness.report.figures import decomposition_figure  # matplotlib takes a second
    if save:
        # What is saved is passed on: notes quote NVTX ranges, and provenance what a trace says of its machine.
        passed_on = type(result).model_validate(clean_json(result.to_dict()))
        emit_json(passed_on.to_dict(), str(save / "decomposition.json"))
        if not _without_parquet():
            table.save(launches, save / "launches.parquet", _saved(passed_on))
        decomposition_figure(passed_on, save / "decomposition.png")
        write_atomic(save / "README.md", to_markdown(passed_on, "decomposition.png"))
    if plot:
        decomposition_figure(result, plot)
    if markdown:
        linked = None
        if plot:
            linked = Path(os.path.relpath(plot, markdown.parent)).as_posix()
        write_atomic(markdown, to_markdown(result, linked))
    if json_path:
        emit_json(result.to_dict(), json_path)
