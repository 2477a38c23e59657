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

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.attribution.classify import Match
from harness.attribution.occurrences import PRODUCTS, main_attentions
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
    forwards, stray = _forwards_without_strays(launches, told, geometry)
    types_told = _check_types(forwards, launches, geometry)
    prefills = _prefills(forwards, tokens)
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
    if macs != one.macs * len(prefills):
        raise RolesUnknown(
            f"the launches' products come to {macs / 1e9:.3f} GMAC, the ledger's to {one.macs * len(prefills) / 1e9:.3f}: "
            f"the tail may not be {tail}"
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
    fits += "" if forwards[0].rows_told or rows_fit else "; tokens as given, not checked"
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
    if len(attentions) % layers:
        raise RolesUnknown(
            f"{len(attentions)} attention launches are no multiple of the {layers} layers of {geometry.name or 'the model'}",
            contradicted=True,
        )
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
    choices: dict[int, list[tuple[list[str], bool]]] = {
        # A chunk whose rows nobody reads computes no FFN in its last layer.
        1: [(["attn_output"], False)],
        3: [(_FFN[3], False)],
        4: [([*_FFN[3], "output"], True), (_FFN[4], False)],
        5: [([*_FFN[4], "output"], True)],
    }
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


def _prefills(forwards: list[Forward], tokens: int | None) -> list[list[Forward]]:
    """Forwards grouped into prefills: a chunk without a head goes on in the next forward."""
    if any(f.rows is None for f in forwards):
        if tokens is None:
            raise HarnessError("the trace does not tell how many tokens its prefills have; give --tokens.")
        for f in forwards:
            f.rows = tokens
    groups: list[list[Forward]] = []
    current: list[Forward] = []
    for forward in forwards:
        current.append(forward)
        if forward.has_head or (tokens is not None and sum(f.rows or 0 for f in current) >= tokens):
            groups.append(current)
            current = []
    if current:
        raise RolesUnknown("the trace ends inside a prefill")
    sizes = {sum(f.rows or 0 for f in g) for g in groups}
    if tokens is not None and sizes != {tokens}:
        raise RolesUnknown(
            f"the trace's prefills have {', '.join(map(str, sorted(sizes)))} tokens, not {tokens}", contradicted=True
        )
    if len(sizes) > 1:
        raise RolesUnknown(
            f"prefills of {', '.join(map(str, sorted(sizes)))} tokens are mixed: choose one with --occurrence"
        )
    return groups


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
