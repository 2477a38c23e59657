"""A Llama- or Qwen2-architecture model in a GGUF file, or in the shards of a split one: geometry, weights, vocabulary.

Everything that this engine would compute wrongly is refused here by one sentence: another architecture, scaled RoPE,
experts, tensors that it does not know, shapes that differ from the geometry.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.digest import file_sha256
from engine.errors import ModelError
from engine.geometry import Geometry
from engine.gguf_file import GgufFile, StringArray
from engine.tensors import TensorInfo, dequantize, expected_shapes
from engine.tokens import Tokenizer

ROPE_STYLES = {"llama": "norm", "qwen2": "neox"}
"""llama: converters permute q and k for pairs (2i, 2i + 1); qwen2: pairs (i, i + d/2) as trained."""

_SHARD = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd|blk\.\d+\.attn\.rotary_emb\.inv_freq")  # constants of old converters

T = TypeVar("T", int, float, str)


def open_model(path: Path) -> GgufModel:
    """Opens a GGUF file; any shard of a split model opens them all. Raises ModelError, one sentence."""
    first = GgufFile(path)
    count = first.metadata.get("split.count", 0)
    return GgufModel(path, _open_shards(path, first, count) if count else [first])


class GgufModel:
    """Weights of a GGUF file, mapped: nothing is read before it is asked for."""

    synthetic = False
    seed: int | None = None
    note = ""

    def __init__(self, path: Path, files: list[GgufFile]) -> None:
        self.path = path
        self.metadata = files[0].metadata
        self._files = files
        self._file_of = {name: file for file in files for name in file.tensors}
        if len(self._file_of) < sum(len(file.tensors) for file in files):
            raise ModelError(f"{path}: a tensor is in two shards; the split is damaged, split the model again.")
        self.tensors: dict[str, TensorInfo] = {
            name: file.tensors[name].info for name, file in self._file_of.items() if not _IGNORED.match(name)
        }
        self.geometry = _geometry(self)
        self.name = str(self.metadata.get("general.name") or path.stem)
        _check_tensors(self)

    def offset(self, tensor: str) -> int:
        """Where a tensor's bytes start in its file."""
        return self._file_of[tensor].tensors[tensor].offset

    def info(self, tensor: str) -> TensorInfo:
        """What is known of a tensor. Raises ModelError where there is none of that name."""
        if tensor not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {tensor!r}.")
        return self.tensors[tensor]

    def raw(self, tensor: str) -> np.ndarray:
        """Its blocks as the file stores them: uint8 [n_bytes], a read-only view of the mapped file."""
        self.info(tensor)
        return self._file_of[tensor].bytes_of(tensor)

    def dequantize(self, tensor: str) -> np.ndarray:
        """Its values: float32 of the tensor's shape, by the gguf package's dequantisers."""
        return dequantize(self.raw(tensor), self.info(tensor))

    def sha256(self) -> str:
        """The file's SHA-256; of a split model, the SHA-256 of its shards' digests in order."""
        digests = [file_sha256(file.path) for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()

    def tokenizer(self) -> Tokenizer | None:
        """Its vocabulary, or None where it has none that this engine reads (`engine.tokens.require` says why)."""
        return Tokenizer.from_metadata(self.metadata, str(self.path)) if Tokenizer.reads(self.metadata) else None

    def key(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A metadata value of this type. Raises ModelError where it is missing without a default, or of another type."""
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelError(
                f"{self.path}: metadata key {name!r} is missing; convert the model again with a current llama.cpp."
            )
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(
                f"{self.path}: metadata key {name!r} is {_show(value)}, where this engine needs one {kind.__name__}."
            )
        return value


def _show(value: Any) -> str:
    return repr(value) if isinstance(value, int | float | str) else f"a list of {len(value)}"


def _open_shards(path: Path, given: GgufFile, count: Any) -> list[GgufFile]:
    """All files of a split model in order. `split.no` counts from 0, file names from 1."""
    match = _SHARD.fullmatch(path.name)
    if type(count) is not int or count < 1 or (count > 1 and not match):
        raise ModelError(
            f"{path}: a shard of a split model (split.count {_show(count)}), whose name must end in -00001-of-{count:05d}.gguf; rename it."
            if type(count) is int
            else f"{path}: metadata key 'split.count' is {_show(count)}, not a whole number; the file is damaged."
        )
    if count == 1 or not match:
        return [given]
    if int(match["count"]) != count:
        raise ModelError(
            f"{path}: split.count is {count}, but the name says {int(match['count'])} shards; rename the files."
        )
    files = []
    for i in range(count):
        shard = path.with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf")
        if not shard.exists():
            raise ModelError(
                f"{shard} is missing: shard {i + 1} of {count} of {path.name}; put all shards in one folder."
            )
        file = given if shard == path else GgufFile(shard)
        if (number := file.metadata.get("split.no")) != i or file.metadata.get("split.count") != count:
            raise ModelError(
                f"{shard}: split.no is {number!r}, where its name says {i} (counted from 0); the shards are mixed up, get them again."
            )
        files.append(file)
    return files


def _geometry(model: GgufModel) -> Geometry:
    """The geometry that the metadata and the tensor table state. Raises ModelError for what this engine cannot compute."""
    path = model.path
    arch = model.key("general.architecture", str)
    if arch not in ROPE_STYLES:
        raise ModelError(
            f"{path}: architecture {arch!r} is not supported; this engine runs {' and '.join(ROPE_STYLES)}."
        )
    sizes = {
        field: model.key(f"{arch}.{name}", int)
        for field, name in {
            "layers": "block_count", "hidden": "embedding_length", "ffn": "feed_forward_length",
            "heads": "attention.head_count", "context": "context_length",
        }.items()
    }  # fmt: skip
    sizes["kv_heads"] = model.key(f"{arch}.attention.head_count_kv", int, sizes["heads"])
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
    _refuse_what_would_be_wrong(model, arch)
    rope_dims = model.key(f"{arch}.rope.dimension_count", int, 0)
    head_dim = model.key(f"{arch}.attention.key_length", int, rope_dims or sizes["hidden"] // sizes["heads"])
    for key, value in (
        ("rope.dimension_count", rope_dims or head_dim),
        ("attention.value_length", model.key(f"{arch}.attention.value_length", int, head_dim)),
    ):
        if value != head_dim:
            raise ModelError(
                f"{path}: {arch}.{key} is {value}, but the head dimension is {head_dim}; this engine needs them equal."
            )
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"{path}: the head dimension is {head_dim}; RoPE needs an even one.")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{path}: tensor 'token_embd.weight' is missing; the file is incomplete.")
    tokens = model.metadata.get("tokenizer.ggml.tokens")
    vocab = model.key(f"{arch}.vocab_size", int, len(tokens) if isinstance(tokens, StringArray) else embedding.shape[0])
    return Geometry(
        architecture=arch,  # type: ignore[arg-type]
        head_dim=head_dim,
        vocab=vocab,
        rope_base=model.key(f"{arch}.rope.freq_base", float, 10000.0),
        rope_style=ROPE_STYLES[arch],  # type: ignore[arg-type]
        rms_eps=model.key(f"{arch}.attention.layer_norm_rms_epsilon", float),
        qkv_bias="blk.0.attn_q.bias" in model.tensors,
        weight_types={name: info.type for name, info in model.tensors.items() if len(info.shape) == 2},
        name=str(model.metadata.get("general.name") or path.stem),
        **sizes,
    )


def _refuse_what_would_be_wrong(model: GgufModel, arch: str) -> None:
    path = model.path
    scaling = model.key(f"{arch}.rope.scaling.type", str, "none")
    factor = model.key(f"{arch}.rope.scaling.factor", float, model.key(f"{arch}.rope.scale_linear", float, 1.0))
    if scaling != "none" or factor != 1.0:
        raise ModelError(
            f"{path}: RoPE scaling {scaling!r} with factor {factor:g} ({arch}.rope.scaling) is not supported; use a model without it."
        )
    if (experts := model.key(f"{arch}.expert_count", int, 0)) > 0:
        raise ModelError(
            f"{path}: a mixture of {experts} experts ({arch}.expert_count) is not supported; use a dense model."
        )
    if "rope_freqs.weight" in model.tensors:
        if not np.all(model.dequantize("rope_freqs.weight") == 1):
            raise ModelError(
                f"{path}: tensor 'rope_freqs.weight' rescales RoPE (Llama 3.1 and later), which is not supported; use a model without it."
            )
        del model.tensors["rope_freqs.weight"]


def _check_tensors(model: GgufModel) -> None:
    """Every tensor of the geometry is there with its shape, and none that this engine would ignore."""
    expected = expected_shapes(model.geometry)
    for name, shape in expected.items():
        info = model.tensors.get(name)
        if info is None:
            raise ModelError(f"{model.path}: tensor {name!r} is missing; the file is incomplete.")
        if info.shape != shape:
            raise ModelError(
                f"{model.path}: tensor {name!r} ({info.type} at offset {model.offset(name)}) has shape {list(info.shape)}, "
                f"where the metadata asks for {list(shape)}; the file is damaged."
            )
    for name, info in model.tensors.items():
        if name not in expected:
            raise ModelError(
                f"{model.path}: tensor {name!r} ({info.type} at offset {model.offset(name)}) is no part of a "
                f"{model.geometry.architecture} model of {model.geometry.layers} layers as this engine computes it."
            )
