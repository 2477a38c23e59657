"""Weights on the device: every matrix as f16 [N, K] in one resident cache, dequantised once by our own kernels.

The token embedding stays as its ggml blocks, of which a prefill reads a few rows; a tied head has an f16 copy beside it.

Matrices that the `concat` lever joins lie one after another (q, k, v; gate, up), so that a GEMM over all their rows and
a GEMM over one of them read the same bytes: the lever changes views, never the cache.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np

from engine.backend import Progress
from engine.cuda import jit
from engine.cuda.arena import ALIGNMENT, Arena, align
from engine.errors import EngineError
from engine.geometry import Geometry
from engine.synth import SynthTensor, describe_tensor
from engine.tensors import Model, TensorInfo

EMBEDDING = "token_embd.weight"
GROUPS = (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",))
"""Matrices of one layer that share a buffer, in the order of their rows."""

_SYNTH_PATCH = {
    "q4_0": "patch_blocks<18, 0>", "q5_0": "patch_blocks<22, 0>", "q8_0": "patch_blocks<34, 0>",
    "q4_1": "patch_blocks<20, 1>", "q5_1": "patch_blocks<24, 1>", "q4_K": "patch_blocks<144, 2>",
    "q5_K": "patch_blocks<176, 2>", "q6_K": "patch_blocks<210, 3>",
    "f16": "patch_halves<false>", "bf16": "patch_halves<true>",
}  # fmt: skip
"""Second step of the device generator for each type that it makes; f32 tensors are filled on the host."""


class Weights:
    """The f16 cache and the f32 vectors (norms, biases) of a model, resident until `close`."""

    def __init__(self, model: Model, stream: int, progress: Progress | None = None) -> None:
        """Loads everything; on return the stream may still be at work on it.

        Raises EngineError where the device's memory does not hold the f16 cache.
        """
        g = model.geometry
        self.matrices: dict[str, int] = {}  # tensor → device address of its f16 [N, K]
        self.vectors: dict[str, int] = {}  # tensor → device address of its f32 [N]
        groups = list(_groups(g))
        names = [tensor for group in groups for tensor in group]
        embedding = model.info(EMBEDDING)
        vectors = [t for t, info in model.tensors.items() if len(info.shape) == 1]
        sizes = {group[0]: sum(2 * _count(model.info(t)) for t in group) for group in groups}
        vector_offsets, total = {}, 0
        for tensor in vectors:
            vector_offsets[tensor], total = total, align(total + 4 * _count(model.info(tensor)))
        self.arena = Arena(
            f"the f16 weight cache of {model.name}",
            {**sizes, "vectors": max(total, ALIGNMENT), "embedding": embedding.n_bytes},
        )
        staging = Arena("the staging buffer of weight blocks", {"blocks": max(model.info(t).n_bytes for t in names)})
        self.embedding_type = embedding.type
        try:
            _load_blocks(model, embedding, self.arena["embedding"], stream)
            done, of = embedding.n_bytes, embedding.n_bytes + sum(model.info(t).n_bytes for t in names)
            for group in groups:
                address = self.arena[group[0]]
                for tensor in group:
                    info = model.info(tensor)
                    self.matrices[tensor] = address
                    _load_blocks(model, info, staging["blocks"], stream)
                    dequantize(info, staging["blocks"], address, stream)
                    address += 2 * _count(info)
                    done += info.n_bytes
                    if progress:
                        progress("loading weights", done, of)
            self._load_vectors(model, vector_offsets, total, stream)
            _synchronize(stream)  # the staging buffer must outlive its readers
        finally:
            staging.close()

    def _load_vectors(self, model: Model, offsets: dict[str, int], total: int, stream: int) -> None:
        """Every f32 vector in one copy."""
        host = np.zeros(max(total, 4) // 4, np.float32)
        for tensor, at in offsets.items():
            values = model.dequantize(tensor).ravel()
            host[at // 4 : at // 4 + values.size] = values
            self.vectors[tensor] = self.arena["vectors"] + at
        _copy_in(self.arena["vectors"], host.view(np.uint8), stream)

    def matrix(self, tensor: str) -> int:
        """Device address of a matrix; the head of a tied model is the embedding's own."""
        return self.matrices.get(tensor) or self.matrices[EMBEDDING]

    @property
    def embedding(self) -> int:
        """Device address of the token embedding's ggml blocks, of type `embedding_type`."""
        return self.arena["embedding"]

    def vector(self, tensor: str) -> int:
        """Device address of a norm's weight or a bias; 0 where the model has none of that name."""
        return self.vectors.get(tensor, 0)

    def close(self) -> None:
        """Frees the cache. Idempotent."""
        self.arena.close()


def _groups(g: Geometry) -> Iterator[tuple[str, ...]]:
    for layer in range(g.layers):
        for group in GROUPS:
            yield tuple(f"blk.{layer}.{matrix}.weight" for matrix in group)
    yield (EMBEDDING if g.tied_embedding else "output.weight",)


def _count(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64))


def _load_blocks(model: Model, info: TensorInfo, out: int, stream: int) -> None:
    """A tensor's blocks to device address `out`: made there for synthetic models, else copied."""
    if model.synthetic and info.type in _SYNTH_PATCH:
        assert model.seed is not None
        synthesise(describe_tensor(info, model.seed), out, stream)
    else:
        _copy_in(out, model.raw(info.name), stream)


def dequantize(info: TensorInfo, blocks: int, out: int, stream: int) -> None:
    """Launches the dequantisation of a tensor's blocks (device address) into f16 at `out`."""
    eighths, rest = divmod(_count(info), 8)
    if rest:
        raise EngineError(
            f"tensor {info.name} has {_count(info)} weights, which is not a multiple of 8; the CUDA engine cannot load it, "
            "use the CPU backend."
        )
    kernel = jit.kernel("dequant", symbol=f"dequantize<{info.type.upper()}>")
    kernel(stream, (-(-eighths // 256),), (256,),
           ctypes.c_void_p(blocks), ctypes.c_void_p(out), ctypes.c_ulonglong(eighths))  # fmt: skip


def synthesise(tensor: SynthTensor, out: int, stream: int) -> None:
    """Launches the generator of a synthetic tensor's blocks at `out` (16-byte aligned); any type but f32."""
    n_bytes, kind = tensor.info.n_bytes, tensor.info.type
    fill_words(out, n_bytes, tensor.key, stream)
    patch = jit.kernel("synth", symbol=_SYNTH_PATCH[kind])
    grid = (-(-tensor.blocks // 256),)
    if kind in ("f16", "bf16"):
        patch(
            stream, grid, (256,), ctypes.c_void_p(out), ctypes.c_ulonglong(tensor.blocks), ctypes.c_int(tensor.exponent)
        )
    else:
        patch(stream, grid, (256,), ctypes.c_void_p(out), ctypes.c_ulonglong(tensor.blocks),
              ctypes.c_ulonglong(_packed(tensor.d)), ctypes.c_ulonglong(_packed(tensor.m)))  # fmt: skip


def fill_words(out: int, n_bytes: int, key: int, stream: int) -> None:
    """Launches the plain random stream of `key` over n_bytes at `out` (16-byte aligned)."""
    jit.kernel("synth", symbol="fill_words")(
        stream, (-(-n_bytes // 4096),), (256,),
        ctypes.c_void_p(out), ctypes.c_ulonglong(n_bytes), ctypes.c_ulonglong(key),
    )  # fmt: skip


def fill_random_f16(out: int, count: int, key: int, stream: int) -> None:
    """Launches `count` random f16 values of magnitude 1/16 … 1/4 at `out`: operands on which to time a GEMM."""
    fill_words(out, 2 * count, key, stream)
    jit.kernel("synth", symbol="patch_halves<false>")(
        stream, (-(-count // 256),), (256,), ctypes.c_void_p(out), ctypes.c_ulonglong(count), ctypes.c_int(12),
    )  # fmt: skip


def _packed(halves: tuple[int, int, int, int]) -> int:
    return sum(half << 16 * i for i, half in enumerate(halves))


def _copy_in(out: int, host: np.ndarray, stream: int) -> None:
    """Host bytes to the device, in stream order. From pageable memory: on return the host's bytes are no longer needed."""
    from cupy.cuda import runtime

    host = np.ascontiguousarray(host)
    runtime.memcpyAsync(out, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream)


def _synchronize(stream: int) -> None:
    from cupy.cuda import runtime

    runtime.streamSynchronize(stream)
