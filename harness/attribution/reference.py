"""The reference engine: llama-bench's own wall as the anchor, and the class table of its last traced repetition."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.attribution.decompose import Decomposition, decompose
from harness.errors import HarnessError, last_words

TRACED_REPETITIONS = 2
"""Repetitions under the tracer, beside llama-bench's warm-up: the last one is the table."""


@dataclass(frozen=True)
class Anchor:
    """What llama-bench measured without a tracer."""

    walls_ns: tuple[int, ...]  # every repetition, in order
    about: dict[str, Any]  # build commit and number, model, GPU, batch sizes, as it reports them

    @property
    def settled_ns(self) -> tuple[int, ...]:
        """Without the first repetition, which is always the slowest (where there are others)."""
        return self.walls_ns[1:] if len(self.walls_ns) > 1 else self.walls_ns


def command_line(
    binary: Path, gguf: Path, tokens: int, *, ub: int | None, repetitions: int, extra: Sequence[str] = ()
) -> list[str]:
    """llama-bench for one prefill length and no generation, every layer on the GPU, flash attention on, JSON out.

    The logical batch (-b) holds the whole prompt; `ub` is the physical one (llama.cpp's default of 512 cuts 3325 tokens
    into 7 chunks).
    """
    line = [
        str(binary),
        "-m",
        str(gguf),
        "-p",
        str(tokens),
        "-n",
        "0",
        "-ngl",
        "99",
        "-fa",
        "1",
        "-r",
        str(repetitions),
        "-o",
        "json",
    ]
    if ub is not None:
        line += ["-ub", str(ub), "-b", str(max(ub, 2048))]
    return [*line, *extra]


def run_anchor(argv: Sequence[str], tokens: int, *, timeout_s: float) -> Anchor:
    """Runs llama-bench and reads its JSON. Raises HarnessError naming the binary and its last words."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except OSError as error:
        raise HarnessError(f"{argv[0]} cannot be run ({error.strerror}); give llama-bench's path to --bin.") from None
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"{argv[0]} did not end within {timeout_s:.0f} s; raise --timeout or lower --repetitions."
        ) from None
    if done.returncode != 0:
        raise HarnessError(f"{argv[0]} ended with status {done.returncode}: {last_words(done.stderr, lines=2)}")
    return parse_anchor(done.stdout, tokens, str(argv[0]))


def parse_anchor(text: str, tokens: int, binary: str) -> Anchor:
    """The entry of `llama-bench -o json` that ran this prompt length and generated nothing."""
    try:
        entries = json.loads(text)
        found = [e for e in entries if int(e["n_prompt"]) == tokens and int(e["n_gen"]) == 0]
        walls = [tuple(int(ns) for ns in e["samples_ns"]) for e in found]
    except (ValueError, TypeError, KeyError) as error:
        raise HarnessError(f"{binary} printed no llama-bench JSON ({type(error).__name__}: {error}); give a llama-bench built after 2024 to --bin.") from None  # fmt: skip
    if len(found) != 1 or not walls[0] or min(walls[0]) <= 0:
        raise HarnessError(
            f"{binary} reports {len(found)} usable tests of {tokens} prompt tokens and no generation; expected one."
        )
    keep = ("build_commit", "build_number", "model_type", "model_filename", "gpu_info", "backends", "n_batch", "n_ubatch", "flash_attn", "n_gpu_layers", "test_time")  # fmt: skip
    about = {k: found[0][k] for k in keep if k in found[0]}
    if "model_filename" in about:
        about["model_filename"] = Path(about["model_filename"]).name
    return Anchor(walls[0], about)


def reference_of_llama_bench(
    binary: Path, gguf: Path, tokens: int, *, ub: int | None, repetitions: int, timeout_s: float, trace_to: Path | None,
    tail: str | None = None, extra: Sequence[str] = (),
) -> Decomposition:  # fmt: skip
    """The reference as a decomposition: wall from untraced repetitions, classes and roles from the last traced one.

    trace_to: where the scrubbed nsys export is left; None keeps no trace file.
    Raises HarnessError: no binary, no nsys, JSON that is none, launches that do not fit the GGUF.
    """
    import shutil
    import tempfile

    from harness.attribution.recorded import geometry_of, load_recorded
    from harness.sources.nsys_driver import find_nsys, record
    from harness.sources.scrub import scrub

    # What is wrong is told before minutes are spent.
    geometry_of(str(gguf))
    if shutil.which(str(binary)) is None and not binary.exists():
        raise HarnessError(f"{binary} does not exist; give llama-bench's path to --bin.")
    if binary.exists():
        binary = binary.absolute()  # Path drops "./", and a bare name would be looked for on PATH
    find_nsys()
    anchor = run_anchor(
        command_line(binary, gguf, tokens, ub=ub, repetitions=repetitions, extra=extra), tokens, timeout_s=timeout_s
    )
    with tempfile.TemporaryDirectory(prefix="harness-reference-") as folder:
        raw = Path(folder) / "trace.sqlite"
        argv = command_line(binary, gguf, tokens, ub=ub, repetitions=TRACED_REPETITIONS, extra=extra)
        record(argv, raw, timeout_s=timeout_s)
        last = TRACED_REPETITIONS + 1  # llama-bench warms up with one prefill of the same length
        recorded = load_recorded(raw, gguf=str(gguf), tokens=tokens, occurrence=last, tail=tail)
        if trace_to is not None:
            scrub(raw, trace_to)
    result = decompose(
        recorded.launches,
        wall_ns=recorded.wall_ns,
        roles=recorded.roles,
        untraced_wall_ns=anchor.settled_ns,
        **recorded.about,
    )
    result.provenance |= {
        "engine": "llama.cpp",
        "llama_bench": anchor.about,
        "all_walls_ms": [ns / 1e6 for ns in anchor.walls_ns],
    }
    result.notes.append(f"wall: median of {len(anchor.settled_ns)} repetitions of llama-bench, untraced; its first, always the slowest, is left out")  # fmt: skip
    return result
