"""The GGUF container: header, metadata and tensor table of one file, every length checked before it is believed.

Why not `gguf.GGUFReader`: it trusts every count and offset of the file (a key count of 2^60 loops, a cut string is read
short, offsets wrap in uint64), and it builds a NumPy view per metadata element, which takes seconds for a 49k-token
vocabulary. The format's constants (value types, ggml types, block sizes) and the dequantisers are the gguf package's.

Layout (versions 2 and 3): "GGUF", u32 version, u64 tensors, u64 keys; keys: string, u32 type, value; tensors: string,
u32 dims, u64 dim × dims (innermost first), u32 ggml type, u64 offset from the data's start; padding to
`general.alignment`; data. A string is u64 length + UTF-8. Version 1 has u32 for counts, lengths and dims. Version 3 may
be big-endian throughout. Source: ggml's docs/gguf.md, with its history of versions.
"""

from __future__ import annotations

import mmap
import re
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUFValueType

from engine.errors import ModelError
from engine.gguf_impostors import what_it_is
from engine.tensors import TensorInfo, block_of, type_name

_SCALARS = {
    GGUFValueType.UINT8: "B", GGUFValueType.INT8: "b", GGUFValueType.UINT16: "H", GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I", GGUFValueType.INT32: "i", GGUFValueType.UINT64: "Q", GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f", GGUFValueType.FLOAT64: "d", GGUFValueType.BOOL: "?",
}  # fmt: skip
_VERSIONS = (1, 2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True)
class StringArray:
    """An array of strings left in the file until asked for: a vocabulary is large, and most commands never read it."""

    data: memoryview
    offset: int
    count: int
    length: str = "<Q"  # struct code of a string's length

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[str]:
        at = self.offset
        size = struct.calcsize(self.length)
        for _ in range(self.count):
            (length,) = struct.unpack_from(self.length, self.data, at)
            yield bytes(self.data[at + size : at + size + length]).decode("utf-8", "replace")
            at += size + length


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file and where its bytes lie: `offset` counts from the file's start."""

    info: TensorInfo
    offset: int


class GgufFile:
    """One GGUF file, mapped: `metadata` (key → number, bool, str, ndarray or StringArray) and `tensors` by name."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError, one sentence, for a file that is not one whole GGUF of version 1, 2 or 3."""
        self.path = path
        self.data = memoryview(_map(path))
        self.size = len(self.data)
        self.order = "<"  # or ">": the byte order of everything in it
        self._length = "Q"  # struct code of counts, lengths and dims
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
                f"{what} at offset {start} needs {size} bytes, but the file ends at {self.size}; {self._cut_short()}."
            )
        self._at = start + size
        return start

    def _cut_short(self) -> str:
        if re.search(r"[-.](split-[a-z]+|part\d+of\d+|part-?[a-z0-9]+)$", self.path.name):
            return "its name says that it is one piece of a file that was cut up: join the pieces in order with `cat`"
        return "it is truncated or damaged, get it again"

    def _scalar(self, code: str, what: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from(self.order + code, self.data, self._take(size, what))[0]

    def _string(self, what: str, *, exact: bool = True) -> str:
        """A name must be UTF-8; a text that nothing is looked up by (`exact` false) may be latin-1, as old converters wrote."""
        length = self._scalar(self._length, f"the length of {what}")
        start = self._take(length, what)
        raw = bytes(self.data[start : start + length])
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            if not exact:
                return raw.decode("latin-1")
            raise self._fail(f"{what} at offset {start} is not UTF-8; the file is damaged, get it again.") from None

    def _header(self) -> tuple[int, int]:
        magic = bytes(self.data[:4])
        if magic != b"GGUF":
            raise self._fail(what_it_is(self.data) or f"not a GGUF file (starts with {magic!r} at offset 0, not b'GGUF'); give a .gguf file.")  # fmt: skip
        self._at = 4
        version = self._scalar("I", "the version")
        if version and version & 0xFFFF == 0:
            self.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in _VERSIONS:
            raise self._fail(
                f"GGUF version {version} at offset 4, this program reads versions 1 to 3; convert the model again with a current llama.cpp."
            )
        if version == 1:
            self._length = "I"
        length = struct.calcsize("<" + self._length)
        least_key = length + 1 + 4 + 1  # name's length, one letter, type, one byte of value
        least_tensor = length + 1 + 4 + length + 4 + 8
        tensors, keys = self._scalar(self._length, "the tensor count"), self._scalar(self._length, "the key count")
        for count, size, what, at in (
            (tensors, least_tensor, "tensors", 8),
            (keys, least_key, "metadata keys", 8 + length),
        ):
            if count * size > self.size - self._at:
                raise self._fail(
                    f"the header claims {count} {what} at offset {at}, more than its {self.size} bytes can hold; {self._cut_short()}."
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
            return self._string(what, exact=False)
        item = self._value_type(what)
        count = self._scalar(self._length, what)
        if item in _SCALARS:
            dtype = np.dtype(self.order + _SCALARS[item])
            start = self._take(count * dtype.itemsize, what)
            return np.frombuffer(self.data, dtype, count, start)
        if item is not GGUFValueType.STRING:
            raise self._fail(
                f"{what} at offset {self._at} is an array of arrays, which llama.cpp does not write; the file is damaged."
            )
        if count * struct.calcsize("<" + self._length) > self.size - self._at:
            raise self._fail(
                f"{what} at offset {self._at} claims {count} strings, more than the file's {self.size} bytes can hold; {self._cut_short()}."
            )
        start = self._at
        for _ in range(count):
            self._take(self._scalar(self._length, what), what)
        return StringArray(self.data, start, count, self.order + self._length)

    def _value_type(self, what: str) -> GGUFValueType:
        number = self._scalar("I", what)
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
                    f"{self._cut_short()}."
                )
            tensors[info.name] = FileTensor(info, start)
        self._check_overlap(tensors)
        self._check_nothing_follows(
            max((t.offset + t.info.n_bytes for t in tensors.values()), default=data_start), alignment
        )
        return tensors

    def _tensor_entry(self, i: int) -> tuple[TensorInfo, int, int]:
        """(info, offset from the data's start, where its entry starts)."""
        where = self._at
        name = self._string(f"the name of tensor {i}")
        what = f"the entry of tensor {name!r}"
        n_dims = self._scalar("I", what)
        if not name or not 1 <= n_dims <= _MAX_DIMS:
            raise self._fail(
                f"tensor {i} ({name!r}) at offset {where} has {n_dims} dimensions, not 1 to {_MAX_DIMS}; the file is damaged."
            )
        dims = tuple(self._scalar(self._length, what) for _ in range(n_dims))
        number = self._scalar("I", what)
        offset = self._scalar("Q", what)
        kind = type_name(number)
        try:
            weights, size = block_of(kind)
        except KeyError:
            raise self._fail(
                f"tensor {name!r} at offset {where} has unknown {kind}, whose size nobody here knows; convert the model again with a "
                "current llama.cpp, or install a newer gguf package."
            ) from None
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

    def _check_nothing_follows(self, end: int, alignment: int) -> None:
        """Shards joined by `cat` begin like their first one, and lack what the others hold."""
        for start in (end, -(-end // alignment) * alignment):
            if bytes(self.data[start : start + 4]) == b"GGUF":
                raise self._fail(
                    f"a second GGUF starts at offset {start}: these are shards of a split model joined by `cat`; cut them apart there, or "
                    "get the shards again and give the first, or merge them with `llama-gguf-split --merge`."
                )


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
