"""Geometry and sizes of a dense decoder in a GGUF, whatever its architecture and whether or not this engine runs it.

The metadata's standard keys say the shapes, and the tensors must have them; q, k and v, and gate and up, may lie in one
tensor (Phi-3's `attn_qkv` and doubled `ffn_up`). What the ledger has no row for is refused by one sentence: experts,
layers that differ, FFNs without a gate, state-space and latent-attention matrices.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.geometry import MATRICES, Geometry
from engine.gguf_file import StringArray

if TYPE_CHECKING:
    from engine.gguf_model import GgufModel
    from engine.tensors import TensorInfo

ROPE_STYLES = {"llama": "norm", "qwen2": "neox"}
"""Architectures that this engine runs. llama: converters permute q and k for pairs (2i, 2i + 1); qwen2: pairs (i, i + d/2)."""

_SIZES = {
    "layers": "block_count", "hidden": "embedding_length", "ffn": "feed_forward_length",
    "heads": "attention.head_count", "context": "context_length",
}  # fmt: skip
_FUSED = {"attn_q": "attn_qkv", "attn_k": "attn_qkv", "attn_v": "attn_qkv", "ffn_gate": "ffn_up"}
_NO_PRODUCT = re.compile(
    r"(token_embd|token_types|position_embd|output|\w*norm\w*|rope_\w+)\.|blk\.\d+\.\w*(norm|rope|rot_embd|rotary)"
)
"""Tensors of two or more dimensions that are no matrix of a layer's products."""

_KINDS_OF_FILE = {
    "adapter": "a LoRA adapter", "mmproj": "the projector of a vision or audio model", "imatrix": "an importance matrix",
    "clip": "the projector of a vision or audio model",
}  # fmt: skip
"""`general.type`, or the architecture that such files give, → what it is instead of a model."""


def read_geometry(model: GgufModel) -> Geometry:
    """The geometry that metadata and tensor table state. Raises ModelError, one sentence, where the ledger would be wrong."""
    path = model.path
    arch = model.key("general.architecture", str)
    kind = model.metadata.get("general.type")
    if other := _KINDS_OF_FILE.get(kind if isinstance(kind, str) else "") or _KINDS_OF_FILE.get(arch):
        raise ModelError(f"{path}: this GGUF is {other}, no language model; give the model's own .gguf.")
    if not model.tensors:
        raise ModelError(
            f"{path}: this GGUF holds a vocabulary or metadata and no tensors; give the model's own .gguf."
        )
    _refuse_experts(model, arch)
    sizes = {field: model.key(f"{arch}.{name}", int) for field, name in _SIZES.items()}
    sizes["kv_heads"] = model.key(f"{arch}.attention.head_count_kv", int, sizes["heads"])
    # Layers that predict further tokens come last in the count, and no prefill runs them.
    sizes["layers"] -= model.key(f"{arch}.nextn_predict_layers", int, 0)
    if arch == "qwen":
        sizes["ffn"] //= 2  # its converter writes the width of gate and up together
    for field, value in sizes.items():
        if value < 1:
            raise ModelError(f"{path}: the metadata gives {value} {field}; the file is damaged.")
    if sizes["heads"] % sizes["kv_heads"]:
        raise ModelError(
            f"{path}: {sizes['heads']} heads cannot share {sizes['kv_heads']} KV heads; the file is damaged."
        )
    if sizes["layers"] > len(model.tensors):
        raise ModelError(
            f"{path}: {arch}.block_count is {sizes['layers']}, but there are only {len(model.tensors)} tensors; the file is damaged."
        )
    head_dim = model.key(f"{arch}.attention.key_length", int, sizes["hidden"] // sizes["heads"])
    value_dim = model.key(f"{arch}.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise ModelError(
            f"{path}: {arch}.attention.value_length is {value_dim}, but the head dimension is {head_dim}; a ledger is known only where "
            "they are equal."
        )
    if head_dim < 1:
        raise ModelError(f"{path}: the metadata gives {head_dim} head dimensions; the file is damaged.")
    if not model.key(f"{arch}.attention.causal", bool, True):
        raise ModelError(f"{path}: {arch}.attention.causal is false: an encoder, whose attention the ledger of a decoder does not count; give a decoder.")  # fmt: skip
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{path}: tensor 'token_embd.weight' is missing or no matrix; the file is incomplete.")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    vocab = model.key(f"{arch}.vocab_size", int, len(tokens) if isinstance(tokens, StringArray) else embedding.shape[0])
    geometry = Geometry(
        architecture=arch,
        head_dim=head_dim,
        vocab=vocab,
        rope_base=_positive(model, f"{arch}.rope.freq_base", 10000.0),
        rope_style=ROPE_STYLES.get(arch, "unknown"),  # type: ignore[arg-type]
        rms_eps=_epsilon(model, arch),
        qkv_bias=bool({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"} & model.tensors.keys()),
        window=model.key(f"{arch}.attention.sliding_window", int, 0),
        name=model.name,
        **sizes,  # type: ignore[arg-type]
    )
    geometry.weight_types.update(_weight_types(model, geometry))
    _refuse_other_products(model, geometry)
    return geometry


def _positive(model: GgufModel, key: str, default: float) -> float:
    value = model.key(key, float, default)
    if value <= 0:
        raise ModelError(f"{model.path}: metadata key {key!r} is {value:g}, not above 0; the file is damaged.")
    return value


def _epsilon(model: GgufModel, arch: str) -> float:
    """Of RMSNorm, or of LayerNorm where a model has that; 0 where it says neither, which no ledger minds."""
    for key in (f"{arch}.attention.layer_norm_rms_epsilon", f"{arch}.attention.layer_norm_epsilon"):
        if key in model.metadata:
            if (value := model.key(key, float)) < 0:
                raise ModelError(f"{model.path}: metadata key {key!r} is {value:g}, below 0; the file is damaged.")
            return value
    return 0.0


def _refuse_experts(model: GgufModel, arch: str) -> None:
    experts = model.key(f"{arch}.expert_count", int, 0)
    routed = next((name for name in model.tensors if re.match(r"blk\.\d+\.ffn_\w*(exps|gate_inp)", name)), None)
    if experts > 0 or routed:
        count = (
            f"a mixture of {experts} experts ({arch}.expert_count)" if experts else f"a mixture of experts ({routed!r})"
        )
        raise ModelError(
            f"{model.path}: {count}, whose products and weight bytes depend on the routing, so no ledger and no run is known here; use a "
            "dense model, or read the trace without it."
        )


def _weight_types(model: GgufModel, geometry: Geometry) -> dict[str, str]:
    """GGUF name of every matrix of the ledger → ggml type; parts of one tensor have its type."""
    types = {"token_embd.weight": _matrix(model, geometry, "token_embd.weight").type}
    if "output.weight" in model.tensors:
        types["output.weight"] = _matrix(model, geometry, "output.weight").type
    for layer in range(geometry.layers):
        for part in MATRICES:
            name = f"blk.{layer}.{part}.weight"
            types[name] = _matrix(model, geometry, name).type
    return types


def _matrix(model: GgufModel, geometry: Geometry, name: str) -> TensorInfo:
    """The tensor that holds a matrix of the ledger, whole or with its neighbours. Raises ModelError."""
    shape = geometry.matrix_shape(name)
    part = name.split(".")[-2]
    info = model.tensors.get(name)
    joined = model.tensors.get(name.replace(part, _FUSED.get(part, part)))
    if part.startswith("attn") and info is None and joined is not None:
        info, shape = joined, (geometry.q_dim + 2 * geometry.kv_dim, shape[1])
    if part in ("ffn_gate", "ffn_up"):
        up, gate = (model.tensors.get(name.replace(part, other)) for other in ("ffn_up", "ffn_gate"))
        both = (2 * geometry.ffn, shape[1])
        if gate is None and up is not None and up.shape == both:
            info, shape = up, both
    if info is None:
        raise ModelError(f"{model.path}: tensor {name!r} is missing; {_why_missing(geometry)}.")
    if info.shape != shape:
        raise ModelError(
            f"{model.path}: tensor {info.name!r} ({info.type} at offset {model.offset(info.name)}) has shape {list(info.shape)}, where the "
            f"metadata asks for {list(shape)}; {_why_missing(geometry)}."
        )
    return info


def _why_missing(geometry: Geometry) -> str:
    if geometry.architecture in ROPE_STYLES:
        return "the file is incomplete or damaged"
    return f"either the file is damaged, or {geometry.architecture!r} is no dense decoder with gated FFNs, whose ledger alone is known here"


def _refuse_other_products(model: GgufModel, geometry: Geometry) -> None:
    """A matrix that the ledger lacks would make every figure of GMAC too small."""
    fused = set(_FUSED.values())
    for name, info in model.tensors.items():
        layer = re.match(r"blk\.(\d+)\.(\w+)", name)
        if len(info.shape) < 2 or max(info.shape) == 1 or _NO_PRODUCT.match(name):
            continue
        if layer and (int(layer[1]) >= geometry.layers or layer[2] in MATRICES or layer[2] in fused):
            continue
        raise ModelError(
            f"{model.path}: tensor {name!r} ({info.type} at offset {model.offset(name)}) is a matrix that the ledger of a dense decoder has no "
            f"row for, so its GMAC would be too few; {geometry.architecture!r} models with it are not known here."
        )
