"""What a forward works on: the KV cache, the reused buffers, and the rows that one op leaves for the next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.cpu.threads import Threads
from engine.cpu.weights import Weights
from engine.geometry import Geometry
from engine.levers import Levers


class Buffers:
    """Float32 arrays that live as long as the engine and only grow, so that a timed pass allocates nothing large."""

    def __init__(self) -> None:
        self._held: dict[str, np.ndarray] = {}

    def get(self, name: str, rows: int, columns: int) -> np.ndarray:
        """[rows, columns], contiguous, contents undefined."""
        held = self._held.get(name)
        if held is None or held.size < rows * columns:
            held = self._held[name] = np.empty(rows * columns, np.float32)
        return held[: rows * columns].reshape(rows, columns)

    def drop(self, name: str) -> None:
        """Frees one buffer."""
        self._held.pop(name, None)


class Cache:
    """Keys and values of every layer, float32 [layers, Hkv, capacity, d]; row p is position p."""

    def __init__(self, geometry: Geometry, capacity: int) -> None:
        shape = (geometry.layers, geometry.kv_heads, capacity, geometry.head_dim)
        self.capacity = capacity
        self.keys = np.empty(shape, np.float32)
        self.values = np.empty(shape, np.float32)


def rope_table(geometry: Geometry, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position · base^(−2i/d), float32 [count, d/2]; angles in float64, as positions reach 10⁴ radians."""
    exponent = np.arange(0, geometry.head_dim, 2) / geometry.head_dim
    angle = np.arange(first, first + count)[:, None] * geometry.rope_base**-exponent
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


@dataclass
class Forward:
    """One forward in flight. Ops read and write these fields; nothing else is shared between them."""

    weights: Weights
    levers: Levers
    threads: Threads
    buffers: Buffers
    cache: Cache
    past: int
    caller_ids: np.ndarray
    rope: tuple[np.ndarray, np.ndarray]
    rows: dict[str, np.ndarray] = field(default_factory=dict)  # output of a matrix or of an op kind, [m, columns]
    ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    residual: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))
    delta: np.ndarray | None = None  # what the next norm adds to the residual
    q: np.ndarray = field(default_factory=lambda: np.empty((0, 0, 0, 0), np.float32))  # [Hkv, rows, G, d]
    logits: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.float32))

    @property
    def geometry(self) -> Geometry:
        """The model's shapes."""
        return self.weights.geometry

    def buffer(self, name: str, rows: int, columns: int) -> np.ndarray:
        """[rows, columns] of the engine's buffers, contents undefined."""
        return self.buffers.get(name, rows, columns)
