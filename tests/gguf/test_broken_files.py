"""Every kind of bad file gives one sentence that names the file and what is wrong with it, never a traceback or a hang."""

from __future__ import annotations

import os
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.gguf_model import open_model
from engine.tensors import TYPES, require_runnable


class Builder:
    """Writes GGUF bytes field by field, so that any of them can be wrong."""

    def __init__(self, *, version: int = 3, endian: str = "<") -> None:
        self.endian, self.version = endian, version
        self.keys: list[bytes] = []
        self.tensors: list[bytes] = []
        self.data = b""

    def text(self, value: str) -> bytes:
        raw = value.encode()
        return struct.pack(f"{self.endian}Q", len(raw)) + raw

    def key(self, name: str, kind: int, value: bytes) -> Builder:
        self.keys.append(self.text(name) + struct.pack(f"{self.endian}I", kind) + value)
        return self

    def tensor(self, name: str, dims: tuple[int, ...], kind: int, offset: int) -> Builder:
        entry = struct.pack(f"{self.endian}I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        self.tensors.append(self.text(name) + entry)
        return self

    def bytes(self) -> bytes:
        counts = struct.pack(f"{self.endian}IQQ", self.version, len(self.tensors), len(self.keys))
        head = b"GGUF" + counts + b"".join(self.keys) + b"".join(self.tensors)
        return head + b"\0" * (-len(head) % 32) + self.data


def refusal(path: Path) -> str:
    """The sentence that running this file gives; it is one line, names the file, and is a ModelError."""
    with pytest.raises(ModelError) as refused:
        require_runnable(open_model(path))
    sentence = str(refused.value)
    assert "\n" not in sentence and str(path) in sentence and sentence.endswith((".", "`."))
    return sentence


def written(folder: Path, raw: bytes) -> Path:
    path = folder / "broken.gguf"
    path.write_bytes(raw)
    return path


HEADER = struct.Struct("<4sIQQ")


CONTAINERS: dict[str, tuple[Callable[[], bytes], list[str]]] = {
    "empty": (lambda: b"", ["empty"]),
    "text": (lambda: b"hello world, I am text" * 9, ["not a GGUF file", "offset 0"]),
    "two bytes": (lambda: b"GG", ["not a GGUF file"]),
    "magic alone": (lambda: b"GGUF", ["truncated", "offset 4"]),
    "version 0": (lambda: HEADER.pack(b"GGUF", 0, 0, 0) + bytes(99), ["version 0", "offset 4"]),
    "version 4": (lambda: HEADER.pack(b"GGUF", 4, 0, 0) + bytes(99), ["version 4", "offset 4"]),
    "version 4, big-endian": (lambda: Builder(endian=">", version=4).bytes(), ["version 4"]),
    "version 1 without metadata": (lambda: struct.pack("<4sIII", b"GGUF", 1, 0, 0) + bytes(99), ["'general.architecture' is missing"]),
    "2^60 keys": (lambda: HEADER.pack(b"GGUF", 3, 0, 1 << 60) + bytes(999), [str(1 << 60), "metadata keys", "offset 16"]),
    "2^64-1 tensors": (lambda: HEADER.pack(b"GGUF", 3, 2**64 - 1, 0) + bytes(999), [str(2**64 - 1), "tensors", "offset 8"]),
    "key of 2^63 bytes": (lambda: HEADER.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", 1 << 63) + bytes(99), ["metadata key 0", "truncated"]),
    "unknown value type": (lambda: Builder().key("k", 77, bytes(16)).bytes(), ["'k'", "unknown value type 77"]),
    "array of 2^61 floats": (lambda: Builder().key("k", 9, struct.pack("<IQ", 6, 1 << 61)).bytes(), ["'k'", "truncated"]),
    "array of 2^61 strings": (lambda: Builder().key("k", 9, struct.pack("<IQ", 8, 1 << 61)).bytes(), ["'k'", "strings"]),
    "array of arrays": (lambda: Builder().key("k", 9, struct.pack("<IQ", 9, 1) + bytes(32)).bytes(), ["'k'", "array of arrays"]),
    "key twice": (lambda: Builder().key("k", 4, bytes(4)).key("k", 4, bytes(4)).bytes(), ["second 'k'"]),
    "key is not UTF-8": (lambda: HEADER.pack(b"GGUF", 3, 0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(99), ["UTF-8"]),
    "alignment 3": (lambda: Builder().key("general.alignment", 4, struct.pack("<I", 3)).bytes(), ["general.alignment"]),
    "alignment 0": (lambda: Builder().key("general.alignment", 4, struct.pack("<I", 0)).bytes(), ["general.alignment"]),
    "unknown ggml type": (lambda: Builder().tensor("blk.0.x", (32,), 99, 0).bytes() + bytes(999), ["'blk.0.x'", "unknown ggml type 99"]),
    "a removed ggml type": (lambda: Builder().tensor("blk.0.x", (32,), 31, 0).bytes() + bytes(999), ["'blk.0.x'", "ggml type 31"]),
    "no dimensions": (lambda: Builder().tensor("t", (), 0, 0).bytes() + bytes(99), ["'t'", "0 dimensions"]),
    "2^32-1 dimensions": (lambda: Builder().bytes()[:8] + struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"t" + b"\xff" * 4 + bytes(99), ["4294967295 dimensions"]),
    "a zero dimension": (lambda: Builder().tensor("t", (32, 0), 0, 0).bytes() + bytes(99), ["'t'", "shape [32, 0]"]),
    "rows of half a block": (lambda: Builder().tensor("t", (48, 4), 3, 0).bytes() + bytes(999), ["'t'", "q4_1", "blocks of 32"]),
    "elements overflow 64 bits": (lambda: Builder().tensor("t", (1 << 40, 1 << 40), 0, 0).bytes() + bytes(99), ["'t'", "f32", str(1 << 82)]),
    "offset wraps 64 bits": (lambda: Builder().tensor("t", (8,), 0, 2**64 - 32).bytes() + bytes(99), ["'t'", "f32", "file ends at"]),
    "offset past the end": (lambda: Builder().tensor("t", (8,), 0, 1 << 20).bytes() + bytes(99), ["'t'", "f32", "file ends at"]),
    "offset not aligned": (lambda: Builder().tensor("t", (8,), 0, 4).bytes() + bytes(99), ["'t'", "multiple of 32"]),
    "tensor twice": (lambda: Builder().tensor("t", (8,), 0, 0).tensor("t", (8,), 0, 32).bytes() + bytes(99), ["'t'", "twice"]),
    "tensors overlap": (lambda: Builder().tensor("a", (16,), 0, 0).tensor("b", (8,), 1, 32).bytes() + bytes(99), ["'b' (f16)", "overlaps 'a' (f32)", "offset"]),
    "tensors at one place": (lambda: Builder().tensor("a", (8,), 0, 0).tensor("b", (8,), 0, 0).bytes() + bytes(99), ["overlaps"]),
    "no metadata": (lambda: Builder().bytes(), ["'general.architecture' is missing"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_broken_container_is_one_sentence(kind: str, tmp_path: Path) -> None:
    make, words = CONTAINERS[kind]
    sentence = refusal(written(tmp_path, make()))
    for word in words:
        assert word in sentence


def test_what_is_no_file_is_one_sentence(tmp_path: Path) -> None:
    assert "directory" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "absent.gguf")
    os.mkfifo(tmp_path / "pipe.gguf")  # opening it would wait for a writer
    assert "regular file" in refusal(tmp_path / "pipe.gguf")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    assert "cannot be read" in refusal(tmp_path / "loop.gguf")


def test_a_file_truncated_anywhere_names_what_it_lacks(small_file: Path, tmp_path: Path) -> None:
    whole = small_file.read_bytes()
    for size in [*range(4, 3000, 61), *range(3000, len(whole), len(whole) // 40), len(whole) - 40]:
        sentence = refusal(written(tmp_path, whole[:size]))
        assert "truncated" in sentence or "can hold" in sentence
    assert "tensor 'output.weight' (q6_K) at offset" in refusal(written(tmp_path, whole[:-40]))


def rewritten(small_file: Path, folder: Path, *, keys: dict[str, object] | None = None, drop: tuple[str, ...] = (),
              shapes: dict[str, tuple[int, ...]] | None = None, extra: dict[str, np.ndarray] | None = None) -> Path:  # fmt: skip
    """The small file written again by the gguf package with some keys or tensors changed, dropped or added."""
    import gguf

    reader = gguf.GGUFReader(small_file)
    values = {
        name: (field.contents(), field.types[0])
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    path = folder / "changed.gguf"
    writer = gguf.GGUFWriter(path, str(values["general.architecture"][0]))
    del writer.kv_data[0]["general.architecture"]
    for name, value in (keys or {}).items():
        old = values.get(name, (None, None))[1]
        guess = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, str: gguf.GGUFValueType.STRING}
        values[name] = (value, old if old and type(value) is not str else guess[type(value)])
    for name, (value, kind) in values.items():
        if name not in drop:
            writer.add_key_value(name, value, kind)
    for t in reader.tensors:
        if t.name not in drop:
            shape = (shapes or {}).get(t.name, tuple(reversed(t.shape.tolist())))
            count = int(np.prod(shape)) * t.n_bytes // t.n_elements
            writer.add_tensor_info(t.name, shape, np.dtype(np.float32), count, raw_dtype=t.tensor_type)
    for name, array in (extra or {}).items():
        writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for t in reader.tensors:
        if t.name not in drop:
            shape = (shapes or {}).get(t.name, tuple(reversed(t.shape.tolist())))
            count = int(np.prod(shape)) * t.n_bytes // t.n_elements
            writer.write_tensor_data(np.resize(t.data.view(np.uint8).reshape(-1), count))
    for array in (extra or {}).values():
        writer.write_tensor_data(array)
    writer.close()
    return path


METADATA: list[tuple[dict[str, object], list[str]]] = [
    ({"general.architecture": "gemma2"}, ["'gemma2.block_count' is missing"]),
    ({"qwen2.attention.head_count": 3}, ["3 heads cannot share 2 KV heads"]),
    ({"qwen2.attention.head_count": 0}, ["0 heads"]),
    ({"qwen2.block_count": 2}, ["'blk.1.attn_q.weight' is missing"]),
    ({"qwen2.block_count": 4_000_000_000}, ["block_count is 4000000000"]),
    ({"qwen2.embedding_length": 512}, ["'token_embd.weight' (q4_K at offset", "[64, 256]", "[64, 512]"]),
    ({"qwen2.feed_forward_length": 512}, ["'blk.0.ffn_gate.weight' (q4_K at offset", "[256, 256]", "[512, 256]"]),
    ({"qwen2.vocab_size": 65}, ["'token_embd.weight'", "[65, 256]"]),
    ({"qwen2.rope.dimension_count": 32}, ["rope.dimension_count is 32"]),
    ({"qwen2.attention.value_length": 32}, ["value_length is 32"]),
    ({"qwen2.attention.key_length": 7, "qwen2.attention.value_length": 7, "qwen2.rope.dimension_count": 7}, ["'blk.0.attn_q.weight'", "[28, 256]"]),
    ({"qwen2.rope.scaling.type": "yarn"}, ["RoPE scaling 'yarn'"]),
    ({"qwen2.rope.scale_linear": 4.0}, ["RoPE scaling", "factor 4"]),
    ({"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0}, ["RoPE scaling 'linear' with factor 2"]),
    ({"qwen2.rope.freq_base": float("nan")}, ["'qwen2.rope.freq_base' is nan", "no finite number"]),
    ({"qwen2.rope.freq_base": float("inf")}, ["'qwen2.rope.freq_base' is inf", "no finite number"]),
    ({"qwen2.rope.freq_base": 0.0}, ["'qwen2.rope.freq_base' is 0", "not above 0"]),
    ({"qwen2.attention.layer_norm_rms_epsilon": float("nan")}, ["layer_norm_rms_epsilon' is nan", "no finite number"]),
    ({"qwen2.attention.layer_norm_rms_epsilon": -1.0}, ["layer_norm_rms_epsilon' is -1", "below 0"]),
    ({"qwen2.rope.scaling.factor": float("nan")}, ["'qwen2.rope.scaling.factor' is nan"]),
    ({"qwen2.expert_count": 8}, ["8 experts"]),
    ({"qwen2.block_count": "one"}, ["'qwen2.block_count' is 'one'", "whole number"]),
    ({"split.count": 3}, ["shard of a split model", "rename it"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"), METADATA, ids=[next(iter(k)) + f"={next(iter(k.values()))}" for k, _ in METADATA]
)
def test_metadata_that_would_be_computed_wrongly_is_one_sentence(keys, words, small_file, tmp_path) -> None:
    sentence = refusal(rewritten(small_file, tmp_path, keys=keys))
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    "key", ["general.architecture", "qwen2.block_count", "qwen2.embedding_length", "qwen2.feed_forward_length",
            "qwen2.attention.head_count", "qwen2.attention.layer_norm_rms_epsilon", "qwen2.context_length"],
)  # fmt: skip
def test_a_missing_key_is_named(key: str, small_file: Path, tmp_path: Path) -> None:
    assert f"'{key}' is missing" in refusal(rewritten(small_file, tmp_path, drop=(key,)))


def test_a_missing_tensor_is_named(small_file: Path, small, tmp_path: Path) -> None:
    for tensor in set(small.tensors) - {"output.weight", "blk.0.attn_q.bias"}:
        assert f"'{tensor}' is missing" in refusal(rewritten(small_file, tmp_path, drop=(tensor,)))
    assert "'blk.0.attn_k.bias' (f32 at offset" in refusal(rewritten(small_file, tmp_path, drop=("blk.0.attn_q.bias",)))


def test_a_missing_head_means_a_tied_embedding(small_file: Path, tmp_path: Path) -> None:
    model = open_model(rewritten(small_file, tmp_path, drop=("output.weight",)))
    assert model.geometry.tied_embedding and model.geometry.weight_type("output.weight") == "q4_K"


def test_a_tensor_of_another_shape_is_named_with_both_shapes(small_file: Path, tmp_path: Path) -> None:
    sentence = refusal(rewritten(small_file, tmp_path, shapes={"blk.0.attn_k.weight": (64, 256)}))
    assert "'blk.0.attn_k.weight' (q4_K at offset" in sentence and "[64, 256]" in sentence and "[128, 256]" in sentence


def test_a_tensor_that_would_be_ignored_is_refused(small_file: Path, tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(64, np.float32)}
    assert "'blk.0.attn_q_norm.weight'" in refusal(rewritten(small_file, tmp_path, extra=extra))


def test_rope_factors_are_refused_unless_they_change_nothing(small_file: Path, tmp_path: Path) -> None:
    factors = np.ones(32, np.float32)
    open_model(rewritten(small_file, tmp_path, extra={"rope_freqs.weight": factors}))
    factors[5] = 8
    assert "rope_freqs.weight" in refusal(rewritten(small_file, tmp_path, extra={"rope_freqs.weight": factors}))


@settings(max_examples=250, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 255)), max_size=12),
    cut=st.one_of(st.none(), st.integers(0, 4095)),
    words=st.lists(st.tuples(st.integers(0, 4087), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])), max_size=3),
)  # fmt: skip
@example(flips=[], cut=None, words=[])
def test_random_damage_gives_a_working_model_or_one_sentence(small_file, tmp_path, flips, cut, words) -> None:
    """Byte flips, cuts and absurd 64-bit words in the header and tables (the first 4 KiB)."""
    raw = bytearray(small_file.read_bytes())
    for at, value in words:
        raw[at : at + 8] = struct.pack("<Q", value)
    for at, mask in flips:
        raw[at] ^= mask
    path = written(tmp_path, bytes(raw[:cut]))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        model = open_model(path)
        for name, info in model.tensors.items():
            assert model.raw(name).nbytes == info.n_bytes
            assert info.type not in TYPES or model.dequantize(name).shape == info.shape
        assert "\n" not in model.refusal
        model.tokenizer()
    except ModelError as error:
        assert "\n" not in str(error) and str(path) in str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 * 1024, "no allocation follows a number that the file made up"


def test_the_command_says_the_sentence_and_exits_with_1(small_file: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    path = written(tmp_path, small_file.read_bytes()[:5000])
    for command in (["model", "info"], ["model", "greedy", "--prompt", "x"]):
        run = subprocess.run(
            [sys.executable, "-m", "harness.cli", *command, "--model", str(path)], capture_output=True, text=True
        )
        assert run.returncode == 1 and run.stdout == ""
        assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1 and str(path) in run.stderr
