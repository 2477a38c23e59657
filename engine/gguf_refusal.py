"""Why this engine does not run a model whose geometry and sizes are known: what it would compute wrongly.

Another architecture, scaled RoPE, ggml types without a kernel, tensors that it would ignore, shapes that differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.errors import ModelError
from engine.gguf_geometry import ROPE_STYLES
from engine.tensors import TYPES, expected_shapes

if TYPE_CHECKING:
    from engine.gguf_model import GgufModel


def refusal(model: GgufModel) -> str:
    """One sentence that names the first reason, or "" where the engine runs the model."""
    try:
        _check(model)
    except ModelError as error:
        return str(error)
    return ""


def _check(model: GgufModel) -> None:
    path, g = model.path, model.geometry
    arch = g.architecture
    if arch not in ROPE_STYLES:
        raise ModelError(
            f"{path}: architecture {arch!r} is not supported; this engine runs {' and '.join(ROPE_STYLES)}."
        )
    if model.order != "<":
        raise ModelError(
            f"{path}: a big-endian GGUF; to run it convert it with gguf's `gguf-convert-endian FILE little`."
        )
    model.key(f"{arch}.attention.layer_norm_rms_epsilon", float)
    rope_dims = model.key(f"{arch}.rope.dimension_count", int, g.head_dim)
    if rope_dims != g.head_dim:
        raise ModelError(
            f"{path}: {arch}.rope.dimension_count is {rope_dims}, but the head dimension is {g.head_dim}; this engine needs them equal."
        )
    if g.head_dim % 2:
        raise ModelError(f"{path}: the head dimension is {g.head_dim}; RoPE needs an even one.")
    _check_rope(model, arch)
    _check_tensors(model)


def _check_rope(model: GgufModel, arch: str) -> None:
    path = model.path
    scaling = model.key(f"{arch}.rope.scaling.type", str, "none")
    factor = model.key(f"{arch}.rope.scaling.factor", float, model.key(f"{arch}.rope.scale_linear", float, 1.0))
    # Linear scaling divides positions by the factor: by 1, and by the 0 that llama.cpp takes for 1, it is none.
    if scaling not in ("none", "linear") or factor not in (0.0, 1.0):
        raise ModelError(
            f"{path}: RoPE scaling {scaling!r} with factor {factor:g} ({arch}.rope.scaling) is not supported; use a model without it."
        )
    if "rope_freqs.weight" in model.tensors:
        factors = model.tensors["rope_freqs.weight"]
        if factors.type not in TYPES or not np.all(model.dequantize("rope_freqs.weight") == 1):
            raise ModelError(
                f"{path}: tensor 'rope_freqs.weight' rescales RoPE (Llama 3.1 and later), which is not supported; use a model without it."
            )
        del model.tensors["rope_freqs.weight"]


def _check_tensors(model: GgufModel) -> None:
    """Every tensor of the geometry is there with its shape and a type that is run, and none that would be ignored."""
    expected = expected_shapes(model.geometry)
    for name, shape in expected.items():
        info = model.tensors.get(name)
        if info is None:
            raise ModelError(f"{model.path}: tensor {name!r} is missing; the file is incomplete.")
        where = f"{model.path}: tensor {name!r} ({info.type} at offset {model.offset(name)})"
        if info.shape != shape:
            raise ModelError(
                f"{where} has shape {list(info.shape)}, where the metadata asks for {list(shape)}; the file is damaged."
            )
        if info.type not in TYPES:
            raise ModelError(f"{where} has a type that this engine does not run; it runs {', '.join(TYPES)}.")
    for name, info in model.tensors.items():
        if name not in expected:
            raise ModelError(
                f"{model.path}: tensor {name!r} ({info.type} at offset {model.offset(name)}) is no part of a "
                f"{model.geometry.architecture} model of {model.geometry.layers} layers as this engine computes it."
            )
