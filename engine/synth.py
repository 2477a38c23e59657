"""Synthetic weights: random blocks of a geometry's own ggml types, from a seed, equal to the bit wherever they are made.

No download and no file: a CUDA kernel can fill the same bytes on the device. This docstring is the specification
("synth/1"); every step is integer arithmetic, so NumPy and CUDA cannot differ.

**Stream.** A tensor's bytes are first filled with a counter-based random stream (SplitMix64, Steele et al. 2014):

    mix(z):  z ^= z >> 30;  z *= 0xBF58476D1CE4E5B9;  z ^= z >> 27;  z *= 0x94D049BB133111EB;  z ^= z >> 31
    G        = 0x9E3779B97F4A7C15                                   (all of it modulo 2^64)
    key      = mix(mix(seed + G) ^ crc32(tensor name in UTF-8))     (computed on the host: `SynthTensor.key`)
    word(i)  = mix(key + (i + 1) * G)

    byte j of the tensor = byte (j mod 8) of word(j div 8), little-endian; the last word is cut where the tensor ends.

The tensor is row-major: row n holds K / block weights' blocks, one after another, with no padding.

**Patches.** Then a few bytes of every block are replaced by a function of the random bytes that lie there. `u16(o)` is
the little-endian 16-bit word at byte `o` of the block; D and M are four float16 bit patterns each, chosen per tensor on
the host (`SynthTensor.d`, `.m`, as integers: the device does no float arithmetic); t = u16(0) & 3, except q6_K:

    f16     u16(0) = (u16(0) & 0x83FF) | ((E - ((u16(0) >> 10) & 1)) << 10)      E = `SynthTensor.exponent` (biased)
    bf16    u16(0) = (u16(0) & 0x807F) | ((E - ((u16(0) >> 7) & 1)) << 7)
    q4_0    u16(0) = D[t]                                      w = d (q - 8)
    q5_0    u16(0) = D[t]                                      w = d (q - 16)
    q8_0    u16(0) = D[t]                                      w = d q
    q4_1    u16(0) = D[t], u16(2) = M[t]                       w = d q + m,      m = -7.5 d
    q5_1    u16(0) = D[t], u16(2) = M[t]                       w = d q + m,      m = -15.5 d
    q4_K    u16(0) = D[t], u16(2) = M[t]; bytes 4..11 |= 0xA0  w = d sc q - dmin mn,  dmin = 7.5 d
    q5_K    the same                                           w = d sc q - dmin mn,  dmin = 15.5 d
    q6_K    t = u16(208) & 3; u16(208) = D[t];                 w = d sc (q - 32)
            each byte b of 192..207 becomes the int8  s = 32 + (b & 31), or -s where b & 0x80

0xA0 sets the top bit of every packed 6-bit scale and min of a K-quant (sc and mn are then uniform in 32..63).
f32 tensors are small (norms, biases) and always filled on the host; u = the little-endian 32-bit word in place:

    *_norm.weight   (192 + (u & 127)) / 256                    0.75 .. 1.246
    *.bias          ((u & 255) - 128) / np.float32(1024)                   -0.125 .. 0.124
    a matrix        the f16 rule applied to u & 0xFFFF, widened

**Scale.** D = float16(base x (0.75, 1, 1.25, 1.5)) with `base` such that a matrix's weights have a standard deviation of
about 1 / sqrt(K): activations stay near 1 through any number of layers, scores and logits are near N(0, 1).
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np
import psutil

from engine.backend import Progress
from engine.errors import ModelError
from engine.geometry import Geometry
from engine.tensors import TYPES, TensorInfo, block_of, dequantize, expected_shapes, ggml_type
from engine.titles import title

SPEC = "synth/1"
GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0.75, 1.0, 1.25, 1.5)
_MASK = (1 << 64) - 1
_CHUNK_WORDS = 1 << 16  # 512 KiB a step: stays in a core's L2

MIN_OVER_SCALE = {"q4_1": -7.5, "q5_1": -15.5, "q4_K": 7.5, "q5_K": 15.5}
"""m / d (or dmin / d) of the types that store one: it centres their weights on zero."""


def _moment(values: range) -> float:
    """Mean square of equally likely whole numbers."""
    return sum(v * v for v in values) / len(values)


def _k_quant_spread(top: int) -> float:
    """RMS of sc q - (top / 2) mn, with q uniform in 0..top and sc, mn independent and uniform in 32..63."""
    centre, scale = top / 2, range(32, 64)
    spread = _moment(scale) * (_moment(range(top + 1)) + centre**2) - 2 * (47.5 * centre) ** 2
    return math.sqrt(spread)


SPREAD = {
    "q4_0": math.sqrt(_moment(range(-8, 8))),
    "q5_0": math.sqrt(_moment(range(-16, 16))),
    "q8_0": math.sqrt(_moment(range(-128, 128))),
    "q4_1": math.sqrt(_moment(range(16)) - 7.5**2),
    "q5_1": math.sqrt(_moment(range(32)) - 15.5**2),
    "q4_K": _k_quant_spread(15),
    "q5_K": _k_quant_spread(31),
    "q6_K": math.sqrt(_moment(range(32, 64)) * _moment(range(-32, 32))),
}
"""Standard deviation of a weight in units of its block's d."""

_FACTOR_RMS = math.sqrt(sum(f * f for f in FACTORS) / len(FACTORS))


def mix(z: int) -> int:
    """SplitMix64's finaliser on one 64-bit word."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def tensor_key(seed: int, name: str) -> int:
    """The stream's key of one tensor: a 64-bit word."""
    return mix(mix((seed + GOLDEN) & _MASK) ^ zlib.crc32(name.encode()))


def stream_words(key: int, first: int, count: int) -> np.ndarray:
    """word(first) … word(first + count − 1): uint64 [count]."""
    start = (key + (first + 1) * GOLDEN) & _MASK
    z = np.arange(count, dtype=np.uint64)
    z *= np.uint64(GOLDEN)
    z += np.uint64(start)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


@dataclass(frozen=True)
class SynthTensor:
    """Everything that a kernel needs to fill one tensor: its type, size, key and the patches' constants."""

    info: TensorInfo
    key: int  # 64-bit
    d: tuple[int, int, int, int]  # float16 bit patterns, zeros for types without
    m: tuple[int, int, int, int]  # float16 bit patterns, zeros for types without
    exponent: int  # biased exponent E of f16, bf16 and f32 matrices, else 0

    @property
    def blocks(self) -> int:
        """Blocks of the tensor, row after row."""
        return self.info.n_bytes // block_of(self.info.type)[1]


def describe_tensor(info: TensorInfo, seed: int) -> SynthTensor:
    """The constants of one tensor; deterministic in (its name, shape, type, seed)."""
    target = 1 / math.sqrt(info.shape[-1])
    d = m = np.zeros(4, np.float16)
    exponent = 0
    if info.type in SPREAD:
        base = target / SPREAD[info.type] / _FACTOR_RMS
        d = np.array([base * f for f in FACTORS]).astype(np.float16)
        m = (d.astype(np.float64) * MIN_OVER_SCALE.get(info.type, 0.0)).astype(np.float16)
    elif len(info.shape) == 2:
        # |w| is 2^e (1 + x) or 2^(e-1) (1 + x), x uniform: RMS 2^e sqrt(7/3 · 5/8); e is rounded to a whole number.
        power = round(math.log2(target / math.sqrt(7 / 3 * 5 / 8)))
        exponent = power + (127 if info.type == "bf16" else 15)
    pattern_d, pattern_m = (tuple(int(b) for b in t.view(np.uint16)) for t in (d, m))
    return SynthTensor(info, tensor_key(seed, info.name), pattern_d, pattern_m, exponent)  # type: ignore[arg-type]


def fill(tensor: SynthTensor, out: np.ndarray, first_block: int = 0) -> None:
    """Writes the bytes of consecutive blocks into `out` (uint8, a whole number of blocks, contiguous).

    `first_block` must be a multiple of 4, so that its bytes start on a 64-bit word of the stream.
    """
    size = block_of(tensor.info.type)[1]
    assert first_block % 4 == 0 and out.size % size == 0
    step = _CHUNK_WORDS * 8 // (4 * size) * 4 * size
    for at in range(0, out.size, step):
        part = out[at : at + step]
        words = stream_words(tensor.key, (first_block * size + at) // 8, (part.size + 7) // 8)
        part[:] = words.view(np.uint8)[: part.size]
        _patch(tensor, part.reshape(-1, size))


def _patch(tensor: SynthTensor, blocks: np.ndarray) -> None:
    """Replaces the scale fields of uint8 [n, block bytes] in place, as the module's docstring lists."""
    kind = tensor.info.type
    if kind == "f32":
        _patch_f32(tensor, blocks)
        return
    at = 208 if kind == "q6_K" else 0
    head = blocks[:, at : at + 2].copy().view(np.uint16)[:, 0]
    if kind == "f16":
        head = _patch_half(head, tensor.exponent)
    elif kind == "bf16":
        head = ((head & 0x807F) | ((tensor.exponent - ((head >> 7) & 1)) << 7)).astype(np.uint16)
    else:
        pick = head & 3
        head = np.array(tensor.d, np.uint16)[pick]
        if kind in MIN_OVER_SCALE:
            blocks[:, 2:4] = np.array(tensor.m, np.uint16)[pick, None].view(np.uint8)
        if kind in ("q4_K", "q5_K"):
            blocks[:, 4:12] |= 0xA0
        elif kind == "q6_K":
            scales = blocks[:, 192:208]
            magnitude = 32 + (scales & 31)
            blocks[:, 192:208] = np.where(scales & 0x80, 256 - magnitude.astype(np.int16), magnitude).astype(np.uint8)
    blocks[:, at : at + 2] = head[:, None].view(np.uint8)


def _patch_half(word: np.ndarray, exponent: int) -> np.ndarray:
    return ((word & 0x83FF) | ((exponent - ((word >> 10) & 1)) << 10)).astype(np.uint16)


def _patch_f32(tensor: SynthTensor, blocks: np.ndarray) -> None:
    word = blocks.view(np.uint32)[:, 0]
    if len(tensor.info.shape) == 2:
        value = _patch_half((word & 0xFFFF).astype(np.uint16), tensor.exponent).view(np.float16).astype(np.float32)
    elif tensor.info.name.endswith(".bias"):
        value = ((word & 255).astype(np.float32) - 128) / np.float32(1024)
    else:
        value = (192 + (word & 127).astype(np.float32)) / np.float32(256)
    blocks[:] = value[:, None].view(np.uint8)


class SynthModel:
    """A model of random blocks that are made when asked for; the same seed gives the same bytes on every backend."""

    synthetic = True
    path = None
    refusal = ""

    def __init__(self, geometry: Geometry, seed: int = 0, *, note: str = "") -> None:
        """Raises ModelError when a matrix's row does not fill whole blocks of its type, or a type is unknown."""
        self.geometry, self.seed, self.note = geometry, seed, note
        self.name = geometry.name or f"{geometry.architecture}-{geometry.layers}x{geometry.hidden}"
        self.title = title(self.name)
        self.tensors: dict[str, TensorInfo] = {}
        for tensor, shape in expected_shapes(geometry).items():
            kind = geometry.weight_types.get(tensor, "f32")
            if kind not in TYPES:
                raise ModelError(
                    f"geometry {self.name!r}: tensor {tensor} has type {kind!r}; use one of {', '.join(TYPES)}."
                )
            weights, size = block_of(kind)
            if shape[-1] % weights:
                raise ModelError(
                    f"geometry {self.name!r}: tensor {tensor} has rows of {shape[-1]} weights, which {kind} cannot hold "
                    f"(blocks of {weights}); give it another type."
                )
            self.tensors[tensor] = TensorInfo(tensor, shape, kind, math.prod(shape) // weights * size)

    def info(self, tensor: str) -> TensorInfo:
        """What is known of a tensor. Raises ModelError where there is none of that name."""
        if tensor not in self.tensors:
            raise ModelError(f"synthetic model {self.name!r} has no tensor {tensor!r}.")
        return self.tensors[tensor]

    def constants(self, tensor: str) -> SynthTensor:
        """What a device kernel needs to fill this tensor by itself."""
        return describe_tensor(self.info(tensor), self.seed)

    def raw(self, tensor: str) -> np.ndarray:
        """Its blocks: uint8 [n_bytes], made now."""
        out = np.empty(self.info(tensor).n_bytes, np.uint8)
        fill(self.constants(tensor), out)
        return out

    def dequantize(self, tensor: str) -> np.ndarray:
        """Its values: float32 of the tensor's shape."""
        return dequantize(self.raw(tensor), self.info(tensor))

    def sha256(self) -> str:
        """Identity of the weights: a hash of the specification's version, the geometry and the seed."""
        geometry = asdict(self.geometry)
        if not geometry["window"]:
            del geometry["window"]  # without one the weights are those of records made before geometries had windows
        identity = {"spec": SPEC, "geometry": geometry, "seed": self.seed}
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def tokenizer(self) -> None:
        """A synthetic model has no vocabulary."""
        return None


def write_gguf(model: SynthModel, path: Path, progress: Progress | None = None) -> None:
    """Writes the model as a GGUF that llama.cpp loads (tokenizer `none`), one tensor in memory at a time.

    The file appears under its name only when whole. Raises ModelError where it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_parts_of_the_dead(path)
        _write(model, part, progress)
        part.replace(path)
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or part}"
        raise ModelError(f"cannot write {path} ({reason}); choose another place with -o.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def _remove_parts_of_the_dead(path: Path) -> None:
    """A killed writer leaves up to 5 GB under a temporary name, which holds its process id."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        pid = left.name.split(".")[-2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)


def _write(model: SynthModel, path: Path, progress: Progress | None) -> None:
    g = model.geometry
    writer = gguf.GGUFWriter(path, g.architecture)
    writer.add_name(f"{model.name} (synthetic, seed {model.seed})")
    writer.add_description(f"random blocks, {SPEC}")
    writer.add_block_count(g.layers)
    writer.add_context_length(g.context)
    writer.add_embedding_length(g.hidden)
    writer.add_feed_forward_length(g.ffn)
    writer.add_head_count(g.heads)
    writer.add_head_count_kv(g.kv_heads)
    writer.add_key_length(g.head_dim)
    writer.add_value_length(g.head_dim)
    writer.add_rope_dimension_count(g.head_dim)
    writer.add_rope_freq_base(g.rope_base)
    writer.add_layer_norm_rms_eps(g.rms_eps)
    writer.add_vocab_size(g.vocab)
    writer.add_tokenizer_model("none")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for info in model.tensors.values():
        writer.add_tensor_info(
            info.name, info.shape, np.dtype(np.float32), info.n_bytes, raw_dtype=ggml_type(info.type)
        )
    total, done = sum(info.n_bytes for info in model.tensors.values()), 0
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, info in model.tensors.items():
            writer.write_tensor_data(model.raw(name))
            done += info.n_bytes
            if progress:
                progress("writing, MB", done // 10**6, total // 10**6)
        for file in writer.fout or ():
            file.flush()
            os.fsync(file.fileno())
    finally:
        writer.close()
