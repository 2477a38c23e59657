"""What every kernel takes on every architecture: registers, shared memory, stack and spills. No GPU needed.

`python -m engine.cuda.kernel_report` prints it as Markdown; exit status 1 where a kernel spills more than its header allows.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.cuda.jit import ARCHES, compile_file, declared, sources
from engine.errors import EngineError


@dataclass(frozen=True)
class ReportRow:
    """One kernel on one architecture."""

    source: str
    kernel: str
    arch: str
    registers: int
    static_smem: int
    stack: int
    spill_stores: int
    spill_loads: int
    allowed_spill_bytes: int

    @property
    def ok(self) -> bool:
        """True where the kernel spills no more than its header allows."""
        return self.spill_stores + self.spill_loads <= self.allowed_spill_bytes


def report(
    arches: Sequence[str] = ARCHES, names: Sequence[str] | None = None, *, cache_directory: Path | None = None
) -> list[ReportRow]:
    """Compiles sources (default: all) for `arches`; one row for each declared kernel and architecture."""
    rows = []
    for name in names or sources():
        for arch in arches:
            entries = [entry for entry in declared(name) if entry.on(arch)]
            if not entries:
                continue
            cubin = compile_file(name, arch, cache_directory=cache_directory)
            for entry in entries:
                resources = asdict(cubin.resources[entry.expression])
                rows.append(
                    ReportRow(name, entry.expression, arch, **resources, allowed_spill_bytes=entry.allowed_spill_bytes)
                )
    return rows


def report_markdown(rows: Sequence[ReportRow]) -> str:
    """The report as a Markdown table; kernels that spill more than their header allows are marked."""
    lines = [
        "| source | kernel | arch | registers | static smem, B | stack, B | spill stores, B | spill loads, B | allowed, B |",
        "|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in rows:
        mark = "" if r.ok else " **spills**"
        lines.append(
            f"| {r.source} | `{r.kernel}`{mark} | {r.arch} | {r.registers} | {r.static_smem} | {r.stack} "
            f"| {r.spill_stores} | {r.spill_loads} | {r.allowed_spill_bytes} |"
        )
    return "\n".join(lines) + "\n"


def _main() -> int:
    import argparse
    import sys

    parser = argparse.ArgumentParser(
        prog="python -m engine.cuda.kernel_report", description="Compile every kernel; no GPU needed."
    )
    parser.add_argument("--json", action="store_true", help="as JSON, not Markdown")
    parser.add_argument("--arch", action="append", choices=ARCHES, help="one architecture (repeat for more)")
    parser.add_argument("names", nargs="*", help="kernel sources (default: all)")
    options = parser.parse_args()
    try:
        rows = report(tuple(options.arch or ARCHES), options.names)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([asdict(row) | {"ok": row.ok} for row in rows], indent=2))
    else:
        print(report_markdown(rows), end="")
    bad = [row for row in rows if not row.ok]
    for row in bad:
        print(f"{row.source}.cu: {row.kernel} on {row.arch} spills {row.spill_stores} + {row.spill_loads} bytes "
              f"where {row.allowed_spill_bytes} are allowed.", file=sys.stderr)  # fmt: skip
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(_main())
