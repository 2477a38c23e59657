"""One million launches from an nsys export to a finished decomposition: time and memory, beside two other ways to sum them.

    python benchmarks/trace_million.py [--launches 1000000] [--repeat 3] [--out benchmarks/trace_million]
    python benchmarks/trace_million.py --render benchmarks/trace_million.json

Generates an export of schema 3.20 (kernels, copies, memsets and the runtime calls that launched them), then runs each way
in fresh processes and reports the median of the repetitions:

    harness   `load_recorded` + `decompose`: classes, unions, gap, checks
    command   the whole `harness decompose --trace FILE --json OUT` process, with the interpreter's start and the rendering
    sql       the columns of `nsys stats -r cuda_gpu_kern_sum` (total, count, mean, median, min, max, standard deviation by name)
    pandas    every kernel read with its name by `read_sql`, then one `groupby`

The last two give sums per name only. Target, of the whole process on two cores: one million launches in ≤ 4 s and ≤ 1 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LIMIT_S, LIMIT_GB = 4.0, 1.0
WAYS = ("harness", "command", "sql", "pandas")

KERN_SUM = """
WITH durations AS (
    SELECT demangledName AS id, end - start AS ns,
           row_number() OVER (PARTITION BY demangledName ORDER BY end - start) AS place,
           count(*) OVER (PARTITION BY demangledName) AS instances
    FROM CUPTI_ACTIVITY_KIND_KERNEL
)
SELECT s.value, sum(ns), max(instances), avg(ns),
       avg(CASE WHEN place IN ((instances + 1) / 2, (instances + 2) / 2) THEN ns END), min(ns), max(ns),
       sqrt(max(0, avg(ns * ns * 1.0) - avg(ns) * avg(ns)))
FROM durations JOIN StringIds s ON s.id = durations.id
GROUP BY durations.id ORDER BY 2 DESC
"""

FORWARD = (
    ("void rms_norm_f32<(int)1024, (bool)1, (bool)0, (bool)0>(const float *, float *, int, long)", 55, 32),
    ("void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)1, (bool)0>(const float *, const int *, void *)", 21, 24),
    ("void mul_mat_q<(ggml_type)12, (int)128, (bool)0, (ggml_prec)30>(const char *, const int *)", 480, 255),
    ("void k_bin_bcast<&op_add, float, float, float, const float *>(const T2 *, const T3 *, T4 *)", 57, 19),
    ("void rope_neox<(bool)1, (bool)0, float, float>(const T3 *, T4 *, int, int, int)", 113, 18),
    ("void mul_mat_q<(ggml_type)14, (int)128, (bool)0, (ggml_prec)30>(const char *, const int *)", 99, 255),
    ("void mul_mat_q_stream_k_fixup<(ggml_type)14, (int)128, (bool)0, (ggml_prec)30>(const int *)", 11, 86),
    ("void k_set_rows<float, long, __half>(const T1 *, const T2 *, T3 *, long, long)", 10, 16),
    ("void flash_attn_ext_f16<(int)128, (int)128, (int)8, (int)8, (bool)0, (bool)0, (bool)0>(const char *)", 714, 217),
    ("void unary_gated_op_kernel<&op_silu, float>(const T2 *, const T2 *, T2 *, long)", 299, 16),
)
"""(name, µs, registers) of launches in the order of a layer; the generator fills up to 60 names with element-wise ones."""


def generate(path: Path, launches: int) -> None:
    """An export of `launches` device activities: 98 % kernels of 60 names, copies and memsets, a runtime call for each."""
    functors = [f"at::native::BinaryFunctor<float, float, float, op_{i}<float>>" for i in range(60 - len(FORWARD))]
    extra = [
        (
            f"void at::native::elementwise_kernel<(int)128, (int)2, void at::native::gpu_kernel_impl_nocast<{f}>"
            "(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)",
            5 + i,
            32,
        )
        for i, f in enumerate(functors)
    ]
    # Rare ones spread between the layers, as in a real trace.
    kinds = [*FORWARD * 5, *extra]
    db = sqlite3.connect(path)
    db.executescript(
        """
        PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;
        CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
        CREATE TABLE META_DATA_EXPORT (name TEXT NOT NULL, value TEXT);
        INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.20.3');
        CREATE TABLE TARGET_INFO_GPU (id INTEGER, name TEXT);
        INSERT INTO TARGET_INFO_GPU VALUES (0, 'synthetic');
        CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
            contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
            demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
            registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
            blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
            dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL,
            gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
            contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, bytes INTEGER NOT NULL,
            copyKind INTEGER NOT NULL, graphNodeId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
            contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL,
            bytes INTEGER NOT NULL, graphNodeId INTEGER);
        CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
            globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
        """
    )
    db.executemany("INSERT INTO StringIds VALUES (?, ?)", [(i, kind[0]) for i, kind in enumerate(dict.fromkeys(kinds))])
    ids = {kind[0]: i for i, kind in enumerate(dict.fromkeys(kinds))}
    db.execute("INSERT INTO StringIds VALUES (1000, 'cudaLaunchKernel_v7000')")
    pid = 1 << 48 | 4242 << 24
    kernels, copies, memsets = launches - launches // 50, launches // 100, launches // 50 - launches // 100

    def kernel_rows() -> Iterator[tuple[int | None, ...]]:
        at = 0
        for i in range(kernels):
            name, us, registers = kinds[i % len(kinds)]
            ns = us * 1000 + i * 7919 % 997  # a little spread, no random generator in the loop
            grid = (3325, 7 + i % 5, 1)
            yield (
                at, at + ns, 0, 1, None, 7, i, pid, ids[name], ids[name], ids[name], 0, 0, registers, *grid, 128, 1, 1, 0, 4096, 0,
                0, i, 65536, None if i < kernels // 4 else i % 4000, 0,
            )  # fmt: skip
            at += ns + 900

    db.executemany(f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({','.join('?' * 28)})", kernel_rows())
    db.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (?, ?, 0, 1, 13, ?, ?, 13300, 1, NULL)",
        ((i * 90_000, i * 90_000 + 1400, kernels + i, pid) for i in range(copies)),
    )
    db.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (?, ?, 0, 1, 7, ?, ?, 0, 4, NULL)",
        ((i * 95_000, i * 95_000 + 800, kernels + copies + i, pid) for i in range(memsets)),
    )
    db.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, 0, ?, ?, 1000, 0, NULL)",
        ((i * 3000, i * 3000 + 2500, pid | 4242, i) for i in range(launches)),
    )
    db.commit()
    db.close()


def by_harness(path: Path) -> float:
    """Seconds of `load_recorded` + `decompose`."""
    from harness.attribution.decompose import decompose
    from harness.attribution.recorded import load_recorded

    start = time.perf_counter()
    found = load_recorded(path)
    result = decompose(found.launches, wall_ns=found.wall_ns, **found.about)
    seconds = time.perf_counter() - start
    assert result.ok, [c for c in result.checks if not c.ok]
    return seconds


def by_command(path: Path) -> float:
    """Seconds of the whole command."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "harness.cli", "decompose", "--trace", str(path), "--json", "-"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def by_sql(path: Path) -> float:
    """Seconds of nsys's kernel summary as SQL."""
    start = time.perf_counter()
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as db:
        assert len(db.execute(KERN_SUM).fetchall()) == 60
    return time.perf_counter() - start


def by_pandas(path: Path) -> float:
    """Seconds of the obvious pandas: read everything with names, then group."""
    import pandas as pd

    start = time.perf_counter()
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True) as db:
        frame = pd.read_sql(
            "SELECT k.*, s.value AS name FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName",
            db,
        )
    frame["ns"] = frame["end"] - frame["start"]
    assert len(frame.groupby("name")["ns"].agg(["sum", "count", "mean", "median", "min", "max", "std"])) == 60
    return time.perf_counter() - start


def measure(way: str, path: Path) -> dict[str, float]:
    """One way in a process of its own: seconds, CPU seconds with imports, peak GB of it and its children together."""
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, "--file", str(path)], check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout)


def report(results: dict[str, dict[str, float]], facts: dict[str, object]) -> str:
    """The results as Markdown."""
    lines = [
        "# One million launches, from nsys SQLite to a decomposition",
        "",
        f"**{verdict(results['command'])}**",
        "",
        f"{facts['launches']:,} launches of 60 kernel names in a {facts['file_mb']:.0f} MB export; {facts['cpu']}, {facts['cores']} cores, "
        f"Python {facts['python']}; median of {facts['repeat']} fresh processes. `python benchmarks/trace_million.py` makes this file.",
        "`s` is the wall of the way itself, for the whole process with the interpreter's start, imports and rendering; `CPU s` is of all its "
        "threads and children, imports included; `peak GB` (10⁹ bytes) is the resident set of the process and its children together.",
        "",
        "| way | s | × harness | CPU s (with imports) | peak GB |",
        "|:---|---:|---:|---:|---:|",
    ]
    base = results["harness"]["s"]
    label = {
        "harness": "harness: classes, unions, gap, checks",
        "command": "the whole `harness decompose --trace` process",
        "sql": "SQL of `nsys stats -r cuda_gpu_kern_sum`: sums per name",
        "pandas": "pandas, `read_sql` and `groupby`: sums per name",
    }
    lines += [
        f"| {label[w]} | {r['s']:.2f} | {r['s'] / base:.2f} | {r['cpu_s']:.2f} | {r['gb']:.2f} |"
        for w, r in results.items()
    ]
    return "\n".join([*lines, ""])


def verdict(command: dict[str, float]) -> str:
    """Whether the whole process met its target, with the figures that decided."""
    target = f"{LIMIT_S:.0f} s and {LIMIT_GB:.0f} GB"
    missed = [
        f"{command[key]:.2f} {unit} against {limit:.0f} {unit}"
        for key, unit, limit in (("s", "s", LIMIT_S), ("gb", "GB", LIMIT_GB))
        if command[key] > limit
    ]
    if missed:
        return f"Target for the whole process, {target}: not met: {' and '.join(missed)}."
    return f"Target for the whole process, {target}: met, with {command['s']:.2f} s and {command['gb']:.2f} GB."


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def main() -> None:
    """Parses the options and runs; with --way it is the measured process itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(""))
    parser.add_argument("--render", type=Path, help="a record whose page is written again, beside it")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.render:
        record = json.loads(options.render.read_text())
        options.render.with_suffix(".md").write_text(report(record["results"], record["facts"]))
        return
    if options.way:
        seconds = {"harness": by_harness, "command": by_command, "sql": by_sql, "pandas": by_pandas}[options.way](
            options.file
        )
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        cpu = sum(u.ru_utime + u.ru_stime for u in used)
        print(json.dumps({"s": seconds, "cpu_s": cpu, "gb": sum(u.ru_maxrss for u in used) / 1e6}))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "million.sqlite"
        generate(path, options.launches)
        facts: dict[str, object] = {
            "launches": options.launches, "file_mb": path.stat().st_size / 1e6, "cpu": _cpu(), "cores": os.cpu_count(),
            "python": platform.python_version(), "repeat": options.repeat,
        }  # fmt: skip
        results = {}
        for way in WAYS:
            runs = [measure(way, path) for _ in range(options.repeat)]
            results[way] = {k: statistics.median(r[k] for r in runs) for k in ("s", "cpu_s", "gb")}
            print(f"{way:8}", *(f"{value:6.2f} {key}" for key, value in results[way].items()), flush=True)
    options.out.with_suffix(".json").write_text(json.dumps({"facts": facts, "results": results}, indent=2) + "\n")
    options.out.with_suffix(".md").write_text(report(results, facts))


if __name__ == "__main__":
    main()
