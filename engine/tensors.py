"""What is known of a weight tensor without reading it, and the ggml types that this engine runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize

from engine.errors import ModelError
from engine.geometry import Geometry

if TYPE_CHECKING:
    from engine.tokens import Tokenizer

TYPES = ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_K", "q5_K", "q6_K")
"""ggml types that this engine runs, as llama.cpp prints their names. The size of any other is known as well."""


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's name, row-major shape ((N, K) or (N,)), ggml type and size in the file."""

    name: str
    shape: tuple[int, ...]
    type: str  # as llama.cpp prints it; what this engine runs is one of TYPES
    n_bytes: int


class Model(Protocol):
    """Weights with a geometry: a GGUF file (`engine.gguf_model.GgufModel`) or a synthetic one (`engine.synth.SynthModel`)."""

    geometry: Geometry
    name: str
    title: str  # the name as a person writes it
    tensors: dict[str, TensorInfo]
    synthetic: bool
    note: str  # one sentence for a person on where the weights come from, or ""
    refusal: str  # one sentence on why this engine cannot run it (its geometry and sizes are known all the same), or ""

    @property
    def path(self) -> Path | None:
        """The file that was opened, or None."""

    @property
    def seed(self) -> int | None:
        """The seed of synthetic weights, or None."""

    def info(self, tensor: str) -> TensorInfo:
        """What is known of a tensor. Raises ModelError where there is none of that name."""

    def raw(self, tensor: str) -> np.ndarray:
        """Its blocks as the file stores them: uint8 [n_bytes]."""

    def dequantize(self, tensor: str) -> np.ndarray:
        """Its values: float32 of the tensor's shape."""

    def sha256(self) -> str:
        """Identity of the content: equal for equal weights."""

    def tokenizer(self) -> Tokenizer | None:
        """Its vocabulary, or None where it has none that this engine reads (`engine.tokens.require` says why)."""


def require_runnable(model: Model) -> None:
    """Raises ModelError, the model's own sentence, where this engine would compute it wrongly or not at all."""
    if model.refusal:
        raise ModelError(model.refusal)


def ggml_type(name: str) -> GGMLQuantizationType:
    """The gguf package's constant for a type named as llama.cpp prints it. Raises KeyError."""
    return GGMLQuantizationType[name.upper()]


def type_name(number: int) -> str:
    """llama.cpp's name of a ggml type: 12 → "q4_K"; "ggml type 99" for a number that the gguf package does not know."""
    try:
        name = GGMLQuantizationType(number).name.lower()
    except ValueError:
        return f"ggml type {number}"
    return re.sub(r"_k(?=_|$)", "_K", name)


def block_of(name: str) -> tuple[int, int]:
    """(weights, bytes) of one block of a type named as llama.cpp prints it. Raises KeyError."""
    return GGML_QUANT_SIZES[ggml_type(name)]


def dequantize(raw: np.ndarray, info: TensorInfo) -> np.ndarray:
    """uint8 [n_bytes] → float32 of `info.shape`, by the gguf package's own dequantisers."""
    return np.ascontiguousarray(gguf_dequantize(raw, ggml_type(info.type)), dtype=np.float32).reshape(info.shape)


def expected_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Row-major shape of every tensor that a model of this geometry has, in the order of llama.cpp's files."""
    g = geometry
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (g.vocab, g.hidden)}
    for i in range(g.layers):
        for part in parts:
            name = f"blk.{i}.{part}.weight"
            shapes[name] = (g.hidden,) if part.endswith("norm") else g.matrix_shape(name)
            if g.qkv_bias and part in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{i}.{part}.bias"] = shapes[name][:1]
    shapes["output_norm.weight"] = (g.hidden,)
    if not g.tied_embedding:
        shapes["output.weight"] = (g.vocab, g.hidden)
    return shapes
