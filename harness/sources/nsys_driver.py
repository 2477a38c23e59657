"""Drives Nsight Systems: finds it (also the copy inside Nsight Compute), records a command, exports SQLite.

The copy bundled with Nsight Compute writes a `.qdstrm` that it cannot import itself; `QdstrmImporter` lies beside it and
needs libdw and libelf. Sampling and context-switch tracing stay off: they made a two-second run 665 MB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, last_words

PROFILE_OPTIONS = ("-t", "cuda,nvtx", "-s", "none", "--cpuctxsw=none", "--cuda-graph-trace=node")
"""What is recorded: CUDA activity and NVTX ranges, graph launches node by node so that their kernels are not hidden."""

_NSIGHT_ROOTS = (
    "/opt/nvidia",
    "/usr/local/cuda",
    "/usr/local/nvidia",
    "/usr/lib/nsight-compute",
    "/usr/lib/nsight-systems",
)
_INSTALL = "install Nsight Systems (Debian/Ubuntu with NVIDIA's repository: `apt-get install nsight-systems-cli`)"


@dataclass(frozen=True)
class Nsys:
    """An `nsys` and, where it cannot import by itself, the importer beside it."""

    nsys: Path
    importer: Path | None

    @property
    def bundled(self) -> bool:
        """True for the copy inside Nsight Compute."""
        return "nsight-compute" in str(self.nsys).lower()


def find_nsys() -> Nsys:
    """The `nsys` on PATH, else the newest below the usual roots. HARNESS_NSYS names one by hand.

    Raises HarnessError, with what to install, where there is none.
    """
    named = os.environ.get("HARNESS_NSYS")
    if named and not Path(named).is_file():
        raise HarnessError(f"HARNESS_NSYS names {named}, which is no file; correct it or unset it.")
    on_path = shutil.which("nsys")
    candidates = [Path(p) for p in (named, on_path) if p]
    if not candidates:
        for root in map(Path, _NSIGHT_ROOTS):
            candidates += sorted(root.glob("**/target-linux-*/nsys"), reverse=True) if root.is_dir() else []
    for nsys in candidates:
        if os.access(nsys, os.X_OK):
            return Nsys(nsys, _find_importer(nsys.resolve()))
    raise HarnessError(f"nsys is not on PATH nor below {', '.join(_NSIGHT_ROOTS)}; {_INSTALL} or set HARNESS_NSYS.")


def _find_importer(nsys: Path) -> Path | None:
    """QdstrmImporter of the same installation. NVIDIA's layout has it in a folder beside nsys's `target-…`; an nsys that
    lies anywhere else (a wrapper in /usr/bin) has none, and nothing is searched for it."""
    if not nsys.parent.name.startswith("target-"):
        return None
    found = sorted(nsys.parent.parent.glob("*/QdstrmImporter"))
    return found[0] if found else None


def record(argv: Sequence[str], out: Path, *, timeout_s: float | None = None) -> Path:
    """Runs `argv` under nsys and leaves its SQLite export at `out` (replaced in one step).

    Raises HarnessError when nsys is missing, the command fails, or the recording cannot be imported; the last lines
    of the failing program's output are in the sentence.
    """
    tools = find_nsys()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nsys-", dir=out.parent) as scratch:
        report = Path(scratch) / "trace"
        command = [
            str(tools.nsys),
            "profile",
            *PROFILE_OPTIONS,
            "--force-overwrite=true",
            "-o",
            str(report),
            *argv,
        ]
        done = _run(command, timeout_s=timeout_s)
        made = [p for p in (report.with_suffix(".nsys-rep"), report.with_suffix(".qdstrm")) if p.exists()]
        if done.returncode != 0 and not _is_import_failure(done, made):
            raise HarnessError(
                f"{argv[0]} under nsys ended with status {done.returncode}: {last_words(done.stdout, done.stderr)}"
            )
        if not made:
            raise HarnessError(
                f"nsys recorded nothing of {argv[0]} ({last_words(done.stdout, done.stderr)}); does it use CUDA at all?"
            )
        sqlite = export(made[0], Path(scratch) / "trace.sqlite", tools)
        sqlite.replace(out)
    return out


def export(report: Path, out: Path, tools: Nsys | None = None) -> Path:
    """`.nsys-rep` or `.qdstrm` → SQLite at `out`. Raises HarnessError with the importer's own last words."""
    tools = tools or find_nsys()
    with tempfile.TemporaryDirectory(prefix=".nsys-", dir=out.parent) as scratch:
        if report.suffix == ".qdstrm":
            report = _import(report, Path(scratch) / "imported.nsys-rep", tools)
        part = Path(scratch) / "export.sqlite"
        done = _run(
            [str(tools.nsys), "export", "--type", "sqlite", "--force-overwrite=true", "-o", str(part), str(report)]
        )
        if done.returncode != 0 or not part.exists():
            raise HarnessError(f"nsys could not export {report}: {last_words(done.stdout, done.stderr)}")
        part.replace(out)
    return out


def _import(qdstrm: Path, out: Path, tools: Nsys) -> Path:
    if tools.importer is None:
        raise HarnessError(f"{tools.nsys} wrote {qdstrm.name}, and no QdstrmImporter lies beside it; {_INSTALL}.")
    folders = [str(tools.importer.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    env = os.environ | {"LD_LIBRARY_PATH": ":".join(folders)}
    done = _run([str(tools.importer), "--input-file", str(qdstrm), "--output-file", str(out)], env=env)
    if done.returncode == 0 and out.exists():
        return out
    words = last_words(done.stdout, done.stderr)
    if "libdw" in words or "libelf" in words:
        raise HarnessError(
            f"{tools.importer.name} cannot start ({words}); run `apt-get install libdw1 libelf1` or put both on LD_LIBRARY_PATH."
        )
    raise HarnessError(f"{tools.importer.name} could not import {qdstrm.name}: {words}")


def _is_import_failure(done: subprocess.CompletedProcess[str], made: list[Path]) -> bool:
    """True where only nsys's own import step failed: the raw recording is there and the output says so."""
    return any(p.suffix == ".qdstrm" for p in made) and "import" in (done.stdout + done.stderr).lower()


def _run(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    timeout_s: float | None = None,
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, env=env, timeout=timeout_s, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise HarnessError(
            f"{command[0]} cannot be run ({error.strerror}); check that it is an executable for this machine."
        ) from None
    except subprocess.TimeoutExpired:
        raise HarnessError(
            f"{command[0]} did not end within {timeout_s:.0f} s; raise the timeout or record a shorter run."
        ) from None
