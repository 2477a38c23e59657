"""From records to pages: every round's README.md and figures. Idempotent, byte for byte. `report/index.py` makes the index."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.ab import evidence as ev
from harness.ab.verdict import half_wall
from harness.attribution.decomposition import Decomposition, load_decomposition
from harness.attribution.diff import WORTH, Diff, Row, diff, side_of_decomposition
from harness.files import write_atomic
from harness.report import round_figures as draw
from harness.report.decomposition import above_roof, columns_of
from harness.report.diff_figure import diff_figure, rises_above_noise
from harness.report.figures import decomposition_figure
from harness.report.index import render_index
from harness.report.markdown import markdown_table, templates, tidy
from harness.report.saved import render_saved
from harness.report.words import gain_of, gigabytes, headline, memory_change, ms, percent, span
from harness.rounds.edits import absorb, conditions_text, region
from harness.rounds.record import RoundRecord, Sample
from harness.rounds.store import (
    README,
    find_round,
    load_record,
    read_samples,
    reports_dir,
    round_dirs,
    save_record,
)
from harness.rounds.tables import AFTER, BEFORE, TABLE


def rebuild(reports: Path | None = None, *, figures: bool = True) -> list[Path]:
    """Renders every round, every other page that lies beside its record, and the index; without `figures`, only those
    figures that are missing.

    Returns the files that hold the pages.
    """
    reports = reports or reports_dir()
    paths = round_dirs(reports / "rounds")
    pages = [render_round(path, figures=figures, index=False) for path in paths]
    return [*pages, *render_saved(reports, figures=figures), *render_index(reports, figures=figures)]


def render_round(path: Path, *, figures: bool = True, index: bool = True, take_edits: bool = True) -> Path:
    """Writes one round's README.md and figures; then, with `index`, the index and the neighbours' links.

    Without `figures` only those that are missing are drawn.
    Text that a person edited in the README goes into record.json first, unless `take_edits` is off.
    """
    record = load_record(path)
    if take_edits and absorb(record, path / README):
        save_record(path, record)
    page = _Page(path, record, [load_record(p) for p in round_dirs(path.parent)])
    text = templates().get_template("round.md.j2").render(page.context(redraw=figures))
    write_atomic(path / README, tidy(text))
    if index:
        for neighbour in (page.previous, page.next):
            if neighbour is not None:
                render_round(find_round(neighbour.round, path.parent), figures=False, index=False)
        render_index(path.parent.parent, figures=figures)
    return path / README


@dataclass
class _Page:
    """What one README shows."""

    path: Path
    r: RoundRecord
    everyone: list[RoundRecord]

    @property
    def previous(self) -> RoundRecord | None:
        return max((o for o in self.everyone if o.round < self.r.round), key=lambda o: o.round, default=None)

    @property
    def next(self) -> RoundRecord | None:
        return min((o for o in self.everyone if o.round > self.r.round), key=lambda o: o.round, default=None)

    def context(self, *, redraw: bool) -> dict[str, Any]:
        samples = read_samples(self.path)
        bridge = self.bridge()
        timed = [s for s in samples if s.pair > 0]
        self.draw(timed, bridge, redraw)
        table = self.attached(TABLE)
        return {
            "r": self.r,
            "title": self.r.title or self.r.slug.replace("-", " "),
            "headline": headline(self.r),
            "previous": self.previous,
            "next": self.next,
            "links": {o.round: f"../{o.directory_name}/README.md" for o in self.everyone},
            "region": lambda name, text: region(name, text, self.r.number),
            "last_table": self.last_table(),
            "prediction": self.prediction(),
            "arms_table": self.arms_table(),
            "diff_table": markdown_table(
                ["key<", "A<", "B<"], [[f"`{d.key}`", _code(d.before), _code(d.after)] for d in self.r.diff]
            ),
            "ops": self.ops(),
            "analysis_table": self.analysis_table(),
            "gates_table": self.gates_table(),
            "gates_summary": self.gates_summary(),
            "gates_failed": any(g.ok is False for g in self.r.gates),
            "anchor": self.anchor(),
            "window": self.window(),
            "figures": {
                "pairs": bool(timed),
                "walls": bool(timed),
                "basket": self.r.basket is not None,
                "bridge": bridge is not None and rises_above_noise(bridge),
                "decomposition": self.r.kind == "MEAS-ONLY" and table is not None,
            },
            "walls_table": self.walls_table(),
            "basket_table": self.basket_table(),
            "bridge_table": bridge_table(bridge) if bridge else "",
            "bridge_sentence": _bridge_sentence(bridge) if bridge else "",
            "cash_in": self.cash_in(),
            "table": class_table(table) if table else "",
            "conditions": conditions_text(self.r.retry_conditions),
            "provenance": self.provenance(),
        }

    def attached(self, name: str) -> Decomposition | None:
        file = self.path / name
        return load_decomposition(file) if file.is_file() else None

    def bridge(self) -> Diff | None:
        before, after = self.attached(BEFORE), self.attached(AFTER)
        if before is None or after is None:
            return None
        # Both tables come from one round, and so from one window.
        return diff(side_of_decomposition(before, "arm A"), side_of_decomposition(after, "arm B"), across_windows=True)

    def draw(self, samples: list[Sample], bridge: Diff | None, redraw: bool) -> None:
        r = self.r

        def due(name: str) -> bool:
            return redraw or not (self.path / name).is_file()

        if samples and (due("pairs.png") or due("walls.png")):
            decide, confirm, band, starts = pair_points(r, samples)
            draw.plot_pairs(
                self.path / "pairs.png", decide=decide, confirm=confirm, band=band, bar=r.bar, delta=r.delta, min_pairs=r.min_pairs, estimate=r.estimate,
                confirmed=r.confirmed, title=f"{r.number} {r.title or r.slug}", line=headline(r).removesuffix(f"{memory_change(r)}.") + ".", windows=starts,
            )  # fmt: skip
            lost = {(s.phase, s.window, s.pair) for s in samples if s.dropped}
            kept = [s for s in samples if (s.phase, s.window, s.pair) not in lost]
            letters = sorted({s.arm for s in kept})
            arms = [
                (
                    f"{a}: {r.arms[a].name if a in r.arms else a}",
                    [w for s in kept if s.arm == a for w in s.wall_ms],
                )
                for a in letters
            ]
            draw.plot_walls(self.path / "walls.png", arms, title=f"Every forward of both arms, {r.regime}")
        if bridge is None or not rises_above_noise(bridge):
            (self.path / "bridge.png").unlink(missing_ok=True)
        elif due("bridge.png"):
            sides = " → ".join(r.arms[a].name if a in r.arms else f"arm {a}" for a in "AB")
            diff_figure(self.path / "bridge.png", bridge, title=f"Busy time by class, {sides}")
        table = self.attached(TABLE)
        if table is not None and r.kind == "MEAS-ONLY" and due("decomposition.png"):
            decomposition_figure(table, self.path / "decomposition.png")
        if r.basket is not None and due("basket.png"):
            names = [r.arms[a].name if a in r.arms else a for a in "CD"]
            draw.plot_basket(
                self.path / "basket.png", r.basket, bar=r.bar, names=names, title="Two levers, alone and together"
            )

    def last_table(self) -> str:
        """What the newest decomposition of an earlier round said."""
        for earlier in sorted((o for o in self.everyone if o.round < self.r.round), key=lambda o: -o.round):
            folder = self.path.parent / earlier.directory_name
            for name in (TABLE, AFTER, BEFORE):
                if (folder / name).is_file() and (name != AFTER or earlier.verdict == "LANDED"):
                    table = load_decomposition(folder / name)
                    top = list(table.by_class().items())[:3]
                    busy = table.busy_ms or 1.0
                    said = ", ".join(f"{c} {ms(t)} ms ({t / busy:.1%} of busy)" for c, t in top)
                    link = f"[round {earlier.number}](../{earlier.directory_name}/README.md)"
                    return f"The last table, of {link}, at {table.tokens} tokens: wall {ms(table.wall_ms)} ms, busy {ms(busy)} ms; {said}."
        return "No earlier round holds a table."

    def prediction(self) -> str:
        if self.r.prediction is None:
            return "No gain was predicted."
        return f"Predicted, before the first pair: {percent(self.r.prediction)} of the wall."

    def arms_table(self) -> str:
        rows = [
            [
                letter,
                a.name,
                f"`{a.identity[:12] or '–'}`",
                f"`{a.config_sha256[:12] or '–'}`",
                gigabytes(a.device_memory_bytes),
            ]
            for letter, a in sorted(self.r.arms.items())
        ]
        return markdown_table(["arm<", "name<", "identity<", "config<", "device memory"], rows)

    def ops(self) -> str:
        if not self.r.ops_affected:
            return (
                ""
                if self.r.aa or not (self.path / BEFORE).is_file()  # no traced table: nothing is known of the ops
                else "The plan's ops are the same in both arms; only how they run differs."
            )
        rows = [[o.op, o.cls, o.change, str(o.count)] for o in self.r.ops_affected]
        return "Ops of the plan that differ:\n\n" + markdown_table(["op<", "class<", "change<", "count"], rows)

    def analysis_table(self) -> str:
        a = self.r.analysis
        if a is None:
            return ""
        reach = f"{a.sol:.1%} of its roof" if a.sol is not None else f"{a.claimed:g}× faster (claimed)"
        rows = [[a.cls, ms(a.class_ms), ms(a.wall_ms), reach, percent(a.best_gain), percent(self.r.bar, 1)]]
        return markdown_table(["class<", "ms", "wall, ms", "reach<", "best gain", "bar"], rows)

    def gates_summary(self) -> str:
        """The gates in one line: how many passed, or which failed."""
        gates = self.r.gates
        failed = [g.name for g in gates if g.ok is False]
        passed, absent = sum(g.ok is True for g in gates), sum(g.ok is None for g in gates)
        said = [f"failed: {', '.join(failed)}"] if failed else []
        said.append(f"{passed} gate{'s' * (passed != 1)} passed")
        return ", ".join([*said, *([f"{absent} n/a"] if absent else [])])

    def gates_table(self) -> str:
        state = {True: "passed", False: "**failed**", None: "not applicable"}
        rows = [[g.name, state[g.ok], _figure(g.value), _figure(g.limit), g.detail] for g in self.r.gates]
        return markdown_table(["gate<", "result<", "value", "limit", "detail<"], rows)

    def anchor(self) -> str:
        a = self.r.anchor
        if a is None:
            return ""
        held = "within" if a.ok else "**outside**"
        return (
            f"Anchor: arm A took {ms(a.now_ms)} ms, against {ms(a.wall_ms)} ms in round {a.round:04d} ({percent(a.now_ms / a.wall_ms - 1)}): "
            f"{held} {a.limit:.0%}."
        )

    def window(self) -> str:
        lines = []
        for w in self.r.windows:
            state = {True: "quiet", False: "**not quiet**", None: "not judged"}[w.quiet]
            line = f"- Window {w.window}: {state}"
            line += f"; disturbed by {'; '.join(w.disturbed_by)}" if w.disturbed_by else ""
            line += f"; could not see: {'; '.join(w.unseen)}" if w.unseen else ""
            lines.append(line + ".")
        if self.r.pairs or self.r.dropped:
            lines.append(
                f"- {self.r.pairs} pairs kept, {self.r.dropped} dropped for telemetry reasons that do not look at the outcome."
            )
        return "\n".join(lines) or "No window was opened."

    def walls_table(self) -> str:
        rows = []
        for letter, arm in sorted(self.r.arms.items()):
            if arm.wall is not None:
                w = arm.wall
                rows.append([letter, str(w.forwards), ms(w.median_ms), ms(w.mean_ms), ms(w.p95_ms), f"{w.spread:.2%}"])
        text = markdown_table(["arm<", "forwards", "median, ms", "mean, ms", "p95, ms", "spread of halves"], rows)
        evidence = self.r.evidence
        if evidence is not None:
            text += (
                f"\n\nEvidence for a gain above the bar {evidence.for_:.3g} (lands at {1 / self.r.alpha:.3g}), against it "
                f"{evidence.against:.3g} (reverts at {1 / self.r.beta:.3g}); estimate {percent(self.r.estimate)}, interval {span(self.r.interval)}"
                + (
                    f", confirmed by {self.r.confirm_pairs} fresh pairs at {percent(self.r.confirmed)}."
                    if self.r.confirmed is not None
                    else "."
                )
            )
        return text

    def basket_table(self) -> str:
        b = self.r.basket
        if b is None:
            return ""
        name = {a: self.r.arms[a].name if a in self.r.arms else a for a in "CD"}
        rows = [(name["C"], b.a), (name["D"], b.b), ("both", b.both), ("interaction", b.interaction)]
        return markdown_table(
            ["effect<", "estimate", "interval"], [[n, percent(e.estimate), span(e.interval)] for n, e in rows]
        )

    def cash_in(self) -> str:
        """Prediction and mechanism against what the wall gave."""
        r, parts = self.r, []
        got = gain_of(r)
        if r.prediction is not None and got is not None:
            parts.append(f"predicted {percent(r.prediction)}, the wall gave {percent(got)}")
        m = r.mechanism
        if m.found != "not measured" and m.before_ms and m.after_ms:
            before, after = float(np.median(m.before_ms)), float(np.median(m.after_ms))
            parts.append(f"the changed ops went from {ms(before)} to {ms(after)} ms (mechanism: {m.found})")
            walls = [r.arms[a].wall if a in r.arms else None for a in "AB"]
            if walls[0] and walls[1] and m.found == "positive":
                saved = walls[0].median_ms - walls[1].median_ms
                parts.append(
                    f"of the {ms(before - after)} ms that they gave up the wall cashed {ms(saved)} ms ({saved / (before - after):.0%})"
                )
        if not parts:
            return m.detail
        return "Prediction against cash-in: " + "; ".join(parts) + "." + (f" {m.detail}" if m.detail else "")

    def provenance(self) -> str:
        r = self.r
        rows = [
            ["kind", "A/A" if r.aa else r.kind],
            ["model", r.model],
            ["tokens", str(r.tokens or "")],
            ["device", r.device],
        ]
        if r.kind == "AB" and not r.analysis:
            inner = f"{r.statistic} of {r.inner} forwards a half, {r.regime}"
            rows += [
                ["protocol", f"{r.protocol}: bar {r.bar:.1%}, alpha {r.alpha:g}, beta {r.beta:g}, delta {r.delta:.1%}, {r.min_pairs} to {r.max_pairs} pairs"],
                ["measured as", inner + f", s0 {r.s0:.2%}, seed {r.seed}, " + ("a fresh process every half" if r.boots is None else f"{r.boots} processes an arm")],
                ["frozen", f"{r.frozen_at} `{r.frozen_hash[:12]}`"],
            ]  # fmt: skip
        rows += [["started", r.started], ["finished", r.finished]]
        rows += [[key.replace("_", " "), _code(value)] for key, value in r.provenance.items()]
        if r.vs_reference:
            rows.append(["× the reference", ", ".join(f"{n} {v:.2f}×" for n, v in r.vs_reference.items())])
        if r.promoted:
            rows.append(["promoted to base", r.promoted])
        return markdown_table(["what<", "value<"], [row for row in rows if row[1] not in ("", "``")])


def pair_points(
    record: RoundRecord, samples: list[Sample]
) -> tuple[
    list[tuple[int, float, bool]],
    list[tuple[int, float, bool]],
    list[tuple[int, float | None, float | None]],
    list[int],
]:
    """(deciding pairs, confirmation pairs, interval after each pair, first pair of every later window) of a round.

    A pair is (running number, ln(wall_A / wall_B), kept).
    """
    pairs: dict[tuple[str, int, int], dict[str, Sample]] = {}
    for sample in samples:
        pairs.setdefault((sample.phase, sample.window, sample.pair), {})[sample.arm] = sample
    points: dict[str, list[tuple[int, float, bool]]] = {"decide": [], "confirm": []}
    windows: dict[int, list[float]] = {}
    band: list[tuple[int, float | None, float | None]] = []
    starts: list[int] = []
    number = 0
    for (phase, window, _), halves in sorted(pairs.items(), key=lambda item: (item[0][0] != "decide", *item[0][1:])):
        if phase == "discard" or not {"A", "B"} <= halves.keys():
            continue
        number += 1
        d = float(
            np.log(half_wall(halves["A"].wall_ms, record.statistic) / half_wall(halves["B"].wall_ms, record.statistic))
        )
        kept = not any(h.dropped for h in halves.values())
        points[phase].append((number, d, kept))
        if phase != "decide":
            continue
        if window not in windows and windows:
            starts.append(number)
        windows.setdefault(window, [])
        if kept:
            windows[window].append(d)
            if sum(map(len, windows.values())) >= record.min_pairs:
                arrays = [np.array(v) for v in windows.values()]
                band.append(
                    (number, *ev.confidence_sequence(arrays, s0=record.s0, alpha=record.alpha, beta=record.beta))
                )
    return points["decide"], points["confirm"], band, starts


def bridge_table(found: Diff) -> str:
    """A diff as Markdown: before, after, delta, launches, and µs per launch of every class."""
    rows = [
        [
            str(r.key[0]), ms(r.before.ms), ms(r.after.ms), f"{r.delta_ms:+.2f}", _tag(r, found),
            f"{r.before.launches} → {r.after.launches}", f"{ms(r.before.us_per_launch, 1)} → {ms(r.after.us_per_launch, 1)}",
        ]
        for r in found.classes
    ]  # fmt: skip
    total = [sum(r.before.ms for r in found.classes), sum(r.after.ms for r in found.classes)]
    rows.append(["**busy (sum)**", ms(total[0]), ms(total[1]), f"{found.net_ms + found.noise_ms:+.2f}", "", "", ""])
    return markdown_table(["class<", "A, ms", "B, ms", "delta", "reads as<", "launches", "µs per launch"], rows)


def _tag(row: Row, found: Diff) -> str:
    if abs(row.delta_ms) < WORTH * found.before.busy_ms:
        return ""
    return "within noise" if row.within_noise else "direct gain" if row.delta_ms < 0 else "hidden tax"


def _bridge_sentence(found: Diff) -> str:
    spread = found.spread_text()
    text = f"Of busy, {found.sums_text()}: {found.sentence()}."
    text += "".join(
        f" **Unsound**, {side.label}: {side.unsound[0]}." for side in (found.before, found.after) if side.unsound
    )
    return text + (f" Noise: {spread}." if spread else "")


def class_table(table: Decomposition) -> str:
    """A decomposition as Markdown: rows, the whole, and the checks that failed."""
    columns = [c for c in columns_of(table) if c.header]
    rows = [[c.text(row) or "–" for c in columns] for row in table.classes]
    text = markdown_table([c.header + "<" * c.left for c in columns], rows)
    rate = f", {table.tok_per_s:,.0f} tok/s" if table.tok_per_s else ""
    text += (
        f"\n\nWall {ms(table.wall_ms)} ms{rate}; traced {ms(table.traced_wall_ms)} ms = busy {ms(table.busy_ms)} + gap {ms(table.gap_ms)} ms "
        f"(overlap {ms(table.overlap_ms)} ms)."
    )
    if table.vs_reference:
        text += f" {table.vs_reference:.2f}× the reference."
    if table.structure:
        text += f" Graph: {table.structure}."
    text += f" {above_roof(table)}" if above_roof(table) else ""
    failed = [c for c in table.checks if not c.ok]
    if not failed and (why := table.broken()):
        text += f"\n\n**Unsound**: {why[0]}."
    passed = ", ".join(c.name for c in table.checks if c.ok)
    text += f"\n\nChecks passed: {passed or 'none'}."
    text += "".join(f"\n- **Check failed: {c.name}.** {c.detail}" for c in failed)
    return text


def _figure(value: float | str | None) -> str:
    return "–" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _code(value: Any) -> str:
    """A value of a config or of provenance: in code marks; a mapping as key=value pairs."""
    if value is None or value == "":
        return "" if value == "" else "–"
    if isinstance(value, dict):
        return ", ".join(f"{k}={_plain(v)}" for k, v in value.items())
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{k}={_plain(v)}" for k, v in value.items()) + ")"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
