"""Figures under stress: every text inside the page and clear of every other, bars from 0, marks inside their axes, and
colours that stay apart for every kind of colour vision. Geometry is asked of matplotlib; no picture is compared."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from harness.attribution.decompose import decompose
from harness.attribution.decomposition import Check, ClassRow, Decomposition, Pass, load_decomposition
from harness.attribution.diff import diff, side_of_decomposition, side_of_launches
from harness.attribution.queue import build_queue
from harness.attribution.recorded import classified_launches, load_recorded
from harness.errors import HarnessError
from harness.report.against_figure import against_figure
from harness.report.decomposition import above_roof, to_markdown
from harness.report.diff_figure import diff_figure, rises_above_noise
from harness.report.figures import GAP, colours, decomposition_figure
from harness.report.queue_figure import queue_figure
from harness.report.round_figures import Outcome, plot_basket, plot_campaign, plot_pairs, plot_walls
from harness.report.rounds import pair_points, rebuild
from harness.report.style import GAIN, NOISE, TAX, Page, elide, spread, text_width, wrap
from harness.rounds.record import Basket, Effect
from harness.rounds.store import load_record, read_samples

REPORTS = Path(__file__).parents[2] / "reports"
LONG = "a_class_whose_name_has_forty_characters_"  # 40 of them
BARS = {"landing": 0.015, "landing-strict": 0.03}
OWN = [
    "gate_up/q4_K",
    "down/q4_K",
    "down/q6_K",
    "q_o/q4_K",
    "attention",
    "swiglu",
    "norm",
    "k_v/q4_K",
    "rope_kv",
    "lm_head/q6_K",
    "tail",
    "copy",
]


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Figure]]:
    """Draws one figure and checks what every figure must keep: `drawn(function, …)`, the path given first or by name."""
    pages: list[Page] = []
    save = Page.save

    def checked(page: Page, path: Path) -> None:
        page.figure.draw_without_rendering()  # inside the look's context, as savefig does
        pages.append(page)
        tidy(page.figure)
        save(page, path)

    monkeypatch.setattr(Page, "save", checked)
    kept = os.environ.get("KEEP_FIGURES")  # a folder: look at what the tests draw

    def run(name: str, function: Callable[[Path], None]) -> Figure:
        path = (Path(kept) if kept else tmp_path) / f"{name}.png"
        function(path)
        assert path.stat().st_size < 150_000, "a figure is a small file"
        return pages[-1].figure

    yield run


def texts(figure: Figure) -> list[tuple[str, Bbox]]:
    """Every visible text with its box: of the page, of axes and their ticks, of legends."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    ticks = {id(text) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    shown = [text for text in figure.findobj(Text) if id(text) not in ticks]
    for axes in figure.axes:
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            low, high = sorted(limits)
            slack = 1e-9 * (high - low)
            labels = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            shown += [label for at, label in labels if low - slack <= at <= high + slack]  # the others are never drawn
            shown.append(axis.label)
    return [
        (text.get_text(), Text.get_window_extent(text, renderer))
        for text in shown
        if isinstance(text, Text) and text.get_visible() and text.get_text().strip()
    ]


def tidy(figure: Figure) -> None:
    """No text leaves the page, no two touch, no mark lies outside its axes."""
    page = figure.bbox
    found = texts(figure)
    assert found
    for text, box in found:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1, (
            f"{text!r} leaves the page: {box}"
        )
    for (a, one), (b, two) in combinations(found, 2):
        across = min(one.x1, two.x1) - max(one.x0, two.x0)
        down = min(one.y1, two.y1) - max(one.y0, two.y0)
        assert across <= 1.5 or down <= 1.5, f"{a!r} touches {b!r} by {across:.0f} × {down:.0f} dots"
    for axes in figure.axes:
        for dots in axes.findobj(PathCollection):
            assert isinstance(dots, PathCollection)
            if dots.get_clip_on() and len(dots.get_offsets()):
                at = axes.transData.transform(np.asarray(dots.get_offsets()))
                room = (
                    np.sqrt(np.asarray(dots.get_sizes()).max()) / 2 * figure.dpi / 72
                    if axes.get_xscale() == "log"
                    else 0.0
                )
                low, high = axes.bbox.min - 1, axes.bbox.max + 1
                assert (at - room >= low).all() and (at + room <= high).all(), "a mark leaves its axes"


def words(figure: Figure) -> str:
    return "\n".join(text for text, _ in texts(figure))


# --- decompositions ----------------------------------------------------------------------------------------------------


def names(count: int) -> list[str]:
    return (OWN + [f"{LONG[:-3]}{i:03d}" for i in range(count)])[:count]


def table(a_table: Callable[..., Decomposition], count: int, wall: float, **more: object) -> Decomposition:
    weights = 0.75 ** np.arange(count)
    rows = dict(zip(names(count), (0.97 * wall * weights / weights.sum()).tolist(), strict=True))
    if more.pop("sol", False):
        more["sol"] = {k: 0.4 + 0.62 * (i % 4) / 3 for i, k in enumerate(rows)}
    if more.pop("ratio", False):
        more["ratio"] = {k: 0.8 + 0.3 * (i % 5) for i, k in enumerate(rows)}
    return a_table(rows, wall=wall, **more)


@pytest.mark.parametrize(
    ("name", "count", "wall", "more"),
    [
        ("one", 1, 20.0, {}),
        ("many", 25, 60.0, {"sol": True}),
        ("seconds", 8, 12_345.0, {"sol": True}),
        ("a-second", 8, 1_234.0, {"ratio": True}),
        ("short", 8, 0.3, {"sol": True, "ratio": True}),
        ("no-sol", 12, 68.0, {}),
        ("reference", 12, 68.0, {"sol": True, "ratio": True, "reference": {"one_window": False, "name": "llama.cpp"}}),
        ("failed", 12, 68.0, {"checks": [Check(name=n, ok=False) for n in ("coverage", "possibility", "window")]}),
        ("foreign", 12, 68.0, {"model": "", "device": f"2 × NVIDIA {LONG} 141 GB HBM3e"}),
        ("untitled", 4, 5.0, {"model": f"{LONG}{LONG}{LONG}", "walls_ms": [5.0, 5.1]}),
    ],
)  # fmt: skip
def test_a_decomposition_is_tidy(
    drawn: Callable, a_table: Callable, name: str, count: int, wall: float, more: dict
) -> None:
    result = table(a_table, count, wall, **more)
    if name == "untitled":
        result = result.model_copy(update={"overlap_ms": 1.25})
    if name == "foreign":
        result = result.model_copy(update={"tokens": None, "tok_per_s": None})
    figure = drawn(f"decomposition-{name}", lambda path: decomposition_figure(result, path))
    stacked, rows = figure.axes
    assert stacked.get_xlim()[0] == 0 and rows.get_xlim()[0] == 0
    assert rows.get_xlim()[1] >= max(r.sum_ms for r in result.classes) / (1e3 if wall > 1e4 else 1)
    assert len(rows.xaxis.get_ticklocs()) >= 2, "the rows have an axis of their own"
    said = words(figure)
    assert "share of busy" in said and "Shares are of busy" in said
    longest = max(result.classes, key=lambda r: r.sum_ms)
    assert f"{longest.share:.1%}" in said and "% of wall" not in said
    assert ("failed checks: coverage, possibility, window" in said) == (name == "failed")
    assert ("× ref" in said) == any(r.ratio is not None for r in result.classes)
    assert "None" not in said and "nan" not in said


def test_shares_of_the_bar_and_of_the_rows_are_the_same(drawn: Callable, a_table: Callable) -> None:
    result = a_table({"gate_up": 60.0, "down": 30.0, "attention": 10.0}, wall=200.0)
    figure = drawn("half-gap", lambda path: decomposition_figure(result, path))
    for share in ("60.0%", "30.0%", "10.0%"):
        assert words(figure).count(share) == 2
    assert "100.00 ms" in words(figure), "the gap is told in ms: it has no share of busy"


def test_a_class_above_its_roof_states_the_tolerance_wherever_it_is_shown(
    drawn: Callable, a_table: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.report.decomposition import print_decomposition
    from harness.report.rounds import class_table

    checks = [
        Check(name="possibility", ok=True, value=1.01, limit=1.05, detail="no class beats its ceiling by more than 5%")
    ]
    over = a_table({"down/q4_K": 9.0, "norm": 1.0}, sol={"down/q4_K": 1.012, "norm": 0.9}, checks=checks)
    print_decomposition(over)
    printed = " ".join(capsys.readouterr().out.split())
    figure = " ".join(words(drawn("above-roof", lambda path: decomposition_figure(over, path))).split())
    for said in (printed, figure, to_markdown(over), class_table(over)):
        assert "SOL above 100 % (down 101%)" in said and "tolerates 5%" in said
    assert above_roof(a_table({"down": 9.0}, sol={"down": 1.004}, checks=checks)) == "", "100 % needs no excuse"


def test_traces_of_other_engines_and_of_two_devices_are_tidy(drawn: Callable, shared_data: Path) -> None:
    for file, device in (
        ("nsys_2026.2.1_2gpu_before.sqlite", 1),
        ("kineto_vllm_prefill_decode_graph.json.gz", 2),
        ("kineto_h100_qwen1.5_0.5b.json.gz", None),
        ("nsys_2022.2.1_saxpy_mpi.sqlite", None),
        ("nsys_h200_llama_cpp_mmq_ub4096.sqlite", None),
    ):
        path = shared_data / "traces" / file
        if path.is_file():
            loaded = load_recorded(path, device=device)
            result = decompose(loaded.launches, wall_ns=loaded.wall_ns, roles=loaded.roles, **loaded.about)
            drawn(f"trace-{file.split('.')[0]}", lambda out, r=result: decomposition_figure(r, out))


def test_a_figure_in_another_format_is_refused_in_a_sentence(tmp_path: Path, a_table: Callable) -> None:
    with pytest.raises(HarnessError, match=r"\.jpg is no figure format here; use \.png, \.svg or \.pdf"):
        decomposition_figure(a_table({"norm": 1.0}), tmp_path / "x.jpg")


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_same_record_gives_the_same_bytes(tmp_path: Path, a_table: Callable, suffix: str) -> None:
    once, again = tmp_path / f"once.{suffix}", tmp_path / f"again.{suffix}"
    for path in (once, again):
        decomposition_figure(table(a_table, 12, 68.0, sol=True), path)
    assert once.read_bytes() == again.read_bytes() != b""


# --- queue -------------------------------------------------------------------------------------------------------------


def queue_table(
    a_table: Callable[..., Decomposition], count: int, *, reference: bool, sol: bool = True
) -> Decomposition:
    rng = np.random.default_rng(count)
    rows = {k: float(v) for k, v in zip(names(count), rng.uniform(0.7, 8, count), strict=True)}
    ratio = {k: float(r) for k, r in zip(rows, rng.uniform(0.9, 3, count), strict=True)} if reference else None
    return a_table(rows, wall=1.03 * sum(rows.values()), ratio=ratio, sol=dict.fromkeys(rows, 0.8) if sol else None)


@pytest.mark.parametrize("reference", [True, False])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_a_queue_is_tidy(drawn: Callable, a_table: Callable, count: int, reference: bool) -> None:
    queue = build_queue(queue_table(a_table, count, reference=reference), BARS)
    figure = drawn(f"queue-{count}-{'reference' if reference else 'roof'}", lambda path: queue_figure(path, queue))
    said = words(figure)
    for meaning in (
        "Above a line a class can clear that bar",
        "landing: 1.5% of the wall",
        "Area: the budget",
        "Colour: if the whole",
    ):
        assert meaning in said
    assert ("parity with a reference" in said) == reference and ("against its roofline" in said) != reference
    for c in queue.candidates:
        assert c.label in said or elide(c.label, 1.3, 8.5) in said, f"{c.label} is named nowhere"


def test_a_bubble_right_of_a_line_is_one_that_clears_that_bar(drawn: Callable, a_table: Callable) -> None:
    queue = build_queue(queue_table(a_table, 12, reference=True), {"landing": 0.015})
    axes = drawn("queue-line", lambda path: queue_figure(path, queue)).axes[0]
    line = next(np.asarray(ln.get_xydata()) for ln in axes.lines if len(ln.get_xdata()) > 100)
    line = line[np.isfinite(line[:, 1])]
    judged = 0
    for c in queue.candidates:
        if c.ratio is not None and line[0, 0] < c.share < line[-1, 0] and c.ratio > 1.1:
            assert (c.ratio >= np.interp(c.share, line[:, 0], line[:, 1])) == c.clears["landing"]
            judged += 1
    assert judged >= 4 and {c.clears["landing"] for c in queue.candidates} == {True, False}


def test_a_queue_without_any_figure_to_judge_by_says_so(drawn: Callable, a_table: Callable) -> None:
    queue = build_queue(queue_table(a_table, 3, reference=False, sol=False), BARS)
    assert "neither a reference nor a roof" in words(drawn("queue-none", lambda path: queue_figure(path, queue)))


# --- diff --------------------------------------------------------------------------------------------------------------


def side(a_table: Callable[..., Decomposition], rows: dict[str, float], label: str, spread_: float = 0.0):
    passes = [
        Pass(wall_ms=60, busy_ms=sum(rows.values()) * s, launches=4, class_ms={k.split("/")[0]: v * s for k, v in rows.items()})
        for s in (1 - spread_ / 2, 1.0, 1 + spread_ / 2)
    ]  # fmt: skip
    return side_of_decomposition(a_table(rows, passes=passes), label)


BASE = {"gate_up": 31.0, "down": 16.0, "attention": 6.0, "norm": 2.0}
CHANGES = {
    "growth": BASE | {"attention": 9.5, "norm": 2.5, LONG: 4.0},
    "gain": BASE | {"attention": 3.0},
    "replaced": {"one_gemm": 44.0, "attention": 6.0, "norm": 2.2},
    "nothing": BASE | {"attention": 6.001},
    "many": {f"{LONG[:-3]}{i:03d}": 2.0 + i for i in range(20)},
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_diff_is_tidy_and_its_signs_and_colours_agree(drawn: Callable, a_table: Callable, case: str) -> None:
    found = diff(
        side(a_table, BASE, "base/before.json", 0.01),
        side(a_table, CHANGES[case], "lever/after.json", 0.01),
        across_windows=True,
    )
    figure = drawn(f"diff-{case}", lambda path: diff_figure(path, found))
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert low <= 0 <= high
    gains = [b.get_width() for b in axes.patches if _hex(b) == GAIN]
    taxes = [b.get_width() for b in axes.patches if _hex(b) == TAX]
    noise = [b.get_width() for b in axes.patches if _hex(b) == NOISE]
    assert all(w < 0 for w in gains) and all(w > 0 for w in taxes)
    assert sum(gains) == pytest.approx(found.direct_ms, abs=0.005) and sum(taxes) == pytest.approx(
        found.tax_ms, abs=0.005
    )
    assert sum(noise) == pytest.approx(found.noise_ms, abs=0.005)
    assert all(b.get_hatch() for b in axes.patches if _hex(b) == TAX), "a tax is told from a gain without its colour"
    said = words(figure)
    assert found.sums_text() in said.replace("\n", " ")
    assert ("tax, new" in said) == bool(CHANGES[case].keys() - BASE.keys())
    assert ("gain, gone" in said) == bool(BASE.keys() - CHANGES[case].keys())
    assert rises_above_noise(found) == (case != "nothing")


def _hex(patch) -> str:
    return "#" + "".join(f"{round(255 * v):02X}" for v in patch.get_facecolor()[:3])


def test_a_diff_of_traces_is_tidy(drawn: Callable, shared_data: Path) -> None:
    sides = []
    for name in ("before", "after"):
        path = shared_data / "traces" / f"nsys_2026.2.1_2gpu_{name}.sqlite"
        launches, source, _ = classified_launches(path)
        sides.append(side_of_launches(launches, str(path), source=source))
    assert "at the first side's work" in words(drawn("diff-traces", lambda path: diff_figure(path, diff(*sides))))


def test_a_round_within_noise_has_words_and_no_bridge(in_tmp: Path, a_round: Callable, a_table: Callable) -> None:
    rounds = Path("reports/rounds")

    def arm(rows: dict[str, float]) -> Decomposition:
        return a_table(
            rows, passes=[Pass(wall_ms=60, busy_ms=sum(rows.values()) * s, launches=4) for s in (0.99, 1, 1.01)]
        )

    quiet = a_round(rounds, "quiet", gain=0.0, before=arm(BASE), after=arm(BASE | {"attention": 6.05}))
    told = a_round(rounds, "told", gain=0.03, before=arm(BASE), after=arm(BASE | {"attention": 3.0}))
    (quiet / "bridge.png").write_bytes(b"of an earlier release")
    rebuild()
    page = (quiet / "README.md").read_text(encoding="utf-8")
    assert not (quiet / "bridge.png").exists() and "bridge.png" not in page and "beyond noise" in page
    assert (told / "bridge.png").is_file() and "(bridge.png)" in (told / "README.md").read_text(encoding="utf-8")


# --- against other engines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_ours_against_other_engines_is_tidy(drawn: Callable, count: int) -> None:
    def engine(name: str, wall: float) -> dict:
        return {
            "name": name,
            "model": "qwen2.5-7b-q4_k_m",
            "device": "NVIDIA H200",
            "gap_ms": 0.1 * wall,
            "traced_wall_ms": wall,
        }

    ours = {"gate_up": 30.0, "attention": 5.0, LONG: 2.0, "tail": 0.1, "embedding": 0.05}
    references = [
        engine(f"engine {i} {LONG if i else ''}", 80.0 + 60 * i) | {
            "one_window": i == 1, "wall_ratio": 60 / (80 + 60 * i),
            "roles": [{"role": k, "ours_ms": v, "theirs_ms": 2 * v, "ratio": 0.5} for k, v in ours.items()]
            + [{"role": "dequantize", "ours_ms": None, "theirs_ms": 14.0, "ratio": None}],
        }
        for i in range(count)
    ]  # fmt: skip
    record = {"tokens": 3325, "ours": engine("ours", 60.0), "references": references}
    figure = drawn(f"against-{count}", lambda path: against_figure(record, path))
    (axes,) = figure.axes
    said = words(figure)
    assert axes.get_xlim()[0] == 0 and axes.get_xlim()[1] >= 60
    assert f"{80 + 60 * (count - 1):.2f}" in said, "the wall is told"
    assert "2 more" in said and "0.50×~" in said and "another window's figures" in said and "dequantize" in said
    hatches = {b.get_hatch() for b in axes.patches}
    assert len(hatches) == count + 1, "engines are told apart without their colours"


# --- rounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gain", "noise", "frozen"),
    [
        ("six", 0.0, 0.001, {}),
        ("forty", 0.0175, 0.02, {}),
        ("mile", -0.35, 0.003, {}),
        ("lands", 0.03, 0.002, {}),
        ("first-pair", 0.05, 0.002, {"min_pairs": 1}),
        ("no-delta", 0.05, 0.002, {"delta": 0.0001}),
    ],
)
def test_pairs_and_walls_are_tidy(
    drawn: Callable, in_tmp: Path, a_round: Callable, name: str, gain: float, noise: float, frozen: dict
) -> None:
    path = a_round(Path("reports/rounds"), f"{name} {LONG}", gain=gain, noise=noise, frozen=frozen, drop=(3,))
    r = load_record(path)
    samples = [s for s in read_samples(path) if s.pair]
    decide, confirm, band, starts = pair_points(r, samples)
    figure = drawn(f"pairs-{name}", lambda out: plot_pairs(
        out, decide=decide, confirm=confirm, band=band, bar=r.bar, delta=r.delta, min_pairs=r.min_pairs, estimate=r.estimate,
        confirmed=r.confirmed, title=f"{r.number} {r.title}", line="REVERTED", windows=[*starts, 4],
    ))  # fmt: skip
    said = words(figure)
    assert f"bar {r.bar:+.1%}" in said and "bar + δ" in said and "no promise either way" in said
    assert ("fewer than 6 pairs kept: no verdict yet" in said) == (r.min_pairs == 6)
    assert {"six": 6, "forty": 40}.get(name, r.pairs) == r.pairs
    low, high = figure.axes[0].get_ylim()
    assert low <= min(0, gain) and high >= r.bar, "the line of no change and the bar are always seen"
    arms = [(f"{a}: {LONG}", [w for s in samples if s.arm == a for w in s.wall_ms]) for a in "AB"]
    walls = drawn(f"walls-{name}", lambda out: plot_walls(out, arms, title="Every forward of both arms"))
    assert LONG[:4] in words(walls) and "95th percentile" in words(walls)


def test_a_spike_is_an_arrow_at_the_edge_and_says_how_far_it_went(drawn: Callable) -> None:
    decide = [(n, 0.4 if n == 7 else 0.001 * (n % 5), True) for n in range(1, 31)]
    figure = drawn("pairs-spike", lambda out: plot_pairs(
        out, decide=decide, confirm=[], band=[(30, None, 0.01)], bar=0.015, delta=0.005, min_pairs=6, estimate=0.002, confirmed=None, title="x",
    ))  # fmt: skip
    assert f"1 beyond the axis, to {np.expm1(0.4):+.1%}" in words(figure)
    assert figure.axes[0].get_ylim()[1] < 0.1


def test_a_basket_is_tidy(drawn: Callable) -> None:
    def effect(x: float) -> Effect:
        return Effect(estimate=x, interval=(x - 0.01, x + 0.02))

    basket = Basket(a=effect(0.0), b=effect(-0.2), both=effect(0.05), interaction=effect(0.048))
    figure = drawn(
        "basket",
        lambda out: plot_basket(out, basket, bar=0.015, names=[LONG, "b"], title="Two levers, alone and together"),
    )
    low, high = figure.axes[0].get_xlim()
    assert low <= -0.21 and high >= 0.07 and "bar +1.5%" in words(figure)


def outcomes(count: int) -> list[Outcome]:
    kinds = ["LANDED", "REVERTED", "INCONCLUSIVE", "INVALID", None, "MEAS-ONLY"]
    found = []
    for i in range(count):
        verdict = kinds[i % 6]
        gain = None if verdict in ("MEAS-ONLY", "INVALID") else 0.01 * (i % 5) - 0.01
        interval = None if gain is None else (None if i % 7 == 0 else gain - 0.5 * (i % 3), gain + 0.01)
        found.append(Outcome(
            f"{i + 1:04d} {LONG if i % 2 else 'short'}", verdict, gain, interval, 0.03 if i % 4 == 0 else 0.015,
            control={1: "A/A", 6: "planted"}.get(i, ""), at_most=i == 7, promoted=verdict == "LANDED", wall=f"{60 + i:.2f}",
            reference="2.40×" if i % 3 == 0 else "", anchor=(f"{3325 if i % 2 else 2659} tokens", "burst" if i % 3 else "sustained", f"NVIDIA H200 {LONG}{i % 2}"),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize("count", [1, 12, 130])
def test_a_campaign_is_tidy(drawn: Callable, count: int) -> None:
    rounds = outcomes(count)
    figure = drawn(f"campaign-{count}", lambda path: plot_campaign(path, rounds))
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    assert all(low < r.gain < high for r in rounds if r.gain is not None) and low <= 0 <= high
    assert ("the newest 30 of 130 rounds" in words(figure)) == (count == 130)


def test_an_a_a_is_grey_and_every_verdict_has_a_shape_of_its_own(drawn: Callable) -> None:
    rounds = [
        Outcome("0001 A/A", "REVERTED", 0.001, (-0.002, 0.004), 0.015, control="A/A", wall="66.90"),
        Outcome("0002 lands", "LANDED", 0.03, (0.02, 0.04), 0.015, wall="66.70"),
        Outcome("0003 does not", "REVERTED", 0.002, (-0.002, 0.009), 0.015, wall="67.50"),
        Outcome("0004 unsure", "INCONCLUSIVE", 0.014, (-0.002, 0.03), 0.015, wall="67.10"),
    ]
    axes = drawn("campaign-marks", lambda path: plot_campaign(path, rounds)).axes[0]
    marks = [ln for ln in axes.lines if len(ln.get_xdata()) == 1]
    assert len({m.get_marker() for m in marks}) == len(marks) == 4
    red, green, blue = (int(marks[0].get_markerfacecolor()[i : i + 2], 16) for i in (1, 3, 5))
    assert max(red, green, blue) - min(red, green, blue) < 24, "an A/A is a measurement of noise, not a failure"
    walls = {66.9, 66.7, 67.5, 67.1}
    assert not any(walls & set(np.round(np.asarray(ln.get_ydata(), float), 2)) for ln in axes.lines), (
        "no line through walls"
    )


def test_operating_characteristics_are_drawn_again_from_the_committed_json(drawn: Callable) -> None:
    script = REPORTS.parent / "benchmarks" / "operating_characteristics.py"
    result = json.loads(script.with_suffix(".json").read_text(encoding="utf-8"))
    draw = runpy.run_path(str(script))["draw"]
    figure = drawn("operating", lambda path: draw(result, path))
    curves = [ln for ln in figure.axes[0].lines if len(ln.get_xdata()) > 5]
    assert len(curves) == 4 and len({ln.get_marker() for ln in curves}) == 4
    assert "at most α = 5% land" in words(figure)


# --- the look ----------------------------------------------------------------------------------------------------------

# Machado, Oliveira & Fernandes 2009, severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(shade: str, vision: str) -> np.ndarray:
    rgb = np.array([int(shade[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(VISION[vision]) @ linear, 0, 1)
    xyz = (
        np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
        @ seen
        / [0.9505, 1, 1.089]
    )
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one: str, two: str) -> float:
    """The least CIE76 distance of two colours over every kind of colour vision."""
    return min(float(np.linalg.norm(lab(one, v) - lab(two, v))) for v in VISION)


def test_neighbours_in_every_committed_bar_stay_apart_for_every_colour_vision() -> None:
    tables = [
        load_decomposition(p)
        for p in [*REPORTS.glob("h200/*/decomposition.json"), *REPORTS.glob("rounds/*/*.json")]
        if p.name != "record.json"
    ]
    assert len(tables) >= 5
    for result in tables:
        shades = colours(list(result.by_class()))
        bar = [*(shades[c] for c in result.by_class()), GAP]
        for one, two in pairwise(bar):
            assert apart(one, two) > 15, (one, two)


def test_gain_tax_and_noise_stay_apart_for_every_colour_vision() -> None:
    for one, two in combinations((GAIN, TAX, NOISE), 2):
        assert apart(one, two) > 15, (one, two)


def test_classes_of_a_users_rule_file_get_colours_apart_from_their_neighbours() -> None:
    new = [f"mine_{i}" for i in range(20)]
    shades = colours(["gate_up", *new])
    assert all(apart(shades[a], shades[b]) > 15 for a, b in pairwise(new))


def test_words_are_measured_cut_and_spread() -> None:
    assert text_width("mm") > text_width("ii") > 0
    short = elide(LONG, 1.0)
    assert "…" in short and text_width(short) <= 1.0 and short[0] == LONG[0] and short[-1] == LONG[-1]
    assert elide("short", 1.0) == "short"
    assert wrap("one two three", text_width("one two")) == ["one two", "three"]
    at = spread([5.0, 5.1, 9.9], [1.0, 1.0, 1.0], 0, 10, 0.1)
    assert all(b - a >= 1.1 - 1e-9 for a, b in pairwise(at)) and at[-1] <= 9.5


def test_a_name_with_a_dollar_is_a_name_and_no_formula(drawn: Callable, a_table: Callable) -> None:
    result = a_table({"a$b$c": 3.0, "norm": 1.0})
    assert "a$b$c" in words(drawn("dollar", lambda path: decomposition_figure(result, path)))


def test_a_row_that_sums_up_the_rest_keeps_the_total(drawn: Callable, a_table: Callable) -> None:
    from harness.report.figures import MAX_ROWS, _rows

    result = table(a_table, 25, 60.0, sol=True)
    rows = _rows(result)
    assert len(rows) <= MAX_ROWS and rows[-1].cls.endswith("more") and all(isinstance(r, ClassRow) for r in rows)
    assert sum(r.sum_ms for r in rows) == pytest.approx(sum(r.sum_ms for r in result.classes))
