"""Models in GGUF files: every type, split files, geometry; against the gguf package's own reader."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ModelError
from engine.geometry import tiny
from engine.gguf_model import open_model
from engine.synth import SynthModel, write_gguf
from engine.tensors import TYPES, ggml_type


def test_the_real_file_reads_as_the_gguf_packages_reader_reads_it(smollm2: Path) -> None:
    model, reader = open_model(smollm2), gguf.GGUFReader(smollm2)
    assert list(model.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        info = model.info(t.name)
        assert (info.shape, ggml_type(info.type)) == (tuple(reversed(t.shape.tolist())), t.tensor_type)
        assert model.offset(t.name) == t.data_offset
        assert np.array_equal(model.raw(t.name), t.data.view(np.uint8).reshape(-1))
    for key, value in model.metadata.items():
        field = reader.fields[key]
        if isinstance(value, int | float | str):
            assert value == field.contents()
    assert list(model.metadata["tokenizer.ggml.tokens"]) == reader.fields["tokenizer.ggml.tokens"].contents()


def test_the_real_files_geometry(smollm2: Path) -> None:
    g = open_model(smollm2).geometry
    assert (g.architecture, g.layers, g.hidden, g.ffn, g.heads, g.kv_heads, g.head_dim) == (
        "llama",
        30,
        576,
        1536,
        9,
        3,
        64,
    )
    assert (g.vocab, g.context, g.rope_base, g.rope_style, g.qkv_bias) == (49152, 8192, 1e5, "norm", False)
    assert g.tied_embedding and g.rms_eps == pytest.approx(1e-5)
    assert g.weight_type("output.weight") == "q8_0"  # the embedding is not of the matrices' type
    assert g.weight_type("blk.7.ffn_down.weight") == "q4_1"


def test_the_real_files_hash_is_that_of_its_bytes(smollm2: Path) -> None:
    assert open_model(smollm2).sha256() == hashlib.sha256(smollm2.read_bytes()).hexdigest()


def test_a_changed_file_has_another_hash(small_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copy.gguf"
    raw = bytearray(small_file.read_bytes())
    copy.write_bytes(raw)
    before = open_model(copy).sha256()
    assert before == open_model(copy).sha256() == hashlib.sha256(raw).hexdigest()
    raw[-1] ^= 1
    copy.write_bytes(raw)
    assert open_model(copy).sha256() == hashlib.sha256(raw).hexdigest() != before


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_round_trips_through_a_file(kind: str, tmp_path: Path) -> None:
    g = replace(tiny("llama"), layers=1, vocab=64)
    types = {name: kind for name in g.weight_types if not name.startswith("blk.1.")}
    made = SynthModel(replace(g, weight_types=types), seed=2)
    write_gguf(made, tmp_path / "x.gguf")
    model = open_model(tmp_path / "x.gguf")
    assert model.tensors == made.tensors and model.geometry.weight_types == types
    reader = {t.name: t for t in gguf.GGUFReader(tmp_path / "x.gguf").tensors}
    for name in model.tensors:
        assert np.array_equal(model.raw(name), made.raw(name))
        values = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type).reshape(model.info(name).shape)
        assert np.array_equal(model.dequantize(name), values)
        assert model.dequantize(name).dtype == np.float32


@pytest.mark.parametrize("kind", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16"])
def test_values_quantised_by_the_gguf_package_come_back_near(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    made = SynthModel(
        replace(
            tiny("qwen2"), layers=1, vocab=32, weight_types={n: "f32" for n in tiny().weight_types if ".1." not in n}
        )
    )
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen2")
    g = made.geometry
    for add, value in (
        (writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, g.hidden), (writer.add_feed_forward_length, g.ffn),
        (writer.add_head_count, g.heads), (writer.add_head_count_kv, g.kv_heads), (writer.add_layer_norm_rms_eps, 1e-6),
    ):  # fmt: skip
        add(value)
    wanted = {}
    for name, info in made.tensors.items():
        wanted[name] = rng.standard_normal(info.shape).astype(np.float32)
        if len(info.shape) == 2:
            writer.add_tensor(name, gguf.quants.quantize(wanted[name], ggml_type(kind)), raw_dtype=ggml_type(kind))
        else:
            writer.add_tensor(name, wanted[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = open_model(tmp_path / "q.gguf")
    assert model.geometry.rope_base == 10000.0  # the format's default
    worst = {"q4_0": 0.12, "q4_1": 0.11, "q5_0": 0.06, "q5_1": 0.05, "q8_0": 0.01, "bf16": 0.003, "f16": 0.0005}[kind]
    for name, values in wanted.items():
        error = np.linalg.norm(model.dequantize(name) - values) / np.linalg.norm(values)
        assert error < (worst if values.ndim == 2 else 1e-9)


def split(made: SynthModel, folder: Path, tensors: int) -> list[Path]:
    """The model as shards of at most `tensors` tensors, written by the gguf package's own splitter."""
    writer = gguf.GGUFWriter(folder / "m.gguf", made.geometry.architecture, split_max_tensors=tensors)
    write_gguf(made, folder / "whole.gguf")
    reader = gguf.GGUFReader(folder / "whole.gguf")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            writer.add_key_value(name, field.contents(), field.types[0])
    for t in reader.tensors:
        writer.add_tensor(t.name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("m-*.gguf"))


def test_any_shard_opens_the_whole_split_model(small: SynthModel, tmp_path: Path) -> None:
    shards = split(small, tmp_path, 6)
    assert [p.name for p in shards] == [f"m-{i + 1:05d}-of-{len(shards):05d}.gguf" for i in range(len(shards))] and len(
        shards
    ) == 3
    models = [open_model(shard) for shard in shards]
    for model in models:
        assert set(model.tensors) == set(small.tensors)
        assert all(np.array_equal(model.raw(name), small.raw(name)) for name in small.tensors)
        assert model.geometry == models[0].geometry and model.sha256() == models[0].sha256()


def test_a_missing_or_exchanged_shard_is_one_sentence(small: SynthModel, tmp_path: Path) -> None:
    shards = split(small, tmp_path, 6)
    kept = shards[1].read_bytes()
    shards[1].unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf is missing: shard 2 of 3"):
        open_model(shards[2])
    shards[1].write_bytes(shards[2].read_bytes())
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf: split\.no is 2, where its name says 1"):
        open_model(shards[0])
    shards[1].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(ModelError, match=r"m-00002-of-00003\.gguf: tensor .* truncated"):
        open_model(shards[0])
    shards[1].write_bytes(kept)
    shards[0].rename(tmp_path / "m-00001-of-00009.gguf")
    with pytest.raises(ModelError, match=r"split\.count is 3, but the name says 9"):
        open_model(tmp_path / "m-00001-of-00009.gguf")


def test_an_unknown_tensor_is_one_sentence(small_file: Path, small: SynthModel) -> None:
    for model in (open_model(small_file), small):
        with pytest.raises(ModelError, match="no tensor 'x'"):
            model.raw("x")
