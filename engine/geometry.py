"""Model geometry: the numbers that decide every shape of a prefill, before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeStyle = Literal["norm", "neox", "unknown"]
"""norm: rotates (2i, 2i+1), llama; neox: rotates (i, i + d/2), qwen2; unknown: of an architecture that is not run."""


@dataclass(frozen=True)
class Geometry:
    """Shapes and constants of a dense decoder. This engine runs those of the architectures llama and qwen2.

    `weight_types` maps a GGUF tensor name to its ggml type's name as llama.cpp prints it ("q4_K", "f16", ...).
    A model whose embedding is tied has no entry "output.weight".
    """

    architecture: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    rope_base: float
    rope_style: RopeStyle
    rms_eps: float
    context: int = 32768
    qkv_bias: bool = False
    window: int = 0  # keys that some layers' attention sees at most (gemma, phi3); 0: every layer sees all
    weight_types: dict[str, str] = field(default_factory=dict, hash=False)
    name: str = ""

    @property
    def q_dim(self) -> int:
        """Columns of q: heads × head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Columns of k (and of v): kv_heads × head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def tied_embedding(self) -> bool:
        """True where the head multiplies by the token embedding's own matrix."""
        return "output.weight" not in self.weight_types

    def weight_type(self, tensor: str) -> str:
        """The ggml type's name of a tensor; the head of a tied model has the embedding's."""
        if tensor == "output.weight" and self.tied_embedding:
            tensor = "token_embd.weight"
        return self.weight_types[tensor]

    def matrix_shape(self, tensor: str) -> tuple[int, int]:
        """(N, K) of a weight matrix: y[T, N] = x[T, K] · Wᵀ. Raises KeyError for a tensor that is no matrix."""
        part = tensor.split(".")[-2]
        return {
            "token_embd": (self.vocab, self.hidden),
            "output": (self.vocab, self.hidden),
            "attn_q": (self.q_dim, self.hidden),
            "attn_k": (self.kv_dim, self.hidden),
            "attn_v": (self.kv_dim, self.hidden),
            "attn_output": (self.hidden, self.q_dim),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }[part]


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Weight matrices of one layer, as in `blk.{layer}.{name}.weight`."""


def q4_k_m_types(layers: int, *, tied: bool = False) -> dict[str, str]:
    """ggml types of a Q4_K_M file: attn_v and ffn_down are q6_K where "more bits" are used, the rest q4_K.

    Source: llama.cpp `llama-quant.cpp`, `use_more_bits(i, n)`: i < n/8, or i ≥ 7n/8, or (i − n/8) mod 3 = 2
    (integer divisions).
    """
    types = {"token_embd.weight": "q4_K"}
    if not tied:
        types["output.weight"] = "q6_K"
    for i in range(layers):
        more = i < layers // 8 or i >= 7 * layers // 8 or (i - layers // 8) % 3 == 2
        for name in MATRICES:
            types[f"blk.{i}.{name}.weight"] = "q6_K" if more and name in ("attn_v", "ffn_down") else "q4_K"
    return types


def qwen2_5_7b() -> Geometry:
    """Qwen2.5-7B as Q4_K_M: 28 layers, hidden 3584, FFN 18944, 28 heads and 4 KV heads of 128, vocabulary 152064."""
    return Geometry(
        architecture="qwen2", layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064,
        rope_base=1e6, rope_style="neox", rms_eps=1e-6, context=32768, qkv_bias=True,
        weight_types=q4_k_m_types(28), name="qwen2.5-7b-q4_k_m",
    )  # fmt: skip


def smollm2_135m() -> Geometry:
    """SmolLM2-135M's geometry with Q4_1 matrices and a tied Q4_1 embedding, for a synthetic stand-in."""
    types = {"token_embd.weight": "q4_1"}
    types |= {f"blk.{i}.{name}.weight": "q4_1" for i in range(30) for name in MATRICES}
    return Geometry(
        architecture="llama", layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, head_dim=64, vocab=49152,
        rope_base=1e5, rope_style="norm", rms_eps=1e-5, context=8192, weight_types=types, name="smollm2-135m-q4_1",
    )  # fmt: skip


def tiny(architecture: Literal["llama", "qwen2"] = "qwen2", *, head_dim: int = 64) -> Geometry:
    """A geometry of two layers for tests: small enough for the oracle, with GQA, biases and both RoPE styles."""
    qwen = architecture == "qwen2"
    return Geometry(
        architecture=architecture, layers=2, hidden=256, ffn=768, heads=4, kv_heads=2, head_dim=head_dim, vocab=512,
        rope_base=1e6 if qwen else 1e4, rope_style="neox" if qwen else "norm", rms_eps=1e-6, context=4096, qkv_bias=qwen,
        weight_types=q4_k_m_types(2), name=f"tiny-{architecture}",
    )  # fmt: skip


PRESETS = {
    "qwen2.5-7b-q4_k_m": qwen2_5_7b,
    "smollm2-135m-q4_1": smollm2_135m,
    "tiny-llama": lambda: tiny("llama"),
    "tiny-qwen2": lambda: tiny("qwen2"),
}
"""Geometries known by name; `--model NAME` synthesises weights for them from a seed."""
