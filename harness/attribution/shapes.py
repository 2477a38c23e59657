"""What grids and copies tell of a recorded forward: its rows, and whether a model's widths fit them.

A norm that launches one block a row says how many rows a forward has. An element-wise kernel launches one thread for a
few elements, so its grid says how many elements it had, up to a block, and rows × width must be that number for one of
the model's widths. Neither is true of a persistent kernel (a GEMM that launches as many blocks as there are SMs), so
products and attentions are not asked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.attribution.classify import Match, split_name

if TYPE_CHECKING:
    from engine.geometry import Geometry

BLOCK_A_ROW = {
    "rms_norm_f32": "norm", "vllm::rms_norm_kernel": "norm", "vllm::fused_add_rms_norm_kernel": "norm",
    "at::native::vectorized_gather_kernel": "embedding",
}  # fmt: skip
"""Kernels whose grid has as many blocks in x as the forward has rows (norms; PyTorch's gather of the embedding, whose y
goes over the width) → their family."""
SIZED = ("elementwise", "convert", "swiglu", "kv_store")
"""Families whose grids grow with their elements."""
VECTORS = (1, 2, 4, 8, 16)
"""Elements of a thread."""
LEAST_BLOCKS = 32
"""A smaller grid says too little: it is rounded up to whole blocks."""
FITS, CONTRADICTS = 0.5, 0.2
"""Of the sized launches: at least half must be rows × a width of the model to speak for it, under a fifth speaks
against it. The rest are masks, biases and tables."""


class Rows:
    """Rows of a forward, from the grid of what launches one block a row ahead of its first product."""

    def __init__(self, launches: pd.DataFrame, matches: dict[tuple[str, str], Match]) -> None:
        names = {n for (n, _), m in matches.items() if BLOCK_A_ROW.get(split_name(n)[0]) == m.cls}
        self.grid = launches["grid"].to_numpy(object)
        told = np.flatnonzero(launches["name"].isin(names).to_numpy())
        embedding = (launches["class"] == "embedding").to_numpy(bool)
        self.rows = np.array([i for i in told if embedding[i] or self.grid[i].endswith(",1,1")], np.int64)

    def of(self, row: int, since: int = 0) -> int | None:
        """Rows of the last such launch in [since, row); None where there is none."""
        at = int(np.searchsorted(self.rows, row)) - 1
        return int(self.grid[self.rows[at]].split(",")[0]) if at >= 0 and self.rows[at] >= since else None


@dataclass(frozen=True)
class Sized:
    """What the element-wise launches of some forwards say of a number of rows and a model's widths."""

    launches: int  # that were asked
    fitting: int  # that are rows × a width
    other_rows: int | None  # what most of them say instead, where they agree on another number

    @property
    def fits(self) -> bool:
        """Enough of them speak for rows and model."""
        return self.launches > 0 and self.fitting >= FITS * self.launches

    @property
    def contradicts(self) -> bool:
        """So many of them, and so few that fit, that rows or model must be wrong."""
        return self.launches > 0 and self.fitting < CONTRADICTS * self.launches


def widths_of(geometry: Geometry) -> list[int]:
    """Row lengths of the activations between a model's products; halves are RoPE's."""
    g = geometry
    found = [g.hidden, g.ffn, 2 * g.ffn, g.q_dim, g.kv_dim, g.q_dim + 2 * g.kv_dim, g.q_dim // 2, g.kv_dim // 2]
    return sorted(set(found))


def sized(launches: pd.DataFrame, forwards: list[tuple[int, int, int]], geometry: Geometry) -> Sized:
    """Asks the element-wise launches inside each forward, given as (first row of the table, last row, rows M)."""
    widths = widths_of(geometry)
    cls = launches["class"].isin(SIZED).to_numpy() & (launches["kind"] == "kernel").to_numpy()
    grid, block = launches["grid"].to_numpy(object), launches["block"].to_numpy(object)
    asked: Counter[tuple[int, int, int]] = Counter()
    for first, last, rows in forwards:
        for i in (first + np.flatnonzero(cls[first : last + 1])).tolist():
            blocks, threads = volume(grid[i]), volume(block[i])
            if blocks >= LEAST_BLOCKS and threads:
                asked[blocks, threads, rows] += 1
    fitting = sum(n for (blocks, threads, rows), n in asked.items() if _fits(blocks, threads, rows, widths))
    votes: Counter[int] = Counter()
    for (blocks, threads, _), n in asked.items():
        for told in _rows_told(blocks, threads, widths):
            votes[told] += n
    total = sum(asked.values())
    told, most = max(votes.items(), key=lambda v: (v[1], -v[0]), default=(0, 0))
    return Sized(total, fitting, told if most >= FITS * total and most > fitting else None)


def volume(dims: str) -> int:
    """Blocks of a grid or threads of a block, "x,y,z"; 0 where the source tells none."""
    return int(np.prod([int(d) for d in dims.split(",")], dtype=np.int64)) if dims else 0


def _fits(blocks: int, threads: int, rows: int, widths: list[int]) -> bool:
    return any(-(-rows * w // (threads * v)) == blocks for w in widths for v in VECTORS)


def _rows_told(blocks: int, threads: int, widths: list[int]) -> set[int]:
    """Every number of rows that this grid may stand for."""
    found: set[int] = set()
    for w in widths:
        for v in VECTORS:
            low, high = (blocks - 1) * threads * v // w + 1, blocks * threads * v // w
            if low == high:  # a grid that fits several numbers tells none
                found.add(low)
    return found
