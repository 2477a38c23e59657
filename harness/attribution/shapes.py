"""What grids and dimensions tell of a recorded forward: its rows, and whether a model's widths explain them.

A norm that launches one block a row says how many rows a forward has. An element-wise kernel launches one thread for a few
elements, one number of them in the whole trace, so its grid says how many elements it had, up to a block; a product whose
kernel's name tells its tile launches a block a tile; an attention may launch a block a head; a profiler may write the
dimensions themselves. All of it must be explained by rows × a width of the model that the launch's place in its layer allows.

What every layer launches and no width explains contradicts the model; what runs a few times a forward (masks, tables) does
not. A dimension counts as checked only if the same launches contradict that dimension changed by a quarter or more. Persistent
kernels (a block or cluster an SM, whatever the shape) are not asked.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.attribution.classify import Match, split_name

if TYPE_CHECKING:
    from engine.geometry import Geometry
    from harness.attribution.roles import Forward

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
    (re.compile(r"at::native::unrolled_elementwise_kernel<.*?std::array<char\*, \d+ul>, (\d+),"), ()),
    (re.compile(r"at::native::unrolled_elementwise_kernel<"), (4, 8)),
    (re.compile(r"at::native::vectorized_elementwise_kernel<16,"), (16,)),
    (re.compile(r"at::native::vectorized_elementwise_kernel<8,"), (8,)),
    (re.compile(r"at::native::vectorized_elementwise_kernel<"), (4, 8)),
    (re.compile(r"_vec(\d+)<"), ()),
    (re.compile(r"unary_gated_op_kernel<|k_set_rows<|k_bin_bcast_unravel<"), (1,)),
    (re.compile(r"k_bin_bcast<"), (2,)),
)
"""Kernels whose name tells the elements of a thread (its group), or that launch a few numbers of them: a multiple of the
vector's width (PyTorch's CUDALoops.cuh: 4 a thread in older versions; 8, or 16 where in- and outputs are one byte, in newer)."""
_VECTORIZED = "at::native::vectorized_elementwise_kernel<"
_SMALL_TYPES = re.compile(r"\b(?:bool|(?<!array<)char|Float8\w*|FillFunctor)\b")
"""What PyTorch may give more elements a thread than the rest of a trace's vectorized kernels."""
LEAST_BLOCKS = 32
"""A smaller grid says too little: it is rounded up to whole blocks."""
MOST_SMS = 304
"""Of any GPU (AMD MI300X). A product with fewer blocks may be persistent."""
_TILE = re.compile(
    r"_tilesize(\d+)x(\d+)x|(?:cutlass|ampere|turing|volta|maxwell)_(?!.*stream)\w*?gemm\w*?_(\d+)x(\d+)_"
)
_HEADS_IN_Z = re.compile(r"\bflash_fwd_kernel<.*?Flash_fwd_kernel_traits<(\d+), (\d+),")
"""FlashAttention 2 launches (⌈queries / kBlockM⌉, batch, heads) blocks: flash_fwd_launch_template.h, run_flash_fwd."""
_HEAD_A_BLOCK = re.compile(r"\brope_(?:neox|norm)<")
"""llama.cpp's RoPE launches a block for every row of every head, in x (rope.cu)."""
PADDED_VOCAB = 1024
"""Rows that an engine or a file may add to the vocabulary to round it up; of a small one, up to an eighth."""
DIMENSIONS = {"hidden": "hidden", "ffn": "ffn", "heads": "q", "kv_heads": "kv", "vocab": "vocab"}
"""Field of a geometry → what its width is called."""
_OTHERS = tuple(sorted({a / b for a in range(1, 9) for b in range(1, 9) if not 0.8 < a / b < 1.25}))


class Rows:
    """Rows of a forward: from the dimensions of its products, or the grid of what launches one block a row ahead of them."""

    def __init__(self, launches: pd.DataFrame, matches: dict[tuple[str, str], Match]) -> None:
        names = {n for (n, _), m in matches.items() if BLOCK_A_ROW.get(split_name(n)[0]) == m.cls}
        self.grid = launches["grid"].to_numpy(object)
        self.shape = launches["shape"].to_numpy(object)
        told = np.flatnonzero(launches["name"].isin(names).to_numpy())
        embedding = (launches["class"] == "embedding").to_numpy(bool)
        self.rows = np.array([i for i in told if embedding[i] or self.grid[i].endswith(",1,1")], np.int64)

    def of(self, row: int, since: int = 0) -> int | None:
        """Rows of the product at `row`, else of the last launch of a block a row in [since, row); None where none tells."""
        if exact := dimensions(self.shape[row]):
            return exact[0]
        at = int(np.searchsorted(self.rows, row)) - 1
        return int(self.grid[self.rows[at]].split(",")[0]) if at >= 0 and self.rows[at] >= since else None


def dimensions(shape: str) -> tuple[int, int, int] | None:
    """(M, N, K) of a product's `shape`; None where the source tells none."""
    if not shape:
        return None
    m, n, k = map(int, shape.split(","))
    return m, n, k


def volume(dims: str) -> int:
    """Blocks of a grid or threads of a block, "x,y,z"; 0 where the source tells none."""
    return int(np.prod([int(d) for d in dims.split(",")], dtype=np.int64)) if dims else 0


@dataclass(frozen=True)
class _Grid:
    """Element-wise launches of one kind, or products or attentions of one kind (`what`)."""

    what: str  # "elements", "tiles", "heads" (blocks in z), "head rows" (blocks for each row of each head), "dims"
    place: str  # between which products, or the matrices of a product
    cls: str
    name: str
    grid: str
    threads: int
    rows: int
    keys: int  # rows and what is cached before them
    shape: str = ""


@dataclass
class Evidence:
    """What the launches of some forwards say of rows and widths, whatever the model."""

    seen: dict[_Grid, set[tuple[int, int]]] = field(default_factory=dict)  # → (forward, layer) of its launches
    count: Counter[_Grid] = field(default_factory=Counter)
    joined: frozenset[str] = frozenset()  # matrices of one product, as "attn_k+attn_v", in layers before the last
    least: int = 2  # (forward, layer) in which what contradicts must run

    def against(self, geometry: Geometry, scale: float = 1.0) -> list[_Grid]:
        """The launches of every layer that no width of the model explains, rows times `scale`; [] where it fits."""
        found: list[_Grid] = []
        by_key: dict[str, list[_Grid]] = defaultdict(list)
        others: dict[tuple[str, ...], list[_Grid]] = defaultdict(list)
        for g in self.seen:
            if g.what == "elements":
                by_key[_layout(g.name)[0]].append(g)
            elif not _fits_exactly(g, geometry, scale):
                others[g.what, g.place, g.name].append(g)
        allowed = {}
        for g in self.seen:
            if g.what == "elements" and (at := (g.place, g.cls, g.rows, g.keys)) not in allowed:
                allowed[at] = self._elements(g, geometry, round(g.rows * scale), scale)
        for grids in by_key.values():
            options = set.intersection(*(set(_layout(g.name)[1]) for g in grids))
            fewest: list[_Grid] | None = None
            for each in sorted(options):
                wrong: dict[tuple[str, str], list[_Grid]] = defaultdict(list)
                for g in grids:
                    counts = allowed[g.place, g.cls, g.rows, g.keys]
                    if not _explained(g, each, counts) and self._may_contradict(g):
                        wrong[g.place, g.name].append(g)
                misfits = [g for group in wrong.values() if self._every_layer(group) for g in group]
                if fewest is None or len(misfits) < len(fewest):
                    fewest = misfits
            found += fewest or []
        for group in others.values():
            if group[0].what == "dims" or self._every_layer(group):
                found += group
        return found

    def _every_layer(self, group: list[_Grid]) -> bool:
        return len(set().union(*(self.seen[g] for g in group))) >= self.least

    @staticmethod
    def _may_contradict(g: _Grid) -> bool:
        """Whether a misfit says something: the kernel's layout is known, or its family has one width; and around an
        attention, where caches and masks have sizes of their own, only what is rows of some width."""
        options = _layout(g.name)[1]
        known = options is not VECTORS
        if not known and g.cls not in ("swiglu", "kv_store"):
            return False
        if known and g.place in ("ffn_in", "ffn", "next"):
            return True
        return any(_is_width(volume(g.grid), g.threads * each, g.rows) for each in options)

    def _elements(self, g: _Grid, geometry: Geometry, rows: int, scale: float) -> set[int]:
        """Numbers of elements that a launch at this place may have."""
        m = geometry
        q, kv = m.q_dim, m.kv_dim
        if g.cls == "swiglu":
            widths = {m.ffn} | ({2 * m.ffn} if "ffn_gate+ffn_up" in self.joined else set())
        elif g.cls == "kv_store":
            widths = {kv, 2 * kv}
        else:
            widths = {
                "qkv": {m.hidden, q, kv, q // 2, kv // 2, m.heads, m.kv_heads},
                "attention": {q, kv, q // 2, kv // 2, m.heads, m.kv_heads, m.head_dim, m.head_dim // 2},
                "o": {q, m.heads},
                "ffn_in": {m.hidden},
                "ffn": {m.ffn, m.hidden},
                "next": {m.hidden},
            }[g.place] | {1}
            if g.place in ("qkv", "attention"):
                widths |= {2 * kv, kv} if "attn_k+attn_v" in self.joined else set()
                widths |= {q + kv, (q + kv) // 2} if self.joined & {"attn_q+attn_k", "attn_q+attn_k+attn_v"} else set()
                widths |= {q + 2 * kv, 2 * kv} if "attn_q+attn_k+attn_v" in self.joined else set()
            if g.place == "ffn" and "ffn_gate+ffn_up" in self.joined:
                widths |= {2 * m.ffn}
        keys = round(g.keys * scale)
        counts = {r * w for r in {rows, keys} for w in widths}
        if g.place in ("qkv", "attention"):
            counts |= {rows * keys, m.heads * rows * keys}  # a mask, scores
        if g.cls == "convert":
            counts |= {m.hidden * w for w in (q, kv, m.ffn)}  # weights that are cast on the way
        return counts

    def told(self, geometry: Geometry) -> list[str]:
        """Names of the widths that the launches determine: each would contradict them if it were another."""
        found = []
        widths = {
            volume(g.grid) * g.threads * each // g.rows // 32 * 32
            for g in self.seen
            if g.what == "elements"
            for each in _layout(g.name)[1]
        }
        for name, called in DIMENSIONS.items():
            is_now = getattr(geometry, name)
            if name in ("heads", "kv_heads"):
                others = {*range(1, 65), *(round(is_now * f) for f in _OTHERS)}
                others |= {w // geometry.head_dim for w in widths}
            elif name == "vocab":
                others = {round(is_now * f) for f in (0.5, 0.8, 1.25, 2)}
            else:
                others = {round(is_now * f / 32) * 32 for f in _OTHERS} | widths | {w // 2 for w in widths}
            others = {o for o in others if o > 0 and not 0.8 < o / is_now < 1.25}
            if self.seen and all(self.against(replace(geometry, **{name: o})) for o in sorted(others)):
                found.append(called)
        return found

    def rows_told(self, geometry: Geometry) -> bool:
        """Whether another number of rows would contradict the launches."""
        return bool(self.seen) and all(self.against(geometry, f) for f in _OTHERS)

    def launches(self, grids: list[_Grid] | None = None) -> int:
        """Launches behind some grids, or behind all."""
        return sum(self.count[g] for g in (self.seen if grids is None else grids))

    def other_rows(self, wrong: list[_Grid], geometry: Geometry) -> int | None:
        """Another number of rows that explains them all; None where none or several do."""
        votes: Counter[int] = Counter()
        for g in wrong:
            if g.what == "elements":
                widths = [w for w in self._elements(replace(g, rows=1, keys=1), geometry, 1, 1.0) if w >= 32]
                for rows in _rows_of(g, widths):
                    votes[rows] += self.count[g]
        told, most = max(votes.items(), key=lambda v: (v[1], -v[0]), default=(0, 0))
        if most < self.launches(wrong) / 2 or told == wrong[0].rows:
            return None
        return told if not self.against(geometry, told / wrong[0].rows) else None


def evidence(launches: pd.DataFrame, forwards: list[Forward], layers: int) -> Evidence:
    """What the launches between the first and the last product of each forward say. `past` of each forward is set."""
    columns = ("class", "name", "grid", "block", "shape")
    cls, name, grid, block, shape = (launches[c].to_numpy(object) for c in columns)
    kernel = (launches["kind"] == "kernel").to_numpy()
    found = Evidence(
        joined=frozenset(
            m for f in forwards for (_, m), at in zip(f.products, f.layers, strict=True) if "+" in m and at < layers - 1
        ),
        least=max(2, layers - 1) * len(forwards),
    )

    def add(g: _Grid, where: tuple[int, int]) -> None:
        found.seen.setdefault(g, set()).add(where)
        found.count[g] += 1

    for number, f in enumerate(forwards):
        rows = f.rows or 0
        if rows <= 1:
            continue
        keys = rows + f.past
        marks = sorted(
            [*((r, m, at) for (r, m), at in zip(f.products, f.layers, strict=True)),
             *((r, "attention", at) for at, r in enumerate(f.attentions))]
        )  # fmt: skip
        for (row, matrices, layer), after in zip(marks, [*marks[1:], None], strict=True):
            where = (number, layer)
            base = _Grid("", matrices, cls[row], name[row], grid[row], volume(block[row]), rows, keys)
            if matrices == "attention":
                if (z := _HEADS_IN_Z.search(name[row])) and grid[row] and not grid[row].startswith("1,"):
                    add(replace(base, what="heads", threads=int(z[1])), where)
            elif shape[row]:
                exact = replace(base, what="dims", shape=shape[row], grid="", threads=0, name="")
                add(replace(exact, place=f"last {matrices}") if layer in (-1, layers - 1) else exact, where)
            elif cls[row] == "gemm" and layer >= 0 and _TILE.search(name[row]):
                tiles = replace(base, what="tiles")
                if layer < layers - 1 or tiles in found.seen:  # the last layer's may be of one row
                    add(tiles, where)
            if after is None:
                break
            place = _place(matrices, after[1])
            may_be_one_row = layer == layers - 1 and matrices != "attention" and not matrices.startswith("attn_")
            for i in range(row + 1, after[0]):
                if not kernel[i] or not grid[i]:
                    continue
                g = replace(base, place=place, cls=cls[i], name=name[i], grid=grid[i], threads=volume(block[i]))
                if _HEAD_A_BLOCK.search(name[i]):
                    if volume(grid[i]) > 1:
                        add(replace(g, what="head rows"), where)
                elif cls[i] in SIZED or "at::native::" in name[i]:
                    layout = _layout(name[i])[1]
                    if (cls[i] not in SIZED and layout is VECTORS) or volume(grid[i]) < LEAST_BLOCKS or not g.threads:
                        continue
                    if layout is VECTORS and volume(grid[i]) == rows:
                        continue  # a block a row, whatever its width
                    if cls[i] not in ("swiglu", "kv_store", "convert"):
                        g = replace(g, cls="")
                    g = replace(g, what="elements")
                    if not may_be_one_row or g in found.seen:
                        add(g, where)
    _without_persistent(found)
    return found


def _without_persistent(found: Evidence) -> None:
    """Leaves out products with no more blocks than a GPU has SMs, and those that have one grid for different matrices."""
    grids: dict[tuple[str, str], set[str]] = defaultdict(set)
    for g in found.seen:
        if g.what == "tiles":
            grids[g.name, g.grid].add(g.place)
    alike = [{"ffn_gate", "ffn_up"}, {"attn_k", "attn_v"}, {"attn_q", "attn_output", "ffn_down"}]
    for g in [g for g in found.seen if g.what == "tiles"]:
        places = grids[g.name, g.grid]
        if volume(g.grid) <= MOST_SMS or not (len(places) == 1 or any(places <= a for a in alike)):
            del found.seen[g], found.count[g]


def _place(before: str, after: str) -> str:
    """Where a launch between two marks stands in its layer."""
    if before == "attention":
        return "o"
    if after == "attention":
        return "attention"
    if before.startswith(("attn_q", "attn_k", "attn_v")):
        return "qkv"
    if before == "attn_output":
        return "ffn_in"
    return "ffn" if before.startswith("ffn_gate") or before == "ffn_up" else "next"


@lru_cache(maxsize=1024)
def _layout(name: str) -> tuple[str, tuple[int, ...]]:
    """(what shares one number of elements a thread in a trace, the numbers that it may be)."""
    for pattern, several in TOLD_VECTORS:
        if found := pattern.search(name):
            if _VECTORIZED in name and several != (16,):
                small = _SMALL_TYPES.search(name)
                return (name, (*several, 16)) if small else (_VECTORIZED, several)
            return name, several or (int(found[1]),)
    return name, VECTORS


def _explained(g: _Grid, each: int, counts: set[int]) -> bool:
    """Whether a grid is that of one of these numbers of elements, `each` a thread; a second axis may be the rows."""
    per_block, blocks = g.threads * each, volume(g.grid)
    if any(-(-count // per_block) == blocks for count in counts):
        return True
    x, y, z = (*map(int, g.grid.split(",")), 1, 1)[:3]
    return y == g.rows and z == 1 and any(c % y == 0 and -(-(c // y) // per_block) == x for c in counts)


def _is_width(blocks: int, elements: int, rows: int) -> bool:
    """Whether `blocks` of so many elements are `rows` rows of a width that models have: a multiple of 32."""
    if elements > 32 * rows:
        return False  # any grid would be
    width = blocks * elements // rows // 32 * 32
    return width > 0 and -(-rows * width // elements) == blocks


def _fits_exactly(g: _Grid, geometry: Geometry, scale: float) -> bool:
    """Whether a product's dimensions or tiles, or what counts heads, is the model's."""
    rows = round(g.rows * scale)
    if g.what == "heads":
        return int(g.grid.split(",")[2]) == geometry.heads and geometry.head_dim <= g.threads
    if g.what == "head rows":
        return int(g.grid.split(",")[0]) in {rows * h for h in (geometry.heads, geometry.kv_heads)}
    matrices = g.place.removeprefix("last ")
    shapes = [geometry.matrix_shape(f"{'' if m == 'output' else 'blk.0.'}{m}.weight") for m in matrices.split("+")]
    n, k = sum(s[0] for s in shapes), shapes[0][1]
    if g.what == "dims":
        told = dimensions(g.shape)
        assert told is not None
        for m, wide in ((told[0], told[1]), (told[1], told[0])):  # y = x·Wᵀ, or yᵀ = W·xᵀ
            near = abs(wide - n) <= min(PADDED_VOCAB, n // 8) if matrices == "output" else wide == n
            if near and (m == rows or (g.place.startswith("last ") and m <= rows)):
                return told[2] == k
        return False
    found = _TILE.search(g.name)
    assert found is not None
    a, b = (int(s) for s in found.groups() if s)
    x, y = (*map(int, g.grid.split(",")), 1)[:2]  # z splits K
    return any(x * y in _tilings(-(-rows // a), -(-n // b)) for a, b in ((a, b), (b, a)))


def _tilings(across: int, down: int) -> set[int]:
    """Blocks for so many tiles: as they are, or rounded up to a swizzle's or cluster's width in either direction."""
    up = (1, 2, 4, 8)
    return {-(-across // i) * i * (-(-down // j) * j) for i in up for j in up}


def _rows_of(g: _Grid, widths: list[int]) -> set[int]:
    """Every number of rows that this grid may stand for."""
    found: set[int] = set()
    blocks = volume(g.grid)
    for w in widths:
        for each in _layout(g.name)[1]:
            elements = g.threads * each
            low, high = (blocks - 1) * elements // w + 1, blocks * elements // w
            if low == high:  # a grid that fits several numbers tells none
                found.add(low)
    return found
