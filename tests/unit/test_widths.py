"""Every table of the command line at 60, 72, 80 and 200 columns, on a terminal and in a pipe: no word is broken, nothing is
wider than a terminal, and a pipe has every name whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from engine.plan import ROLES
from harness import launches
from harness.ab.calibration import Calibration
from harness.attribution.decomposition import Pass
from harness.cli import group
from harness.commands.ab import print_gates
from harness.commands.calibrate import _print as print_calibration
from harness.report.sol import print_counters, print_rows
from harness.report.table import print_table, say, shortened, wrap
from harness.rounds.record import Gate
from harness.sol.crosscheck import SolRow
from harness.sol.ncu import Counters

WIDTHS = (60, 72, 80, 200)
LONG = (
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<gemm::kernel::GemmUniversal<cute::tuple<int, int>, float>>>(T1)",
    "nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_NNT",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, a_table: Callable, a_round: Callable) -> Path:
    """Tables, rounds and a launch table whose names are as long as real ones."""
    from harness.files import to_json

    made = tmp_path_factory.mktemp("w")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(made)
        rows = {
            "gate_up/q4_K": 33.0,
            "down/q4_K": 17.0,
            "attention": 9.5,
            "rope_kv": 1.0,
            "embedding/q4_K": 0.02,
            "dequantize/q6_K": 2.0,
        }
        sols = {key: 0.5 for key in rows}
        walls = [Pass(wall_ms=64.0 + i, busy_ms=62.5, launches=4, class_ms=dict.fromkeys(ROLES, 1.0)) for i in range(3)]
        wall = a_table(rows).wall_ms
        table = a_table(rows, sol=sols, ratio={"attention": 2.0}, walls_ms=[wall - 1, wall, wall + 1], passes=walls)
        Path("before.json").write_text(to_json(table.to_dict()))
        Path("after.json").write_text(to_json(a_table({k: v * 1.1 for k, v in rows.items()}, sol=sols).to_dict()))
        a_round(
            Path("reports/rounds"), "concat", gain=0.03, title="The widest GEMM as one launch with gate_up and q/k/v"
        )
        a_round(
            Path("reports/rounds"),
            "nothing",
            gain=0.0,
            retry_conditions=["attention.share > 0.10", "gate_up.share > 0.99"],
        )
        start = [i * 10_000 for i in range(12)]
        launched = launches.from_columns(
            name=[LONG[i % 3] for i in range(12)], kind="kernel", start_ns=start, end_ns=[s + 7_000 + i for i, s in enumerate(start)], device=0
        )  # fmt: skip
        launches.save(
            launched, Path("t.parquet"), launches.Saved(model="qwen2.5-7b-q4_k_m", device="NVIDIA H200 NVL", tokens=64)
        )
    return made


COUNTED = Counters(
    kernel=LONG[1], duration_ns=183_000.0, memory_sol=0.7, sm_sol=0.905, dram_sol=0.125, tensor_sol=0.9, achieved_occupancy=0.146,
    theoretical_occupancy=0.75, registers=168, smem_bytes=214_000, blocks_per_sm=1, limited_by=("registers", "shared memory"),
    grid="2,66,1", block="384,1,1", waves=1.0, stalls=(("long scoreboard", 2.0), ("barrier", 1.0)), warp_instructions=5e6,
    dram_bytes=1e6, l2_bytes=2e6, shared_wavefronts=3e6,
)  # fmt: skip
WORK = {"warp_instructions": 1.5e6, "dram_bytes": 2e5, "l2_bytes": 3e6, "shared_wavefronts": 5e5}


def sol_tables() -> None:
    print_rows(
        [SolRow(cls, "q4_K", "L13 ffn_gate", "3325 x 18944 x 3584", 590.1, 225.7, 10**8, "compute", 0.98, COUNTED, WORK, ("counted more",))
         for cls in ("gate_up", "dequantize", "attention")]
    )  # fmt: skip
    print_counters([COUNTED])


def gate_tables() -> None:
    print_gates(
        [Gate(name="parity rel L2 vs reference (smollm2-135m-instruct-q4_1, 129 tokens), arm A", ok=True, value=2e-4, limit=2e-3),
         Gate(name="determinism of B", ok=False, value="different", detail="two forwards of the same tokens differ in 14 of 152064 logits")]
    )  # fmt: skip


def calibration_tables() -> None:
    planted = [
        {
            "planted": g,
            "label": "bar + 0.5 %",
            "verdict": v,
            "estimate": g,
            "interval": [g - 0.01, None],
            "pairs": 14,
            "as_it_should": ok,
        }
        for g, v, ok in ((0.02, "LANDED", True), (0.01, "INCONCLUSIVE", False), (0.0, None, None))
    ]
    print_calibration(
        Calibration(
            machine={}, base="base", workload_sha256="0", regime="sustained", pairs=20, inner=7, statistic="lower_quartile", s0=0.0022,
            noise_floor=0.004, smallest_gain=None, bar=0.015, max_pairs=40, planted=planted,
            candidates=[{"inner": 7, "statistic": "lower_quartile", "pair_sd": 0.0022}],
        )
    )  # fmt: skip


COMMANDS: dict[str, tuple[str, ...] | Callable[[], None]] = {
    "queue": ("queue", "before.json", "--stale-ok", "--claim", "attention=2.0"),
    "diff": ("diff", "before.json", "after.json", "--across-windows"),
    "diff of traces": ("diff", "t.parquet", "t.parquet"),
    "decompose": ("decompose", "t.parquet"),
    "trace info": ("trace", "info", "t.parquet"),
    "trace classify": ("trace", "classify", "t.parquet"),
    "round list": ("round", "list"),
    "round show": ("round", "show", "1"),
    "model info": ("model", "info", "--model", "qwen2.5-7b-q4_k_m"),
    "model list": ("model", "list"),
    "model levers": ("model", "levers"),
    "doctor": ("doctor",),
    "sol": sol_tables,
    "gates": gate_tables,
    "calibrate": calibration_tables,
}


def helps(command: object = group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of every command and subcommand."""
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from helps(below, (*path, name))


@pytest.fixture
def printed(
    harness: Callable, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path
) -> Callable[..., str]:
    """What a command prints at a width, on a terminal or in a pipe."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval=None: 1.0)  # doctor's advice changes with the load

    def show(name: str, width: int, *, terminal: bool) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        (monkeypatch.setenv if terminal else monkeypatch.delenv)("FORCE_COLOR", *(["1"] if terminal else [False]))  # type: ignore[arg-type]
        what = COMMANDS[name]
        if callable(what):
            capfd.readouterr()
            what()
            return ANSI.sub("", capfd.readouterr().out)
        _, out, err = harness(*what)
        assert err == ""
        return ANSI.sub("", out)

    return show


def words(text: str) -> set[str]:
    """The words of a table (a path may break behind a folder, a demangled name behind "::"), without the line that names what is left out and what changes between runs (loads, times)."""
    kept = re.sub(r"not shown at \d+ columns: [^()]*\(--json\s+has\s+all\)", "", text)
    return {
        word
        for word in kept.replace("/", " ").replace("::", " ").split()
        if not re.search(r"\d", word) and not set(word) <= set("─-")
    }


COMMAND = re.compile(r"(\S*/)?(python[\d.]*|pip|apt-get|harness) ")
"""A line to be pasted, which is never broken."""


@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_is_broken_and_nothing_is_wider_than_a_terminal(printed: Callable[..., str], name: str) -> None:
    known = words(printed(name, 2000, terminal=True)) | words(printed(name, 2000, terminal=False))
    assert len(known) > 3
    for width in WIDTHS:
        text = printed(name, width, terminal=True)
        wide = [line for line in text.splitlines() if len(line) > width and not COMMAND.match(line)]
        assert not wide, (width, text)
        assert {w for w in words(text) if not w.endswith("…")} <= known, width
        assert words(printed(name, width, terminal=False)) <= known, width


@pytest.mark.parametrize("name", ["trace classify", "diff of traces", "sol"])
def test_long_names_are_cut_on_a_terminal_and_whole_in_a_pipe(printed: Callable[..., str], name: str) -> None:
    expected = LONG[1:2] if name == "sol" else LONG
    assert all(kernel in printed(name, 60, terminal=False) for kernel in expected)
    assert "…" in printed(name, 60, terminal=True)
    assert "…" not in printed(name, 60, terminal=False)


def test_a_column_that_is_left_out_is_named_and_the_most_needed_ones_stay(printed: Callable[..., str]) -> None:
    text = printed("queue", 60, terminal=True)
    assert "not shown at 60 columns: share" in text
    assert {"class", "SOL", "budget", "gain", "gate_up", "attention"} <= set(text.split())
    assert "not shown" not in printed("queue", 200, terminal=True)


def help_words(text: str) -> set[str]:
    """Words of a help text; click breaks lines behind hyphens, and sets [0<=x<=9] by letters."""
    return set(re.sub(r"\[[^\]]*x[^\]]*=[^\]]*\]", "", text).replace("-", " ").split())


def test_no_help_breaks_a_word_or_cuts_a_sentence(harness: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in helps():
        monkeypatch.setenv("COLUMNS", "200")
        whole = help_words(harness(*path, "--help")[1])
        for width in ("60", "72", "80"):
            monkeypatch.setenv("COLUMNS", width)
            out = harness(*path, "--help")[1]
            shown = help_words(out)
            assert shown <= whole, (path, width, shown - whole)
            assert not re.search(r"[a-z,]\.\.\.$", out, re.M), path


@given(st.text("ab_/ \n", max_size=80), st.integers(1, 30))
def test_wrapping_loses_nothing_and_fits(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert max(map(len, lines)) <= width or any(line.startswith(" ") for line in lines)
    assert all(word in wrap(text, width, whole=True) or " " in text or "\n" in text for word in text.split())
    assert len(shortened(text, width)) <= width


def test_a_word_too_long_for_its_line_is_taken_apart_at_its_seams_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = "reports/rounds/0001-a-very-long-name-of-a-round/README.md"
    assert wrap(path, 30) == ["reports/rounds/", "0001-a-very-long-name-of-a-", "round/README.md"]
    say(path, console=Console(width=30))
    assert capsys.readouterr().out == path + "\n"


def test_a_table_of_signs_that_ascii_lacks_is_aligned(tmp_path: Path) -> None:
    with (tmp_path / "t").open("w", encoding="ascii") as file:
        print_table(["→", "what<"], [["≥ 1", "a"], ["–", "b"]], drop=["→"], console=Console(file=file, width=40))
    assert (tmp_path / "t").read_text() == "  ->  what\n----------\n>= 1  a\n   -  b\n"
