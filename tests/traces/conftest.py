"""Recorded traces of other people's work, beside the checkout; tests of them skip, saying so, where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of recorded traces."""
    folder = DATA / "traces"
    if not folder.is_dir():
        pytest.skip(f"no recorded traces at {folder}")
    return folder
