"""Synthetic weights: the specification word by word, sane scales, and a file that appears whole or not at all."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelError
from engine.geometry import PRESETS, qwen2_5_7b, tiny
from engine.gguf_model import open_model
from engine.synth import SynthModel, fill, write_gguf
from engine.tensors import TYPES, block_of

MASK = 2**64 - 1
KNOWN = {"f16": 4012177114, "q4_1": 2152387266, "q4_K": 3525111492, "q6_K": 2678021049}  # CRC-32 of one tensor


def of_type(kind: str, seed: int = 7) -> SynthModel:
    g = tiny()
    return SynthModel(replace(g, weight_types=dict.fromkeys(g.weight_types, kind)), seed)


def specified_bytes(model: SynthModel, tensor: str, blocks: int) -> bytes:
    """The docstring's specification in plain Python integers, for the first blocks of a tensor: an independent reading."""

    def mix(z: int) -> int:
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 & MASK
        z ^= z >> 27
        z = z * 0x94D049BB133111EB & MASK
        return z ^ z >> 31

    golden = 0x9E3779B97F4A7C15
    t = model.constants(tensor)
    key = mix(mix(model.seed + golden & MASK) ^ zlib.crc32(tensor.encode()))
    assert key == t.key
    kind = model.info(tensor).type
    size = block_of(kind)[1]
    out = bytearray()
    for i in range(-(-blocks * size // 8)):
        out += struct.pack("<Q", mix(key + (i + 1) * golden & MASK))
    del out[blocks * size :]
    for start in range(0, len(out), size):
        u16 = struct.unpack_from("<H", out, start)[0]
        if kind == "f16":
            struct.pack_into("<H", out, start, u16 & 0x83FF | t.exponent - (u16 >> 10 & 1) << 10)
        elif kind == "bf16":
            struct.pack_into("<H", out, start, u16 & 0x807F | t.exponent - (u16 >> 7 & 1) << 7)
        elif kind == "q6_K":
            scale = struct.unpack_from("<H", out, start + 208)[0]
            struct.pack_into("<H", out, start + 208, t.d[scale & 3])
            for at in range(start + 192, start + 208):
                magnitude = 32 + (out[at] & 31)
                out[at] = (256 - magnitude) if out[at] & 0x80 else magnitude
        elif kind == "f32":
            half = u16 & 0x83FF | t.exponent - (u16 >> 10 & 1) << 10
            struct.pack_into("<f", out, start, struct.unpack("<e", struct.pack("<H", half))[0])
        else:
            struct.pack_into("<H", out, start, t.d[u16 & 3])
            if kind in ("q4_1", "q5_1", "q4_K", "q5_K"):
                struct.pack_into("<H", out, start + 2, t.m[u16 & 3])
            if kind in ("q4_K", "q5_K"):
                for at in range(start + 4, start + 12):
                    out[at] |= 0xA0
    return bytes(out)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_are_those_of_the_specification(kind: str) -> None:
    model, tensor = of_type(kind), "blk.1.ffn_down.weight"
    blocks = 41
    assert model.raw(tensor)[: blocks * block_of(kind)[1]].tobytes() == specified_bytes(model, tensor, blocks)


def test_known_bytes_never_change() -> None:
    """Recorded results name a seed: another stream under the same seed would make them unrepeatable."""
    digests = {kind: zlib.crc32(of_type(kind).raw("blk.0.attn_q.weight")) for kind in ("f16", "q4_1", "q4_K", "q6_K")}
    assert digests == KNOWN


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("first", [4, 8, 100])
def test_a_range_of_blocks_equals_the_same_part_of_the_whole(kind: str, first: int) -> None:
    model, tensor, size = of_type(kind), "blk.0.ffn_up.weight", block_of(kind)[1]
    part = np.empty(5 * size, np.uint8)
    fill(model.constants(tensor), part, first)
    assert np.array_equal(part, model.raw(tensor)[first * size : (first + 5) * size])


def test_chunks_join_without_a_seam() -> None:
    """A tensor larger than the generator's working set, checked around its chunk's edges."""
    model = SynthModel(replace(qwen2_5_7b(), layers=1, vocab=4096))
    tensor = "blk.0.ffn_down.weight"
    whole, size = model.raw(tensor), block_of("q6_K" if model.info(tensor).type == "q6_K" else "q4_K")[1]
    for first in range(0, len(whole) // size - 64, 2468):
        part = np.empty(64 * size, np.uint8)
        fill(model.constants(tensor), part, first)
        assert np.array_equal(part, whole[first * size : (first + 64) * size])


@pytest.mark.parametrize("kind", TYPES)
def test_weights_have_the_spread_that_keeps_activations_near_one(kind: str) -> None:
    model = of_type(kind)
    w = model.dequantize("blk.0.ffn_down.weight")
    spread = float(w.std()) * w.shape[1] ** 0.5
    assert 0.9 < spread < 1.1 and abs(float(w.mean())) < 0.12 * float(w.std()) and np.isfinite(w).all()
    assert (
        model.dequantize("blk.0.attn_norm.weight").min() > 0.7
        and model.dequantize("blk.0.attn_norm.weight").max() < 1.3
    )
    assert np.abs(model.dequantize("blk.0.attn_q.bias")).max() <= 0.125


def test_rows_of_the_7b_geometry_stay_finite_in_f16() -> None:
    """K = 18944 gives the smallest scales of the model: subnormal float16, still exact and not zero."""
    model = SynthModel(replace(qwen2_5_7b(), layers=1, vocab=256))
    for tensor in ("blk.0.ffn_down.weight", "blk.0.attn_v.weight", "blk.0.attn_k.weight"):
        w = model.dequantize(tensor)
        assert 0.97 < float(w.std()) * w.shape[1] ** 0.5 < 1.03
        assert np.array_equal(w.astype(np.float16).astype(np.float32) != 0, w != 0)


def test_seeds_tensors_and_geometries_differ() -> None:
    a, b = of_type("q4_K", 0), of_type("q4_K", 1)
    name, other = "blk.0.attn_q.weight", "blk.0.attn_output.weight"
    assert not np.array_equal(a.raw(name), b.raw(name)) and not np.array_equal(a.raw(name), a.raw(other))
    assert len({a.sha256(), b.sha256(), of_type("q6_K", 0).sha256()}) == 3 and a.sha256() == of_type("q4_K", 0).sha256()


def test_the_7b_preset_is_the_size_of_the_real_q4_k_m_file() -> None:
    model = SynthModel(PRESETS["qwen2.5-7b-q4_k_m"]())
    assert sum(t.n_bytes for t in model.tensors.values()) == pytest.approx(4.68e9, rel=2e-3)
    q6 = [n for n, t in model.tensors.items() if t.type == "q6_K"]
    assert len(q6) == 1 + 2 * 14


def test_a_type_that_a_row_cannot_hold_is_one_sentence() -> None:
    g = replace(PRESETS["smollm2-135m-q4_1"](), layers=1)
    with pytest.raises(ModelError, match=r"rows of 576 weights, which q4_K cannot hold \(blocks of 256\)"):
        SynthModel(replace(g, weight_types=dict.fromkeys(g.weight_types, "q4_K")))
    with pytest.raises(ModelError, match="type 'q9_9'"):
        SynthModel(replace(g, weight_types=dict.fromkeys(g.weight_types, "q9_9")))


@pytest.mark.parametrize("preset", ["tiny-llama", "tiny-qwen2"])
def test_the_file_holds_the_model_and_the_keys_that_llama_cpp_requires(preset: str, tmp_path: Path) -> None:
    made = SynthModel(PRESETS[preset](), 3)
    steps: list[tuple[str, int, int]] = []
    write_gguf(made, tmp_path / "deep" / "x.gguf", lambda *step: steps.append(step))
    model = open_model(tmp_path / "deep" / "x.gguf")
    assert replace(model.geometry, name="", rms_eps=0) == replace(made.geometry, name="", rms_eps=0)
    assert all(np.array_equal(model.raw(name), made.raw(name)) for name in made.tensors)
    assert steps[-1][1] == steps[-1][2] == sum(t.n_bytes for t in made.tensors.values()) // 10**6
    fields = gguf.GGUFReader(tmp_path / "deep" / "x.gguf").fields
    arch = made.geometry.architecture
    required = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
                "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size")  # fmt: skip
    assert {f"{arch}.{key}" for key in required} | {"general.architecture"} <= set(fields)
    assert fields["tokenizer.ggml.model"].contents() == "none" and model.tokenizer() is None
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["x.gguf"]


def test_a_killed_writer_leaves_no_file_of_that_name(tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    code = (
        "import sys, time; from pathlib import Path; from engine.geometry import tiny; from engine.synth import *\n"
        "write_gguf(SynthModel(tiny()), Path(sys.argv[1]), lambda w, done, of: (print(done, flush=True), time.sleep(0.2)))"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE)
    assert writer.stdout and writer.stdout.readline()
    time.sleep(0.3)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert not target.exists()
    assert [p.suffix for p in tmp_path.iterdir()] == [".part"]
    write_gguf(SynthModel(tiny()), target)
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"], "the next writer removes what a dead one left"


def test_an_interrupted_writer_keeps_the_old_file_and_cleans_up(tmp_path: Path) -> None:
    target = tmp_path / "x.gguf"
    target.write_bytes(b"old")

    def interrupt(what: str, done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(SynthModel(tiny()), target, interrupt)
    assert target.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["x.gguf"]


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot write .*; choose another place with -o\."):
        write_gguf(SynthModel(tiny()), tmp_path / "file" / "x.gguf")
