"""Our prefill attention: which kernel of `kernels/attention.cu` runs, with what grid, shared memory and workspace.

All pointers are device addresses of f16, 16-byte aligned; strides are in elements and multiples of 8:

    q    [rows, heads, head_dim]            row r sits at position past + r
    k, v [past + rows, kv_heads, head_dim]  key j is row j of the cache
    out  [rows, heads, head_dim]            out[r] = softmax(scale · q[r] · kᵀ over keys ≤ past + r) · v
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from math import e, log2
from typing import TYPE_CHECKING, Literal

from engine.cuda import jit
from engine.errors import EngineError

if TYPE_CHECKING:
    from engine.cuda.jit import Launch

Variant = Literal["mma", "wgmma", "split"]
"""mma: tiles with mma.sync, everywhere. wgmma: tiles on sm_90a. split: a few rows, keys spread over many blocks."""

HEAD_DIMS = (64, 128)
SPLIT_MAX_ROWS = 4
"""Above this many rows a tile kernel wins: `split` reads every key again for each row."""

# The kernels' own constants (a test compares them with attention.cu).
Q_ROWS, SPLIT_KEYS = 128, 256
KEYS = {"mma": 64, "wgmma": 128}
THREADS = {"mma": 128, "wgmma": 256, "split": 128}


def choose_variant(arch: str, rows: int) -> Variant:
    """The kernel for `rows` query rows on `arch` ("sm_90a")."""
    if rows <= SPLIT_MAX_ROWS:
        return "split"
    return "wgmma" if arch == "sm_90a" else "mma"


def shared_memory_bytes(variant: Variant, head_dim: int) -> int:
    """Dynamic shared memory of a tile kernel: Q and two stages of K and of V; wgmma aligns its tiles to 1024 bytes."""
    if variant == "split":
        return 0
    return (Q_ROWS + 4 * KEYS[variant]) * head_dim * 2 + (1024 if variant == "wgmma" else 0)


def attention_workspace_bytes(
    *, rows: int, past: int, heads: int, head_dim: int, variant: Variant | None = None
) -> int:
    """Bytes of device workspace that this call needs: f32 partial results, for the split kernel alone."""
    if (variant or choose_variant("", rows)) != "split":
        return 0
    return rows * heads * _splits(rows, past) * (head_dim + 2) * 4


def bind_attention(
    stream: int,
    q_ptr: int,
    k_ptr: int,
    v_ptr: int,
    out_ptr: int,
    *,
    rows: int,
    past: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_stride: int,
    kv_stride: int,
    out_stride: int,
    scale: float,
    workspace_ptr: int = 0,
    workspace_bytes: int = 0,
    variant: Variant | None = None,
) -> tuple[Launch, ...]:
    """The launches of one attention, in order, ready to submit any number of times.

    Raises EngineError for a shape, stride, alignment or workspace that the kernels do not take.
    """
    if head_dim not in HEAD_DIMS:
        raise EngineError(
            f"attention has no kernel for head_dim {head_dim}; it has {' and '.join(map(str, HEAD_DIMS))}."
        )
    if rows < 1 or past < 0 or kv_heads < 1 or heads % kv_heads or not scale > 0:
        raise EngineError(
            f"attention cannot run {rows} rows after {past}, {heads} heads on {kv_heads} KV heads, scale {scale}; "
            "it needs rows ≥ 1, past ≥ 0, heads a multiple of kv_heads and scale > 0."
        )
    if any(p % 16 for p in (q_ptr, k_ptr, v_ptr, out_ptr)) or any(s % 8 for s in (q_stride, kv_stride, out_stride)):
        raise EngineError(
            "attention reads 16 bytes at a time; align q, k, v and out to 16 bytes and strides to 8 elements."
        )
    variant = variant or choose_variant(jit.device_arch(), rows)
    q, k, v, out = c_void_p(q_ptr), c_void_p(k_ptr), c_void_p(v_ptr), c_void_p(out_ptr)
    group, scale_log2 = c_int(heads // kv_heads), c_float(scale * log2(e))
    if variant == "split":
        need = attention_workspace_bytes(rows=rows, past=past, heads=heads, head_dim=head_dim, variant="split")
        if workspace_bytes < need or not workspace_ptr:
            raise EngineError(f"attention over {rows} rows needs a workspace of {need} bytes, not {workspace_bytes}.")
        partial, splits = c_void_p(workspace_ptr), _splits(rows, past)
        split = jit.kernel("attention", symbol=f"attention_split<{head_dim}>")
        combine = jit.kernel("attention", symbol=f"attention_combine<{head_dim}>")
        return (
            split.bind(stream, (splits, heads, rows), (THREADS["split"],), q, k, v, partial, c_int(past), group,
                       c_int(q_stride), c_int(kv_stride), scale_log2),
            combine.bind(stream, (heads, rows), (head_dim,), partial, out, c_int(past), c_int(splits), c_int(out_stride)),
        )  # fmt: skip
    kernel = jit.kernel("attention", symbol=f"attention_{variant}<{head_dim}>")
    grid = (heads, -(-rows // Q_ROWS))
    return (
        kernel.bind(stream, grid, (THREADS[variant],), q, k, v, out, c_int(rows), c_int(past), group, c_int(q_stride),
                    c_int(kv_stride), c_int(out_stride), scale_log2, smem=shared_memory_bytes(variant, head_dim)),
    )  # fmt: skip


def _splits(rows: int, past: int) -> int:
    return -(-(past + rows) // SPLIT_KEYS)
