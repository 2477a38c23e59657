"""Geometry and sizes of models that this engine does not run; running them, and files that are no model, is one sentence."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from click.testing import CliRunner
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import EngineError, ModelError
from engine.geometry import MATRICES
from engine.gguf_model import open_model
from engine.levers import Levers
from engine.open import open_engine
from engine.plan import build_plan
from harness.cli import group

CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "models"
HIDDEN, FFN, VOCAB, LAYERS, HEADS, KV = 256, 512, 64, 2, 4, 2
Q, K = HIDDEN, HIDDEN // HEADS * KV


def tensors_of(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """GGUF name → row-major shape of a plain Llama with an untied head."""
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(layers):
        shapes |= {f"blk.{i}.{part}.weight": shape for part, shape in {
            "attn_norm": (HIDDEN,), "attn_q": (Q, HIDDEN), "attn_k": (K, HIDDEN), "attn_v": (K, HIDDEN), "attn_output": (HIDDEN, Q),
            "ffn_norm": (HIDDEN,), "ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN),
        }.items()}  # fmt: skip
    return shapes


def write(
    path: Path, arch: str = "llama", *, shapes: dict[str, tuple[int, ...]] | None = None, keys: dict[str, Any] | None = None,
    kind: str = "F32", endian: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE, drop: tuple[str, ...] = (),
) -> Path:  # fmt: skip
    """A small model by the gguf package's writer, its matrices of one ggml type and zeros."""
    writer = gguf.GGUFWriter(path, arch, endianess=endian)
    values: dict[str, Any] = {
        "block_count": LAYERS, "context_length": 4096, "embedding_length": HIDDEN, "feed_forward_length": FFN,
        "attention.head_count": HEADS, "attention.head_count_kv": KV, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    for name, value in (values | (keys or {})).items():
        full = name if name.startswith(("general.", "tokenizer.")) else f"{arch}.{name}"
        if name in drop:
            continue
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        else:
            writer.add_array(full, value)
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    for name, shape in (tensors_of() if shapes is None else shapes).items():
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            rows = np.zeros((*shape[:-1], shape[-1] // block * size), np.uint8)
            writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def other_version(path: Path, version: int) -> Path:
    """The container written again as GGUF 1 (32-bit counts, lengths and dims) or 2 (version 3's layout)."""
    raw = path.read_bytes()
    if version == 2:
        path.write_bytes(raw[:4] + struct.pack("<I", 2) + raw[8:])
        return path
    at = 4
    out = bytearray(b"GGUF" + struct.pack("<I", 1))

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, raw, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> None:
        nonlocal at
        length = take("Q")
        out.extend(struct.pack("<I", length) + raw[at : at + length])
        at += length

    def value(kind: int) -> None:
        nonlocal at
        if kind == 8:
            text()
        elif kind == 9:
            item, count = take("I"), take("Q")
            out.extend(struct.pack("<II", item, count))
            for _ in range(count):
                value(item)
        else:
            size = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}[kind]
            out.extend(raw[at : at + size])
            at += size

    take("I")
    tensors, count = take("Q"), take("Q")
    out.extend(struct.pack("<II", tensors, count))
    for _ in range(count):
        text()
        kind = take("I")
        out.extend(struct.pack("<I", kind))
        value(kind)
    for _ in range(tensors):
        text()
        dims = take("I")
        out.extend(struct.pack("<I", dims))
        for _ in range(dims):
            out.extend(struct.pack("<I", take("Q")))
        out.extend(struct.pack("<IQ", take("I"), take("Q")))
    path.write_bytes(bytes(out) + bytes(-len(out) % 32) + raw[at + (-at % 32) :])
    return path


def macs(path: Path, tokens: int = 48) -> int:
    """Multiply-accumulates of a whole prefill by the ledger."""
    return build_plan(open_model(path).geometry, tokens, Levers(tail="full")).macs


def macs_by_hand(tokens: int = 48, head_dim: int = HIDDEN // HEADS) -> int:
    """Products of the shapes above, causal attention, and the head on one row."""
    q, k = HEADS * head_dim, KV * head_dim
    layer = tokens * (HIDDEN * (q + 2 * k) + q * HIDDEN + 3 * HIDDEN * FFN) + 2 * q * tokens * (tokens + 1) // 2
    return LAYERS * layer + VOCAB * HIDDEN


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_has_one_geometry_and_runs(version: int, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", keys={"tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCAB)]})
    before = open_model(path)
    model = open_model(other_version(path, version) if version < 3 else path)
    assert model.geometry == before.geometry and model.refusal == ""
    assert list(model.metadata["tokenizer.ggml.tokens"])[:2] == ["t0", "t1"]
    assert macs(path) == macs_by_hand()
    with open_engine(model, Levers(), backend="cpu") as engine:
        assert engine.prefill(np.arange(5, dtype=np.int32)).shape == (VOCAB,)


def test_a_big_endian_file_gives_its_sizes_and_is_not_run(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", endian=gguf.GGUFEndian.BIG, keys={"attention.head_count_kv": [KV, KV]})
    model = open_model(path)
    assert model.geometry.kv_heads == KV and macs(path) == macs_by_hand()
    assert "big-endian" in model.refusal and "gguf-convert-endian" in model.refusal


@pytest.mark.parametrize("kind", [t.name for t in GGML_QUANT_SIZES if t.name not in ("I8", "I16", "I32", "I64", "F64")])
def test_every_ggml_type_has_its_bytes_in_the_ledger(kind: str, tmp_path: Path) -> None:
    model = open_model(write(tmp_path / "m.gguf", kind=kind))
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    plan = build_plan(model.geometry, 8, Levers(tail="full"))
    held = {p.tensor: p.file_bytes for op in plan for p in op.parts}
    assert held["blk.1.ffn_down.weight"] == HIDDEN * FFN // block * size == model.info("blk.1.ffn_down.weight").n_bytes
    assert (model.refusal == "") == (
        kind in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
    )


def phi3() -> dict[str, tuple[int, ...]]:
    """q, k and v in one tensor, gate and up in one twice as high."""
    shapes = tensors_of()
    for i in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "ffn_gate"):
            del shapes[f"blk.{i}.{part}.weight"]
        shapes[f"blk.{i}.attn_qkv.weight"] = (Q + 2 * K, HIDDEN)
        shapes[f"blk.{i}.ffn_up.weight"] = (2 * FFN, HIDDEN)
    return shapes


def gemma3() -> dict[str, tuple[int, ...]]:
    """A head dimension of its own, a tied embedding, norms of q and k, norms after attention and FFN."""
    shapes = {k: v for k, v in tensors_of().items() if k != "output.weight"}
    for i in range(LAYERS):
        for part, shape in {
            "attn_q": (HEADS * 96, HIDDEN),
            "attn_k": (KV * 96, HIDDEN),
            "attn_v": (KV * 96, HIDDEN),
            "attn_output": (HIDDEN, HEADS * 96),
        }.items():
            shapes[f"blk.{i}.{part}.weight"] = shape
        shapes |= {f"blk.{i}.{n}.weight": (96,) for n in ("attn_q_norm", "attn_k_norm")}
        shapes |= {f"blk.{i}.{n}.weight": (HIDDEN,) for n in ("post_attention_norm", "post_ffw_norm")}
    return shapes


def qwen3() -> dict[str, tuple[int, ...]]:
    """Norms of q and k, one row a head."""
    return tensors_of() | {
        f"blk.{i}.{n}.weight": (HIDDEN // HEADS,) for i in range(LAYERS) for n in ("attn_q_norm", "attn_k_norm")
    }


FOREIGN: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any], int]] = {
    "qwen3": ("qwen3", qwen3(), {"attention.key_length": 64, "attention.value_length": 64, "rope.freq_base": 1e6}, 64),
    "mistral3": ("mistral3", tensors_of(), {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0}, 64),
    "phi3": ("phi3", phi3() | {"rope_factors_long.weight": (32,), "rope_factors_short.weight": (32,)}, {"rope.dimension_count": 64}, 64),
    "gemma3": ("gemma3", gemma3(), {"attention.key_length": 96, "attention.value_length": 96, "attention.sliding_window": 1024}, 96),
    "a name nobody has heard of": ("brandnew", tensors_of(), {}, 64),
    "LayerNorm's epsilon, no RMS one": ("cohere", tensors_of(), {"attention.layer_norm_epsilon": 1e-5}, 64),
    "an array of equal layers": ("llama", tensors_of(), {"feed_forward_length": [FFN, FFN], "attention.head_count": [HEADS] * 2}, 64),
    "partial rotary": ("glm4", tensors_of(), {"rope.dimension_count": 32}, 64),
    "a layer that predicts further tokens": ("brandnew", tensors_of(3), {"block_count": 3, "nextn_predict_layers": 1}, 64),
    "llama 3.1": ("llama", tensors_of() | {"rope_freqs.weight": (32,)}, {}, 64),
    "longrope": ("llama", tensors_of() | {"rope_factors_long.weight": (32,)}, {"rope.scaling.type": "longrope"}, 64),
}  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_dense_decoder_has_the_ledger_of_its_shapes(name: str, tmp_path: Path) -> None:
    arch, shapes, keys, head_dim = FOREIGN[name]
    drop = ("attention.layer_norm_rms_epsilon",) if "attention.layer_norm_epsilon" in keys else ()
    path = write(tmp_path / "m.gguf", arch, shapes=shapes, keys=keys, drop=drop)
    assert macs(path) == macs_by_hand(head_dim=head_dim)
    model = open_model(path)
    assert set(model.geometry.weight_types) >= {f"blk.{i}.{m}.weight" for i in range(LAYERS) for m in MATRICES}
    assert (model.refusal == "") == (name == "an array of equal layers")
    if model.refusal:
        with pytest.raises(ModelError) as refused:
            open_engine(model, Levers(), backend="cpu")
        assert str(refused.value) == model.refusal and str(path) in model.refusal and "\n" not in model.refusal


def test_beyond_a_sliding_window_the_ledger_is_not_known(tmp_path: Path) -> None:
    arch, shapes, keys, _ = FOREIGN["gemma3"]
    geometry = open_model(write(tmp_path / "m.gguf", arch, shapes=shapes, keys=keys)).geometry
    build_plan(geometry, 1024)
    with pytest.raises(EngineError, match="1025 tokens exceed the sliding window of 1024"):
        build_plan(geometry, 1025)


REFUSED: dict[str, tuple[str, dict[str, tuple[int, ...]], dict[str, Any], str]] = {
    "experts": ("llama", tensors_of(), {"expert_count": 8}, "mixture of 8 experts"),
    "experts without their key": ("brandnew", tensors_of() | {"blk.0.ffn_gate_inp.weight": (4, HIDDEN)}, {}, "mixture of experts"),
    "layers that differ": ("deci", tensors_of(), {"attention.head_count_kv": [2, 1]}, "differs from layer to layer (2, 1)"),
    "no gate": ("gpt2", {k: v for k, v in tensors_of().items() if "gate" not in k}, {}, "'blk.0.ffn_gate.weight' is missing"),
    "state space beside attention": ("falcon-h1", tensors_of() | {"blk.1.ssm_in.weight": (99, HIDDEN)}, {}, "'blk.1.ssm_in.weight'"),
    "latent attention": ("deepseek2", tensors_of(), {"attention.key_length": 64, "attention.value_length": 32}, "value_length is 32"),
    "an encoder": ("bert", tensors_of(), {"attention.causal": False}, "encoder"),
    "an adapter": ("llama", {"blk.0.attn_q.weight.lora_a": (4, HIDDEN)}, {"general.type": "adapter"}, "LoRA adapter"),
    "a projector": ("clip", {"v.patch_embd.weight": (4, HIDDEN)}, {}, "projector"),
    "a vocabulary": ("llama", {}, {}, "no tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_ledger_cannot_count_is_refused_by_name(name: str, tmp_path: Path) -> None:
    arch, shapes, keys, words = REFUSED[name]
    with pytest.raises(ModelError) as refused:
        open_model(write(tmp_path / "m.gguf", arch, shapes=shapes, keys=keys))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_text_in_latin_1_is_read_and_a_name_is_printable(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", keys={"general.description": "caf#", "general.name": "a\x1b[31mb\nc"})
    path.write_bytes(path.read_bytes().replace(b"caf#", b"caf\xe9"))
    model = open_model(path)
    assert model.metadata["general.description"] == "caf\xe9" and model.name == "a [31mb c"


def zipped(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, "x" * 99)
    return buffer.getvalue()


IMPOSTORS: dict[str, tuple[bytes, str]] = {
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4368439584\n", "4,368,439,584 bytes"),
    "HTML": (b"<!DOCTYPE html>\n<html><title>404</title>", "HTML page"),
    "html without doctype": (b"\n  <HTML><body>Please log in", "HTML page"),
    "XML": (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML text"),
    "JSON error": (b'{"error":"Repository not found"}', "JSON text"),
    "model.safetensors.index.json": (b'{"metadata": {}, "weight_map": {}}', "convert_hf_to_gguf"),
    "gzip": (gzip.compress(b"GGUF" * 99), "gunzip"),
    "zip": (zipped("model.gguf"), "unzip"),
    "PyTorch": (zipped("archive/data.pkl"), "PyTorch checkpoint"),
    "pickle": (pickle.dumps({"a": 1}, protocol=2), "pickle"),
    "safetensors": (struct.pack("<Q", 64) + b'{"a":{"dtype":"F16"}}' + bytes(99), "safetensors"),
    "zeros": (bytes(4096), "zeros"),
    "old GGML": (b"tjgg" + bytes(99), "GGJT"),
    "tar": (b"model.gguf" + bytes(247) + b"ustar\x0000" + bytes(500), "tar archive"),
    "nsys export": (b"SQLite format 3\0" + bytes(99), "--trace"),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSTORS)
def test_an_impostor_is_named_for_what_it_is(name: str, tmp_path: Path) -> None:
    raw, words = IMPOSTORS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(raw)
    done = CliRunner().invoke(group, ["model", "info", "--model", str(path)])
    sentence = str(done.exception)
    assert isinstance(done.exception, ModelError) and words in sentence and sentence.startswith(str(path))
    assert "\n" not in sentence and sentence.endswith(".")


def test_shards_joined_by_cat_are_named_and_so_is_a_piece_of_a_cut_file(tmp_path: Path) -> None:
    first = write(tmp_path / "a.gguf", keys={"general.name": "first"})
    raw = first.read_bytes()
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(raw * 2)
    with pytest.raises(ModelError, match=f"second GGUF starts at offset {len(raw)}.*`cat`"):
        open_model(tmp_path / "m-00001-of-00002.gguf")
    for name in ("m.gguf.part1of2", "m.gguf-split-a"):
        (tmp_path / name).write_bytes(raw[: len(raw) // 2])
        with pytest.raises(ModelError, match="one piece of a file that was cut up: join the pieces"):
            open_model(tmp_path / name)


SERVES = ("g_ok", "g_llama31_rope_freqs", "g_yarn", "g_iq4_nl", "g_qwen3", "g_v2", "g_kv_array_equal", "g_linear_factor1", "g_description_latin1")  # fmt: skip
RUNS = ("g_ok", "g_v2", "g_kv_array_equal", "g_linear_factor1", "g_description_latin1")


@pytest.mark.skipif(not CASES.is_dir(), reason=f"no cases at {CASES}")
@pytest.mark.parametrize("name", SERVES)
def test_given_files_serve_where_only_geometry_is_needed(name: str) -> None:
    model = open_model(CASES / f"{name}.gguf")
    g = model.geometry
    assert (g.layers, g.hidden, g.ffn, g.heads, g.kv_heads, g.head_dim, g.vocab) == (2, 32, 64, 4, 2, 8, 64)
    assert (model.refusal == "") == (name in RUNS)


@pytest.mark.skipif(not CASES.is_dir(), reason=f"no cases at {CASES}")
def test_given_files_that_are_no_model_are_named() -> None:
    with pytest.raises(ModelError, match="second GGUF starts at offset 54912"):
        open_model(CASES / "g_cat.gguf")
    with pytest.raises(ModelError, match=r"Git LFS pointer of 135 bytes.*`git lfs pull`"):
        open_model(CASES / "g_lfs_pointer.gguf")
