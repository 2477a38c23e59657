"""Every kernel compiles for every architecture with no GPU and no driver, and spills no more than its header allows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core", reason="compiling needs cuda-core: pip install 'prefill-harness[compile]'")

from engine.cuda import jit
from engine.cuda.kernel_report import report
from engine.errors import EngineError


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of this run's own: nothing that an earlier run compiled is taken for compiling now."""
    return tmp_path_factory.mktemp("cubins")


def test_each_source_declares_the_kernels_that_it_defines() -> None:
    for name in jit.sources():
        text = (jit.KERNELS / f"{name}.cu").read_text()
        for entry in jit.declared(name):
            assert f"{entry.expression.split('<')[0]}(" in text, f"{name}.cu declares {entry.expression}"


@pytest.mark.parametrize("arch", jit.ARCHES)
@pytest.mark.parametrize("name", jit.sources())
def test_compiles_within_its_allowed_spills(name: str, arch: str, cubins: Path) -> None:
    rows = report((arch,), (name,), cache_directory=cubins)
    assert rows, f"{name}.cu has no kernel for {arch}"
    for row in rows:
        assert row.ok, f"{row.kernel} spills {row.spill_stores} + {row.spill_loads} bytes on {arch}"
        assert 0 < row.registers <= 255
        assert row.static_smem <= 48 * 1024


def test_a_cached_cubin_is_read_and_a_torn_one_is_compiled_again(cubins: Path) -> None:
    first = jit.compile_file("swiglu", "sm_90a", cache_directory=cubins)
    written = first.path.stat().st_mtime_ns
    assert jit.compile_file("swiglu", "sm_90a", cache_directory=cubins) == first
    assert first.path.stat().st_mtime_ns == written
    first.path.write_bytes(first.code[:100])
    assert jit.compile_file("swiglu", "sm_90a", cache_directory=cubins).code == first.code
    assert first.path.read_bytes() == first.code


def test_defines_flags_and_architecture_are_part_of_a_cubins_identity(cubins: Path) -> None:
    paths = {
        jit.compile_file("swiglu", "sm_90a", cache_directory=cubins).path,
        jit.compile_file("swiglu", "sm_80", cache_directory=cubins).path,
        jit.compile_file("swiglu", "sm_90a", {"UNUSED": 1}, cache_directory=cubins).path,
        jit.compile_file("swiglu", "sm_90a", lineinfo=True, cache_directory=cubins).path,
    }
    assert len(paths) == 4


def test_a_kernel_that_spills_is_reported(cubins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 live values in 32 registers must spill: the report sees it, and allows what the header allows."""
    source = """// kernel: crowded
//   allowed-spill-bytes: {allowed}
extern "C" __global__ void __launch_bounds__(1024, 2) crowded(float* x) {{
  float v[100];
#pragma unroll
  for (int i = 0; i < 100; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; ++i) x[i * 1024 + threadIdx.x] = v[i] * v[(i * 37 + 11) % 100];
}}
"""
    monkeypatch.setattr(jit, "KERNELS", tmp_path)
    for name, allowed, ok in (("strict", 0, False), ("lenient", 100_000, True)):
        (tmp_path / f"{name}.cu").write_text(source.format(allowed=allowed))
        (row,) = report(("sm_90a",), (name,), cache_directory=cubins)
        assert row.spill_stores > 0 and row.spill_loads > 0 and row.registers <= 32
        assert row.ok is ok


def test_a_source_that_does_not_compile_says_where(
    cubins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "KERNELS", tmp_path)
    (tmp_path / "broken.cu").write_text('// kernel: f\nextern "C" __global__ void f() { undeclared(); }\n')
    with pytest.raises(EngineError, match=r"broken\.cu does not compile for sm_80[\s\S]*undeclared"):
        jit.compile_file("broken", "sm_80", cache_directory=cubins)
    (tmp_path / "nothing.cu").write_text("// no kernels\n")
    with pytest.raises(EngineError, match="declares no kernel"):
        jit.compile_file("nothing", "sm_80", cache_directory=cubins)


def test_the_report_command_prints_json(cubins: Path) -> None:
    del cubins
    ran = subprocess.run(
        [sys.executable, "-m", "engine.cuda.kernel_report", "--json", "--arch", "sm_90a", "swiglu"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert row["kernel"] == "swiglu_rows" and row["arch"] == "sm_90a" and row["ok"]
    assert set(row) >= {"registers", "static_smem", "stack", "spill_stores", "spill_loads", "allowed_spill_bytes"}
