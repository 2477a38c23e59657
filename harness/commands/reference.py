"""`harness reference`: measure the engine that ratios are taken against."""

from __future__ import annotations

from pathlib import Path

import click

from harness.commands._options import FILE, TAIL, json_named, written_as
from harness.errors import Exit


@click.group(short_help="Measure the engine that ratios are against.")
def command() -> None:
    """Measure a reference engine in this window, for `harness decompose --reference`."""


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
