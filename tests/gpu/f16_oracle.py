"""The CPU oracle with the CUDA path's storage: every value that a kernel writes in f16 is rounded to f16.

f16 storage alone moves the last logits by 0.7e-3 to 2.6e-3 of their norm on two-layer geometries, more where a head
attends to one key and its score was rounded. Against this oracle that part is gone, and what is left is the kernels' own error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.backend import OpHook
from engine.cpu.ops import OPS
from engine.cpu.run import CpuEngine
from engine.cpu.state import Forward
from engine.levers import Levers
from engine.plan import Op, Plan
from engine.tensors import Model


def _round(values: np.ndarray) -> None:
    values[...] = values.astype(np.float16)


def _norm(f: Forward, op: Op) -> None:
    _exact["norm"](f, op)
    _round(f.rows["norm"])


def _gemm(f: Forward, op: Op) -> None:
    _exact["gemm"](f, op)
    for part in op.parts:
        if part.matrix not in ("attn_output", "ffn_down", "output"):  # those are f32
            _round(f.rows[part.matrix])


def _rope_kv(f: Forward, op: Op) -> None:
    _exact["rope_kv"](f, op)
    unscaled = np.float32(f.geometry.head_dim**0.5)  # the oracle folds 1/√d into q, the CUDA path scales the scores
    f.q[...] = (f.q * unscaled).astype(np.float16) / unscaled
    _round(f.cache.keys[op.layer])
    _round(f.cache.values[op.layer])


def _attention(f: Forward, op: Op) -> None:
    _exact["attention"](f, op)
    _round(f.rows["attention"])


def _swiglu(f: Forward, op: Op) -> None:
    _exact["swiglu"](f, op)
    _round(f.rows["swiglu"])


_exact: dict[str, Callable[[Forward, Op], None]] = dict(OPS)
_ROUNDED = {"norm": _norm, "gemm": _gemm, "rope_kv": _rope_kv, "attention": _attention, "swiglu": _swiglu}


class _RoundedMatrices:
    """A model whose matrices are what the resident f16 cache holds; the embedding is gathered from its blocks, exactly."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def dequantize(self, tensor: str) -> np.ndarray:
        values = self._model.dequantize(tensor)
        exact = values.ndim == 1 or tensor == "token_embd.weight"
        return values if exact else values.astype(np.float16).astype(np.float32)


class F16Oracle(CpuEngine):
    """Float32 arithmetic on values stored as the CUDA path stores them."""

    def __init__(self, model: Model, levers: Levers) -> None:
        super().__init__(_RoundedMatrices(model), levers)  # type: ignore[arg-type]

    def _forward(self, plan: Plan, ids: np.ndarray, hook: OpHook | None) -> np.ndarray:
        OPS.update(_ROUNDED)
        try:
            return super()._forward(plan, ids, hook)
        finally:
            OPS.update(_exact)
