"""A model's weights as float32 arrays, dequantised once."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import psutil

from engine.backend import Progress
from engine.errors import EngineError
from engine.geometry import MATRICES, Geometry
from engine.plan import Part

JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
"""Matrices of a layer that lie one after another in memory, so that a joined GEMM reads a view and no copy."""


class Model(Protocol):
    """What the backend needs of a model, real or synthetic."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def name(self) -> str: ...

    def dequantize(self, tensor: str) -> np.ndarray:
        """float32, row-major: (N, K) of a matrix, (N,) of a vector."""


class Weights:
    """Matrices by their parts, vectors by their GGUF names; all float32 and resident.

    Raises EngineError where the float32 weights do not fit the machine's free memory.
    """

    def __init__(self, model: Model, progress: Progress | None = None) -> None:
        self.geometry = g = model.geometry
        tensors = {f"blk.{i}.{m}.weight": g.matrix_shape(f"blk.{i}.{m}.weight") for i in range(g.layers) for m in MATRICES}
        tensors["token_embd.weight"] = (g.vocab, g.hidden)
        if not g.tied_embedding:
            tensors["output.weight"] = (g.vocab, g.hidden)
        _check_memory(model.name, 4 * sum(n * k for n, k in tensors.values()))
        self._joint: dict[str, tuple[np.ndarray, int]] = {}
        self._allocate(tensors)
        for done, (tensor, (n, _)) in enumerate(tensors.items()):
            joint, start = self._joint[tensor]
            joint[start : start + n] = model.dequantize(tensor)
            if progress:
                progress("dequantise weights", done + 1, len(tensors))
        self.vectors = {name: model.dequantize(name).astype(np.float32, copy=False) for name in _vector_names(g)}

    def _allocate(self, tensors: dict[str, tuple[int, int]]) -> None:
        groups = [[f"blk.{i}.{m}.weight" for m in joined] for i in range(self.geometry.layers) for joined in JOINED]
        grouped = {t for group in groups for t in group}
        for group in groups + [[t] for t in tensors if t not in grouped]:
            joint = np.empty((sum(tensors[t][0] for t in group), tensors[group[0]][1]), np.float32)
            start = 0
            for tensor in group:
                self._joint[tensor] = (joint, start)
                start += tensors[tensor][0]

    def matrix(self, parts: tuple[Part, ...]) -> np.ndarray:
        """[ΣN, K]: a view of the parts' rows, which follow one another in memory."""
        tensor = parts[0].tensor
        if tensor == "output.weight" and self.geometry.tied_embedding:
            tensor = "token_embd.weight"
        joint, start = self._joint[tensor]
        return joint[start : start + sum(p.n for p in parts)]

    @property
    def embedding(self) -> np.ndarray:
        """[vocab, hidden]."""
        return self._joint["token_embd.weight"][0]


def _vector_names(g: Geometry) -> list[str]:
    """RMSNorm weights, and the biases of q, k and v where the architecture has them."""
    names = ["output_norm.weight"]
    for i in range(g.layers):
        names += [f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight"]
        if g.qkv_bias:
            names += [f"blk.{i}.attn_{x}.bias" for x in "qkv"]
    return names


def _check_memory(name: str, needed: int) -> None:
    available = psutil.virtual_memory().available
    if needed > available:
        raise EngineError(
            f"{name} needs {needed / 2**30:.1f} GiB as float32 on the CPU and {available / 2**30:.1f} GiB are free; "
            "use a smaller model or a machine with a GPU."
        )
