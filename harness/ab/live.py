"""The live line of a round: pair, estimate with [L, U] against the bar, both evidences, ETA, clock."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from rich.console import Console
from rich.live import Live as RichLive
from rich.text import Text

from harness.ab.verdict import Conclusion
from harness.report.table import print_lines, wrap
from harness.rounds.record import Frozen

QUIET_S = 5.0
"""In a pipe, at most one line in so many seconds (and always the last)."""


@dataclass(frozen=True)
class Status:
    """Where a round stands after a pair."""

    phase: str  # "decide" or "confirm"
    done: int  # kept pairs of this window's phase
    of: int
    conclusion: Conclusion
    frozen: Frozen
    eta_s: float | None
    clock: str  # "1965 MHz", or what is known

    def line(self) -> str:
        """One line of at most 80 columns for the usual figures."""
        c, f = self.conclusion, self.frozen
        gain = "–" if c.estimate is None else f"{100 * c.estimate:+.2f}%"
        low, high = ("…" if v is None else f"{100 * v:+.2f}" for v in c.interval)
        what = "confirm" if self.phase == "confirm" else "pair"
        eta = "" if self.eta_s is None else f"  ETA {int(self.eta_s) // 60}:{int(self.eta_s) % 60:02d}"
        return (
            f"{what} {self.done}/{self.of} {gain} [{low}, {high}] bar {f.bar:.1%}  for {times(c.log_for)}/{1 / f.alpha:.0f} "
            f"against {times(c.log_against)}/{1 / f.beta:.0f}{eta}  {self.clock}".rstrip()
        )


def times(log_evidence: float) -> str:
    """Evidence as a factor, short."""
    value = float(np.exp(min(log_evidence, 50.0)))
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 0.95 else f"{value:.2g}"


class Live:
    """Shows a round on stderr: one line that is rewritten on a terminal, a line now and then in a pipe."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._rich: RichLive | None = None
        self._last = 0.0
        self._pending = ""

    def __enter__(self) -> Live:
        if self._console.is_terminal:
            self._rich = RichLive(Text(""), console=self._console, auto_refresh=False)
            self._rich.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._rich is not None:
            self._rich.stop()
            self._rich = None
        elif self._pending:
            print(self._pending, file=sys.stderr, flush=True)
            self._pending = ""

    def say(self, text: str) -> None:
        """A step or a warning: stays on the screen."""
        if self._rich is not None:
            print_lines(*map(Text, wrap(text, self._console.width)), console=self._console)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, status: Status) -> None:
        """The state after a pair."""
        line = status.line()
        if self._rich is not None:
            self._rich.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        self._pending = line
        if time.monotonic() - self._last >= QUIET_S:
            self._last = time.monotonic()
            self._pending = ""
            print(line, file=sys.stderr, flush=True)
