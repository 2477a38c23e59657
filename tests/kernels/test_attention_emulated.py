"""attention.cu itself, run thread by thread on the CPU (attention_emulator.cpp), against float64 attention.

What it proves without a GPU: index maps, swizzles, descriptors, masks, barriers and pipeline stages. What it cannot: that the
hardware's layouts are the PTX ISA's as the emulator reads them, and speed.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.cuda.attention import attention_workspace_bytes

HERE = Path(__file__).parent
VARIANTS = {"mma": 0, "wgmma": 1, "split": 2}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("the emulator needs g++")
    library = tmp_path_factory.mktemp("emulator") / "attention.so"
    command = [
        "g++",
        "-O2",
        "-std=c++17",
        "-march=native",
        "-shared",
        "-fPIC",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
    ]
    built = subprocess.run(
        [*command, "-o", str(library), str(HERE / "attention_emulator.cpp")], capture_output=True, text=True
    )
    if built.returncode and "_Float16" in built.stderr:
        pytest.skip("this g++ has no _Float16")
    assert built.returncode == 0, built.stderr
    return ctypes.CDLL(str(library))


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, past: int, scale: float) -> np.ndarray:
    """float64 [rows, heads, d] of q [rows, heads, d] and k, v [keys, kv_heads, d]."""
    rows, heads, _ = q.shape
    group = heads // k.shape[1]
    out = np.empty(q.shape)
    visible = np.arange(k.shape[0])[None, :] <= past + np.arange(rows)[:, None]
    for head in range(heads):
        scores = q[:, head].astype(np.float64) @ k[:, head // group].astype(np.float64).T * scale
        scores = np.where(visible, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, head // group].astype(np.float64)
    return out


def run(
    emulator: ctypes.CDLL,
    variant: str,
    rows: int,
    past: int,
    *,
    d: int = 128,
    heads: int = 1,
    kv_heads: int = 1,
    late: int = 1,
    backward: int = 0,
    q_magnitude: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """(computed, reference) [rows, heads, d]; rows and columns around every operand hold NaN and must stay unread or unwritten."""
    rng = np.random.default_rng(rows * 1000 + past + d)
    keys, guard, pad = past + rows, 150, 8

    def guarded(count: int, width: int, magnitude: float) -> np.ndarray:
        x = np.full((count + guard, width + pad), np.nan, np.float16)
        x[:count, :width] = rng.standard_normal((count, width)) * magnitude
        return x

    q, k, v = guarded(rows, heads * d, q_magnitude), guarded(keys, kv_heads * d, 1.0), guarded(keys, kv_heads * d, 1.0)
    out = np.full((rows + guard, heads * d + pad), np.nan, np.float16)
    aligned = [_aligned(x) for x in (q, k, v, out)]
    need = attention_workspace_bytes(rows=rows, past=past, heads=heads, head_dim=d, variant="split")
    partial = np.full(need // 4, np.nan, np.float32)
    scale = 1 / math.sqrt(d)
    emulator.emulate(
        VARIANTS[variant], d, *(ctypes.c_void_p(x.ctypes.data) for x in (*aligned, partial)), rows, past, heads,
        heads // kv_heads, q.shape[1], k.shape[1], out.shape[1], ctypes.c_float(scale * math.log2(math.e)), late, backward,
    )  # fmt: skip
    result = aligned[3]
    assert np.isnan(result[rows:]).all() and np.isnan(result[:, heads * d :]).all(), "wrote outside its rows or columns"
    expected = reference(
        q[:rows, : heads * d].reshape(rows, heads, d),
        k[:keys, : kv_heads * d].reshape(keys, kv_heads, d),
        v[:keys, : kv_heads * d].reshape(keys, kv_heads, d),
        past,
        scale,
    )
    return result[:rows, : heads * d].reshape(rows, heads, d).astype(np.float64), expected


def _aligned(x: np.ndarray) -> np.ndarray:
    """A copy whose address is a multiple of 16 bytes, as the kernels ask."""
    buffer = np.empty(x.nbytes + 16, np.uint8)
    start = -buffer.ctypes.data % 16
    copy = buffer[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[:] = x
    return copy


def check(got: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(got).all()
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error <= 1e-3, f"relative L2 {error:.2e}"
    worst = np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert worst.max() <= 5e-3, f"row and head {np.unravel_index(worst.argmax(), worst.shape)}: {worst.max():.2e}"


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("rows", "past"),
    [(1, 0), (7, 0), (8, 0), (9, 0), (127, 0), (128, 0), (129, 0), (1, 300), (65, 5), (130, 63), (9, 120)],
)
def test_tiles_compute_attention_at_every_edge(
    emulator: ctypes.CDLL, variant: str, d: int, rows: int, past: int
) -> None:
    check(*run(emulator, variant, rows, past, d=d))


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("backward", [0, 1])
def test_tiles_do_not_depend_on_when_copies_land_or_warps_run(
    emulator: ctypes.CDLL, variant: str, late: int, backward: int
) -> None:
    check(*run(emulator, variant, 333, 70, d=64, late=late, backward=backward))


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 1), (6, 2), (7, 1)])
def test_query_heads_share_their_kv_head(emulator: ctypes.CDLL, variant: str, heads: int, kv_heads: int) -> None:
    check(*run(emulator, variant, 3 if variant == "split" else 40, 30, d=64, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("rows", "past"), [(1, 0), (1, 1), (1, 30), (1, 254), (1, 255), (1, 256), (1, 518), (1, 3324), (4, 0), (8, 252)]
)
def test_split_keys_compute_attention_at_every_length(emulator: ctypes.CDLL, d: int, rows: int, past: int) -> None:
    check(*run(emulator, "split", rows, past, d=d))


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split"])
def test_large_scores_stay_finite(emulator: ctypes.CDLL, variant: str) -> None:
    rows = 4 if variant == "split" else 150
    check(*run(emulator, variant, rows, 20, q_magnitude=100.0))


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split"])
def test_zero_queries_give_the_mean_of_the_visible_values(emulator: ctypes.CDLL, variant: str) -> None:
    check(*run(emulator, variant, 4 if variant == "split" else 140, 10, d=64, q_magnitude=0.0))
