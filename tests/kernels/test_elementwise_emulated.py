"""The element-wise kernels themselves, run thread by thread on the CPU (elementwise_emulator.cpp): what they compute, without a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.pathfinder", reason="the CUDA headers are found by cuda-pathfinder")

from engine.cuda import jit
from engine.synth import describe_tensor, fill
from engine.tensors import TYPES, TensorInfo, block_of, dequantize

HERE = Path(__file__).parent
u32, u64, i64, f32 = ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_longlong, ctypes.c_float


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    library = tmp_path_factory.mktemp("emulator") / "elementwise.so"
    includes = [f"-I{directory}" for directory in (jit.KERNELS, *jit.cuda_headers())]
    flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    source = str(HERE / "elementwise_emulator.cpp")
    built = subprocess.run(["g++", *flags, *includes, "-o", str(library), source], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


def at(array: np.ndarray, offset: int = 0) -> Any:
    """Address of an array's element, as a kernel's argument."""
    return ctypes.c_void_p(array.ctypes.data + offset * array.itemsize)


def f16(values: np.ndarray) -> np.ndarray:
    """Rounded to f16, saturating, as float64."""
    return np.clip(values, -65504, 65504).astype(np.float16).astype(np.float64)


def tensor(kind: str, n: int, k: int) -> TensorInfo:
    weights, size = block_of(kind)
    return TensorInfo("blk.0.ffn_down.weight", (n, k), kind, n * k // weights * size)


@pytest.mark.parametrize("kind", TYPES)
def test_dequantised_weights_equal_the_gguf_packages_rounded_to_f16(kernels: ctypes.CDLL, kind: str) -> None:
    """Synthetic blocks, and any bytes at all (huge, denormal and NaN scales among them)."""
    info = tensor(kind, 37, 512)
    synthetic = np.empty(info.n_bytes, np.uint8)
    fill(describe_tensor(info, 5), synthetic)
    anything = np.random.default_rng(3).integers(0, 256, info.n_bytes, dtype=np.uint8)
    for blocks in (synthetic, anything):
        out = np.full(37 * 512 + 8, 0xFFFF, np.uint16)
        getattr(kernels, f"dequantize_{kind.upper()}")(at(blocks), at(out), u64(37 * 512 // 8))
        with np.errstate(all="ignore"):
            want = dequantize(blocks, info).astype(np.float16).ravel()
        assert (out[-8:] == 0xFFFF).all()
        number = ~np.isnan(want)
        np.testing.assert_array_equal(np.isnan(out[:-8].view(np.float16)), ~number)
        np.testing.assert_array_equal(out[:-8][number], want.view(np.uint16)[number])


@pytest.mark.parametrize("kind", [t for t in TYPES if t != "f32"])
def test_synthetic_blocks_equal_the_hosts(kernels: ctypes.CDLL, kind: str) -> None:
    info = tensor(kind, 37, 512)
    constants = describe_tensor(info, 7)
    want = np.empty(info.n_bytes, np.uint8)
    fill(constants, want)
    got = np.zeros(info.n_bytes + 16, np.uint8)
    kernels.fill(at(got), u64(info.n_bytes), u64(constants.key))
    patch = getattr(kernels, f"patch_{kind}")
    if kind in ("f16", "bf16"):
        patch(at(got), u64(constants.blocks), ctypes.c_int(constants.exponent))
    else:
        packed = [u64(sum(h << 16 * i for i, h in enumerate(four))) for four in (constants.d, constants.m)]
        patch(at(got), u64(constants.blocks), *packed)
    np.testing.assert_array_equal(got[: info.n_bytes], want)
    assert not got[info.n_bytes :].any()


def test_a_fill_of_any_length_stops_at_its_last_byte(kernels: ctypes.CDLL) -> None:
    whole = np.zeros(64, np.uint8)
    kernels.fill(at(whole), u64(64), u64(9))
    for length in range(1, 64):
        part = np.full(64, 0xEE, np.uint8)
        kernels.fill(at(part), u64(length), u64(9))
        np.testing.assert_array_equal(part[:length], whole[:length])
        assert (part[length:] == 0xEE).all()


@pytest.mark.parametrize("kind", TYPES)
def test_embedding_rows_are_the_gguf_packages_values(kernels: ctypes.CDLL, kind: str) -> None:
    info = tensor(kind, 50, 2560)
    table = np.empty(info.n_bytes, np.uint8)
    fill(describe_tensor(info, 2), table)
    ids = np.array([49, 0, 7, 7], np.int32)
    out = np.full((4, 2560), np.nan, np.float32)
    getattr(kernels, f"embed_{kind.upper()}")(at(ids), at(table), at(out), u32(4), ctypes.c_int(2560))
    np.testing.assert_array_equal(out, dequantize(table, info)[ids])


@pytest.mark.parametrize("hidden", [8, 256, 576, 1032, 3584])
@pytest.mark.parametrize("add", [False, True])
def test_norm_equals_float64(kernels: ctypes.CDLL, hidden: int, add: bool) -> None:
    """With residuals far above f16's 65504, which the f32 stream must carry."""
    rng = np.random.default_rng(hidden)
    rows, eps = 3, 1e-6
    residual = (rng.standard_normal((rows, hidden)) * np.array([[1], [3e5], [1e-3]])).astype(np.float32)
    delta = rng.standard_normal((rows, hidden)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, hidden).astype(np.float32)
    out = np.full((rows, hidden), np.nan, np.float16)
    before = residual.copy()
    vecs = 4 if hidden >= 2048 else 2 if hidden >= 1024 else 1
    kernels.norm(vecs, add, at(residual), at(delta), at(weight), at(out), u32(rows), hidden, f32(eps))
    want_residual = before + delta if add else before
    np.testing.assert_array_equal(residual, want_residual)
    x = want_residual.astype(np.float64)
    want = x * weight / np.sqrt((x**2).mean(1, keepdims=True) + eps)
    np.testing.assert_allclose(out.astype(np.float64), want, rtol=6e-4, atol=6e-8)


def test_norm_saturates_and_keeps_nan(kernels: ctypes.CDLL) -> None:
    residual = np.ones((2, 8), np.float32)
    residual[1, 3] = np.nan
    weight = np.full(8, 1e6, np.float32)
    out = np.zeros((2, 8), np.float16)
    kernels.norm(1, False, at(residual), None, at(weight), at(out), u32(2), 8, f32(1e-6))
    assert (out[0] == 65504).all() and np.isnan(out[1]).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block"), [(4, 2, 64, 32), (3, 1, 128, 64), (2, 2, 16, 32)])
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_rope_equals_float64(
    kernels: ctypes.CDLL, heads: int, kv_heads: int, head_dim: int, block: int, neox: bool, together: bool, biased: bool
) -> None:
    """Rows that are no multiple of four, q for the last rows only, three matrices or one, positions near 32768."""
    rng = np.random.default_rng(head_dim)
    rows, q_first, past, base = 7, 2, 32757, 1e6
    q_dim, kv_dim = heads * head_dim, kv_heads * head_dim
    whole = rng.standard_normal((rows, q_dim + 2 * kv_dim)).astype(np.float16)
    q, k, v = (np.ascontiguousarray(p) for p in np.split(whole, [q_dim, q_dim + kv_dim], axis=1))
    before = [p.astype(np.float64) for p in (q, k, v)]
    biases = [rng.standard_normal(p.shape[1]).astype(np.float32) for p in (q, k, v)]
    frequency = base ** (-2.0 * np.arange(head_dim // 2) / head_dim)
    angle = np.arange(past + rows)[:, None] * frequency
    table = np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)
    k_cache, v_cache = (np.full((past + rows, kv_dim), np.nan, np.float16) for _ in range(2))
    if together:
        places = at(whole), at(whole, q_dim), at(whole, q_dim + kv_dim), i64(whole.shape[1]), i64(whole.shape[1])
    else:
        places = at(q), at(k), at(v), i64(q_dim), i64(kv_dim)
    kernels.rope(
        neox, *places, at(k_cache), at(v_cache), *(at(b) if biased else None for b in biases), at(table),
        rows, q_first, past, heads, kv_heads, head_dim, u32(block),
    )  # fmt: skip

    if biased:
        before = [p + b for p, b in zip(before, biases, strict=True)]
    cosine, sine = np.cos(angle[past:, None]), np.sin(angle[past:, None])

    def rotated(x: np.ndarray) -> np.ndarray:
        x = x.reshape(rows, -1, head_dim).copy()
        half = head_dim // 2
        first = np.s_[..., :half] if neox else np.s_[..., ::2]
        second = np.s_[..., half:] if neox else np.s_[..., 1::2]
        a, b = x[first].copy(), x[second].copy()
        x[first], x[second] = a * cosine - b * sine, a * sine + b * cosine
        return x.reshape(rows, -1)

    got_q = whole[:, :q_dim] if together else q
    close = {"rtol": 1e-3, "atol": 1e-3}
    np.testing.assert_allclose(got_q[q_first:], rotated(before[0])[q_first:], **close)
    np.testing.assert_allclose(k_cache[past:], rotated(before[1]), **close)
    np.testing.assert_allclose(v_cache[past:], before[2], **close)
    if not biased:
        np.testing.assert_array_equal(got_q[:q_first], before[0][:q_first])  # rows that nobody asked for stay
    assert np.isnan(k_cache[:past]).all() and np.isnan(v_cache[:past]).all()


@pytest.mark.parametrize(("rows", "ffn"), [(1, 8), (5, 776), (3, 2368)])
@pytest.mark.parametrize("together", [False, True])
def test_swiglu_equals_float64(kernels: ctypes.CDLL, rows: int, ffn: int, together: bool) -> None:
    rng = np.random.default_rng(ffn)
    both = (rng.standard_normal((rows, 2 * ffn)) * 8).astype(np.float16)
    both[0, :4], both[0, ffn : ffn + 4] = [60000, -60000, -20, 0], [60000, 60000, 3, 2]  # saturates, −0, tiny, 0
    gate, up = (np.ascontiguousarray(p) for p in np.split(both, 2, axis=1))
    out = np.full(rows * ffn + 8, np.nan, np.float16)
    places = (at(both), at(both, ffn)) if together else (at(gate), at(up))
    kernels.swiglu(*places, at(out), u32(rows), u32(ffn // 8), u32(2 * ffn if together else ffn))
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        want = f16(g / (1 + np.exp(-g)) * u)
    np.testing.assert_allclose(out[:-8].reshape(rows, ffn).astype(np.float64), want, rtol=1e-3, atol=6e-8)
    assert np.isnan(out[-8:]).all()
