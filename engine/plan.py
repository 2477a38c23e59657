"""The plan: (geometry, token count, levers) → an ordered list of ops, before anything runs.

A backend executes the ops and tags each launch with its op's index; the harness attributes launches to ops by that
tag; the ledger of GMAC and bytes per class is a sum over the same list.

Layout of a prefill of T rows at positions past … past + T − 1 (activations row-major):

    tokens_in → embed → layers × [attn_norm → q, k, v → rope_kv → attention → o → ffn_norm → gate, up → swiglu → down]
              → final_norm → lm_head → logits_out

Norms carry the residual: each adds the previous op's f32 delta into the f32 residual stream, stores it and writes the
normalised row in the activation type. Biases of q, k and v are added in `rope_kv`, which also stores k and v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from engine.errors import EngineError
from engine.geometry import Geometry
from engine.levers import Levers
from engine.tensors import block_of

ROLES = (
    "gate_up", "down", "q_o", "k_v", "attention", "lm_head", "quantize", "dequantize", "convert",
    "norm", "rope_kv", "swiglu", "embedding", "tail", "copy", "other",
)  # fmt: skip
"""The closed list of classes where there is a plan. `tail`: ops of the last layer that run for one row only."""

ROLE_OF_MATRIX = {
    "attn_q": "q_o", "attn_output": "q_o", "attn_k": "k_v", "attn_v": "k_v",
    "ffn_gate": "gate_up", "ffn_up": "gate_up", "ffn_down": "down", "output": "lm_head",
}  # fmt: skip

Precision = Literal["f16", "f32"]
Kind = Literal["tokens_in", "embed", "norm", "gemm", "rope_kv", "attention", "swiglu", "logits_out"]


@dataclass(frozen=True)
class Part:
    """One weight matrix's share of a GEMM op (several where `concat` joins them)."""

    matrix: str  # "attn_q", ..., "output"
    tensor: str  # GGUF name
    weight_type: str
    n: int
    macs: int
    file_bytes: int  # as stored in the GGUF


@dataclass(frozen=True)
class Op:
    """One step of the forward. Bytes are those that must cross memory once, in the path's own element sizes."""

    index: int
    name: str  # "L03 gate", "lm_head"
    kind: Kind
    layer: int  # −1 outside the layers
    role: str  # what it does, one of ROLES; a one-row tail op keeps its role here
    cls: str  # the class that it is charged to: the role, or "tail"
    weight_type: str  # ggml type of its weights, "q4_K+q6_K" where several, "-" where none
    m: int  # rows that it computes
    n: int  # columns (GEMM: outputs; attention: keys; else: row width)
    k: int  # GEMM: inputs; attention: head_dim; else 0
    macs: int
    bytes_read: int
    bytes_written: int
    parts: tuple[Part, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class LedgerRow:
    """GMAC and bytes of one (role, matrix, weight type, part of the graph)."""

    role: str
    matrix: str  # "attn_q", …, "output", or "-" for an op without weights
    weight_type: str
    part: Literal["body", "last_layer", "tail", "head"]
    ops: int
    macs: int
    file_bytes: int  # weight bytes as the GGUF stores them, once per op
    path_bytes: int  # weight bytes as this path reads them
    io_bytes: int  # activations read and written (for ops without weights: everything)

    @property
    def gmac(self) -> float:
        """10⁹ multiply-accumulates."""
        return self.macs / 1e9


@dataclass(frozen=True)
class Plan:
    """An ordered list of ops and what it was built from."""

    geometry: Geometry
    tokens: int
    levers: Levers
    precision: Precision
    past: int
    all_logits: bool
    ops: tuple[Op, ...] = field(repr=False)

    def __iter__(self) -> Iterator[Op]:
        return iter(self.ops)

    def __len__(self) -> int:
        return len(self.ops)

    @property
    def macs(self) -> int:
        """All multiply-accumulates of the plan."""
        return sum(op.macs for op in self.ops)

    def ledger(self) -> list[LedgerRow]:
        """GMAC and bytes per (role, matrix, weight type, part), in order of first appearance."""
        return ledger(self)

    def structure(self) -> str:
        """One sentence on the graph's shape, such as "27 full layers + one-row tail"."""
        layers = self.geometry.layers
        head = f"head on {_count(self.tokens if self.all_logits else 1, 'row')}"
        if self.levers.tail == "full" or self.all_logits:
            return f"{_count(layers, 'full layer')}; {head}"
        one_row = "q, attention, o and FFN" if self.levers.tail == "last_row" else "FFN"
        rest = "k and v for every row" if self.levers.tail == "last_row" else "attention for every row"
        return f"{_count(layers - 1, 'full layer')} + one-row tail ({one_row} of the last layer for the last row; {rest}); {head}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def element_bytes(weight_type: str, count: int) -> int:
    """Bytes that `count` weights take in the GGUF, by the ggml type's block size. `count` must fill whole blocks."""
    block, size = block_of(weight_type)
    return count // block * size


def build_plan(
    geometry: Geometry,
    tokens: int,
    levers: Levers | None = None,
    *,
    precision: Precision = "f16",
    past: int = 0,
    all_logits: bool = False,
) -> Plan:
    """The ops of one forward over `tokens` rows after `past` cached ones.

    `precision` is the path's activation and resident-weight type (f16 on CUDA, f32 on the CPU backend).
    `all_logits` runs the head, and so the whole last layer, for every row (the fidelity mode).
    Raises EngineError when tokens is not positive, or the rows do not fit the context or a sliding window, beyond which
    attention is not causal over everything and its MACs are not those counted here.
    """
    levers = levers or Levers()
    if tokens < 1 or past < 0:
        raise EngineError(f"cannot plan {tokens} tokens after {past}; ask for 1 or more.")
    if past + tokens > geometry.context:
        raise EngineError(
            f"{past + tokens} tokens do not fit the context of {geometry.context} of {geometry.name or 'this model'}; use fewer tokens."
        )
    if geometry.window and past + tokens > geometry.window:
        raise EngineError(
            f"{past + tokens} tokens exceed the sliding window of {geometry.window} of {geometry.name or 'this model'}, and which layers "
            "have it is not known here, so neither are attention's MACs; use fewer tokens."
        )
    return _build(geometry, tokens, levers, precision, past, all_logits)


@lru_cache(maxsize=64)
def _build(g: Geometry, tokens: int, levers: Levers, precision: Precision, past: int, all_logits: bool) -> Plan:
    """Plans are immutable and asked for in every forward: building one anew would cost the wall milliseconds."""
    builder = _Builder(g, tokens, levers, 2 if precision == "f16" else 4, past)
    builder.forward(all_logits)
    return Plan(g, tokens, levers, precision, past, all_logits, tuple(builder.ops))


class _Builder:
    """Appends the ops of one forward; `e` is the activation's element size in bytes."""

    def __init__(self, g: Geometry, tokens: int, levers: Levers, e: int, past: int) -> None:
        self.g, self.tokens, self.levers, self.e, self.past = g, tokens, levers, e, past
        self.ops: list[Op] = []

    def forward(self, all_logits: bool) -> None:
        g, t = self.g, self.tokens
        tail = "full" if all_logits else self.levers.tail
        self.add("tokens_in", "tokens_in", -1, "copy", t, 1, 0, 0, 4 * t, 4 * t)
        embedding = g.weight_type("token_embd.weight")
        # CUDA gathers rows of ggml blocks, the CPU rows of float32.
        gathered = element_bytes(embedding, t * g.hidden) if self.e == 2 else self.e * t * g.hidden
        self.add("embed", "embed", -1, "embedding", t, g.hidden, 0, 0, gathered + 4 * t, 4 * t * g.hidden,
                 weight_type=embedding)  # fmt: skip
        for layer in range(g.layers):
            last = layer == g.layers - 1
            attn_rows = 1 if last and tail == "last_row" else t
            ffn_rows = 1 if last and tail != "full" else t
            self.layer(layer, attn_rows, ffn_rows)
        rows = t if all_logits else 1
        self.norm("final_norm", -1, rows)
        self.gemm("lm_head", -1, ["output"], rows, out_bytes=4)
        self.add("logits_out", "logits_out", -1, "copy", rows, g.vocab, 0, 0, 4 * rows * g.vocab, 4 * rows * g.vocab)

    def layer(self, layer: int, attn_rows: int, ffn_rows: int) -> None:
        g, t, e = self.g, self.tokens, self.e
        one_row = attn_rows < t
        self.norm("attn_norm", layer, t, residual=layer > 0)
        if self.levers.concat == "on" and not one_row:
            self.gemm("qkv", layer, ["attn_q", "attn_k", "attn_v"], t)
        else:
            self.gemm("q", layer, ["attn_q"], attn_rows)
            if self.levers.concat == "on":
                self.gemm("kv", layer, ["attn_k", "attn_v"], t)
            else:
                self.gemm("k", layer, ["attn_k"], t)
                self.gemm("v", layer, ["attn_v"], t)
        width = attn_rows * g.q_dim + 2 * t * g.kv_dim
        self.add("rope_kv", "rope_kv", layer, "rope_kv", t, g.q_dim + 2 * g.kv_dim, 0, 0, e * width, e * width)
        keys = self.past + t
        pairs = attn_rows * self.past + (t if one_row else t * (t + 1) // 2)
        self.add("attention", "attention", layer, "attention", attn_rows, keys, g.head_dim, 2 * g.q_dim * pairs,
                 e * (attn_rows * g.q_dim + 2 * keys * g.kv_dim), e * attn_rows * g.q_dim)  # fmt: skip
        self.gemm("o", layer, ["attn_output"], attn_rows, out_bytes=4)
        self.norm("ffn_norm", layer, ffn_rows)
        if self.levers.concat == "on":
            self.gemm("gate_up", layer, ["ffn_gate", "ffn_up"], ffn_rows)
        else:
            self.gemm("gate", layer, ["ffn_gate"], ffn_rows)
            self.gemm("up", layer, ["ffn_up"], ffn_rows)
        self.add(
            "swiglu", "swiglu", layer, "swiglu", ffn_rows, g.ffn, 0, 0, 2 * e * ffn_rows * g.ffn, e * ffn_rows * g.ffn
        )
        self.gemm("down", layer, ["ffn_down"], ffn_rows, out_bytes=4)

    def norm(self, name: str, layer: int, rows: int, *, residual: bool = True) -> None:
        """RMSNorm of f32 rows; with `residual` it first adds an f32 delta and stores the sum."""
        h = self.g.hidden
        self.add(name, "norm", layer, "norm", rows, h, 0, 0, 4 * h * rows * (2 if residual else 1) + 4 * h,
                 rows * h * (self.e + (4 if residual else 0)))  # fmt: skip

    def gemm(self, name: str, layer: int, matrices: list[str], rows: int, *, out_bytes: int | None = None) -> None:
        """y[rows, ΣN] = x[rows, K] · Wᵀ, its weights read once in the path's type; f32 output where `out_bytes` is 4."""
        parts = []
        for matrix in matrices:
            tensor = f"blk.{layer}.{matrix}.weight" if layer >= 0 else f"{matrix}.weight"
            n, k = self.g.matrix_shape(tensor)
            weight_type = self.g.weight_type(tensor)
            parts.append(Part(matrix, tensor, weight_type, n, rows * n * k, element_bytes(weight_type, n * k)))
        n_sum = sum(p.n for p in parts)
        self.add(name, "gemm", layer, ROLE_OF_MATRIX[max(parts, key=lambda p: p.n).matrix], rows, n_sum, k, rows * n_sum * k,
                 self.e * (n_sum * k + rows * k), (out_bytes or self.e) * rows * n_sum,
                 weight_type="+".join(sorted({p.weight_type for p in parts})), parts=tuple(parts))  # fmt: skip

    def add(self, name: str, kind: Kind, layer: int, role: str, m: int, n: int, k: int, macs: int, read: int, written: int,
            *, weight_type: str = "-", parts: tuple[Part, ...] = ()) -> None:  # fmt: skip
        in_tail = layer == self.g.layers - 1 and m == 1 and self.tokens > 1
        self.ops.append(
            Op(
                len(self.ops), f"L{layer:02d} {name}" if layer >= 0 else name, kind, layer, role, "tail" if in_tail else role,
                weight_type, m, n, k, macs, read, written, parts,
            )
        )  # fmt: skip


def ledger(plan: Plan) -> list[LedgerRow]:
    """Sums the plan's ops per (role, matrix, weight type, part); a fused GEMM is split by its parts."""
    element = 2 if plan.precision == "f16" else 4
    last = plan.geometry.layers - 1
    rows: dict[tuple[str, str, str, str], list[int]] = {}
    for op in plan:
        part = "head" if op.layer < 0 else "tail" if op.cls == "tail" else "last_layer" if op.layer == last else "body"
        if op.parts:
            for i, p in enumerate(op.parts):
                weights = element * p.macs // op.m
                io = op.bytes - element * op.n * op.k if i == 0 else 0
                _accumulate(
                    rows, (ROLE_OF_MATRIX[p.matrix], p.matrix, p.weight_type, part), p.macs, p.file_bytes, weights, io
                )
        else:
            _accumulate(rows, (op.role, "-", op.weight_type, part), op.macs, 0, 0, op.bytes)
    return [LedgerRow(*key, *sums) for key, sums in rows.items()]  # type: ignore[arg-type]


def _accumulate(rows: dict[tuple[str, str, str, str], list[int]], key: tuple[str, str, str, str], *values: int) -> None:
    sums = rows.setdefault(key, [0] * (len(values) + 1))
    for i, value in enumerate((1, *values)):
        sums[i] += value
