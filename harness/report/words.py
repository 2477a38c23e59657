"""How figures are written for people: percents, intervals, milliseconds, gigabytes. JSON keeps the bare numbers."""

from __future__ import annotations

from collections.abc import Sequence

from harness.rounds.record import RoundRecord


def percent(value: float | None, digits: int = 2) -> str:
    """A signed fraction as +1.23%; a dash for None."""
    return "–" if value is None else f"{value:+.{digits}%}"


def span(interval: Sequence[float | None] | None) -> str:
    """An interval of gains; an open side as ∞."""
    if interval is None or all(v is None for v in interval):
        return "–"
    low, high = interval
    return f"[{'−∞' if low is None else percent(low)}, {'∞' if high is None else percent(high)}]"


def ms(value: float | None, digits: int = 2) -> str:
    """Milliseconds; a dash for None. Below 10 µs in total a third and fourth digit."""
    return "–" if value is None else f"{value:.{digits}f}" if abs(value) >= 0.01 or value == 0 else f"{value:.4f}"


Scale = tuple[tuple[float, float, int, str], ...]
"""(from this value on, divided by, digits, unit), the largest first."""
WALL: Scale = ((1e4, 1e3, 2, "s"), (1e2, 1, 1, "ms"), (0.1, 1, 2, "ms"), (0, 1e-3, 2, "µs"))
"""Of milliseconds."""
MEMORY: Scale = ((1e9, 1e9, 2, "GB"), (0, 1e6, 0, "MB"))
"""Of bytes; GB are 10⁹."""


def in_one_unit(values: Sequence[float], scale: Scale) -> tuple[list[str], str]:
    """Figures that belong together (a range, before and after) in the one unit, with the digits, that the largest asks for."""
    largest = max(map(abs, values))
    _, by, digits, unit = next(step for step in scale if largest >= step[0])
    return [f"{value / by:,.{digits}f}" for value in values], unit


def clock(*values_ms: float) -> str:
    """Milliseconds in the unit that reads best; several of them with one unit: "0.89 … 1.02 s"."""
    figures, unit = in_one_unit(values_ms, WALL)
    return f"{' … '.join(figures)} {unit}"


def gigabytes(count: int | None) -> str:
    """Bytes as GB, or MB below one; a dash for None."""
    if count is None:
        return "–"
    (figure,), unit = in_one_unit([count], MEMORY)
    return f"{figure} {unit}"


def gain_of(record: RoundRecord) -> float | None:
    """The gain that a round is known by: the confirmed one where it was confirmed, else the estimate."""
    return record.confirmed if record.confirmed is not None else record.estimate


def spelt(outcome: str) -> str:
    """An outcome as a person reads it: its wall may have gained, below the bar."""
    return outcome.replace("mechanism-positive/wall-negative", "mechanism positive, wall below the bar")


def headline(record: RoundRecord) -> str:
    """One sentence: the verdict, its figure and its price in memory."""
    verdict = record.verdict or "OPEN"
    outcome = f" ({spelt(record.outcome)})" if record.outcome and record.outcome.lower() != verdict.lower() else ""
    text = f"{verdict}{outcome}"
    if record.analysis is not None:
        a = record.analysis
        text += f": at best {percent(a.best_gain)} of the wall from {a.cls}, below the bar of {percent(record.bar, 1)}"
    elif record.estimate is not None:
        figure = f"{percent(record.confirmed)} confirmed, " if record.confirmed is not None else ""
        text += (
            f": {figure}{percent(record.estimate)} over {record.pairs} pairs {span(record.interval)} against a bar of "
            f"{percent(record.bar, 1)}, {record.regime}"
        )
    elif record.reason:
        text += f": {record.reason.rstrip('.')}"
    return text + memory_change(record) + "."


def memory_change(record: RoundRecord) -> str:
    """Device memory of both arms; "" where it was not read."""
    held = [record.arms[a].device_memory_bytes if a in record.arms else None for a in "AB"]
    if held[0] is None or held[1] is None:
        return ""
    (before, after), unit = in_one_unit([held[0], held[1]], MEMORY)
    return f"; device memory {before} {unit} → {after} {unit}"
