"""What grids and copies tell of a recorded forward: its rows, and whether a model's widths fit them.

A norm that launches one block a row says how many rows a forward has. An element-wise kernel launches one thread for a
few elements, so its grid says how many elements it had, up to a block, and rows × width must be that number for one of
the model's widths. Neither is true of a persistent kernel (a GEMM that launches as many blocks as there are SMs), so
products and attentions are not asked.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
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
"""Elements of a thread, where the kernel's name does not tell."""
TOLD_VECTORS = (
    (re.compile(r"at::native::elementwise_kernel<\d+, (\d+)"), ()),
    (re.compile(r"at::native::unrolled_elementwise_kernel<"), (4, 8)),
    (re.compile(r"at::native::vectorized_elementwise_kernel<"), (4, 8, 16)),
    (re.compile(r"_vec(\d+)<"), ()),
    (re.compile(r"unary_gated_op_kernel<|k_set_rows<"), (1,)),
)
"""Kernels whose name tells the elements of a thread (its group), or that launch a few numbers of them."""
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
    misfit: str = ""  # a family whose one width is another than the model's, as a clause

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
    widths = {c: widths_of(geometry) for c in SIZED}
    widths["swiglu"] = [geometry.ffn, 2 * geometry.ffn]
    widths["kv_store"] = [geometry.kv_dim, 2 * geometry.kv_dim]
    cls = launches["class"].to_numpy(object)
    inside = np.isin(cls, SIZED) & (launches["kind"] == "kernel").to_numpy()
    name, grid, block = (launches[c].to_numpy(object) for c in ("name", "grid", "block"))
    asked: Counter[tuple[str, str, str, str, int]] = Counter()
    for first, last, rows in forwards:
        for i in (first + np.flatnonzero(inside[first : last + 1])).tolist():
            asked[cls[i], name[i], grid[i], block[i], rows] += 1
    votes: Counter[int] = Counter()
    of_one_width: dict[str, list[tuple[bool, bool]]] = {"swiglu": [], "kv_store": []}  # (fits, is rows × another width)
    total = fitting = 0
    for (c, n, g, b, rows), count in asked.items():
        blocks, threads = volume(g), volume(b)
        if blocks < LEAST_BLOCKS or not threads:
            continue
        per_block = [threads * v for v in _vectors(n)]
        fits = any(-(-rows * w // p) == blocks for w in widths[c] for p in per_block)
        if not fits and blocks == rows:
            continue  # a block a row, whatever its width
        total += count
        fitting += count * fits
        if c in of_one_width:
            of_one_width[c].append((fits, any(_is_width(blocks, p, rows) for p in per_block)))
        for told in _rows_told(blocks, per_block, widths[c]):
            votes[told] += count
    told, most = max(votes.items(), key=lambda v: (v[1], -v[0]), default=(0, 0))
    misfit = ""
    for c, found in of_one_width.items():
        if found and all(other and not fits for fits, other in found):
            misfit = f"the grids of {c} are rows of another width than {widths[c][0]}"
    return Sized(total, fitting, told if most >= FITS * total and most > fitting else None, misfit)


def _is_width(blocks: int, elements: int, rows: int) -> bool:
    """Whether `blocks` of so many elements are `rows` rows of a width that models have: a multiple of 32."""
    if elements > 32 * rows:
        return False  # any grid would be
    width = blocks * elements // rows // 32 * 32
    return width > 0 and -(-rows * width // elements) == blocks


@lru_cache(maxsize=1024)
def _vectors(name: str) -> tuple[int, ...]:
    """How many elements a thread of this kernel may have."""
    for pattern, several in TOLD_VECTORS:
        if found := pattern.search(name):
            return several or (int(found[1]),)
    return VECTORS


def volume(dims: str) -> int:
    """Blocks of a grid or threads of a block, "x,y,z"; 0 where the source tells none."""
    return int(np.prod([int(d) for d in dims.split(",")], dtype=np.int64)) if dims else 0


def _rows_told(blocks: int, per_block: list[int], widths: list[int]) -> set[int]:
    """Every number of rows that this grid may stand for; elements a block: `per_block`."""
    found: set[int] = set()
    for w in widths:
        for elements in per_block:
            low, high = (blocks - 1) * elements // w + 1, blocks * elements // w
            if low == high:  # a grid that fits several numbers tells none
                found.add(low)
    return found
