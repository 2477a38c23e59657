"""Real weights: SmolLM2-135M-Instruct against what llama.cpp computes from the same file's f32 values.

llama.cpp's own arithmetic is what stands between the two: a float64 forward of these weights is 8.4e-4 (given_a) and
1.6e-4 (given_b) from its logits in relative L2, as the CPU backend is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cpu.run import CpuEngine
from engine.levers import Levers
from engine.models import resolve

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "logits"
PROMPTS = ("given_a", "given_b")

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="llama.cpp's recorded logits (../shared/data/logits) are absent"
)


@pytest.fixture(scope="module")
def engine() -> Iterator[CpuEngine]:
    model = resolve(None, gpu=False)
    if model.synthetic:
        pytest.skip(f"SmolLM2's weights are not to be had here: {model.note}")
    with CpuEngine(model, Levers()) as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((DATA / "smollm2_llama_cpp.json").read_text())


@pytest.mark.parametrize("name", [*PROMPTS, "random519"])
def test_last_logits_equal_llama_cpps(engine: CpuEngine, recorded: dict[str, Any], name: str) -> None:
    want = np.load(DATA / "smollm2_last_logits.npz")[f"{name}_f32"]
    got = engine.prefill(np.array(recorded[name]["tokens"], np.int32))
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-3
    assert got.argmax() == recorded[name]["f32"]["argmax"]


@pytest.mark.parametrize("name", PROMPTS)
def test_greedy_continues_as_llama_cpp_does(engine: CpuEngine, recorded: dict[str, Any], name: str) -> None:
    want = recorded[name]["f32"]
    got = engine.greedy(np.array(recorded[name]["tokens"], np.int32), 32)
    assert got.generated == want["greedy32"]
    np.testing.assert_allclose(got.margins, want["margins"], atol=0.02)
