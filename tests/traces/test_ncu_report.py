"""ncu reports are read without a GPU: real values from a real report, one sentence for a file that is none."""

from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.sol.ncu import combine, read_report

REPORT = Path(__file__).parents[2].parent / "shared" / "data" / "traces" / "ncu_h200_nvjet_sol.ncu-rep"
needs_report = pytest.mark.skipif(not REPORT.exists(), reason=f"{REPORT} is absent")


@needs_report
def test_real_report_gives_the_recorded_speed_of_light() -> None:
    (launch,) = read_report(REPORT)
    assert launch.kernel.startswith("nvjet_sm90_hsh_256x128")
    assert launch.duration_ns == 183008
    assert launch.memory_sol == pytest.approx(0.6996, abs=5e-5)
    assert launch.sm_sol == pytest.approx(0.9048, abs=5e-5)
    assert launch.achieved_occupancy == pytest.approx(0.1464, abs=5e-5)
    assert (launch.registers, launch.blocks_per_sm, launch.block) == (168, 1, "384,1,1")
    assert launch.limited_by == ("registers", "shared memory")
    assert launch.warp_instructions is None  # not collected in this report: unknown, never zero


@needs_report
@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.9])
def test_a_report_cut_short_is_one_sentence(tmp_path: Path, keep: float) -> None:
    data = REPORT.read_bytes()
    broken = tmp_path / "broken.ncu-rep"
    broken.write_bytes(data[: int(len(data) * keep) if keep < 1 else int(keep)])
    with pytest.raises(HarnessError, match=r"broken\.ncu-rep"):
        read_report(broken)


@pytest.mark.parametrize("content", [b"", b"not a report at all", b"SQLite format 3\0" + bytes(100)])
def test_a_file_that_is_no_report_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.ncu-rep"
    path.write_bytes(content)
    with pytest.raises(HarnessError, match=r"x\.ncu-rep"):
        read_report(path)


def test_an_absent_report_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="does not exist"):
        read_report(tmp_path / "none.ncu-rep")


@needs_report
def test_an_op_of_several_launches_sums_its_work_and_keeps_its_main_kernels_bound() -> None:
    from dataclasses import replace

    (launch,) = read_report(REPORT)
    main = replace(launch, warp_instructions=100.0, dram_bytes=10.0)
    fixup = replace(launch, kernel="reduce", duration_ns=1000.0, sm_sol=0.1, warp_instructions=7.0, dram_bytes=None)
    both = combine([fixup, main])
    assert both.kernel == launch.kernel and both.sm_sol == launch.sm_sol
    assert both.duration_ns == launch.duration_ns + 1000
    assert both.warp_instructions == 107
    assert both.dram_bytes is None  # one launch without the counter makes the sum unknown


@needs_report
def test_a_report_can_be_kept_as_markdown(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from harness.commands.sol import command

    done = CliRunner().invoke(command, ["--ncu-rep", str(REPORT), "--markdown", str(tmp_path / "sol.md")])
    assert done.exception is None
    assert "| 183.0 | 70.0% | 90.5% |" in (tmp_path / "sol.md").read_text()
    assert "209.2 KB of shared memory" in " ".join(done.output.split())
