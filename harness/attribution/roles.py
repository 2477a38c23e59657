"""Roles, layers and MACs of a foreign engine's launches, from their order within a layer, checked against the ledger.

An engine that we do not own tags nothing. But every decoder launches the same things in the same order: attention runs
once a layer, the products between two attentions are o, gate, up, down and the next layer's q, k, v (or their joined
forms), and what stands between two products belongs to one of them. So a forward is cut at its attentions and its products
are named by their place, in any grouping. What the trace tells must be what the model says: weight types in kernels' names,
rows and widths in grids, one-row products of the last layer, the size of the logits that are copied back. Where they differ,
nothing is named and no MAC is charged.

Elementwise launches go where our plan puts that work: bias adds before RoPE with `rope_kv`, residual adds with `norm`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.attribution.classify import Match
from harness.attribution.occurrences import PRODUCTS, Forwards, find_forwards, main_attentions
from harness.attribution.shapes import Rows, dimensions, evidence
from harness.errors import HarnessError
from harness.launches import nullable

if TYPE_CHECKING:
    from engine.geometry import Geometry
    from engine.plan import Op, Plan

_ROLE_OF_CLASS = {
    "quantize": "quantize", "dequantize": "dequantize", "convert": "convert", "norm": "norm", "rope": "rope_kv",
    "kv_store": "rope_kv", "swiglu": "swiglu", "embedding": "embedding", "sampling": "lm_head", "copy": "copy",
    "memset": "copy", "communication": "copy",
}  # fmt: skip
"""Family → role of a launch whose role does not depend on its place."""


_PREPARES = ("norm", "quantize", "dequantize")
_ELEMENTWISE_AFTER = {
    "attn_q": "rope_kv", "attn_k": "rope_kv", "attn_v": "rope_kv", "attn_output": "norm", "ffn_down": "norm",
    "ffn_gate": "swiglu", "ffn_up": "swiglu",
}  # fmt: skip
"""Matrix of the product before it → role of an element-wise launch: biases, residuals, the gate's product."""


STRAY = 0.01
"""Products that no model's layer has (RoPE's table of angles, an adapter) may take this part of all products' time."""


class RolesUnknown(Exception):
    """Why nothing is charged: one clause. `contradicted`: the trace says that model, tokens or tail are wrong; otherwise
    its launches are of an order that is not known here."""

    def __init__(
        self, why: str, *, contradicted: bool = False, hint: str = "a rule file (--rules) can name the launches"
    ) -> None:
        super().__init__(why)
        self.contradicted, self.hint = contradicted, hint


@dataclass
class Forward:
    """One forward over some rows: a whole prefill, or a chunk of one."""

    products: list[tuple[int, str]]  # (row in the table, matrices as "attn_q" or "ffn_gate+ffn_up"), in launch order
    layers: list[int]  # of each product; −1 for the head
    attentions: list[int]  # rows, one a layer
    rows: int | None  # M, where a launch tells it
    has_head: bool
    rows_told: bool = False  # by a grid; else as the caller said
    past: int = 0
    plan: Plan | None = field(default=None, repr=False)


@dataclass
class Attributed:
    """What the launch order told."""

    launches: pd.DataFrame  # the family view, with `layer` and `macs`
    roles: pd.DataFrame  # the same launches with role classes and the file's weight types
    prefills: int
    chunks: list[int]  # rows of the forwards of one prefill
    tokens: int  # of one prefill
    plan: Plan  # of one prefill in one piece
    first_rows: list[int]  # the table's row of each prefill's first launch: what prepares its first product
    fits: str  # what was counted and what was checked, as a clause
    stray: list[str]  # names of products that are no matrix of the model


def attribute(
    launches: pd.DataFrame,
    matches: dict[tuple[str, str], Match],
    geometry: Geometry,
    *,
    tokens: int | None,
    tail: str,
) -> Attributed:
    """Names every launch's role and books every product's and attention's MACs.

    launches: one device's classified table, ordered by start; partial forwards at its ends are not allowed.
    Raises RolesUnknown where the order does not fit `geometry` or the trace contradicts it, and HarnessError where the
    trace does not tell its tokens and nobody gave them.
    """
    told = Rows(launches, matches)
    exchanges = int((launches["class"] == "communication").sum())
    if exchanges and exchanges >= len(main_attentions(launches)):
        raise RolesUnknown(
            f"{exchanges} launches exchange data between devices, so this one computes a share of each product that the model's "
            "ledger does not tell",
            hint="record one device that runs the whole model",
        )
    check_layers(launches, geometry)
    forwards, stray = _forwards_without_strays(launches, told, geometry)
    types_told = _check_types(forwards, launches, geometry)
    prefills = _prefills(forwards, launches, tokens)
    for prefill in prefills:
        for before, forward in pairwise(prefill):
            forward.past = before.past + (before.rows or 0)
    widths_told, rows_fit = _check_rows(launches, forwards, geometry)
    tail_told = _check_tail(launches, prefills, geometry, tail)
    chunks = [f.rows or 0 for f in prefills[0]]
    total = sum(chunks)
    one = build(geometry, total, tail)
    for prefill in prefills:
        for forward in prefill:
            forward.plan = build(geometry, forward.rows or 0, tail, forward.past)
    family, roles = _book(launches, forwards, geometry, stray)
    macs = int(family["macs"].fillna(0).sum())
    # An engine that makes embeddings runs no head at all.
    headless = not any(f.has_head for f in forwards)
    ledger = (one.macs - (_ops(one)[-1, "output"].macs if headless else 0)) * len(prefills)
    if macs != ledger:
        raise RolesUnknown(
            f"the launches' products come to {macs / 1e9:.3f} GMAC, the ledger's to {ledger / 1e9:.3f}: "
            f"the tail may not be {tail}, or the trace holds a part of a prefill",
            contradicted=True,
        )
    first_rows = [_first_row(prefill[0], family) for prefill in prefills]
    products = sum(len(f.products) for f in forwards)
    fits = f"{len(forwards) * geometry.layers} attentions and {products} products in place"
    checked = [f"types in {types_told} of their names"] if types_told else []
    by_dims = bool(launches["shape"].iat[forwards[0].products[0][0]])
    checked += ["rows in grids of a block a row"] if forwards[0].rows_told and not by_dims else []
    checked += [widths_told] if widths_told else []
    checked += [f"tail {tail}"] if tail_told else []
    fits += f"; checked: {', '.join(checked)}" if checked else "; types, widths and tail not told by the trace"
    fits += "" if forwards[0].rows_told or rows_fit else f"; {NOT_CHECKED}"
    names = sorted({str(launches["name"].iat[i]) for i in stray})
    return Attributed(family, roles, len(prefills), chunks, total, one, first_rows, fits, names)


def _first_row(forward: Forward, family: pd.DataFrame) -> int:
    """Where a forward starts: what prepares its first product has its layer."""
    row = forward.products[0][0]
    layer = family["layer"].to_numpy(dtype=np.int64, na_value=-1)
    while row > 0 and layer[row - 1] == 0:
        row -= 1
    return row


# Cutting the trace into forwards


def check_layers(launches: pd.DataFrame, geometry: Geometry) -> None:
    """Holds the model's layers to what runs between the attentions, whatever their number is a multiple of.

    Where a forward ends, something runs that does not run between two of its layers: a final norm, a head, an embedding, a
    copy of tokens or logits; a chunk whose rows nobody reads leaves out its last FFN. So a place that the model calls the
    end of a forward must differ from every place that it calls inner, and none of those may hold an embedding, or products
    and norms beyond a layer's (a head) or short of it (no FFN).
    Raises RolesUnknown: contradicted, or where a
    forward of these layers is cut at an end of the table.
    """
    found, layers = find_forwards(launches), geometry.layers
    if found is None:
        return
    name, count = geometry.name or "the model", len(found.attentions)
    if count % layers:
        if max(found.lengths) == layers and found.cut and set(found.lengths[1:-1]) <= {layers}:
            raise RolesUnknown(f"the trace {found.cut} inside a forward of {name}", hint=_ONE_PREFILL)
        raise RolesUnknown(
            f"{count} attention launches are no multiple of the {layers} layers of {name}{_shown(found, layers)}",
            contradicted=True,
        )
    ends = [p for i, p in enumerate(found.between, 1) if i % layers == 0]
    inner = [p for i, p in enumerate(found.between, 1) if i % layers]
    layer = {p.sequence for p in inner}
    like = sum(p.sequence in layer or (not inner and p.plain) for p in ends)
    bare = sum(p.embeddings == 0 for p in ends) if found.ahead.embeddings else 0
    if like or bare:
        why = "run only what runs between two layers" if like else "look up no embedding, as the first one does"
        raise RolesUnknown(
            f"{like or bare} of {len(ends)} ends of forwards of {layers} layers {why}{_shown(found, layers)}",
            contradicted=True,
        )
    usual = Counter(inner).most_common(1)[0][0] if inner else None
    if usual and (
        0 < found.ahead.embeddings <= usual.embeddings  # as each layer would look one up
        or any(
            p.embeddings > usual.embeddings or (p.products - usual.products) * (p.norms - usual.norms) > 0
            for p in inner
        )
    ):
        raise RolesUnknown(
            f"an embedding, a head or a layer without an FFN is inside what would be the {layers} layers of {name}{_shown(found, layers)}",
            contradicted=True,
        )


def _shown(found: Forwards, layers: int) -> str:
    """The layers that the launches themselves show, as a clause; "" where they are the model's."""
    shown = sorted(set(found.whole) or set(found.lengths))
    if shown == [layers]:
        return ""
    return f": the trace shows forwards of {_listed(shown)} layers" if len(shown) < 4 else ""


def _listed(numbers: list[int]) -> str:
    return " and ".join(
        [", ".join(map(str, numbers[:-1])), str(numbers[-1])] if len(numbers) > 1 else [str(numbers[0])]
    )


def _forwards_without_strays(
    launches: pd.DataFrame, told: Rows, geometry: Geometry
) -> tuple[list[Forward], np.ndarray]:
    """(forwards, rows of products that are no matrix of the model).

    An order that fits is taken as it is. Where none does, the products that are shortest by name are left out, one name
    after the other, as long as they take next to nothing together.
    """
    products = np.flatnonzero(launches["class"].isin(PRODUCTS).to_numpy() & (launches["kind"] == "kernel").to_numpy())
    name = launches["name"].to_numpy(object)[products]
    duration = (launches["end_ns"] - launches["start_ns"]).to_numpy()[products]
    stray = np.zeros(len(products), bool)
    try:
        return _forwards(launches, products, told, geometry), products[stray]
    except RolesUnknown as why:
        if why.contradicted or len(products) == 0:
            raise
        first = why
    times = pd.Series(duration).groupby(name).agg(["mean", "sum"]).sort_values("mean")
    for shortest in times.index[times["sum"].cumsum() <= STRAY * duration.sum()]:
        stray |= name == shortest
        try:
            return _forwards(launches, products[~stray], told, geometry), products[stray]
        except RolesUnknown:
            continue
    raise first


def _forwards(launches: pd.DataFrame, products: np.ndarray, told: Rows, geometry: Geometry) -> list[Forward]:
    attentions = main_attentions(launches)
    layers = geometry.layers
    if len(attentions) == 0:
        raise RolesUnknown("no launch is known for an attention")
    between = [part.tolist() for part in np.split(products, np.searchsorted(products, attentions))]
    head_len = len(between[0])
    if head_len not in _QKV:
        raise RolesUnknown(f"{head_len} products before the first attention are no q, k and v")
    naming = _Naming(launches, geometry)
    found = []
    for f in range(len(attentions) // layers):
        at = attentions[f * layers : (f + 1) * layers]
        names: list[tuple[int, str]] = []
        where: list[int] = []
        # Products ahead of this forward's first attention: the last ones since the previous forward's attention.
        start = between[f * layers][-head_len:]
        names += zip(start, naming.best(start, [(q, 0) for q in _QKV[head_len]]), strict=True)
        where += [0] * head_len
        for layer in range(1, layers):
            inside = between[f * layers + layer]
            matrices = naming.between(inside, layer - 1)
            names += zip(inside, matrices, strict=True)
            ffn = next(i for i, m in enumerate(matrices) if m.startswith("attn_q"))
            where += [layer - 1] * ffn + [layer] * (len(matrices) - ffn)
        after = between[(f + 1) * layers]
        if f + 1 < len(attentions) // layers:
            after = after[: len(after) - head_len]
        has_head = _name_tail(names, where, after, launches, geometry)
        rows = told.of(start[0], since=int(attentions[f * layers - 1]) if f else 0)
        found.append(Forward(names, where, at.tolist(), rows, has_head, rows is not None))
    _check_grouping(found, launches, geometry)
    return found


def _check_grouping(forwards: list[Forward], launches: pd.DataFrame, geometry: Geometry) -> None:
    """An engine joins q, k and v (gate and up) where their types are one: layers of as many types have as many products,
    those of more types no fewer. One that differs has lost a launch, and so has a fix-up without its product. What runs for
    one row may be joined as it likes.
    """
    cls = launches["class"].to_numpy(object)
    found: set[tuple[str, int, int]] = set()  # (joined part, types in it, products)
    for forward in forwards:
        groups: dict[tuple[int, str], list[tuple[int, str]]] = {}
        for (row, matrices), layer in zip(forward.products, forward.layers, strict=True):
            part = "q, k and v" if matrices[:6] in ("attn_q", "attn_k", "attn_v") else "gate and up"
            if layer >= 0 and matrices not in ("attn_output", "ffn_down"):
                groups.setdefault((layer, part), []).append((row, matrices))
        for (layer, part), products in groups.items():
            if not any(cls[row] == "gemv" for row, _ in products):
                types = {geometry.weight_type(_tensor(m, layer)) for _, group in products for m in group.split("+")}
                found.add((part, len(types), len(products)))
    for part, kinds, count in found:
        for other, others, more in found:
            if part == other and kinds <= others and (count > more or (kinds == others and count < more)):
                raise RolesUnknown(f"{part} are {count} products in one layer and {more} in another")
    kernels = launches[launches["kind"] == "kernel"]
    ahead = kernels.groupby("stream")["class"].shift()
    alone = (kernels["class"] == "gemm_fixup") & ~ahead.isin([*PRODUCTS, "gemm_fixup"])
    if alone.any():
        raise RolesUnknown(f"{int(alone.sum())} fix-ups stand without the product that they finish")


_QKV = {1: [["attn_q+attn_k+attn_v"]], 2: [["attn_q", "attn_k+attn_v"], ["attn_q+attn_k", "attn_v"]],
        3: [["attn_q", "attn_k", "attn_v"]]}  # fmt: skip
_FFN = {3: ["attn_output", "ffn_gate+ffn_up", "ffn_down"], 4: ["attn_output", "ffn_gate", "ffn_up", "ffn_down"]}
"""Number of launches → the groupings of a layer's matrices into that many."""


class _Naming:
    """Names of the products between two attentions: the grouping that the types allow and that takes time like its MACs."""

    def __init__(self, launches: pd.DataFrame, geometry: Geometry) -> None:
        self.geometry = geometry
        self.types = launches["weight_type"].to_numpy(object)
        self.shape = launches["shape"].to_numpy(object)
        self.duration = (launches["end_ns"] - launches["start_ns"]).to_numpy()

    def between(self, rows: list[int], layer: int) -> list[str]:
        """o, gate, up and down of `layer`, and q, k and v of the next. Raises RolesUnknown for another count."""
        choices = [
            (ffn + qkv, layer) for b, all_qkv in _QKV.items() if (ffn := _FFN.get(len(rows) - b)) for qkv in all_qkv
        ]
        if not choices:
            raise RolesUnknown(
                f"{len(rows)} products between the attentions of layers {layer} and {layer + 1} are no o, gate, up, down, q, k and v"
            )
        return self.best(rows, choices)

    def best(self, rows: list[int], choices: list[tuple[list[str], int]]) -> list[str]:
        """The first choice with the fewest contradicted types and the evenest rate."""
        return min(choices, key=lambda c: self._score(rows, *c))[0] if len(choices) > 1 else choices[0][0]

    def _score(self, rows: list[int], matrices: list[str], layer: int) -> tuple[int, float]:
        g, wrong, rate = self.geometry, 0, []
        seen_q = False
        for row, group in zip(rows, matrices, strict=True):
            seen_q |= group.startswith("attn_q")
            at = layer + (seen_q and not matrices[0].startswith("attn_q"))
            wrong += not _fits(self.types[row], group, at, g)
            if told := dimensions(self.shape[row]):
                wrong += sum(g.matrix_shape(_tensor(m, at))[0] for m in group.split("+")) not in told[:2]
            weights = sum(int(np.prod(g.matrix_shape(_tensor(m, at)))) for m in group.split("+"))
            rate.append(np.log(weights / max(int(self.duration[row]), 1)))
        return wrong, float(np.std(rate))


def _name_tail(
    names: list[tuple[int, str]], where: list[int], rows: list[int], launches: pd.DataFrame, geometry: Geometry
) -> bool:  # fmt: skip
    """The products after a forward's last attention; True where the head is among them."""
    last = geometry.layers - 1
    cls = launches["class"].to_numpy(object)
    ffn = sum(m.startswith("ffn") for (_, m), at in zip(names, where, strict=True) if at == 0)
    choices: dict[int, list[tuple[list[str], bool]]] = {
        # A chunk whose rows nobody reads computes no FFN in its last layer.
        1: [(["attn_output"], False)],
        3: [(_FFN[3], False)],
        4: [([*_FFN[3], "output"], True), (_FFN[4], False)],
        5: [([*_FFN[4], "output"], True)],
    }
    if last and ffn == 3 and not any(cls[r] == "gemv" for r in rows):
        choices[4].reverse()  # gate and up are two products in the other layers, too: no head ran
    for matrices, head in choices.get(len(rows), []):
        if all(_fits(launches["weight_type"].iat[r], m, last, geometry) for r, m in zip(rows, matrices, strict=True)):
            body = len(matrices) - head
            names += zip(rows, matrices, strict=True)
            where += [last] * body + [-1] * head
            return head
    raise RolesUnknown(f"{len(rows)} products after the last attention are no o, gate, up, down and head")


def _fits(told: str, matrices: str, layer: int, geometry: Geometry) -> bool:
    """Whether a product whose name tells the weight type `told` can be these matrices."""
    # A name that tells one of the file's types must tell the right one; others are what a file's type was turned into.
    types = {geometry.weight_type(_tensor(m, layer)) for m in matrices.split("+")}
    return told not in set(geometry.weight_types.values()) or types == {told}


def _tensor(matrix: str, layer: int) -> str:
    return "output.weight" if matrix == "output" else f"blk.{layer}.{matrix}.weight"


def _check_types(forwards: list[Forward], launches: pd.DataFrame, geometry: Geometry) -> int:
    """Types that the names tell (of a product, or of the dequantise pass ahead of it) against the file's; how many told.

    k and v have one shape, and engines launch them in either order: the types decide, else k comes first.
    """
    told = launches["weight_type"].to_numpy(object)
    cls = launches["class"].to_numpy(object)
    known = set(geometry.weight_types.values())
    told_by = 0
    for forward in forwards:
        rows = [r for r, _ in forward.products]
        wrong: dict[bool, list[str]] = {False: [], True: []}
        for swapped in wrong:
            previous = -1
            for (row, matrices), layer in zip(forward.products, forward.layers, strict=True):
                if swapped and matrices in ("attn_k", "attn_v"):
                    matrices = "attn_v" if matrices == "attn_k" else "attn_k"
                types = {geometry.weight_type(_tensor(m, layer)) for m in matrices.split("+")}
                seen = {told[row]} & known
                since = slice(max(previous + 1, row - 6), row)
                seen |= set(told[since][cls[since] == "dequantize"])
                told_by += bool(seen) and not swapped
                if seen and not seen <= types:
                    wrong[swapped].append(
                        f"layer {layer} {matrices} is {'+'.join(sorted(types))} in the file and {'+'.join(sorted(seen))} in the trace"
                    )
                previous = row
        if wrong[False] and wrong[True]:
            raise RolesUnknown(min(wrong.values(), key=len)[0], contradicted=True)
        if wrong[False]:
            turned = {"attn_k": "attn_v", "attn_v": "attn_k"}
            forward.products = [(r, turned.get(m, m)) for r, (_, m) in zip(rows, forward.products, strict=True)]
    return told_by


def _check_rows(launches: pd.DataFrame, forwards: list[Forward], geometry: Geometry) -> tuple[str, bool]:
    """Rows × widths of the model against grids and dimensions: (what they tell, as a clause; whether they tell the rows)."""
    seen = evidence(launches, forwards, geometry.layers)
    told = {f.rows for f in forwards}
    rows = told.pop() if len(told) == 1 else None
    name = geometry.name or "the model"
    if wrong := seen.against(geometry):
        first = wrong[0]
        if exact := [g for g in wrong if g.what == "dims"]:
            m, n, k = dimensions(exact[0].shape) or (0, 0, 0)
            why = f"the profiler tells M, N, K = {m}, {n}, {k} of {exact[0].place}, which {name} with {exact[0].rows} rows does not have"
        elif (other := seen.other_rows(wrong, geometry)) and not forwards[0].rows_told and rows is not None:
            why = f"the grids of {seen.launches(wrong)} element-wise launches tell {other} rows of {name}, not {rows}"
        elif first.what == "elements":
            why = (
                f"the grids of {seen.launches(wrong)} element-wise launches are not {rows or 'the'} rows of {name}'s widths "
                f"(first {first.grid} of {first.name.split('(')[0][:60]})"
            )
        else:
            what = {"tiles": f"tiles of {first.place}"}.get(first.what, "heads")
            why = f"the grid {first.grid} of {seen.launches(wrong)} launches tells other {what} than {name}'s at {first.rows} rows"
        raise RolesUnknown(why, contradicted=True)
    widths, rows_fit = seen.told(geometry), seen.rows_told(geometry)
    dims = sum(n for g, n in seen.count.items() if g.what == "dims")
    grids = seen.launches() - dims
    parts = ([f"{grids} grids"] if grids else []) + ([f"the dimensions of {dims} products"] if dims else [])
    if not widths:
        return (f"rows in {' and '.join(parts)}" if rows_fit else ""), rows_fit
    return f"{'rows and ' if rows_fit else ''}widths of {', '.join(widths)} in {' and '.join(parts)}", rows_fit


def _check_tail(launches: pd.DataFrame, prefills: list[list[Forward]], geometry: Geometry, tail: str) -> bool:
    """What the last layer computed against `tail`; True where the trace told.

    A product of the last layer that has the kernel and the grid of the layer before it had as many rows; a matrix-vector
    product where the layers before it had a matrix product, or a grid that tells one row, had one.
    """
    if geometry.layers < 2:
        return False
    cls, name, grid = (launches[c].to_numpy(object) for c in ("class", "name", "grid"))
    wants_one = {"full": (), "ffn_last_row": ("ffn_gate", "ffn_up", "ffn_down"),
                 "last_row": ("attn_q", "attn_output", "ffn_gate", "ffn_up", "ffn_down")}[tail]  # fmt: skip
    told = False
    for prefill in prefills:
        forward = prefill[-1]
        if (forward.rows or 0) <= 1:
            continue
        last = {m: r for (r, m), at in zip(forward.products, forward.layers, strict=True) if at == geometry.layers - 1}
        before: dict[str, set[tuple[str, str, str]]] = {}
        for (r, m), at in zip(forward.products, forward.layers, strict=True):
            if 0 <= at < geometry.layers - 1:
                before.setdefault(m, set()).add((cls[r], name[r], grid[r]))
        for matrices, row in last.items():
            others = before.get(matrices, set())
            if "attn_k" in matrices or "attn_v" in matrices or not (others or matrices.startswith("ffn")):
                continue
            same = bool(grid[row]) and (cls[row], name[row], grid[row]) in others
            one = cls[row] == "gemv" and all(c == "gemm" for c, _, _ in others or {("gemm", "", "")})
            if not same and not one:
                continue
            if one != (matrices.split("+")[0] in wants_one):
                raise RolesUnknown(
                    f"{matrices} of the last layer ran for {'one row' if one else 'every row'}, which tail {tail} does not",
                    contradicted=True,
                )
            told = True
    return told


def _prefills(forwards: list[Forward], launches: pd.DataFrame, tokens: int | None) -> list[list[Forward]]:
    """Forwards grouped into prefills: a chunk without a head goes on in the next forward, and where none has a head
    (embeddings) the tokens that were given say where a prefill ends."""
    if any(f.rows is None for f in forwards):
        if tokens is None:
            raise HarnessError("the trace does not tell how many tokens its prefills have; give --tokens.")
        for f in forwards:
            f.rows = tokens
    steps = sum(f.rows == 1 for f in forwards)
    if 0 < steps < len(forwards):
        raise RolesUnknown(f"{steps} of {len(forwards)} forwards are decode steps of one row", hint=_ONE_PREFILL)
    heads = any(f.has_head for f in forwards)
    groups: list[list[Forward]] = []
    current: list[Forward] = []
    for forward in forwards:
        current.append(forward)
        if forward.has_head or (not heads and tokens is not None and sum(f.rows or 0 for f in current) >= tokens):
            groups.append(current)
            current = []
    if current:
        raise RolesUnknown("the trace ends inside a prefill", hint=_ONE_PREFILL)
    sizes = [sum(f.rows or 0 for f in g) for g in groups]
    took = [
        _times(launches, [r for f in g for r in f.attentions], [r for f in g for r, _ in f.products]) for g in groups
    ]
    uneven = _uneven(took, told=forwards[0].rows_told)
    if tokens is not None and set(sizes) != {tokens}:
        if len(sizes) > 1 and sizes[0] < tokens and set(sizes[1:]) == {tokens}:
            raise RolesUnknown(
                f"the first of {len(sizes)} prefills holds {sizes[0]} of {tokens} tokens", hint=_ONE_PREFILL
            )
        if uneven and chunked(sizes, tokens):
            raise RolesUnknown(f"{uneven}, as in chunks of one prefill of {tokens} tokens", hint=_ONE_PREFILL)
        raise RolesUnknown(
            f"the trace's prefills have {', '.join(map(str, sorted(set(sizes))))} tokens, not {tokens}",
            contradicted=True,
        )
    if len(set(sizes)) > 1:
        raise RolesUnknown(
            f"prefills of {', '.join(map(str, sorted(set(sizes))))} tokens are mixed: choose one with --occurrence"
        )
    if uneven:
        raise RolesUnknown(f"{uneven}: chunks of one prefill, or prompts behind a cache", hint=_ONE_PREFILL)
    return groups


_ONE_PREFILL = "choose one prefill with --range or --occurrence"
GROWN = 1.5
"""Attention beside its products: it takes less than this times as long in one forward as in another of equal rows (in the
second of two equal chunks three times as long: it attends to both)."""
LONGER = 3.0
"""Products of forwards of one number of rows take less than this times as long in one as in another."""


def _times(
    launches: pd.DataFrame, attentions: list[int] | np.ndarray, products: list[int] | np.ndarray
) -> tuple[int, int]:
    ns = (launches["end_ns"] - launches["start_ns"]).to_numpy()
    return int(ns[attentions].sum()), int(ns[products].sum())


def _uneven(took: list[tuple[int, int]], *, told: bool) -> str:
    """Why forwards, given as ns of attentions and products, are no prefills of one length, as a clause; "" where they may
    be. told: by their grids, that they have as many rows."""
    took = [(a, p) for a, p in took if a and p]
    if len(took) < 2:
        return ""
    grown = max(a / p for a, p in took) / min(a / p for a, p in took)
    longer = max(p for _, p in took) / min(p for _, p in took)
    if grown > GROWN:
        return f"attention takes {grown:.1f} × as long beside its products in one forward as in another"
    return (
        f"the products of one forward take {longer:.1f} × as long as those of another"
        if longer > LONGER and not told
        else ""
    )


def chunked(rows: list[int], tokens: int) -> bool:
    """Whether forwards of so many rows, taken in order, make up prefills of `tokens`, each of several."""
    total = 0
    for n in rows:
        total += n
        if total > tokens:
            return False
        total %= tokens
    return total == 0 and max(rows) < tokens


# Tokens without a model


@dataclass(frozen=True)
class TokensTold:
    """What a trace says of the tokens that were given for one prefill."""

    detail: str  # what they were checked against, or what contradicts them
    ok: bool = True
    no_speed: str = ""  # why the window's walls are of no whole prefill, as a clause; "" where they are


NOT_CHECKED = "tokens as given, not checked"


def check_tokens(
    launches: pd.DataFrame,
    found: Forwards | None,
    matches: dict[tuple[str, str], Match],
    tokens: int,
    repeats: list[np.ndarray],
) -> TokensTold:
    """Holds `tokens` of one prefill to the rows in grids, forward by forward, without a model.

    launches: one device's classified table; found: `find_forwards` of it; repeats: rows of the prefills that `find_repeats` found in it, [] where the
    whole table is taken for one.
    """
    told = Rows(launches, matches)
    if found is None:
        seen = {int(told.grid[i].split(",")[0]) for i in told.rows} - {1}
        if len(seen) != 1:
            return TokensTold(NOT_CHECKED)
        (rows,) = seen
        if rows == tokens:
            return TokensTold(f"{tokens} tokens are the rows of {len(told.rows)} grids of a block a row")
        if tokens % rows:
            return TokensTold(_contradiction([rows], tokens), ok=False)
        return TokensTold(
            NOT_CHECKED, no_speed=f"its forwards have {rows} rows, and nothing tells how many make up a prefill"
        )
    inside = np.split(np.arange(len(found.attentions)), found.first[1:])
    row_of = [_rows_of(told, found.attentions, part) for part in inside]
    cut = f"the trace {found.cut} inside a forward" if found.cut else ""
    products = np.flatnonzero(launches["class"].isin(PRODUCTS).to_numpy())
    took = [
        _times(launches, found.attentions[np.isin(found.attentions, r)], products[np.isin(products, r)])
        for r in repeats
    ]
    uneven = _uneven(took, told=False)
    if row_of[0] is None and found.starts_inside and any(row_of):
        row_of[0] = 0  # what is left of it holds nothing that tells
    if any(r is None for r in row_of):
        several = len(row_of) > 1 and (found.ends is None or sum(found.ends) != 1)
        why = uneven if repeats else cut or (f"{len(row_of)} forwards and no whole prefill repeat" if several else "")
        return TokensTold(NOT_CHECKED, no_speed=why)
    rows_told = [r or 0 for r in row_of]
    steps = sum(r == 1 for r in rows_told) if max(rows_told) > 1 else 0
    prefills = _groups(found, rows_told, steps > 0)
    groups = [sum(rows_told[j] for j in part) for part, _ in prefills]
    sizes = [n for n, (_, whole) in zip(groups, prefills, strict=True) if whole]
    partly = [n for n, (_, whole) in zip(groups, prefills, strict=True) if not whole]
    if len(sizes) > 1 and sizes[0] < tokens and set(sizes[1:]) == {tokens}:
        partly.append(sizes.pop(0))  # the trace may start between two of its chunks
    fits = all(n == tokens for n in sizes) or (
        found.ends is None and (sum(groups) == tokens or chunked(groups, tokens))
    )
    of = [found.attentions[np.concatenate([inside[j] for j in part])] for part, _ in prefills]
    grows = chunked(groups, tokens) and bool(
        _uneven([_times(launches, r, _within(products, r)) for r in of], told=True)
    )
    if not (fits or grows) or max(partly, default=0) > tokens:
        return TokensTold(_contradiction(sizes or partly, tokens), ok=False)
    if steps:
        why = f"{steps} of {len(rows_told)} forwards are decode steps of one row"
    elif repeats:
        each = [
            sum(rows_told[j] for j, p in enumerate(inside) if r[0] <= found.attentions[p[0]] <= r[-1]) for r in repeats
        ]
        why = uneven or ("" if set(each) == {tokens} else f"what repeats has {_listed(sorted(set(each)))} rows")
    elif cut or partly or not sizes:
        why = cut or "the trace holds a part of a prefill"
    else:
        why = (
            ""
            if len(groups) == 1 or sum(groups) == tokens
            else f"{len(groups)} prefills and no launch sequence that repeats"
        )
    if not sizes:
        return TokensTold(f"{NOT_CHECKED}: {why}", no_speed=why)
    many = f"{len(rows_told)} forward{'s' if len(rows_told) > 1 else ''}"
    return TokensTold(f"{tokens} tokens fit the rows of {many}, by grids of a block a row", no_speed=why)


def _contradiction(sizes: list[int], tokens: int) -> str:
    return f"the grids of a block a row tell prefills of {_listed(sorted(set(sizes)))} rows, not {tokens}"


def _rows_of(told: Rows, attentions: np.ndarray, part: np.ndarray) -> int | None:
    """Rows of a forward: ahead of the first of its attentions that tells."""
    for j in part[:2].tolist():
        rows = told.of(int(attentions[j]), since=int(attentions[j - 1]) if j else 0)
        if rows is not None:
            return rows
    return None


def _groups(found: Forwards, rows: list[int], steps: bool) -> list[tuple[list[int], bool]]:
    """(numbers of its forwards, whether it is whole) of each prefill, without decode steps of one row."""
    groups: list[tuple[list[int], bool]] = []
    part: list[int] = []
    for j, n in enumerate(rows):
        if steps and n == 1:
            continue
        part.append(j)
        closed = found.ends is None or found.ends[j]
        cut = (part[0] == 0 and found.starts_inside) or (j == len(rows) - 1 and found.ends_inside)
        if closed or j == len(rows) - 1:
            groups.append((part, closed and not cut))
            part = []
    return [*groups, (part, False)] if part else groups


def _within(products: np.ndarray, attentions: np.ndarray) -> np.ndarray:
    return products[(products > attentions[0]) & (products < attentions[-1])]


def build(geometry: Geometry, rows: int, tail: str, past: int = 0) -> Plan:
    """The plan of one forward of `rows` rows after `past` cached ones."""
    from engine.levers import Levers
    from engine.plan import build_plan

    return build_plan(geometry, rows, Levers.from_dict({"tail": tail}), past=past)


# Booking


def _book(
    launches: pd.DataFrame, forwards: list[Forward], geometry: Geometry, stray: np.ndarray
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the table with `macs` and `layer`, the same launches classed by role); strays prepare RoPE where one follows."""
    size = len(launches)
    cls = launches["class"].to_numpy(object)
    kind = launches["kind"].to_numpy(object)
    macs = np.full(size, -1, np.int64)
    layer = np.full(size, -1, np.int64)
    role = np.array([_ROLE_OF_CLASS.get(c, "other") for c in cls], object)
    types = np.full(size, "-", object)
    product_role = np.full(size, "", object)
    for forward in forwards:
        assert forward.plan is not None
        by_place = _ops(forward.plan)
        for (row, matrices), at in zip(forward.products, forward.layers, strict=True):
            ops = [by_place[at, m] for m in matrices.split("+")]
            macs[row] = sum(op.macs for op in ops)
            layer[row] = at
            role[row] = product_role[row] = ops[0].cls
            types[row] = "+".join(sorted({op.weight_type for op in ops}))
        for at, row in enumerate(forward.attentions):
            op = by_place[at, "attention"]
            macs[row], layer[row], role[row] = op.macs, at, op.cls
        _between(forward, geometry, cls, kind, layer, role, types)
    for row in stray.tolist():
        until = next((j for j in range(row + 1, size) if cls[j] in PRODUCTS), size)
        role[row] = "rope_kv" if "rope" in cls[row:until] else "other"
    family = launches.copy(deep=False)
    family["macs"] = nullable(macs, "Int64")
    family["layer"] = nullable(layer, "Int32")
    roles = family.copy(deep=False)
    roles["class"] = pd.array(role, dtype=pd.StringDtype("python"))
    roles["weight_type"] = pd.array(types, dtype=pd.StringDtype("python"))
    return family, roles


def _ops(plan: Plan) -> dict[tuple[int, str], Op]:
    found: dict[tuple[int, str], Op] = {}
    for op in plan:
        for part in op.parts:
            found[op.layer, part.matrix] = op
        if op.kind == "attention":
            found[op.layer, "attention"] = op
    return found


def _between(forward: Forward, geometry: Geometry, cls: np.ndarray, kind: np.ndarray, layer: np.ndarray,
             role: np.ndarray, types: np.ndarray) -> None:  # fmt: skip
    """Role, layer and weight type of the launches around a forward's products and attentions.

    Each hangs on the product before it, until something prepares the next one (a norm, or a pass over its input or
    weights): from there on it belongs to that one's layer.
    """
    assert forward.plan is not None
    marks = sorted([*forward.products, *((row, "attention") for row in forward.attentions)])
    last = geometry.layers - 1
    one_row_ffn = _ops(forward.plan)[last, "ffn_gate"].cls == "tail"
    first = marks[0][0]
    for j in range(first - 1, -1, -1):
        if cls[j] not in (*_PREPARES, "convert", "memset", "elementwise") or kind[j] == "memcpy":
            break
        layer[j] = layer[first]
        types[j] = types[first] if cls[j] == "dequantize" else "-"
        role[j] = "norm" if cls[j] == "elementwise" else role[j]  # a norm in parts
    for (row, matrix), (stop, _) in zip(marks, [*marks[1:], (_end(marks[-1][0], cls, kind), "")], strict=True):
        following = layer[stop] if stop < len(layer) else -1
        prepared = gathered = False
        for j in range(row + 1, stop):
            if cls[j] == "gemm_fixup":
                role[j], types[j], layer[j] = role[row], types[row], layer[row]
                continue
            if kind[j] == "memcpy":
                continue
            # The last layer goes on with the rows that it gathers.
            gathered |= cls[j] == "embedding"
            prepared |= cls[j] in _PREPARES or (cls[j] == "attention" and matrix != "attention")
            layer[j] = following if prepared else layer[row]
            if cls[j] == "attention":
                role[j] = "attention"
            elif cls[j] == "elementwise":
                role[j] = _ELEMENTWISE_AFTER.get(matrix.split("+")[0], "other")
            elif cls[j] == "dequantize":
                types[j] = types[stop]
            if one_row_ffn and layer[j] == last and (gathered or role[row] == "tail"):
                role[j] = "tail"


def _end(row: int, cls: np.ndarray, kind: np.ndarray) -> int:
    """One past the launches that finish a forward's last product: fix-up, conversion of the logits, sampling."""
    row += 1
    while row < len(cls) and kind[row] == "kernel" and cls[row] in ("gemm_fixup", "sampling", "convert"):
        row += 1
    return row
