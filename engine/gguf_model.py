"""A model in a GGUF file, or in the shards of a split one: geometry, sizes, weights, vocabulary.

Two questions are kept apart. What the model's shapes and sizes are (`engine.gguf_geometry`) is all that a ledger needs,
and is answered for any dense decoder. Whether this engine runs it (`engine.gguf_refusal`) is asked when it is loaded.
"""

from __future__ import annotations

import hashlib
import re
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.digest import file_sha256
from engine.errors import ModelError
from engine.gguf_file import GgufFile
from engine.gguf_geometry import read_geometry
from engine.gguf_refusal import refusal
from engine.tensors import TensorInfo, dequantize
from engine.titles import gguf_title
from engine.tokens import Tokenizer

_SHARD = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_IGNORED = re.compile(r"blk\.\d+\.attn_rot_embd|blk\.\d+\.attn\.rotary_emb\.inv_freq")  # constants of old converters

T = TypeVar("T", int, float, str, bool)


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
        self.name = _printable(str(self.metadata.get("general.name") or path.stem))
        self.title = _printable(gguf_title(self.metadata, path.stem))
        self.geometry = read_geometry(self)
        self.refusal = refusal(self)

    def offset(self, tensor: str) -> int:
        """Where a tensor's bytes start in its file."""
        return self._file_of[tensor].tensors[tensor].offset

    @property
    def order(self) -> str:
        """Byte order of its numbers: "<" or ">"."""
        return self._files[0].order

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
        """A metadata value of this type; an array with a value a layer stands for its number where all are equal.

        Raises ModelError where it is missing without a default, of another type, or no finite number.
        """
        value = self.metadata.get(name, default)
        if value is None:
            raise ModelError(
                f"{self.path}: metadata key {name!r} is missing; convert the model again with a current llama.cpp."
            )
        if isinstance(value, np.ndarray) and len(value):
            if np.any(value != value[0]):
                raise ModelError(
                    f"{self.path}: metadata key {name!r} differs from layer to layer ({_some(value)}), and a ledger of equal layers is "
                    "all that is known here; use a model whose layers are alike."
                )
            value = value[0].item()
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelError(
                f"{self.path}: metadata key {name!r} is {_show(value)}, where one {_KINDS[kind]} is needed; the file is damaged."
            )
        if isinstance(value, float) and not isfinite(value):
            raise ModelError(f"{self.path}: metadata key {name!r} is {value}, no finite number; the file is damaged.")
        return value


_KINDS: dict[type, str] = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def _some(values: np.ndarray) -> str:
    shown = ", ".join(str(v) for v in values[:4].tolist())
    return shown + (", …" if len(values) > 4 else "")


def _printable(text: str) -> str:
    """A name out of a file, on one line and without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]


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
