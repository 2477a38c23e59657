"""Exit statuses, the one error that a command shows to a person, and how it quotes a program that failed."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit status of every command."""

    DONE = 0  # done, LANDED, MEAS-ONLY
    ERROR = 1  # a tool error: one sentence on stderr
    REVERTED = 2
    INCONCLUSIVE = 3
    WINDOW_INVALID = 4
    GATE_FAILED = 5
    CHECK_FAILED = 6  # a decomposition check
    USAGE = 64


class HarnessError(Exception):
    """One sentence: what is wrong, where (file, key, line), what to do."""

    def __init__(self, message: str, *, exit_status: Exit = Exit.ERROR) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def last_words(*streams: str, lines: int = 3) -> str:
    """The last lines that a failed program printed, on one: "A / B / C", or "no output"."""
    said = [line.strip() for text in streams for line in text.splitlines() if line.strip()]
    return " / ".join(said[-lines:]) or "no output"


def one_line(error: object, limit: int = 300) -> str:
    """A library's message on one line and of bounded length: Arrow's and YAML's have several, SQLite's may quote a query."""
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= limit else text[: limit - 1] + "…"
