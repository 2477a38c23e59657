"""The CUDA engine against the CPU oracle: every lever, every awkward token count, decoding, and real weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from f16_oracle import F16Oracle

from engine.cpu.run import CpuEngine
from engine.cuda.run import CudaEngine
from engine.errors import EngineError
from engine.geometry import tiny
from engine.gguf_model import open_model
from engine.levers import Levers
from engine.open import gpu_available
from engine.plan import Op
from engine.synth import SynthModel
from engine.tensors import TYPES, block_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_available(), reason="no NVIDIA GPU")]

BAR = 2e-3  # relative L2 of the last token's logits against the float32 oracle
KERNELS = 1e-3  # the same against an oracle that stores what the CUDA path stores in f16: the kernels' own error
TOKENS = (1, 7, 8, 9, 127, 128, 129, 519)
GEOMETRIES = {"llama-64": ("llama", 64), "qwen2-64": ("qwen2", 64), "qwen2-128": ("qwen2", 128)}


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; NaN, which passes no bar, for a NaN anywhere."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


def ids_of(tokens: int, vocab: int = 512) -> np.ndarray:
    return np.random.default_rng(1000 + tokens).integers(0, vocab, tokens).astype(np.int32)


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def model(request: pytest.FixtureRequest) -> SynthModel:
    architecture, head_dim = GEOMETRIES[request.param]
    # Eight heads, not tiny's four: one head's rounded score weighs less, so that the bar is about kernels and not about luck.
    geometry = replace(tiny(architecture, head_dim=head_dim), hidden=512, heads=8, ffn=1536)  # type: ignore[arg-type]
    return SynthModel(geometry, seed=3)


@pytest.fixture(scope="module")
def oracle(model: SynthModel) -> Iterator[CpuEngine]:
    with CpuEngine(model, Levers()) as engine:
        yield engine


@pytest.mark.parametrize(
    "levers",
    [
        {},
        {"gemm_heuristic": "first"},
        {"concat": "on"},
        {"attention": "cudnn"},
        {"tail": "ffn_last_row"},
        {"tail": "full"},
        {"concat": "on", "attention": "cudnn", "tail": "ffn_last_row"},
        {"concat": "on", "tail": "full", "gemm_heuristic": "first"},
    ],
    ids=lambda levers: ",".join(f"{k}={v}" for k, v in levers.items()) or "base",
)
def test_last_logits_equal_the_oracles(model: SynthModel, oracle: CpuEngine, levers: dict[str, Any]) -> None:
    if levers.get("attention") == "cudnn":
        pytest.importorskip("cudnn")
    with CudaEngine(model, Levers.from_dict(levers)) as engine:
        errors = {t: relative(engine.prefill(ids_of(t)), oracle.prefill(ids_of(t))) for t in TOKENS}
        assert engine.overrun_buffers() == []
    assert max(errors.values()) <= BAR, errors


def test_kernels_add_little_to_what_f16_storage_costs(model: SynthModel) -> None:
    with CudaEngine(model, Levers()) as engine, F16Oracle(model, Levers()) as oracle:
        errors = {t: relative(engine.prefill(ids_of(t)), oracle.prefill(ids_of(t))) for t in TOKENS}
    assert max(errors.values()) <= KERNELS, errors


def test_every_rows_logits_equal_the_oracles(
    model: SynthModel, oracle: CpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CudaEngine(model, Levers()) as engine:
        ids = ids_of(129)
        whole = engine.prefill(ids, all_logits=True)
        assert whole.shape == (129, 512)
        assert relative(whole, oracle.prefill(ids, all_logits=True)) <= BAR
        assert relative(engine.prefill(ids), oracle.prefill(ids)) <= BAR  # the one-row mode again, in the same buffers
    monkeypatch.setattr("engine.cuda.program.LOGITS_CHUNK_BYTES", 50 * 4 * 512)
    with CudaEngine(model, Levers()) as engine:  # in chunks of 50 rows, the last of 29
        assert relative(engine.prefill(ids, all_logits=True), oracle.prefill(ids, all_logits=True)) <= BAR
        assert engine.overrun_buffers() == []


def test_decoding_equals_a_longer_prefill(model: SynthModel, oracle: CpuEngine) -> None:
    """Each step's choice is the oracle's, or a near-tie there: random weights have many."""
    with CudaEngine(model, Levers()) as engine:
        for tokens in (1, 9, 128):
            got = engine.greedy(ids_of(tokens), 12)
            assert got.prompt_ids == ids_of(tokens).tolist() and len(got.generated) == 12
            context = got.prompt_ids
            for chosen, margin in zip(got.generated, got.margins, strict=True):
                logits = oracle.prefill(np.array(context, np.int32))
                tolerance = 4 * BAR * np.linalg.norm(logits)
                assert logits.max() - logits[chosen] <= tolerance
                second, first = np.partition(logits, -2)[-2:]
                assert abs(margin - (first - second)) <= tolerance
                context = [*context, chosen]
        assert engine.overrun_buffers() == []


def test_the_same_ids_give_the_same_bits_and_others_do_not(model: SynthModel) -> None:
    with CudaEngine(model, Levers()) as engine:
        first = engine.prefill(ids_of(129))
        other = engine.prefill(ids_of(129)[::-1].copy())
        engine.prefill(ids_of(7))
        np.testing.assert_array_equal(engine.prefill(ids_of(129)), first)
        assert not np.array_equal(first, other)
        np.testing.assert_array_equal(CudaEngine(model, Levers()).prefill(ids_of(129)), first)  # another engine, too


@pytest.mark.parametrize("kind", TYPES)
def test_every_weight_type_loads(kind: str) -> None:
    g = tiny("llama")
    weights, _ = block_of(kind)
    assert g.hidden % weights == 0
    model = SynthModel(replace(g, weight_types=dict.fromkeys(g.weight_types, kind)), seed=11)
    with CudaEngine(model, Levers()) as engine, F16Oracle(model, Levers()) as oracle:
        assert relative(engine.prefill(ids_of(9)), oracle.prefill(ids_of(9))) <= KERNELS


class Loud(SynthModel):
    """Layer 0's down projection is 2¹⁹ times as large, so that the residual stream passes f16's 65504 as real Qwen2's does."""

    synthetic = False  # blocks come from the host, as a file's do

    def raw(self, tensor: str) -> np.ndarray:
        blocks = super().raw(tensor)
        if tensor == "blk.0.ffn_down.weight":
            blocks = (blocks.view(np.float16) * np.float16(2**10) * np.float16(2**9)).view(np.uint8)
        return blocks


def test_activations_beyond_f16_stay_right(model: SynthModel) -> None:
    types = model.geometry.weight_types | {"blk.0.ffn_down.weight": "f16"}
    loud = Loud(replace(model.geometry, weight_types=types), seed=3)
    assert np.isfinite(loud.dequantize("blk.0.ffn_down.weight")).all()
    with CudaEngine(loud, Levers()) as engine, CpuEngine(loud, Levers()) as oracle:
        assert relative(engine.prefill(ids_of(9)), oracle.prefill(ids_of(9))) <= BAR
        delta = np.empty((9, loud.geometry.hidden), np.float32)
        from cupy.cuda import runtime

        assert engine._arena is not None
        runtime.memcpy(delta.ctypes.data, engine._arena["residual"], delta.nbytes, runtime.memcpyDeviceToHost)
        assert np.abs(delta).max() > 65504


def test_a_hook_hears_every_op_in_order_with_its_launches_inside(model: SynthModel) -> None:
    class Hook:
        def __init__(self) -> None:
            self.heard: list[tuple[str, int]] = []

        def begin(self, op: Op) -> None:
            self.heard.append(("begin", op.index))

        def end(self, op: Op) -> None:
            self.heard.append(("end", op.index))

    for concat in ("off", "on"):
        with CudaEngine(model, Levers.from_dict({"concat": concat})) as engine:
            hook = Hook()
            engine.prefill(ids_of(9), hook=hook)
            plan = engine.plan(9)
            assert hook.heard == [(what, op.index) for op in plan for what in ("begin", "end")]
            assert all(submits for _, submits in engine._program(plan))


def test_mistakes_are_one_sentence(model: SynthModel) -> None:
    engine = CudaEngine(model, Levers())
    with pytest.raises(EngineError, match="token id 512 at position 1 is outside the vocabulary"):
        engine.prefill(np.array([0, 512]))
    with pytest.raises(EngineError, match="do not fit the context"):
        engine.prefill(np.zeros(5000, np.int32))
    assert engine.device_memory_bytes() > 0
    about = engine.describe()
    assert about["precision"] == "f16" and about["arch"] and about["cublaslt"]
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="is closed"):
        engine.prefill(ids_of(7))


def test_memory_is_given_back() -> None:
    from cupy.cuda import runtime

    model = SynthModel(replace(tiny("qwen2"), vocab=65536, hidden=1024), seed=1)  # 134 MB a matrix
    CudaEngine(model, Levers(gemm_heuristic="first")).close()
    before = runtime.memGetInfo()[0]
    with CudaEngine(model, Levers(gemm_heuristic="first")) as engine:
        engine.prefill(ids_of(9))
        used, counted = before - runtime.memGetInfo()[0], engine.device_memory_bytes()
        assert counted > 134e6 and abs(used - counted) < 64e6
    assert before - runtime.memGetInfo()[0] < 16e6


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Iterator[CudaEngine]:
    with CudaEngine(open_model(smollm2), Levers()) as engine:
        yield engine


@pytest.fixture(scope="module")
def recorded(shared_data: Path) -> dict[str, Any]:
    record = json.loads((shared_data / "logits" / "smollm2_llama_cpp.json").read_text())
    logits = np.load(shared_data / "logits" / "smollm2_last_logits.npz")
    return {name: {**record[name], "logits": logits[f"{name}_f32"]} for name in ("given_a", "given_b", "random519")}


@pytest.mark.parametrize("name", ["given_a", "given_b", "random519"])
def test_real_weights_give_llama_cpps_logits(real: CudaEngine, recorded: dict[str, Any], name: str) -> None:
    want = recorded[name]["logits"]
    got = real.prefill(np.array(recorded[name]["tokens"], np.int32))
    assert relative(got, want) <= 5e-3
    assert got.argmax() == want.argmax()


@pytest.mark.parametrize("name", ["given_a", "given_b"])
def test_real_weights_continue_as_llama_cpp_does(real: CudaEngine, recorded: dict[str, Any], name: str) -> None:
    got = real.greedy(np.array(recorded[name]["tokens"], np.int32), 32)
    assert got.generated == recorded[name]["f32"]["greedy32"]
