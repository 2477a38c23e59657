"""From a plan to launches: what each op submits, bound once to the buffers of an arena.

Buffers hold T = `plan.tokens` rows; an op that computes m < T rows computes the last m of them, so a one-row tail reads and
writes the last row's place in the same buffers.

    ids       int32 [T]                 residual  f32 [T, hidden]      x     f16 [T, hidden]       a norm's output
    delta     f32 [T, hidden]           o's and down's output, which the next norm adds into the residual
    qkv       f16: [T, q + 2 kv] as one matrix, or q [T, q], k [T, kv], v [T, kv] one after another (`QkvViews`)
    mixed     f16 [T, q]                attention's output
    gate_up   f16: [T, 2 ffn], or gate [T, ffn] and up [T, ffn] one after another
    act       f16 [T, ffn]              logits    f32 [chunk, vocab]
    k_cache, v_cache  f16 [layers, positions, kv]                      rope  float2 [positions, head_dim / 2]
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engine.backend import Progress
from engine.cuda import jit
from engine.cuda.arena import Arena, align
from engine.cuda.attention import SPLIT_MAX_ROWS, attention_workspace_bytes, bind_attention
from engine.cuda.cublaslt import CublasLt
from engine.cuda.weights import Weights
from engine.errors import EngineError
from engine.geometry import Geometry
from engine.plan import Op, Plan

Submit = Callable[[], object]
Program = list[tuple[Op, tuple[Submit, ...]]]
"""Each op with the calls that submit its launches, in order."""

LOGITS_CHUNK_BYTES = 256 << 20  # all-rows logits leave the device in chunks of at most this
ROPE_ROWS = 4  # rows a block of rope_kv walks: ROWS in rope_kv.cu


def logits_rows(g: Geometry, rows: int) -> int:
    """Rows of logits that fit a chunk, at least one and at most `rows`."""
    return max(1, min(rows, LOGITS_CHUNK_BYTES // (4 * g.vocab)))


def buffer_sizes(g: Geometry, rows: int, positions: int, head_rows: int) -> dict[str, int]:
    """Bytes of every buffer for forwards of up to `rows` rows, `positions` cached ones and `head_rows` rows of logits."""
    cache = 2 * g.layers * positions * g.kv_dim
    return {
        "ids": 4 * rows,
        "residual": 4 * rows * g.hidden,
        "delta": 4 * rows * g.hidden,
        "x": 2 * rows * g.hidden,
        "qkv": 2 * rows * (g.q_dim + 2 * g.kv_dim) + 2 * 256,
        "mixed": 2 * rows * g.q_dim,
        "gate_up": 4 * rows * g.ffn + 256,
        "act": 2 * rows * g.ffn,
        "logits": 4 * logits_rows(g, head_rows) * g.vocab,
        "k_cache": cache,
        "v_cache": cache,
        "rope": 4 * positions * g.head_dim,
        "attention workspace": max(
            attention_workspace_bytes(rows=r, past=positions, heads=g.heads, head_dim=g.head_dim)
            for r in range(1, SPLIT_MAX_ROWS + 1)
        ),
    }


def rope_table(g: Geometry, positions: int) -> np.ndarray:
    """float32 [positions, head_dim / 2, 2]: cos and sin of position · base^(−2i / head_dim), computed in float64."""
    frequency = g.rope_base ** (-2.0 * np.arange(g.head_dim // 2) / g.head_dim)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).astype(np.float32)


@dataclass
class HostBuffers:
    """Where a forward's ids come from and its logits go to: addresses of host memory, read when a copy is submitted."""

    ids: int
    logits: int


@dataclass(frozen=True)
class QkvViews:
    """Addresses of row 0 of q, k and v, and their row strides in elements."""

    q: int
    k: int
    v: int
    q_stride: int
    kv_stride: int

    @classmethod
    def of(cls, g: Geometry, base: int, rows: int, gemms: set[str]) -> QkvViews:
        """The layout that a layer's GEMM ops (their names) write at `base`."""
        if "qkv" in gemms:
            width = g.q_dim + 2 * g.kv_dim
            return cls(base, base + 2 * g.q_dim, base + 2 * (g.q_dim + g.kv_dim), width, width)
        k = base + align(2 * rows * g.q_dim)
        if "kv" in gemms:
            return cls(base, k, k + 2 * g.kv_dim, g.q_dim, 2 * g.kv_dim)
        return cls(base, k, k + align(2 * rows * g.kv_dim), g.q_dim, g.kv_dim)


class Binder:
    """Binds the ops of one plan. One instance per plan: it knows T, the past and each layer's q/k/v layout."""

    def __init__(
        self,
        plan: Plan,
        stream: int,
        weights: Weights,
        arena: Arena,
        positions: int,
        gemms: CublasLt,
        host: HostBuffers,
    ) -> None:
        self.plan, self.g, self.rows = plan, plan.geometry, plan.tokens
        self.stream, self.weights, self.arena, self.positions = stream, weights, arena, positions
        self.gemms, self.host = gemms, host
        self.gemm_names: dict[int, set[str]] = {}
        for op in plan:
            if op.kind == "gemm":
                self.gemm_names.setdefault(op.layer, set()).add(_short(op))
        self.qkv = {
            layer: QkvViews.of(self.g, arena["qkv"], self.rows, names)
            for layer, names in self.gemm_names.items()
            if layer >= 0
        }
        self.attention_rows = {op.layer: op.m for op in plan if op.kind == "attention"}

    def program(self, progress: Progress | None = None) -> Program:
        """Every op with its launches. Compiles kernels and chooses GEMM algorithms that are not there yet."""
        program: Program = []
        for op in self.plan:
            program.append((op, tuple(getattr(self, op.kind)(op))))
            if progress:
                progress("compiling kernels and choosing GEMM algorithms", op.index + 1, len(self.plan))
        return program

    # Each method below is named after an op's kind and returns what that op submits.

    def tokens_in(self, op: Op) -> list[Submit]:
        from cupy.cuda import runtime

        to, size, kind = self.arena["ids"], 4 * op.m, runtime.memcpyHostToDevice
        return [lambda: runtime.memcpyAsync(to, self.host.ids, size, kind, self.stream)]

    def embed(self, op: Op) -> list[Submit]:
        kernel = jit.kernel("embed", symbol=f"embed_rows<{self.weights.embedding_type.upper()}>")
        return [
            kernel.bind(self.stream, (op.m,), (256,), _pointer(self.arena["ids"]), _pointer(self.weights.embedding),
                        _pointer(self.arena["residual"]), ctypes.c_int(self.g.hidden))
        ]  # fmt: skip

    def norm(self, op: Op) -> list[Submit]:
        name = _short(op)
        weight = "output_norm.weight" if op.layer < 0 else f"blk.{op.layer}.{name}.weight"
        adds = not (name == "attn_norm" and op.layer == 0)
        first = self._first(op)
        h = self.g.hidden
        return [
            bind_norm(
                self.stream, self.arena["residual"] + 4 * first * h, self.arena["delta"] + 4 * first * h if adds else 0,
                self.weights.vector(weight), self.arena["x"] + 2 * first * h, rows=op.m, hidden=h, eps=self.g.rms_eps,
            )
        ]  # fmt: skip

    def gemm(self, op: Op) -> list[Submit]:
        name, first, g, arena = _short(op), self._first(op), self.g, self.arena
        w = self.weights.matrix(op.parts[0].tensor)
        x = arena["x"] + 2 * first * g.hidden
        if name == "lm_head":
            return self._lm_head(op, x, w)
        if name in ("o", "down"):
            x = arena["mixed"] + 2 * first * g.q_dim if name == "o" else arena["act"] + 2 * first * g.ffn
            return [self.gemms.gemm(op.m, op.n, op.k, x, w, arena["delta"] + 4 * first * g.hidden, "f32")]
        if name in ("gate", "up", "gate_up"):
            gate, up = self._gate_up(op.layer)
            width = 2 * g.ffn if name == "gate_up" else g.ffn
            y = (up if name == "up" else gate) + 2 * first * width
        else:
            views = self.qkv[op.layer]
            y = {"q": views.q + 2 * first * views.q_stride, "qkv": views.q, "k": views.k, "kv": views.k, "v": views.v}[
                name
            ]
        return [self.gemms.gemm(op.m, op.n, op.k, x, w, y, "f16")]

    def rope_kv(self, op: Op) -> list[Submit]:
        g, views = self.g, self.qkv[op.layer]
        bias = [self.weights.vector(f"blk.{op.layer}.attn_{part}.bias") for part in "qkv"]
        return [
            bind_rope_kv(
                self.stream, g, views, self._cached("k_cache", op.layer), self._cached("v_cache", op.layer),
                bias, self.arena["rope"], rows=op.m, q_first=self.rows - self.attention_rows[op.layer], past=self.plan.past,
            )
        ]  # fmt: skip

    def attention(self, op: Op) -> list[Submit]:
        g, views, first = self.g, self.qkv[op.layer], self._first(op)
        q, out = views.q + 2 * first * views.q_stride, self.arena["mixed"] + 2 * first * g.q_dim
        k, v = self._cached("k_cache", op.layer), self._cached("v_cache", op.layer)
        past = self.plan.past + first
        if self.plan.levers.attention == "cudnn" and past == 0 and op.m > 1:
            from engine.cuda import cudnn_attention

            return list(
                cudnn_attention.bind_attention(
                    self.stream, q, k, v, out, rows=op.m, heads=g.heads, kv_heads=g.kv_heads, head_dim=g.head_dim,
                    q_stride=views.q_stride, kv_stride=g.kv_dim, out_stride=g.q_dim, scale=1 / math.sqrt(g.head_dim),
                )
            )  # fmt: skip
        return list(
            bind_attention(
                self.stream, q, k, v, out, rows=op.m, past=past, heads=g.heads, kv_heads=g.kv_heads, head_dim=g.head_dim,
                q_stride=views.q_stride, kv_stride=g.kv_dim, out_stride=g.q_dim, scale=1 / math.sqrt(g.head_dim),
                workspace_ptr=self.arena["attention workspace"], workspace_bytes=self.arena.sizes["attention workspace"],
            )
        )  # fmt: skip

    def swiglu(self, op: Op) -> list[Submit]:
        g, first = self.g, self._first(op)
        gate, up = self._gate_up(op.layer)
        stride = 2 * g.ffn if "gate_up" in self.gemm_names[op.layer] else g.ffn
        at = 2 * first * stride
        out = self.arena["act"] + 2 * first * g.ffn
        return [bind_swiglu(self.stream, gate + at, up + at, out, rows=op.m, ffn=g.ffn, in_stride=stride)]

    def logits_out(self, op: Op) -> list[Submit]:
        step = logits_rows(self.g, op.m)
        done = (op.m - 1) // step * step  # rows that the head's own chunks have already taken out
        return [self._copy_logits(done, op.m - done)]

    def _lm_head(self, op: Op, x: int, w: int) -> list[Submit]:
        """The head over chunks of rows; every chunk but the last is copied out here, the last one by `logits_out`."""
        submits: list[Submit] = []
        step = logits_rows(self.g, op.m)
        for row in range(0, op.m, step):
            rows = min(step, op.m - row)
            submits.append(self.gemms.gemm(rows, op.n, op.k, x + 2 * row * op.k, w, self.arena["logits"], "f32"))
            if row + rows < op.m:
                submits.append(self._copy_logits(row, rows))
        return submits

    def _copy_logits(self, row: int, rows: int) -> Submit:
        """Copies the chunk in `logits` to the host's row `row`."""
        from cupy.cuda import runtime

        source, size, kind = self.arena["logits"], 4 * rows * self.g.vocab, runtime.memcpyDeviceToHost
        offset = 4 * row * self.g.vocab
        return lambda: runtime.memcpyAsync(self.host.logits + offset, source, size, kind, self.stream)

    def _first(self, op: Op) -> int:
        """The row at which an op of m rows starts: it computes the last m of T."""
        return self.rows - op.m

    def _gate_up(self, layer: int) -> tuple[int, int]:
        """Addresses of row 0 of gate and of up, as the layer's GEMMs write them."""
        gate = self.arena["gate_up"]
        if "gate_up" in self.gemm_names[layer]:
            return gate, gate + 2 * self.g.ffn
        return gate, gate + align(2 * self.rows * self.g.ffn)

    def _cached(self, name: str, layer: int) -> int:
        """Address of a layer's first cached row."""
        return self.arena[name] + 2 * layer * self.positions * self.g.kv_dim


def bind_norm(
    stream: int, residual: int, delta: int, weight: int, out: int, *, rows: int, hidden: int, eps: float
) -> jit.Launch:
    """norm_rows over f32 residual [rows, hidden] into f16 out; a delta of 0 means that there is none to add."""
    vecs = hidden // 4
    per_thread = 4 if vecs >= 512 else 2 if vecs >= 256 else 1
    threads = align(-(-vecs // per_thread), 32)
    if hidden % 4 or threads > 1024:
        raise EngineError(f"norm cannot take rows of {hidden}; it needs a multiple of 4, at most 16384.")
    kernel = jit.kernel("norm", symbol=f"norm_rows<{per_thread}, {'true' if delta else 'false'}>")
    return kernel.bind(stream, (rows,), (threads,), _pointer(residual), _pointer(delta), _pointer(weight), _pointer(out),
                       ctypes.c_int(hidden), ctypes.c_float(eps))  # fmt: skip


def bind_rope_kv(
    stream: int, g: Geometry, views: QkvViews, k_cache: int, v_cache: int, bias: list[int], table: int, *,
    rows: int, q_first: int, past: int,
) -> jit.Launch:  # fmt: skip
    """rope_kv over `rows` rows at positions past …; q is rotated in place from row q_first on. bias: q, k, v, 0 for none."""
    units = (g.heads + 2 * g.kv_heads) * (g.head_dim // 16)
    block = align(units, 32) if units <= 512 else 256
    kernel = jit.kernel("rope_kv", symbol=f"rope_kv<{'true' if g.rope_style == 'neox' else 'false'}>")
    return kernel.bind(
        stream, (-(-rows // ROPE_ROWS), -(-units // block)), (block,),
        _pointer(views.q), _pointer(views.k), _pointer(views.v),
        ctypes.c_longlong(views.q_stride), ctypes.c_longlong(views.kv_stride), _pointer(k_cache), _pointer(v_cache),
        *map(_pointer, bias), _pointer(table), ctypes.c_int(rows), ctypes.c_int(q_first), ctypes.c_int(past),
        ctypes.c_int(g.heads), ctypes.c_int(g.kv_heads), ctypes.c_int(g.head_dim),
    )  # fmt: skip


def bind_swiglu(stream: int, gate: int, up: int, out: int, *, rows: int, ffn: int, in_stride: int) -> jit.Launch:
    """swiglu_rows over f16 gate and up (row stride in_stride elements) into f16 out [rows, ffn]."""
    vecs = ffn // 8
    kernel = jit.kernel("swiglu", symbol="swiglu_rows")
    return kernel.bind(stream, (-(-rows * vecs // 512),), (256,), _pointer(gate), _pointer(up), _pointer(out),
                       ctypes.c_uint(rows * vecs), ctypes.c_uint(vecs), ctypes.c_uint(in_stride))  # fmt: skip


def _short(op: Op) -> str:
    """The op's name without its layer: "attn_norm", "qkv", "lm_head"."""
    return op.name.split()[-1]


def _pointer(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address or None)
