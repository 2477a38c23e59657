"""reports/INDEX.md and campaign.png: every round on a line, and what each gained."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from harness.attribution.decomposition import load_decomposition
from harness.errors import HarnessError
from harness.files import write_atomic
from harness.report import round_figures as draw
from harness.report.markdown import markdown_table, templates, tidy
from harness.report.words import gain_of, ms, percent, span, spelt
from harness.rounds.record import RoundRecord
from harness.rounds.retry import evaluate
from harness.rounds.store import load_record, round_dirs
from harness.rounds.tables import TABLE, newest


def render_index(reports: Path, *, figures: bool = True) -> list[Path]:
    """Writes INDEX.md, and campaign.png once a round has a gain; the paths that hold them."""
    paths = round_dirs(reports / "rounds")
    records = [load_record(p) for p in paths]
    outcomes = campaign(records, paths)
    figure = reports / "campaign.png"
    drawn = any(o.gain is not None for o in outcomes)
    if drawn and (figures or not figure.is_file()):
        draw.plot_campaign(figure, outcomes)
    if not drawn:
        figure.unlink(missing_ok=True)
    text = templates().get_template("index.md.j2").render(
        summary=counted(records), figure=drawn, table=_index_table(records, paths), retries=_retries(records, reports),
    )  # fmt: skip
    write_atomic(reports / "INDEX.md", tidy(text))
    return [reports / "INDEX.md", *([figure] if drawn else [])]


def wall_after(record: RoundRecord, path: Path) -> float | None:
    """The wall that the base has after a round: arm B's where its lever was promoted, else arm A's; a table's own. ms.

    An arm with a plant is no configuration of the engine: the other one speaks for the base then.
    """
    if record.kind == "MEAS-ONLY":
        return load_decomposition(path / TABLE).wall_ms if (path / TABLE).is_file() else None
    planted = "A" in record.arms and bool(record.arms["A"].config.get("plant"))
    arm = record.arms.get("B" if record.promoted or planted else "A")
    return arm.wall.median_ms if arm is not None and arm.wall is not None else None


def control_of(record: RoundRecord) -> str:
    """ "A/A" or "planted" of a round that tests the method, not a lever; "" of the others."""
    if record.aa:
        return "A/A"
    return "planted" if any(arm.config.get("plant") for arm in record.arms.values()) else ""


def verdict_said(record: RoundRecord) -> str:
    """The verdict for a list of rounds; an A/A has none to give: it measures noise."""
    control = control_of(record)
    if control == "A/A":
        return "A/A: noise"
    return (record.verdict or "open") + (f" ({control})" if control else "")


def counted(records: list[RoundRecord]) -> str:
    """One line: how the rounds with a lever ended, and apart from them those that test the method."""
    if not records:
        return "No round was run yet: `harness ab base.yaml lever.yaml` makes the first."
    controls = Counter(c for r in records if (c := control_of(r)))
    verdicts = Counter(r.verdict or "open" for r in records if not control_of(r) and r.kind == "AB")
    others = len(records) - verdicts.total() - controls.total()
    levers = verdicts.total()
    said = (
        [f"{levers} lever{'s' * (levers != 1)}: " + ", ".join(f"{n} {v}" for v, n in verdicts.most_common())]
        if levers
        else []
    )
    if others:
        said.append(f"{others} without a lever")
    if controls:
        said.append(", ".join(f"{n} {c}" for c, n in controls.items()) + " (tests of the method)")
    return f"{len(records)} round{'s' * (len(records) != 1)}: " + "; ".join(said) + "."


def campaign(records: list[RoundRecord], paths: list[Path]) -> list[draw.Outcome]:
    """What the campaign's figure says of every round that no later one corrects."""
    outcomes = []
    for r, path in zip(records, paths, strict=True):
        if r.superseded_by:
            continue
        wall = wall_after(r, path)
        outcomes.append(
            draw.Outcome(
                name=f"{r.number} {r.title or r.slug.replace('-', ' ')}", verdict=r.verdict,
                gain=r.analysis.best_gain if r.analysis is not None else gain_of(r), interval=r.interval,
                bar=r.bar if r.kind == "AB" else None, control=control_of(r),
                at_most=r.analysis is not None, promoted=bool(r.promoted), wall="" if wall is None else ms(wall),
                reference=", ".join(f"{v:.2f}×" for v in r.vs_reference.values()), anchor=(f"{r.tokens} tokens" if r.tokens else "", r.regime, r.device),
            )
        )  # fmt: skip
    return outcomes


def _index_table(records: list[RoundRecord], paths: list[Path]) -> str:
    rows = []
    for r, path in zip(records, paths, strict=True):
        gain = gain_of(r)
        figure = percent(gain) if r.analysis is None else f"≤ {percent(r.analysis.best_gain)}"
        wall = ms(wall_after(r, path))
        reference = ", ".join(f"{v:.2f}×" for v in r.vs_reference.values()) or "–"
        cells = [
            figure,
            span(r.interval) if r.confirmed is None else "confirmed",
            percent(r.bar, 1) if r.kind == "AB" else "–",
            wall,
            reference,
        ]
        if r.superseded_by:
            cells = [f"~~{c}~~" if c != "–" else c for c in cells]
        title = r.title or r.slug.replace("-", " ")
        name = f"~~{title}~~ → [{r.superseded_by:04d}](#{r.superseded_by:04d})" if r.superseded_by else title
        verdict = verdict_said(r)
        verdict += (
            f" ({spelt(r.outcome)})"
            if r.outcome and not control_of(r) and r.outcome not in ("landed", "measured", "inconclusive")
            else ""
        )
        rows.append(
            [f'<a id="{r.number}"></a>[{r.number}](rounds/{r.directory_name}/README.md)', name, verdict, *cells]
        )
    return markdown_table(["round<", "what<", "verdict<", "gain", "interval", "bar", "wall, ms", "× reference"], rows)


def _retries(records: list[RoundRecord], reports: Path) -> str:
    """Retry conditions that the newest table meets."""
    try:
        found = newest(reports)
    except HarnessError:
        return ""
    lines = []
    for r in records:
        if r.superseded_by or r.verdict == "LANDED":
            continue
        for condition in r.retry_conditions:
            answer = evaluate(condition, found.table)
            if answer.state == "met":
                lines.append(
                    f"- Round [{r.number}](rounds/{r.directory_name}/README.md), {r.title or r.slug}: `{condition}` ({answer.detail})."
                )
    return "\n".join(lines)
