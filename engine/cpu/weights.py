"""A model's weights as float32 arrays, dequantised once."""

from __future__ import annotations

import math

import numpy as np
import psutil

from engine.backend import Progress
from engine.errors import EngineError
from engine.plan import Part
from engine.tensors import Model, expected_shapes

JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"))
"""Matrices of a layer that lie one after another in memory, so that a joined GEMM reads a view and no copy."""


class Weights:
    """Matrices by their parts, vectors by their GGUF names; all float32 and resident.

    Raises EngineError where the float32 weights do not fit the machine's free memory.
    """

    def __init__(self, model: Model, progress: Progress | None = None) -> None:
        self.geometry = model.geometry
        shapes = expected_shapes(self.geometry)
        _check_memory(model.name, 4 * sum(math.prod(shape) for shape in shapes.values()))
        self._place = self._allocate({name: shape for name, shape in shapes.items() if len(shape) == 2})
        self.vectors: dict[str, np.ndarray] = {}
        for done, (name, shape) in enumerate(shapes.items(), 1):
            values = model.dequantize(name)
            if len(shape) == 2:
                joint, start = self._place[name]
                joint[start : start + shape[0]] = values
            else:
                self.vectors[name] = np.array(values, np.float32)
            if progress:
                progress("dequantise weights", done, len(shapes))

    def _allocate(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[np.ndarray, int]]:
        """Matrix → (the array that holds its rows, the first of them)."""
        layers = range(self.geometry.layers)
        groups = [tuple(f"blk.{i}.{m}.weight" for m in joined) for i in layers for joined in JOINED]
        alone = set(shapes).difference(*groups)
        place = {}
        for group in groups + [(name,) for name in sorted(alone)]:
            joint = np.empty((sum(shapes[name][0] for name in group), shapes[group[0]][1]), np.float32)
            start = 0
            for name in group:
                place[name] = (joint, start)
                start += shapes[name][0]
        return place

    def matrix(self, parts: tuple[Part, ...]) -> np.ndarray:
        """[ΣN, K]: a view of the parts' rows, which follow one another in memory."""
        tensor = parts[0].tensor
        if tensor == "output.weight" and self.geometry.tied_embedding:
            tensor = "token_embd.weight"
        joint, start = self._place[tensor]
        return joint[start : start + sum(p.n for p in parts)]

    @property
    def embedding(self) -> np.ndarray:
        """[vocab, hidden]."""
        return self._place["token_embd.weight"][0]


def _check_memory(name: str, needed: int) -> None:
    available = psutil.virtual_memory().available
    if needed > available:
        raise EngineError(
            f"{name} needs {needed / 2**30:.1f} GiB as float32 on the CPU and {available / 2**30:.1f} GiB are free; "
            "use a smaller model or a machine with a GPU."
        )
