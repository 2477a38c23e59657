"""Every kernel and the GEMM on the GPU against NumPy: to the bit where they move bits, float64 where they compute."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine.cuda import jit
from engine.cuda.arena import CANARY, Arena
from engine.cuda.program import QkvViews, bind_norm, bind_rope_kv, bind_swiglu, rope_table
from engine.cuda.weights import dequantize as launch_dequantize
from engine.cuda.weights import fill_words, synthesise
from engine.errors import EngineError
from engine.geometry import Geometry
from engine.open import gpu_available
from engine.synth import describe_tensor, fill
from engine.tensors import TYPES, TensorInfo, block_of, dequantize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not gpu_available(), reason="no NVIDIA GPU")]


@pytest.fixture(scope="module")
def stream() -> Iterator[int]:
    import cupy

    made = cupy.cuda.Stream(non_blocking=True)
    yield made.ptr
    made.synchronize()


def to_gpu(array: np.ndarray) -> Any:
    import cupy

    out = cupy.asarray(array)
    cupy.cuda.runtime.deviceSynchronize()
    return out


def to_host(array: Any) -> np.ndarray:
    import cupy

    cupy.cuda.runtime.deviceSynchronize()
    return cupy.asnumpy(array)


def tensor(kind: str, n: int, k: int) -> TensorInfo:
    weights, size = block_of(kind)
    return TensorInfo("blk.0.ffn_down.weight", (n, k), kind, n * k // weights * size)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2 error; NaN for a NaN anywhere."""
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_weights_equal_the_gguf_packages_rounded_to_f16(stream: int, kind: str) -> None:
    info = tensor(kind, 67, 1280)
    synthetic = np.empty(info.n_bytes, np.uint8)
    fill(describe_tensor(info, 5), synthetic)
    anything = np.random.default_rng(3).integers(0, 256, info.n_bytes, dtype=np.uint8)
    for blocks in (synthetic, anything):
        out = to_gpu(np.full(67 * 1280 + 8, 0xFFFF, np.uint16))
        given = to_gpu(blocks)
        launch_dequantize(info, given.data.ptr, out.data.ptr, stream)
        got = to_host(out)
        with np.errstate(all="ignore"):
            want = dequantize(blocks, info).astype(np.float16).ravel()
        assert (got[-8:] == 0xFFFF).all()
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got[:-8].view(np.float16)), ~number)
        np.testing.assert_array_equal(got[:-8][number], want.view(np.uint16)[number])


@pytest.mark.parametrize("kind", [t for t in TYPES if t != "f32"])
def test_synthetic_blocks_equal_the_hosts(stream: int, kind: str) -> None:
    info = tensor(kind, 67, 1280)
    constants = describe_tensor(info, 7)
    want = np.empty(info.n_bytes, np.uint8)
    fill(constants, want)
    out = to_gpu(np.zeros(info.n_bytes + 16, np.uint8))
    synthesise(constants, out.data.ptr, stream)
    got = to_host(out)
    np.testing.assert_array_equal(got[: info.n_bytes], want)
    assert not got[info.n_bytes :].any()


def test_a_fill_stops_at_its_last_byte(stream: int) -> None:
    for length in (1, 15, 16, 17, 4095, 4097):
        out = to_gpu(np.full(length + 32, 0xEE, np.uint8))
        fill_words(out.data.ptr, length, 9, stream)
        assert (to_host(out)[length:] == 0xEE).all()


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_rows_are_the_gguf_packages_values(stream: int, kind: str) -> None:
    info = tensor(kind, 50, 3584)
    table, ids = np.empty(info.n_bytes, np.uint8), np.array([49, 0, 7, 7], np.int32)
    fill(describe_tensor(info, 2), table)
    given, chosen = to_gpu(table), to_gpu(ids)
    out = to_gpu(np.full((4, 3584), np.nan, np.float32))
    jit.kernel("embed", symbol=f"embed_rows<{kind.upper()}>")(
        stream, (4,), (256,), *(ctypes.c_void_p(a.data.ptr) for a in (chosen, given, out)), ctypes.c_int(3584)
    )
    np.testing.assert_array_equal(to_host(out), dequantize(table, info)[ids])


@pytest.mark.parametrize("hidden", [8, 256, 576, 1032, 3584, 8192])
@pytest.mark.parametrize("add", [False, True])
def test_norm_equals_float64_with_residuals_beyond_f16(stream: int, hidden: int, add: bool) -> None:
    rng = np.random.default_rng(hidden)
    rows, eps = 129, 1e-6
    residual = (rng.standard_normal((rows, hidden)) * rng.choice([1, 3e5, 1e-3], (rows, 1))).astype(np.float32)
    delta = rng.standard_normal((rows, hidden)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    x, d, w = to_gpu(residual), to_gpu(delta), to_gpu(weight)
    out = to_gpu(np.full((rows, hidden), np.nan, np.float16))
    bind_norm(
        stream, x.data.ptr, d.data.ptr if add else 0, w.data.ptr, out.data.ptr, rows=rows, hidden=hidden, eps=eps
    )()
    want_residual = residual + delta if add else residual
    np.testing.assert_array_equal(to_host(x), want_residual)
    wide = want_residual.astype(np.float64)
    want = wide * weight / np.sqrt((wide**2).mean(1, keepdims=True) + eps)
    np.testing.assert_allclose(to_host(out).astype(np.float64), want, rtol=6e-4, atol=6e-8)


def test_norm_saturates_and_keeps_nan(stream: int) -> None:
    residual = np.ones((2, 64), np.float32)
    residual[1, 3] = np.nan
    x, w = to_gpu(residual), to_gpu(np.full(64, 1e6, np.float32))
    out = to_gpu(np.zeros((2, 64), np.float16))
    bind_norm(stream, x.data.ptr, 0, w.data.ptr, out.data.ptr, rows=2, hidden=64, eps=1e-6)()
    got = to_host(out)
    assert (got[0] == 65504).all() and np.isnan(got[1]).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (28, 4, 128), (9, 3, 64)])
@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize("together", [False, True])
def test_rope_equals_float64_near_position_32768(
    stream: int, heads: int, kv_heads: int, head_dim: int, style: Any, together: bool
) -> None:
    g = Geometry(
        architecture="qwen2", layers=1, hidden=heads * head_dim, ffn=64, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, vocab=64, rope_base=1e6, rope_style=style, rms_eps=1e-6,
    )  # fmt: skip
    rng = np.random.default_rng(head_dim)
    rows, q_first, past = 11, 3, 32757
    whole = rng.standard_normal((rows, g.q_dim + 2 * g.kv_dim)).astype(np.float16)
    split = [np.ascontiguousarray(p) for p in np.split(whole, [g.q_dim, g.q_dim + g.kv_dim], axis=1)]
    biases = [rng.standard_normal(p.shape[1]).astype(np.float32) for p in split]
    on_gpu = [to_gpu(whole)] if together else [to_gpu(p) for p in split]
    bias_gpu = [to_gpu(b) for b in biases]
    caches = [to_gpu(np.full((past + rows, g.kv_dim), np.nan, np.float16)) for _ in range(2)]
    table = to_gpu(rope_table(g, past + rows))
    if together:
        views = QkvViews.of(g, on_gpu[0].data.ptr, rows, {"qkv"})
    else:
        views = QkvViews(*(a.data.ptr for a in on_gpu), g.q_dim, g.kv_dim)
    bind_rope_kv(
        stream, g, views, caches[0].data.ptr, caches[1].data.ptr, [b.data.ptr for b in bias_gpu], table.data.ptr,
        rows=rows, q_first=q_first, past=past,
    )()  # fmt: skip
    q, k, v = (p.astype(np.float64) + b for p, b in zip(split, biases, strict=True))
    angle = np.arange(past, past + rows)[:, None, None] * g.rope_base ** (-2.0 * np.arange(head_dim // 2) / head_dim)

    def rotated(x: np.ndarray) -> np.ndarray:
        x = x.reshape(rows, -1, head_dim).copy()
        half = head_dim // 2
        first = np.s_[..., :half] if style == "neox" else np.s_[..., ::2]
        second = np.s_[..., half:] if style == "neox" else np.s_[..., 1::2]
        a, b = x[first].copy(), x[second].copy()
        x[first], x[second] = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
        return x.reshape(rows, -1)

    got_q = to_host(on_gpu[0])[:, : g.q_dim]
    close = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(got_q[q_first:], rotated(q)[q_first:], **close)
    np.testing.assert_array_equal(got_q[:q_first], split[0][:q_first])
    for cache, want in zip(caches, (rotated(k), v), strict=True):
        got = to_host(cache)
        np.testing.assert_allclose(got[past:], want, **close)
        assert np.isnan(got[:past]).all()


@pytest.mark.parametrize(("rows", "ffn"), [(1, 8), (5, 776), (129, 18944)])
@pytest.mark.parametrize("together", [False, True])
def test_swiglu_equals_float64(stream: int, rows: int, ffn: int, together: bool) -> None:
    rng = np.random.default_rng(ffn)
    both = (rng.standard_normal((rows, 2 * ffn)) * 8).astype(np.float16)
    both[0, :4], both[0, ffn : ffn + 4] = [60000, -60000, -20, 0], [60000, 60000, 3, 2]  # saturates, −0, tiny, 0
    gate, up = (np.ascontiguousarray(p) for p in np.split(both, 2, axis=1))
    given = [to_gpu(both)] if together else [to_gpu(gate), to_gpu(up)]
    gate_at = given[0].data.ptr
    up_at = gate_at + 2 * ffn if together else given[1].data.ptr
    out = to_gpu(np.full(rows * ffn + 8, np.nan, np.float16))
    bind_swiglu(stream, gate_at, up_at, out.data.ptr, rows=rows, ffn=ffn, in_stride=2 * ffn if together else ffn)()
    got = to_host(out)
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        want = np.clip(g / (1 + np.exp(-g)) * u, -65504, 65504)
    np.testing.assert_allclose(got[:-8].reshape(rows, ffn).astype(np.float64), want, rtol=1.5e-3, atol=1.2e-7)
    assert np.isnan(got[-8:]).all()


@pytest.mark.parametrize("heuristic", ["first", "timed"])
@pytest.mark.parametrize("output", ["f16", "f32"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 4608, 3584), (7, 512, 256), (129, 1000, 576), (519, 768, 1536)])
def test_gemm_equals_float64(stream: int, heuristic: Any, output: Any, m: int, n: int, k: int, tmp_path: Any) -> None:
    """Odd rows and columns, and an x that is aligned to 16 bytes only, as the last row of a tail may be."""
    from engine.cuda.cublaslt import CublasLt

    rng = np.random.default_rng(m)
    x, w = (rng.standard_normal(s).astype(np.float16) for s in ((m, k), (n, k)))
    padded = to_gpu(np.concatenate([np.zeros(8, np.float16), x.ravel()]))
    weights = to_gpu(w)
    y = to_gpu(np.full((m, n), np.nan, np.float16 if output == "f16" else np.float32))
    lt = CublasLt(stream, heuristic, cache_directory=tmp_path)
    try:
        lt.gemm(m, n, k, padded.data.ptr + 16, weights.data.ptr, y.data.ptr, output)()
        assert relative(to_host(y), x.astype(np.float64) @ w.astype(np.float64).T) < (5e-4 if output == "f16" else 1e-5)
        (about,) = lt.describe().values()
        assert "id" in about and (heuristic == "first") == (about["how"] == "first of the heuristic")
    finally:
        lt.close()
    if heuristic == "timed" and "timed" in about["how"]:  # another process takes the kept choice, without timing
        lt = CublasLt(stream, heuristic, cache_directory=tmp_path)
        lt._time = None  # type: ignore[method-assign, assignment]
        lt.gemm(m, n, k, padded.data.ptr + 16, weights.data.ptr, y.data.ptr, output)
        assert lt.describe() == {next(iter(lt.describe())): about}
        lt.close()


def test_a_launch_that_the_gpu_refuses_raises_with_the_kernels_name(stream: int) -> None:
    kernel = jit.kernel("embed", symbol="embed_rows<F16>")
    arguments = (ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(8))
    with pytest.raises(EngineError, match="launch of embed_rows<F16> failed"):
        kernel(stream, (1,), (2048,), *arguments)
    with pytest.raises(EngineError, match="embed_rows<F16> was refused 1048576 bytes of dynamic shared memory"):
        kernel(stream, (1,), (256,), *arguments, smem=1 << 20)


@pytest.mark.parametrize(
    "wrong", [lambda a: a[:-1], lambda a: (*a, ctypes.c_int(0)), lambda a: (*a[:-1], ctypes.c_double(8))]
)
def test_arguments_that_do_not_fit_the_parameters_are_refused(stream: int, wrong: Callable[[Any], Any]) -> None:
    kernel = jit.kernel("embed", symbol="embed_rows<F16>")
    if kernel.parameter_bytes is None:
        pytest.skip("this driver does not tell a kernel's parameters")
    arguments = (ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int(8))
    assert kernel.parameter_bytes == (8, 8, 8, 4)
    with pytest.raises(EngineError, match="takes parameters of"):
        kernel.bind(stream, (1,), (256,), *wrong(arguments))


def test_a_write_past_a_buffer_is_seen() -> None:
    from cupy.cuda import runtime

    arena = Arena("a test", {"a": 100, "b": 1000})
    assert arena.overrun() == []
    runtime.memset(arena["a"] + 100 + CANARY - 1, 0, 1)
    assert arena.overrun() == ["a"]
    arena.close()


def test_more_memory_than_there_is_is_one_sentence() -> None:
    with pytest.raises(EngineError, match=r"GB free and the moon needs"):
        Arena("the moon", {"all": 1 << 50})
