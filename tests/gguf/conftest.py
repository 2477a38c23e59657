"""A small valid GGUF to break, and a real one where it is at hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.geometry import tiny
from engine.synth import SynthModel, write_gguf


@pytest.fixture(scope="session")
def small() -> SynthModel:
    """One layer with q/k/v biases, a q4_K/q6_K mix, 0.9 MB."""
    g = tiny("qwen2")
    types = {name: kind for name, kind in g.weight_types.items() if not name.startswith("blk.1.")}
    return SynthModel(replace(g, layers=1, ffn=256, vocab=64, weight_types=types, name="small"), seed=5)


@pytest.fixture(scope="session")
def small_file(small: SynthModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`small` as a file. Tests copy its bytes, never change it."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(small, path)
    return path
