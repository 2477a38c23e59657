"""The ops of a plan in NumPy, float32: one function per op kind, named as the kind.

Shapes: T rows of this forward, past cached rows before them, H heads in groups of G = H / Hkv per KV head, d head_dim.
An op that computes m rows takes the *last* m rows of its inputs, which is all that a one-row tail is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.cpu.state import Forward
from engine.plan import Op

CACHED = 1 << 16
"""Floats that an element-wise task touches per operand: 256 KiB, so that its passes stay in a core's L2."""

INPUT = {
    "attn_q": "norm", "attn_k": "norm", "attn_v": "norm", "attn_output": "attention",
    "ffn_gate": "norm", "ffn_up": "norm", "ffn_down": "swiglu", "output": "norm",
}  # fmt: skip
"""Matrix → the op kind whose rows it multiplies."""


def tokens_in(f: Forward, op: Op) -> None:
    """Token ids into the engine's own memory, int32 [T]."""
    f.ids = np.array(f.caller_ids, np.int32)


def embed(f: Forward, op: Op) -> None:
    """residual[t] = embedding[ids[t]]: float32 [T, hidden], the residual stream."""
    f.residual = f.buffer("residual", op.m, op.n)
    # The ids are checked; "clip" spares NumPy's buffered copy.
    np.take(f.weights.embedding, f.ids, axis=0, out=f.residual, mode="clip")


def norm(f: Forward, op: Op) -> None:
    """residual += delta of the op before (if any); y = residual / √(mean(residual²) + ε) · w, both float32 [m, hidden]."""
    name = "output_norm.weight" if op.layer < 0 else f"blk.{op.layer}.{op.name.split()[-1]}.weight"
    weight, eps = f.weights.vectors[name], np.float32(f.geometry.rms_eps)
    residual = f.residual[-op.m :]
    delta = None if f.delta is None else f.delta[-op.m :]
    out = f.rows["norm"] = f.buffer("norm", op.m, op.n)

    def task(start: int, stop: int) -> None:
        x, y = residual[start:stop], out[start:stop]
        if delta is not None:
            x += delta[start:stop]
        mean_square = np.einsum("ij,ij->i", x, x) / np.float32(op.n)
        np.multiply(x, (1 / np.sqrt(mean_square + eps))[:, None], out=y)
        y *= weight

    f.threads.rows(task, op.m, max(1, CACHED // op.n))
    f.residual, f.delta = residual, None


def gemm(f: Forward, op: Op) -> None:
    """y[m, ΣN] = x[m, K] · Wᵀ; each part's columns are its matrix's output."""
    x, weight = f.rows[INPUT[op.parts[0].matrix]][-op.m :], f.weights.matrix(op.parts)
    y = f.buffer("+".join(p.matrix for p in op.parts), op.m, op.n)

    def task(start: int, stop: int) -> None:
        np.matmul(x[start:stop], weight.T, out=y[start:stop])

    # One range per worker: BLAS packs the whole of W again for every range.
    f.threads.rows(task, op.m, max(32, -(-op.m // f.threads.count)))
    column = 0
    for part in op.parts:
        f.rows[part.matrix] = y[:, column : column + part.n]
        column += part.n
    if op.parts[0].matrix in ("attn_output", "ffn_down"):
        f.delta = y


def rope_kv(f: Forward, op: Op) -> None:
    """Adds the biases, rotates q and k by their positions, and stores k and v in the layer's cache.

    q goes to [Hkv, rows, G, d], scaled by 1/√d, so that a KV head's query heads are the rows of one matrix;
    k and v go to cache[Hkv, past + T, d].
    """
    g, q, k, v = f.geometry, f.rows["attn_q"], f.rows["attn_k"], f.rows["attn_v"]
    keys, values = f.cache.keys[op.layer], f.cache.values[op.layer]
    group = g.heads // g.kv_heads
    f.q = f.buffer("rotated q", g.kv_heads * len(q) * group, g.head_dim).reshape(g.kv_heads, len(q), group, g.head_dim)
    first_q = op.m - len(q)  # a one-row tail has q of the last position alone
    cos, sin = f.rope
    scale = np.float32(g.head_dim**-0.5)

    def task(start: int, stop: int) -> None:
        at = slice(f.past + start, f.past + stop)
        if g.qkv_bias:
            k[start:stop] += f.weights.vectors[f"blk.{op.layer}.attn_k.bias"]
            v[start:stop] += f.weights.vectors[f"blk.{op.layer}.attn_v.bias"]
        by_head = k[start:stop].reshape(stop - start, g.kv_heads, g.head_dim).transpose(1, 0, 2)
        rotate(by_head, cos[start:stop], sin[start:stop], keys[:, at], g.rope_style)
        values[:, at] = v[start:stop].reshape(stop - start, g.kv_heads, g.head_dim).transpose(1, 0, 2)
        rows = slice(max(start - first_q, 0), stop - first_q)
        if rows.stop > 0:
            if g.qkv_bias:
                q[rows] += f.weights.vectors[f"blk.{op.layer}.attn_q.bias"]
            by_group = q[rows].reshape(-1, g.kv_heads, group, g.head_dim).transpose(1, 0, 2, 3)
            angle = slice(rows.start + first_q, stop)
            rotate(by_group, cos[angle, None] * scale, sin[angle, None] * scale, f.q[:, rows], g.rope_style)

    f.threads.rows(task, op.m, max(1, CACHED // op.n))


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, out: np.ndarray, style: str) -> None:
    """out = x with its pairs turned by the angles: (2i, 2i + 1) in style "norm", (i, i + d/2) in "neox". d is the last axis."""
    half = x.shape[-1] // 2
    first, second = (np.s_[..., 0::2], np.s_[..., 1::2]) if style == "norm" else (np.s_[..., :half], np.s_[..., half:])
    a, b = x[first], x[second]
    out[first] = a * cos - b * sin
    out[second] = a * sin + b * cos


def attention(f: Forward, op: Op) -> None:
    """softmax(q · Kᵀ / √d, causal) · V, float32 [m, H · d].

    Blocks of `cpu_attention_block` query rows; a block of one KV head's G query heads is one matrix [block · G, d],
    and its scores cover only the keys that its last row sees, so memory is block · G · keys floats a thread.
    """
    g, layer = f.geometry, op.layer
    group, block = g.heads // g.kv_heads, f.levers.cpu_attention_block
    out = f.rows["attention"] = f.buffer("attention", op.m, g.q_dim)
    by_head = out.reshape(op.m, g.kv_heads, group, g.head_dim)
    first = op.n - op.m  # position of the first query row

    def task(head: int, start: int) -> None:
        stop = min(start + block, op.m)
        rows, visible = stop - start, first + stop
        q = f.q[head, start:stop].reshape(rows * group, g.head_dim)
        scores = f.threads.scratch(rows * group, visible)
        np.matmul(q, f.cache.keys[layer][head, :visible].T, out=scores)
        hidden = ~np.tri(rows, dtype=bool)[:, None, :]  # inside the block, row i sees its keys 0 … i
        np.copyto(scores.reshape(rows, group, visible)[:, :, first + start :], -np.inf, where=hidden)
        scores -= scores.max(axis=1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=1)
        weighted = scores @ f.cache.values[layer][head, :visible]
        weighted /= total[:, None]
        by_head[start:stop, head] = weighted.reshape(rows, group, g.head_dim)

    # Longest first, so that the workers end together.
    f.threads.each(task, [(h, s) for s in reversed(range(0, op.m, block)) for h in range(g.kv_heads)])


def swiglu(f: Forward, op: Op) -> None:
    """gate ← gate / (1 + e^−gate) · up, float32 [m, ffn], in place."""
    gate, up = f.rows["ffn_gate"], f.rows["ffn_up"]

    def task(start: int, stop: int) -> None:
        g = gate[start:stop]
        t = np.negative(g, out=f.threads.scratch(stop - start, op.n))
        with np.errstate(over="ignore"):  # e^−gate = ∞ for gate < −88: gate / ∞ is the right 0
            np.exp(t, out=t)
        t += 1
        g /= t
        g *= up[start:stop]

    f.threads.rows(task, op.m, max(1, CACHED // op.n))
    f.rows["swiglu"] = gate


def logits_out(f: Forward, op: Op) -> None:
    """Logits into memory that the caller owns, float32 [m, vocab]."""
    f.logits = f.rows["output"].copy()


OPS: dict[str, Callable[[Forward, Op], None]] = {
    f.__name__: f for f in (tokens_in, embed, norm, gemm, rope_kv, attention, swiglu, logits_out)
}
