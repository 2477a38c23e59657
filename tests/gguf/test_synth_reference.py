"""Synthetic presets against what llama.cpp computes from the same values: both architectures, K-quants, biases, both RoPEs.

`llama_cpp_tiny.json` holds llama.cpp's last-token logits; its KV cache is f16, which is most of the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.cpu.run import CpuEngine
from engine.geometry import PRESETS
from engine.gguf_model import open_model
from engine.levers import Levers
from engine.synth import SynthModel, write_gguf

RECORDED = json.loads((Path(__file__).parent / "llama_cpp_tiny.json").read_text())


@pytest.mark.parametrize("run", RECORDED["runs"])
def test_a_presets_logits_equal_llama_cpps(run: str, tmp_path: Path) -> None:
    made = SynthModel(PRESETS[run.split("/")[0]](), RECORDED["seed"])
    write_gguf(made, tmp_path / "x.gguf")
    recorded = RECORDED["runs"][run]
    want, ids = np.array(recorded["logits"]), np.array(recorded["ids"], np.int32)
    for model in (made, open_model(tmp_path / "x.gguf")):
        with CpuEngine(model, Levers()) as engine:
            got = engine.prefill(ids)
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-3
