"""Exit statuses, and the one error that a command shows to a person."""

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
