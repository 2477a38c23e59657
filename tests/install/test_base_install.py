"""`pip install .` without extras: small, and whole outside the checkout."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

pytestmark = [pytest.mark.install, pytest.mark.timeout(900)]

LIMIT_MB = 350


@pytest.fixture(scope="module")
def base(fresh: Callable, wheel: Path):  # type: ignore[no-untyped-def]  # an Environment
    environment = fresh("base")
    environment.pip("install", wheel)
    return environment


def test_it_takes_no_more_than_its_budget(base) -> None:  # type: ignore[no-untyped-def]
    """Disk blocks, as du counts them, pip and its own byte code included."""
    sizes = [path.lstat().st_blocks * 512 for path in base.site_packages.rglob("*")]
    total = sum(sizes) / 2**20
    print(f"{total:.0f} MB")
    assert total <= LIMIT_MB


def test_metadata_is_complete(base) -> None:  # type: ignore[no-untyped-def]
    done = base.run("python", "-c", "from importlib.metadata import metadata as m; import json; print(json.dumps(m('prefill-harness').json))")  # fmt: skip
    about = json.loads(done.stdout)
    assert about["version"] == version("prefill-harness") and about["requires_python"] == ">=3.11"
    assert {"Typing :: Typed", "Programming Language :: Python :: 3.13"} <= set(about["classifier"])
    assert about["description"].startswith("# prefill-harness") and about["description_content_type"] == "text/markdown"
    for package in ("engine", "harness", "protocols", "experiments"):
        assert (base.site_packages / package / "py.typed").is_file()


def test_every_module_that_says_nothing_of_an_extra_imports(base) -> None:  # type: ignore[no-untyped-def]
    code = """
import importlib, pkgutil, engine, harness
failed = []
for package in (engine, harness):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):
        if not module.name.endswith('__main__'):
            try:
                importlib.import_module(module.name)
            except Exception as error:
                failed.append(f'{module.name}: {error}')
print('; '.join(failed))
"""
    done = base.run("python", "-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_a_laptop_gets_to_a_verdict_in_an_empty_folder(base) -> None:  # type: ignore[no-untyped-def]
    assert base.run("harness", "init").returncode == 0
    (base.work / "experiments" / "tiny.yaml").write_text("extends: base-one-thread.yaml\nmodel: tiny-llama\n")
    (base.work / "experiments" / "threads.yaml").write_text("extends: tiny.yaml\nlevers: {cpu_threads: 2}\n")
    (base.work / "protocols" / "short.yaml").write_text(
        "extends: landing.yaml\nalpha: 0.5\nmin_pairs: 1\nmax_pairs: 2\nconfirm_pairs: 1\ntraced_passes: 1\nburst_idle_s: 0\n"
    )
    done = base.run("harness", "ab", "experiments/tiny.yaml", "experiments/threads.yaml", "--protocol",
                    "protocols/short.yaml", "--tokens", "64", "--inner", "1")  # fmt: skip
    assert done.returncode in (0, 2, 3, 4, 5), done.stderr
    assert any(word in done.stdout for word in ("LANDED", "REVERTED", "INCONCLUSIVE")), done.stdout + done.stderr
    (record,) = base.work.glob("reports/rounds/*/record.json")
    assert json.loads(record.read_text())["verdict"]


def test_a_trace_and_a_prefill_decompose(base) -> None:  # type: ignore[no-untyped-def]
    trace = base.work / "t.sqlite"
    with sqlite3.connect(trace) as db:
        db.executescript("""
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER, contextId INTEGER,
                streamId INTEGER, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER, shortName INTEGER,
                gridX INTEGER, gridY INTEGER, gridZ INTEGER, blockX INTEGER, blockY INTEGER, blockZ INTEGER,
                registersPerThread INTEGER, staticSharedMemory INTEGER, dynamicSharedMemory INTEGER);
            INSERT INTO StringIds VALUES (1, 'void mul_mat_q<(ggml_type)12, (int)128, (bool)0>(const char *)');
        """)
        for i in range(5):
            db.execute("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, 0, 1, 7, ?, 1, 1, 1, 1, 1, 1, 32, 1, 1, 16, 0, 0)", (1000 * i, 1000 * i + 900, i))  # fmt: skip
    done = base.run("harness", "decompose", "--trace", "t.sqlite", "--save", "traced")
    assert done.returncode in (0, 6) and "gemm" in done.stdout, done.stderr
    assert "launches.parquet is left out" in done.stderr
    done = base.run("harness", "decompose", "--model", "tiny-llama", "--tokens", "64", "--runs", "2", "--no-ceilings")
    assert done.returncode in (0, 6) and "gate_up" in done.stdout, done.stderr
    done = base.run("harness", "model", "info", "--model", "tiny-qwen2", "--tokens", "64")
    assert done.returncode == 0 and "GMAC" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "module"),
    [
        (["sol", "--ncu-rep", "x.ncu-rep"], "ncu_report"),
        (["decompose", "--trace", "x.parquet"], "pyarrow"),
    ],
)
def test_the_line_that_it_says_brings_what_is_missing(base, argv: list[str], module: str) -> None:  # type: ignore[no-untyped-def]
    (base.work / argv[-1]).write_bytes(b"PAR1")
    done = base.run("harness", *argv)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = done.stderr.split("; run ")[1].strip().removesuffix(".")
    assert line.startswith("pip install '")
    shell = base.run(
        "python", "-c", f"import subprocess, sys; sys.exit(subprocess.run({line!r}, shell=True).returncode)"
    )
    assert shell.returncode == 0, shell.stderr
    assert base.run("python", "-c", f"import {module}").returncode == 0
    assert "is not installed" not in base.run("harness", *argv).stderr
