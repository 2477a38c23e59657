"""The GGUF container: header, metadata and tensor table of one file, every length checked before it is believed.

Why not `gguf.GGUFReader`: it trusts every count and offset of the file (a key count of 2^60 loops, a cut string is read
short, offsets wrap in uint64), and it builds a NumPy view per metadata element, which takes seconds for a 49k-token
vocabulary. The format's constants (value types, ggml types, block sizes) and the dequantisers are the gguf package's.

Layout (version 3, little-endian): "GGUF", u32 version, u64 tensors, u64 keys; keys: string, u32 type, value; tensors:
string, u32 dims, u64 dim × dims (innermost first), u32 ggml type, u64 offset from the data's start; padding to
`general.alignment`; data. A string is u64 length + UTF-8.
"""

from __future__ import annotations

import mmap
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

from engine.errors import ModelError
from engine.tensors import TYPES, TensorInfo, block_of

_SCALARS = {
    GGUFValueType.UINT8: "<B", GGUFValueType.INT8: "<b", GGUFValueType.UINT16: "<H", GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I", GGUFValueType.INT32: "<i", GGUFValueType.UINT64: "<Q", GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT32: "<f", GGUFValueType.FLOAT64: "<d", GGUFValueType.BOOL: "<?",
}  # fmt: skip
_TYPE_OF_NUMBER = {int(GGMLQuantizationType[name.upper()]): name for name in TYPES}
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # name's length, one letter, type, one byte of value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8
_MAX_DIMS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True)
class StringArray:
    """An array of strings left in the file until asked for: a vocabulary is large, and most commands never read it."""

    data: memoryview
    offset: int
    count: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        at = self.offset
        for _ in range(self.count):
            (length,) = struct.unpack_from("<Q", self.data, at)
            yield bytes(self.data[at + 8 : at + 8 + length]).decode("utf-8", "replace")
            at += 8 + length


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file and where its bytes lie: `offset` counts from the file's start."""

    info: TensorInfo
    offset: int


class GgufFile:
    """One GGUF file, mapped: `metadata` (key → number, bool, str, ndarray or StringArray) and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, one sentence, for a file that is not a whole little-endian GGUF of version 3."""
        self.path = path
        self.data = memoryview(_map(path))
        self.size = len(self.data)
        self._at = 0
        tensor_count, key_count = self._header()
        self.metadata = self._keys(key_count)
        self.tensors = self._tensor_table(tensor_count)

    def bytes_of(self, tensor: str) -> np.ndarray:
        """A tensor's bytes: uint8 [n_bytes], a read-only view of the mapping."""
        entry = self.tensors[tensor]
        return np.frombuffer(self.data, np.uint8, entry.info.n_bytes, entry.offset)

    def _fail(self, problem: str) -> ModelError:
        return ModelError(f"{self.path}: {problem}")

    def _take(self, size: int, what: str) -> int:
        """Advances past `size` bytes and returns where they start; Python integers cannot overflow."""
        start = self._at
        if size > self.size - start:
            raise self._fail(
                f"{what} at offset {start} needs {size} bytes, but the file ends at {self.size}; it is truncated or damaged, get it again."
            )
        self._at = start + size
        return start

    def _scalar(self, code: str, what: str) -> Any:
        return struct.unpack_from(code, self.data, self._take(struct.calcsize(code), what))[0]

    def _string(self, what: str) -> str:
        length = self._scalar("<Q", f"the length of {what}")
        start = self._take(length, what)
        try:
            return bytes(self.data[start : start + length]).decode("utf-8")
        except UnicodeDecodeError:
            raise self._fail(f"{what} at offset {start} is not UTF-8; the file is damaged, get it again.") from None

    def _header(self) -> tuple[int, int]:
        magic = bytes(self.data[:4])
        if magic != b"GGUF":
            raise self._fail(f"not a GGUF file (starts with {magic!r} at offset 0, not b'GGUF'); give a .gguf file.")
        self._at = 4
        version = self._scalar("<I", "the version")
        if version and version & 0xFFFF == 0:
            raise self._fail(
                "a big-endian GGUF (version bytes swapped at offset 4); convert it with gguf's `gguf-convert-endian FILE little`."
            )
        if version != 3:
            raise self._fail(
                f"GGUF version {version} at offset 4, this engine reads version 3; convert the model again with a current llama.cpp."
            )
        tensors, keys = self._scalar("<Q", "the tensor count"), self._scalar("<Q", "the key count")
        for count, size, what, at in (
            (tensors, _MIN_TENSOR_BYTES, "tensors", 8),
            (keys, _MIN_KEY_BYTES, "metadata keys", 16),
        ):
            if count * size > self.size - self._at:
                raise self._fail(
                    f"the header claims {count} {what} at offset {at}, more than its {self.size} bytes can hold; it is truncated or damaged."
                )
        return tensors, keys

    def _keys(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for i in range(count):
            start = self._at
            key = self._string(f"the name of metadata key {i}")
            if not key or key in metadata:
                raise self._fail(
                    f"metadata key {i} at offset {start} is {'a second ' + repr(key) if key else 'empty'}; the file is damaged."
                )
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> Any:
        what = f"the value of metadata key {key!r}"
        kind = self._value_type(what)
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind], what)
        if kind is GGUFValueType.STRING:
            return self._string(what)
        item = self._value_type(what)
        count = self._scalar("<Q", what)
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            start = self._take(count * dtype.itemsize, what)
            return np.frombuffer(self.data, dtype, count, start)
        if item is not GGUFValueType.STRING:
            raise self._fail(
                f"{what} at offset {self._at} is an array of arrays, which llama.cpp does not write; the file is damaged."
            )
        if count * 8 > self.size - self._at:
            raise self._fail(
                f"{what} at offset {self._at} claims {count} strings, more than the file's {self.size} bytes can hold; it is truncated or damaged."
            )
        start = self._at
        for _ in range(count):
            length = self._scalar("<Q", what)
            self._take(length, what)
        return StringArray(self.data, start, count)

    def _value_type(self, what: str) -> GGUFValueType:
        number = self._scalar("<I", what)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._fail(
                f"{what} at offset {self._at - 4} has unknown value type {number}; the file is damaged."
            ) from None

    def _tensor_table(self, count: int) -> dict[str, FileTensor]:
        entries = [self._tensor_entry(i) for i in range(count)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._fail(
                f"metadata key 'general.alignment' is {alignment!r}, not a power of two; the file is damaged."
            )
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, FileTensor] = {}
        for info, offset, where in entries:
            if info.name in tensors:
                raise self._fail(f"tensor {info.name!r} is listed twice (offset {where}); the file is damaged.")
            start = data_start + offset
            if offset % alignment:
                raise self._fail(
                    f"tensor {info.name!r} ({info.type}) starts at offset {start}, not a multiple of {alignment}; the file is damaged."
                )
            if start + info.n_bytes > self.size:
                raise self._fail(
                    f"tensor {info.name!r} ({info.type}) at offset {start} needs {info.n_bytes} bytes, but the file ends at {self.size}; "
                    "it is truncated or damaged, get it again."
                )
            tensors[info.name] = FileTensor(info, start)
        self._check_overlap(tensors)
        return tensors

    def _tensor_entry(self, i: int) -> tuple[TensorInfo, int, int]:
        """(info, offset from the data's start, where its entry starts)."""
        where = self._at
        name = self._string(f"the name of tensor {i}")
        what = f"the entry of tensor {name!r}"
        n_dims = self._scalar("<I", what)
        if not name or not 1 <= n_dims <= _MAX_DIMS:
            raise self._fail(
                f"tensor {i} ({name!r}) at offset {where} has {n_dims} dimensions, not 1 to {_MAX_DIMS}; the file is damaged."
            )
        dims = tuple(self._scalar("<Q", what) for _ in range(n_dims))
        number = self._scalar("<I", what)
        offset = self._scalar("<Q", what)
        if number not in _TYPE_OF_NUMBER:
            raise self._fail(
                f"tensor {name!r} at offset {where} has {_foreign_type(number)}; this engine reads {', '.join(TYPES)}."
            )
        kind = _TYPE_OF_NUMBER[number]
        weights, size = block_of(kind)
        if 0 in dims or dims[0] % weights:
            raise self._fail(
                f"tensor {name!r} ({kind}) at offset {where} has shape {list(dims)}, whose rows are not whole blocks of {weights}; the file is damaged."
            )
        shape = tuple(reversed(dims))
        return TensorInfo(name, shape, kind, prod(dims) // weights * size), offset, where

    def _check_overlap(self, tensors: dict[str, FileTensor]) -> None:
        ordered = sorted(tensors.values(), key=lambda t: t.offset)
        for before, after in pairwise(ordered):
            end = before.offset + before.info.n_bytes
            if after.offset < end:
                raise self._fail(
                    f"tensor {after.info.name!r} ({after.info.type}) at offset {after.offset} overlaps {before.info.name!r} "
                    f"({before.info.type}), which ends at {end}; the file is damaged."
                )


def _foreign_type(number: int) -> str:
    try:
        return f"ggml type {number} ({GGMLQuantizationType(number).name})"
    except ValueError:
        return f"unknown ggml type {number}"


def _map(path: Path) -> mmap.mmap:
    """The whole file, read-only. A pipe or a device is refused before it is opened, for opening it could hang."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelError(f"{path} is a directory; give a .gguf file in it.")
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{path} is not a regular file; give a .gguf file.")
        if status.st_size == 0:
            raise ModelError(f"{path} is empty (0 bytes); get the file again.")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; check the path.") from None
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({getattr(error, 'strerror', None) or error}); check the path and its permissions."
        ) from None
