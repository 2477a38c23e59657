"""What a trace offers to look at: prefills that repeat, named ranges, processes, and the command that comes next."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from harness.attribution.classify import classify_launches, load_rules
from harness.attribution.occurrences import find_repeats
from harness.sources.ranges import folded
from harness.sources.trace import Trace

SHOWN_RANGES = 20


def contents(path: Path, trace: Trace) -> dict[str, Any]:
    """{"repeats": device → {count, launches of one, prefills: whether one is a whole prefill, what: in words}, "ranges": [{name, count}], "processes": device → names, "next": command}.

    Ranges are the outermost ones, the most frequent first. Raises HarnessError as the readers do.
    """
    table, _ = classify_launches(trace.launches, load_rules(None))
    repeats: dict[int, dict[str, Any]] = {}
    for device, rows in table.groupby("device"):
        found = find_repeats(rows.reset_index(drop=True))
        if whole := found.prefills:
            what = f"{len(whole)} × the same {len(whole[0]):,} launches"
            repeats[int(device)] = {"count": len(whole), "launches": len(whole[0]), "prefills": True, "what": what}  # type: ignore[call-overload]
        elif found.count:
            each = "one attention" if found.attentions == 1 else f"{found.attentions} attentions"
            what = f"{found.count} × of {found.launches:,} launches, {each} each: layers or groups of layers"
            repeats[int(device)] = {"count": found.count, "launches": found.launches, "prefills": False, "what": what}  # type: ignore[call-overload]
    ranges = [{"name": name, "count": n} for name, n in _ranges(path, trace).most_common(SHOWN_RANGES)]
    shared = {s.device: s.processes for s in trace.found.sharing}
    processes = {d: shared.get(d, [str(p) for p in of]) for d, of in trace.found.processes.items()}
    devices = sorted(table["device"].unique().tolist())
    return {"repeats": repeats, "ranges": ranges, "processes": processes, "next": _next(path, devices, repeats, ranges)}


def _ranges(path: Path, trace: Trace) -> Counter[str]:
    if trace.source != "nsys":
        return Counter(r.text for r in trace.found.ranges or [])
    from harness.sources.nsys import Export

    with Export(path) as export:
        return Counter(folded(text) for text in export.ranges().outermost() if text)


def _next(path: Path, devices: list[int], repeats: dict[int, dict[str, Any]], ranges: list[dict[str, Any]]) -> str:
    """The decomposition to type: of one device, and of the second of several prefills (the first one warms up), or of the
    first named range."""
    command = ["harness", "decompose", "--trace", str(path)]
    if len(devices) > 1:
        command += ["--device", str(devices[0])]
    if repeats.get(devices[0], {}).get("prefills"):
        command += ["--occurrence", "2"]
    elif ranges:
        command += ["--range", ranges[0]["name"]]
    return shlex.join(command)
