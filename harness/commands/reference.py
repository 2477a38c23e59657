"""`harness reference`: measure the engine that ratios are taken against."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from harness.commands._options import FILE, FOLDER, TAIL, json_named, json_option, written_as
from harness.errors import Exit


@click.group(short_help="Other engines: measure one, compare by role.")
def command() -> None:
    """Measure another engine as a reference, and compare with it role by role."""


@command.command("llama-bench", short_help="Run llama-bench as the reference.")
@click.option("--bin", "binary", type=FILE, required=True, help="llama-bench itself.")
@click.option("-m", "--gguf", type=FILE, required=True, help="The GGUF that both engines run.")
@click.option("--tokens", type=click.IntRange(min=1), default=3325, show_default=True)
@click.option("--ub", type=click.IntRange(min=1), help="Physical batch (-ub).  [default: llama-bench's own, 512]")
@click.option(
    "--repetitions",
    type=click.IntRange(min=2),
    default=5,
    show_default=True,
    help="Untraced ones; the first is not counted.",
)
@click.option("--tail", type=TAIL, help="What its last layer computes.  [default: ffn_last_row]")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600, show_default=True, help="Seconds for each of the two runs."
)
@click.option(
    "--trace",
    "trace_to",
    type=FILE,
    callback=written_as("an nsys export", ".sqlite"),
    help="Keep the scrubbed nsys export here.",
)
@click.option(
    "--json",
    "json_path",
    callback=json_named,
    metavar="PATH",
    default="reference.json",
    show_default=True,
    help='Where the reference goes; "-" is stdout.',
)
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def llama_bench(
    binary: Path, gguf: Path, tokens: int, ub: int | None, repetitions: int, tail: str | None, timeout: float,
    trace_to: Path | None, json_path: str, extra: tuple[str, ...],
) -> int:  # fmt: skip
    """Run llama-bench for the anchor, trace it for the class table, and write both as a reference.

    EXTRA arguments (after --) go to llama-bench as they are.
    """
    from harness.attribution.reference import reference_of_llama_bench
    from harness.files import check_writable, emit_json
    from harness.report.decomposition import print_decomposition

    check_writable(json_path)
    check_writable(trace_to)
    result = reference_of_llama_bench(
        binary,
        gguf,
        tokens,
        ub=ub,
        repetitions=repetitions,
        timeout_s=timeout,
        trace_to=trace_to,
        tail=tail,
        extra=extra,
    )
    emit_json(result.to_dict(), json_path)
    if json_path != "-":
        print_decomposition(result)
    return Exit.DONE if result.ok else Exit.CHECK_FAILED


@command.command("compare", short_help="Compare with other engines, role by role.")
@click.argument("ours", type=FILE)
@click.argument("theirs", nargs=-1, required=True, metavar="[NAME=]THEIRS...")
@click.option("--across-windows", is_flag=True, help="They are of other windows, knowingly: their ratios are marked.")
@json_option("the comparison as JSON")
@click.option("--save", type=FOLDER, help="Write against.json, README.md and against.png there.")
def compare(ours: Path, theirs: tuple[str, ...], across_windows: bool, json_path: str | None, save: Path | None) -> int:
    """Compare decompositions of equal prefills by role: ours, then each other engine's, with the ratio to it.

    OURS and THEIRS are JSON of `harness decompose`; NAME is what a column calls the engine (the file's stem without one).
    """
    from harness.attribution.against import against
    from harness.attribution.decomposition import load_decomposition
    from harness.files import check_writable, emit_json, to_json, write_atomic
    from harness.report.against import print_against, to_markdown
    from harness.report.against_figure import against_figure

    check_writable(json_path)
    check_writable(save and save / "against.json")
    named = [(name, Path(path)) if path else (Path(name).stem, Path(name)) for name, _, path in (t.partition("=") for t in theirs)]  # fmt: skip
    record = against(
        ("ours", load_decomposition(ours)),
        [(name, load_decomposition(path)) for name, path in named],
        across_windows=across_windows,
    )
    record["command"] = _spelled(ours, named, across_windows, save)
    for held, path in zip([record["ours"], *record["references"]], [ours, *(path for _, path in named)], strict=True):
        held["file"] = _portable(path)
    if save:
        against_figure(record, save / "against.png")
        write_atomic(save / "README.md", to_markdown(record, "against.png"))
        write_atomic(save / "against.json", to_json(record))
    if json_path:
        emit_json(record, json_path)
    if json_path != "-":
        print_against(record)
    return Exit.DONE


def _portable(path: Path) -> str:
    """A path as given where it is relative, else the file's name: a record carries no path of the machine."""
    return path.name if path.is_absolute() else path.as_posix()


def _spelled(ours: Path, named: list[tuple[str, Path]], across_windows: bool, save: Path | None) -> str:
    """The command that makes the record again."""
    words = ["harness", "reference", "compare", _portable(ours), *(f"{name}={_portable(path)}" for name, path in named)]
    words += ["--across-windows"] if across_windows else []
    words += ["--save", _portable(save)] if save else []
    return shlex.join(words)
