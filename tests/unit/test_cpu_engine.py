"""The CPU backend against float64 mathematics written here, independently of it."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from engine import open as opening
from engine.cpu import ops
from engine.cpu.run import CpuEngine
from engine.cpu.state import Buffers, Cache, Forward
from engine.cpu.threads import Threads
from engine.cpu.weights import Weights
from engine.errors import EngineError
from engine.geometry import PRESETS, Geometry, tiny
from engine.levers import Levers
from engine.plan import build_plan
from engine.synth import SynthModel

LENGTHS = (1, 7, 8, 9, 127, 128, 129)
PRESET_NAMES = ("tiny-llama", "tiny-qwen2")


class Scaled(SynthModel):
    """Synthetic weights with some tensors multiplied, to reach magnitudes that f16 cannot hold."""

    def __init__(self, geometry: Geometry, factors: dict[str, float]) -> None:
        super().__init__(geometry)
        self.factors = factors

    def dequantize(self, tensor: str) -> np.ndarray:
        return super().dequantize(tensor) * np.float32(self.factors.get(tensor, 1))


def reference(model: SynthModel, ids: np.ndarray) -> tuple[np.ndarray, float]:
    """A decoder in float64, token by token and head by head: logits [T, vocab] and the largest activation seen.

    RoPE as the rotation of a complex number, biases where the model has them, softmax over the keys so far.
    """
    g = model.geometry
    w = {name: model.dequantize(name).astype(np.float64) for name in model.tensors}
    head = w.get("output.weight", w["token_embd.weight"])
    frequencies = np.array([g.rope_base ** (-2 * i / g.head_dim) for i in range(g.head_dim // 2)])
    largest = 0.0

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return np.array([row / np.sqrt(np.mean(row**2) + g.rms_eps) * weight for row in x])

    def project(layer: int, name: str, x: np.ndarray) -> np.ndarray:
        y = np.einsum("tk,nk->tn", x, w[f"blk.{layer}.{name}.weight"])
        return y + w.get(f"blk.{layer}.{name}.bias", 0.0)

    def turn(x: np.ndarray, position: int) -> np.ndarray:
        phase = np.exp(1j * position * frequencies)
        half = g.head_dim // 2
        if g.rope_style == "norm":
            z = (x[0::2] + 1j * x[1::2]) * phase
            return np.stack([z.real, z.imag], axis=1).ravel()
        z = (x[:half] + 1j * x[half:]) * phase
        return np.concatenate([z.real, z.imag])

    x = w["token_embd.weight"][ids]
    for layer in range(g.layers):
        h = rms(x, w[f"blk.{layer}.attn_norm.weight"])
        q = project(layer, "attn_q", h).reshape(len(ids), g.heads, g.head_dim)
        k = project(layer, "attn_k", h).reshape(len(ids), g.kv_heads, g.head_dim)
        v = project(layer, "attn_v", h).reshape(len(ids), g.kv_heads, g.head_dim)
        mixed = np.zeros((len(ids), g.heads, g.head_dim))
        for head_index in range(g.heads):
            kv = head_index // (g.heads // g.kv_heads)
            keys = np.array([turn(k[t, kv], t) for t in range(len(ids))])
            for t in range(len(ids)):
                scores = keys[: t + 1] @ turn(q[t, head_index], t) / np.sqrt(g.head_dim)
                weights = np.exp(scores - scores.max())
                mixed[t, head_index] = weights @ v[: t + 1, kv] / weights.sum()
        x = x + project(layer, "attn_output", mixed.reshape(len(ids), -1))
        h = rms(x, w[f"blk.{layer}.ffn_norm.weight"])
        gate, up = project(layer, "ffn_gate", h), project(layer, "ffn_up", h)
        gated = gate / (1 + np.exp(-gate)) * up
        x = x + project(layer, "ffn_down", gated)
        largest = max(largest, *(float(np.abs(a).max()) for a in (x, gate, up, gated, q, k, v)))
    return rms(x, w["output_norm.weight"]) @ head.T, largest


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def some_ids(geometry: Geometry, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, geometry.vocab, count).astype(np.int32)


@pytest.fixture(scope="module", params=PRESET_NAMES)
def model(request: pytest.FixtureRequest) -> SynthModel:
    return SynthModel(PRESETS[request.param]())


@pytest.mark.parametrize("tokens", [1, 7, 33])
def test_logits_of_every_row_equal_a_float64_forward(model: SynthModel, tokens: int) -> None:
    ids = some_ids(model.geometry, tokens)
    want, _ = reference(model, ids)
    with CpuEngine(model, Levers(cpu_threads=2, cpu_attention_block=8)) as engine:
        got = engine.prefill(ids, all_logits=True)
        assert got.shape == (tokens, model.geometry.vocab)
        assert error(got, want) < 2e-5
        assert error(engine.prefill(ids), want[-1]) < 2e-5


def test_biases_of_qwen2_change_the_logits_as_they_should() -> None:
    """Each bias alone, large enough that dropping it, or adding it after RoPE, fails."""
    geometry = tiny("qwen2")
    ids = some_ids(geometry, 9)
    plain = reference(SynthModel(geometry), ids)[0]
    for name in ("attn_q", "attn_k", "attn_v"):
        model = Scaled(geometry, {f"blk.{i}.{name}.bias": 30.0 for i in range(geometry.layers)})
        want = reference(model, ids)[0]
        assert error(plain[-1], want[-1]) > 1e-3
        with CpuEngine(model, Levers()) as engine:
            assert error(engine.prefill(ids), want[-1]) < 2e-5


def test_activations_beyond_the_range_of_f16_are_right(model: SynthModel) -> None:
    big = Scaled(model.geometry, {"token_embd.weight": 3e6, "blk.0.ffn_up.weight": 1e6})
    ids = some_ids(model.geometry, 9)
    want, largest = reference(big, ids)
    assert largest > 65504
    with CpuEngine(big, Levers()) as engine:
        got = engine.prefill(ids)
    assert np.isfinite(got).all()
    assert error(got, want[-1]) < 2e-5


def test_a_tied_embedding_is_the_head() -> None:
    full = tiny("llama")
    types = {k: v for k, v in full.weight_types.items() if k != "output.weight"}
    model = SynthModel(replace(full, weight_types=types, name="tied"))
    assert "output.weight" not in model.tensors
    ids = some_ids(model.geometry, 7)
    with CpuEngine(model, Levers()) as engine:
        assert error(engine.prefill(ids), reference(model, ids)[0][-1]) < 2e-5


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_other_head_dimensions_are_right(head_dim: int) -> None:
    geometry = tiny("qwen2", head_dim=head_dim)
    model = SynthModel(replace(geometry, weight_types=dict.fromkeys(geometry.weight_types, "q8_0")))
    ids = some_ids(model.geometry, 12)
    with CpuEngine(model, Levers()) as engine:
        assert error(engine.prefill(ids), reference(model, ids)[0][-1]) < 2e-5


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_every_tail_and_concat_gives_the_same_last_logits(model: SynthModel, tokens: int) -> None:
    ids = some_ids(model.geometry, tokens)
    results = {}
    for tail in ("last_row", "ffn_last_row", "full"):
        for concat in ("off", "on"):
            with CpuEngine(model, Levers.from_dict({"tail": tail, "concat": concat})) as engine:
                results[tail, concat] = engine.prefill(ids)
    want = results["full", "off"]
    assert all(error(got, want) < 1e-5 for got in results.values())


@pytest.mark.parametrize("levers", [{"cpu_threads": 1}, {"cpu_threads": 3}, {"cpu_attention_block": 1}, {"cpu_attention_block": 1000}])  # fmt: skip
def test_threads_and_attention_blocks_change_no_result(model: SynthModel, levers: dict[str, int]) -> None:
    ids = some_ids(model.geometry, 150)
    with CpuEngine(model, Levers(cpu_threads=2)) as engine:
        want = engine.prefill(ids)
    with CpuEngine(model, Levers.from_dict(levers)) as engine:
        assert error(engine.prefill(ids), want) < 1e-5


def test_decoding_with_the_cache_equals_a_prefill_of_the_longer_sequence(model: SynthModel) -> None:
    ids = some_ids(model.geometry, 9)
    with CpuEngine(model, Levers()) as engine:
        out = engine.greedy(ids, 6)
        assert out.prompt_ids == ids.tolist()
        assert len(out.generated) == len(out.margins) == 6
        for step in range(6):
            logits = engine.prefill(np.array(out.prompt_ids + out.generated[:step], np.int32))
            second, first = np.sort(logits)[-2:]
            assert out.generated[step] == logits.argmax()
            assert out.margins[step] == pytest.approx(first - second, abs=1e-4)
            if step == 0:
                np.testing.assert_allclose(out.prefill_logits, logits, rtol=1e-5, atol=1e-5)


def test_a_prefill_after_others_depends_on_its_own_ids_alone(model: SynthModel) -> None:
    first, longer = some_ids(model.geometry, 20), some_ids(model.geometry, 90, seed=1)
    with CpuEngine(model, Levers()) as engine:
        want = engine.prefill(first)
        engine.prefill(longer, all_logits=True)
        engine.greedy(longer[:5], 3)
        np.testing.assert_array_equal(engine.prefill(first), want)


def test_returned_logits_are_the_callers_own(model: SynthModel) -> None:
    with CpuEngine(model, Levers()) as engine:
        held = engine.prefill(some_ids(model.geometry, 5))
        before = held.copy()
        engine.prefill(some_ids(model.geometry, 5, seed=1))
        np.testing.assert_array_equal(held, before)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, past: int = 0, block: int = 64) -> np.ndarray:
    """The backend's `attention` op alone, last rows of [past + T] keys: q [T, H, d], k and v [past + T, Hkv, d]."""
    geometry, tokens = tiny("llama"), len(q)
    f = Forward(
        weights=cast(Weights, SimpleNamespace(geometry=geometry)),
        levers=Levers(cpu_attention_block=block),
        threads=Threads(2),
        buffers=Buffers(),
        cache=Cache(geometry, past + tokens),
        past=past,
        caller_ids=np.zeros(0),
        rope=(np.zeros(0), np.zeros(0)),
    )
    op = next(op for op in build_plan(geometry, tokens, past=past, precision="f32") if op.kind == "attention")
    f.cache.keys[0], f.cache.values[0] = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
    scaled = (q / np.sqrt(geometry.head_dim)).astype(np.float32)
    f.q = np.ascontiguousarray(scaled.reshape(tokens, geometry.kv_heads, -1, geometry.head_dim).transpose(1, 0, 2, 3))
    ops.attention(f, op)
    f.threads.close()
    return f.rows["attention"].reshape(q.shape)


def attend64(q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int) -> np.ndarray:
    """Causal softmax attention in float64, one query head and row at a time."""
    out = np.empty(q.shape)
    for t in range(len(q)):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            scores = k[: past + t + 1, kv].astype(np.float64) @ q[t, h] / np.sqrt(q.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v[: past + t + 1, kv] / weights.sum()
    return out


@pytest.mark.parametrize("past", [0, 5])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_attention_equals_float64(tokens: int, past: int) -> None:
    geometry = tiny("llama")
    rng = np.random.default_rng(tokens)
    q = 3 * rng.standard_normal((tokens, geometry.heads, geometry.head_dim))
    k, v = rng.standard_normal((2, past + tokens, geometry.kv_heads, geometry.head_dim))
    got = attend(q, k, v, past=past, block=64)
    np.testing.assert_allclose(got, attend64(q, k, v, past), atol=5e-6)


def test_scores_of_thousands_neither_overflow_nor_lose_the_largest() -> None:
    geometry = tiny("llama")
    rng = np.random.default_rng(3)
    q = 2000 * rng.standard_normal((9, geometry.heads, geometry.head_dim))
    k, v = rng.standard_normal((2, 9, geometry.kv_heads, geometry.head_dim))
    np.testing.assert_allclose(attend(q, k, v), attend64(q, k, v, 0), atol=1e-2)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_a_zero_query_gives_the_mean_of_the_visible_values(tokens: int) -> None:
    geometry = tiny("llama")
    k, v = np.random.default_rng(0).standard_normal((2, tokens, geometry.kv_heads, geometry.head_dim))
    got = attend(np.zeros((tokens, geometry.heads, geometry.head_dim)), k, v, block=8)
    mean = np.cumsum(v, axis=0) / np.arange(1, tokens + 1)[:, None, None]
    np.testing.assert_allclose(got, mean.repeat(geometry.heads // geometry.kv_heads, axis=1), atol=2e-6)


def test_the_attention_block_bounds_the_memory_of_attention() -> None:
    geometry, tokens, block = tiny("llama"), 1024, 32
    q = np.ones((tokens, geometry.heads, geometry.head_dim), np.float32)
    k = v = np.ones((tokens, geometry.kv_heads, geometry.head_dim), np.float32)
    peaks = []
    for rows in (block, tokens):
        tracemalloc.start()
        attend(q, k, v, block=rows)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    scores = 4 * tokens * tokens * geometry.heads // geometry.kv_heads  # of one KV head, all rows at once
    assert peaks[1] > scores
    assert peaks[0] < peaks[1] - scores + 3 * scores * block // tokens


class Recorder:
    """An op hook that writes down what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def begin(self, op: Any) -> None:
        self.events.append(("begin", op.index))

    def end(self, op: Any) -> None:
        self.events.append(("end", op.index))


@pytest.mark.parametrize("all_logits", [False, True])
def test_every_op_of_the_plan_is_announced_in_order(model: SynthModel, all_logits: bool) -> None:
    recorder = Recorder()
    with CpuEngine(model, Levers(concat="on")) as engine:
        engine.prefill(some_ids(model.geometry, 8), hook=recorder, all_logits=all_logits)
        plan = engine.plan(8, all_logits=all_logits)
    assert plan.precision == "f32"
    assert recorder.events == [(what, op.index) for op in plan for what in ("begin", "end")]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 2, 512], "token id 512 at position 2 is outside the vocabulary of 512"),
        ([-1], "token id -1 at position 0"),
        ([], "1 or more integers"),
        ([[1, 2]], "1 or more integers"),
        ([1.5], "1 or more integers"),
        ([0] * 4097, "409. tokens do not fit the context of 4096"),
    ],
)
def test_ids_that_cannot_be_computed_get_one_sentence(model: SynthModel, ids: list[Any], says: str) -> None:
    with CpuEngine(model, Levers()) as engine:
        with pytest.raises(EngineError, match=says):
            engine.prefill(np.array(ids))
        with pytest.raises(EngineError, match=says):
            engine.greedy(np.array(ids), 2)


def test_a_continuation_beyond_the_context_is_refused_before_it_starts(model: SynthModel) -> None:
    with CpuEngine(model, Levers()) as engine, pytest.raises(EngineError, match="do not fit the context"):
        engine.greedy(some_ids(model.geometry, 4000), 200)


def test_a_closed_engine_says_so_and_closes_again(model: SynthModel) -> None:
    engine = CpuEngine(model, Levers())
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.prefill(np.array([1]))


def test_weights_larger_than_the_free_memory_are_refused(model: SynthModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(EngineError, match="as float32 on the CPU"):
        CpuEngine(model, Levers())


def test_it_describes_what_decides_its_speed(model: SynthModel) -> None:
    heard: list[tuple[str, int, int]] = []
    with CpuEngine(model, Levers(cpu_threads=2), lambda *a: heard.append(a)) as engine:
        described = engine.describe()
        assert described["threads"] == 2
        assert described["numpy"] == np.__version__
        assert described["device"]
        assert engine.device_memory_bytes() > 4 * 512 * 256
    assert heard[-1] == ("dequantise weights", len(model.tensors), len(model.tensors))


def test_auto_is_cuda_only_with_a_gpu_and_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu, installed, want in [(True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")]:
        monkeypatch.setattr(opening, "gpu_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(opening, "_installed", lambda name, installed=installed: installed)
        assert opening.choose("auto") == want
        assert opening.choose("cpu") == "cpu"
        if want == "cpu":
            with pytest.raises(EngineError, match=r"pip install (-e )?'.*\[cuda\]'" if gpu else "no NVIDIA GPU"):
                opening.choose("cuda")
    with pytest.raises(EngineError, match="'tpu' does not exist"):
        opening.choose("tpu")  # type: ignore[arg-type]


def test_opening_on_the_cpu_gives_this_backend(model: SynthModel) -> None:
    with opening.open_engine(model, Levers(), backend="cpu") as engine:
        assert engine.name == "cpu"
        assert engine.prefill(some_ids(model.geometry, 3)).shape == (model.geometry.vocab,)
