"""`harness trace`: look into recorded traces, see how kernel names are classed, scrub exports, record a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness.commands._options import FILE, json_option, written_as
from harness.errors import Exit


def _export_option(what: str) -> Callable[[Any], Any]:
    """`-o FILE`: the nsys export that is written."""
    return click.option(
        "-o", "--output", type=FILE, callback=written_as("an nsys export", ".sqlite"), required=True, help=what
    )


@click.group(short_help="Look into recorded traces, or record one.")
def command() -> None:
    """Recorded traces: nsys exports (.sqlite, .nsys-rep), PyTorch profiler JSON, launches.parquet."""


@command.command(short_help="What a trace holds.")
@click.argument("file", type=FILE)
@json_option("JSON")
def info(file: Path, json_path: str | None) -> int:
    """What FILE holds: launches per device, their summed time, its union, their span; prefills that repeat, ranges,
    processes; what to know of them, and the command that comes next."""
    from harness.attribution.contents import contents
    from harness.attribution.recorded import read_trace
    from harness.files import emit_json
    from harness.launches import union_ns

    trace = read_trace(file)
    devices = []
    for device, rows in trace.launches.groupby("device"):
        kernels = rows[rows["kind"] == "kernel"]
        sums = {"kernel": kernels, "activity": rows, "graph": rows[rows["kind"] == "graph"]}
        devices.append(
            {
                "device": int(device),  # type: ignore[call-overload]
                "gpu": trace.gpus.get(int(device), ""),  # type: ignore[call-overload]
                "launches": {str(k): int(n) for k, n in rows["kind"].value_counts().items() if n},
                **{f"{name}_sum_ns": int((part["end_ns"] - part["start_ns"]).sum()) for name, part in sums.items()},
                **{
                    f"{name}_union_ns": union_ns(part["start_ns"], part["end_ns"])
                    for name, part in sums.items()
                    if name != "graph"
                },
                "activity_span_ns": int(rows["end_ns"].max() - rows["start_ns"].min()),
                "streams": int(rows["stream"].nunique()),
                "names": int(kernels["name"].nunique()),
            }
        )
    found = {
        "file": file.name,
        "source": trace.source,
        "devices": devices,
        **contents(file, trace),
        "notes": trace.notes,
    }
    if json_path:
        emit_json(found, json_path)
    if json_path != "-":
        _show_info(found)
    return Exit.DONE


def _show_info(found: dict[str, Any]) -> None:
    from harness.report.table import paste, print_table, say

    say(f"{found['file']} · {found['source'] or 'launch table'}", "bold")
    rows = [
        [
            f"{d['device'] if d['device'] >= 0 else 'host'} {d['gpu']}".strip(),
            " + ".join(f"{n:,} {kind}" for kind, n in d["launches"].items()),
            f"{d['kernel_sum_ns'] / 1e6:,.6f}",
            f"{d['activity_sum_ns'] / 1e6:,.6f}",
            f"{d['activity_union_ns'] / 1e6:,.6f}",
            f"{d['activity_span_ns'] / 1e6:,.6f}",
        ]
        for d in found["devices"]
    ]
    heads = ["device<", "launches<", "kernels ms", "all ms", "union ms", "span ms"]
    print_table(heads, rows, drop=["all ms", "kernels ms"])
    for device, of in found["repeats"].items():
        say(f"device {device}: {of['what']}")
    for device, names in found["processes"].items():
        if len(names) > 1:
            say(f"device {device}: {len(names)} processes, {', '.join(names)}")
    if ranges := [f"{r['name']} × {r['count']}" if r["count"] > 1 else r["name"] for r in found["ranges"]]:
        say(f"ranges: {', '.join(ranges[:8])}{' …' if len(ranges) > 8 else ''}")
    for note in found["notes"]:
        say(f"note  {note}")
    say("next")
    paste(found["next"])


@command.command(short_help="Which class each kernel name gets.")
@click.argument("file", type=FILE)
@click.option("--rules", type=FILE, multiple=True, help="A rule file, tried before the packaged ones.")
@click.option("--device", type=int, help="Only this device's launches.")
@json_option("JSON")
def classify(file: Path, rules: tuple[Path, ...], device: int | None, json_path: str | None) -> int:
    """Which class each kernel name of FILE gets, and by which rule, the longest first.

    A rule file is YAML: `rules:` and a list of {pattern: REGEX, class: gemm, weight_type: q4_K}. `pattern` is looked for in
    the whole name, `entry` in the function's qualified name, `arguments` in its template arguments; all that are given must
    match, and the first rule that does wins. `protocols/classes/` holds the packaged ones.
    """
    from harness.attribution.recorded import names
    from harness.files import emit_json

    found = names(file, rules=rules, device=device)
    if json_path:
        emit_json({"file": file.name, "names": found}, json_path)
    if json_path != "-":
        from harness.report.table import print_table, say

        total = sum(row["ms"] for row in found)
        shown = [
            [
                f"{row['ms']:,.3f}",
                f"{row['launches']:,}",
                " ".join(filter(None, (row["class"], row["weight_type"].replace("-", ""), row["tile"]))),
                row["rule"].replace(".yaml rule ", ":"),
                row["name"],
            ]
            for row in found
        ]
        print_table(["ms", "n", "class<", "rule<", "name…"], shown, drop=["rule", "n"], short=_short)
        other = sum(row["ms"] for row in found if row["class"] == "other")
        say(f"{len(found)} names, {total:,.3f} ms; {other / total if total else 0:.2%} of it is classed by no rule")
    return Exit.DONE


def _short(name: str) -> str:
    """The function without its namespaces, then its template arguments: what tells names apart from the left."""
    from harness.attribution.classify import split_name

    entry, arguments = split_name(name)
    return entry.split("::")[-1] + (f"<{arguments}>" if arguments else "")


@command.command(short_help="Remove user, host and environment.")
@click.argument("file", type=FILE)
@_export_option("Where the scrubbed export goes; may be FILE itself.")
def scrub(file: Path, output: Path) -> int:
    """Copy an nsys export without environment, user, host and process names, credentials, addresses and homes."""
    from harness.files import check_writable
    from harness.report.table import say
    from harness.sources.scrub import scrub as scrub_export

    check_writable(output, whole=True)
    done = scrub_export(file, output)
    say(
        f"{output}: {done.tables} tables and {done.strings} strings that attribution needs; {done.dropped_tables} tables left behind"
        + (f", {done.names} user and host names replaced where they stood" if done.names else "")
    )
    return Exit.DONE


@command.command(context_settings={"ignore_unknown_options": True}, short_help="Run a command under nsys.")
@_export_option("Where the SQLite export goes.")
@click.option("--keep-environment", is_flag=True, help="Do not scrub the export.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
def record(output: Path, keep_environment: bool, argv: tuple[str, ...]) -> int:
    """Run a command under nsys (CUDA and NVTX, graphs node by node) and keep its export, scrubbed.

    Write `--` before the command: `harness trace record -o x.sqlite -- llama-bench -m model.gguf`.
    """
    from harness.files import check_writable
    from harness.report.table import say
    from harness.sources.nsys_driver import record as run_under_nsys
    from harness.sources.scrub import scrub as scrub_export

    check_writable(output, whole=True)
    run_under_nsys(argv, output)
    if not keep_environment:
        scrub_export(output, output)
    say(f"{output}: look into it with `harness trace info {output}`")
    return Exit.DONE
