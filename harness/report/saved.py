"""Pages beside a saved record: rendered again from the JSON alone, each by the kind that its `schema` names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.files import write_atomic


def render_saved(folder: Path, *, figures: bool = True) -> list[Path]:
    """Renders every page below `folder`, outside rounds/, that lies beside its record; the pages written.

    A decomposition's page is the README.md beside a `decomposition.json` (as `decompose --save` leaves them); a cross-check's is
    the .md of the same name. A record without its page is somebody's data, and stays without.
    Without `figures`, only figures that are missing are drawn. Raises HarnessError naming a record that cannot be read.
    """
    written: list[Path] = []
    for record in sorted(folder.rglob("*.json")):
        if folder / "rounds" in record.parents:
            continue
        kind = KINDS.get(_schema(record))
        if kind is not None:
            written += kind(record, figures)
    return written


def _schema(record: Path) -> str:
    try:
        found = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(found.get("schema", "")) if isinstance(found, dict) else ""


def _decomposition(record: Path, figures: bool) -> list[Path]:
    from harness.attribution.decomposition import load_decomposition
    from harness.report.decomposition import to_markdown
    from harness.report.figures import decomposition_figure

    page, plot = record.with_name("README.md"), record.with_suffix(".png")
    if record.name != "decomposition.json" or not page.is_file():
        return []
    result = load_decomposition(record)
    if figures or not plot.is_file():
        decomposition_figure(result, plot)
    write_atomic(page, to_markdown(result, plot.name))
    return [page]


def _sol(record: Path, figures: bool) -> list[Path]:
    from harness.report.sol import to_markdown
    from harness.sol.crosscheck import SolRow

    page = record.with_suffix(".md")
    if not page.is_file():
        return []
    about: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    try:
        rows = [SolRow.from_dict(row) for row in about["classes"]]
        text = to_markdown(rows, about)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise HarnessError(f"{record} is no cross-check ({type(error).__name__}: {error}); write it again with `harness sol --json`.") from None  # fmt: skip
    write_atomic(page, text)
    return [page]


def _against(record: Path, figures: bool) -> list[Path]:
    from harness.report.against import to_markdown
    from harness.report.against_figure import against_figure

    page, plot = record.with_name("README.md"), record.with_suffix(".png")
    if not page.is_file():
        return []
    held: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    try:
        text = to_markdown(held, plot.name)
        if figures or not plot.is_file():
            against_figure(held, plot)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise HarnessError(f"{record} is no comparison ({type(error).__name__}: {error}); write it again with `harness reference compare --save`.") from None  # fmt: skip
    write_atomic(page, text)
    return [page]


KINDS: dict[str, Callable[[Path, bool], list[Path]]] = {
    "decomposition/1": _decomposition,
    "sol/1": _sol,
    "against/1": _against,
}
"""schema → what renders a record of it."""
