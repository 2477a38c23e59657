"""Roles, layers and MACs of a foreign engine's launches, from their order within a layer, checked against the ledger.

An engine that we do not own tags nothing. But every decoder launches the same things in the same order: attention runs
once a layer, the products between two attentions are o, gate, up, down and the next layer's q, k, v (or their joined
forms), and what stands between two products belongs to one of them. So a forward is cut at its attentions, its products
are named by their place, and the weight types that the kernels' names tell must be those of the GGUF; where they are
not, nothing is named.

Elementwise launches go where our plan puts that work: bias adds before RoPE with `rope_kv`, residual adds with `norm`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from harness.attribution.classify import Match
from harness.errors import HarnessError
from harness.launches import nullable

if TYPE_CHECKING:
    from engine.geometry import Geometry
    from engine.plan import Op, Plan

_PRODUCTS = ("gemm", "gemv")
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


class RolesUnknown(Exception):
    """Why the launch order does not fit the geometry: one clause, for the notes."""


@dataclass
class Forward:
    """One forward over some rows: a whole prefill, or a chunk of one."""

    products: list[tuple[int, str]]  # (row in the table, matrices as "attn_q" or "ffn_gate+ffn_up"), in launch order
    layers: list[int]  # of each product; −1 for the head
    attentions: list[int]  # rows, one a layer
    rows: int | None  # M, where a launch tells it
    has_head: bool
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
    Raises RolesUnknown where the order does not fit `geometry`, and HarnessError where tokens contradict the trace.
    """
    forwards = _forwards(launches, matches, geometry)
    prefills = _prefills(forwards, tokens)
    chunks = [f.rows or 0 for f in prefills[0]]
    total = sum(chunks)
    one = build(geometry, total, tail)
    for prefill in prefills:
        past = 0
        for forward in prefill:
            rows = forward.rows or 0
            forward.past, forward.plan = past, build(geometry, rows, tail, past)
            past += rows
    family, roles = _book(launches, forwards, geometry)
    macs = int(family["macs"].fillna(0).sum())
    if macs != one.macs * len(prefills):
        raise RolesUnknown(
            f"the launches' products come to {macs / 1e9:.3f} GMAC, the ledger's to {one.macs * len(prefills) / 1e9:.3f}"
        )
    return Attributed(family, roles, len(prefills), chunks, total, one)


def apportion(launches: pd.DataFrame, plan: Plan, prefills: int) -> pd.DataFrame:
    """MACs of whole classes, where single launches cannot be named: split over a class's launches by their duration.

    Products whose names tell a weight type that the ledger has get that type's MACs; all other products share the rest.
    """
    table = launches.copy(deep=False)
    macs = np.full(len(table), -1, np.int64)
    cls = table["class"].to_numpy(object)
    types = table["weight_type"].to_numpy(object)
    duration = (table["end_ns"] - table["start_ns"]).to_numpy()
    by_type: dict[str, int] = {}
    for op in plan:
        for part in op.parts:
            by_type[part.weight_type] = by_type.get(part.weight_type, 0) + part.macs * prefills
    product = np.isin(cls, _PRODUCTS)
    rest = product.copy()
    for name in list(by_type):
        mine = product & (types == name)
        if mine.any():
            macs[mine] = _split(by_type.pop(name), duration[mine])
            rest &= ~mine
    if rest.any():
        macs[rest] = _split(sum(by_type.values()), duration[rest])
    attention = cls == "attention"
    if attention.any():
        macs[attention] = _split(sum(op.macs for op in plan if op.kind == "attention") * prefills, duration[attention])
    table["macs"] = nullable(macs, "Int64")
    return table


def _split(total: int, weights: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to `weights` that sum to `total` exactly."""
    edges = np.concatenate([[0.0], np.cumsum(weights, dtype=np.float64)])
    marks = [int(total * (e / edges[-1])) if edges[-1] else 0 for e in edges[:-1]] + [total]
    return np.diff(np.array(marks, dtype=np.int64))


# Cutting the trace into forwards


def _forwards(launches: pd.DataFrame, matches: dict[tuple[str, str], Match], geometry: Geometry) -> list[Forward]:
    cls = launches["class"].to_numpy(object)
    attentions = _main_attentions(launches, cls)
    layers = geometry.layers
    if len(attentions) == 0 or len(attentions) % layers:
        raise RolesUnknown(f"{len(attentions)} attention launches are no multiple of {layers} layers")
    products = np.flatnonzero(np.isin(cls, _PRODUCTS) & (launches["kind"] == "kernel").to_numpy())
    between = [part.tolist() for part in np.split(products, np.searchsorted(products, attentions))]
    head_len = len(between[0])
    if head_len not in (1, 2, 3):
        raise RolesUnknown(f"{head_len} products before the first attention are no q, k and v")
    rows = _Rows(launches, matches)
    found = []
    for f in range(len(attentions) // layers):
        at = attentions[f * layers : (f + 1) * layers]
        names: list[tuple[int, str]] = []
        where: list[int] = []
        # Products ahead of this forward's first attention: the last `head_len` since the previous forward's attention.
        start = between[f * layers][-head_len:]
        _name(names, where, start, _qkv(head_len), 0)
        for layer in range(1, layers):
            inside = between[f * layers + layer]
            _name(names, where, inside[: len(inside) - head_len], _ffn(len(inside) - head_len), layer - 1)
            _name(names, where, inside[len(inside) - head_len :], _qkv(head_len), layer)
        after = between[(f + 1) * layers]
        if f + 1 < len(attentions) // layers:
            after = after[: len(after) - head_len]
        has_head = _name_tail(names, where, after, launches, geometry)
        found.append(Forward(names, where, at.tolist(), rows.of(start[0]), has_head))
    _check_types(found, launches, geometry)
    return found


def _main_attentions(launches: pd.DataFrame, cls: np.ndarray) -> np.ndarray:
    """Rows of the attention kernel that does the work (fix-ups and masks beside it take little time)."""
    rows = np.flatnonzero(cls == "attention")
    if len(rows) == 0:
        return rows
    part = launches.iloc[rows]
    time = (part["end_ns"] - part["start_ns"]).groupby(part["name"].to_numpy(object)).sum()
    # One name may come in variants (block sizes by length of the keys): those of the same function count together.
    from harness.attribution.classify import split_name

    main = split_name(str(time.idxmax()))[0]
    same = np.array([split_name(n)[0] == main for n in time.index])
    return rows[np.isin(part["name"].to_numpy(object), time.index[same].to_numpy(object))]


def _qkv(count: int) -> list[str]:
    return {1: ["attn_q+attn_k+attn_v"], 2: ["attn_q", "attn_k+attn_v"], 3: ["attn_q", "attn_k", "attn_v"]}[count]


def _ffn(count: int) -> list[str]:
    if count == 3:
        return ["attn_output", "ffn_gate+ffn_up", "ffn_down"]
    if count == 4:
        return ["attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    raise RolesUnknown(f"{count} products after an attention are no o, gate, up and down")


def _name(names: list[tuple[int, str]], where: list[int], rows: list[int], matrices: list[str], layer: int) -> None:
    if len(rows) != len(matrices):
        raise RolesUnknown(f"layer {layer} has {len(rows)} products where {len(matrices)} should be")
    names += zip(rows, matrices, strict=True)
    where += [layer] * len(rows)


def _name_tail(
    names: list[tuple[int, str]], where: list[int], rows: list[int], launches: pd.DataFrame, geometry: Geometry
) -> bool:  # fmt: skip
    """The products after a forward's last attention; True where the head is among them."""
    last = geometry.layers - 1
    choices: dict[int, list[tuple[list[str], bool]]] = {
        # A chunk whose rows nobody reads computes no FFN in its last layer.
        1: [(["attn_output"], False)],
        3: [(_ffn(3), False)],
        4: [([*_ffn(3), "output"], True), (_ffn(4), False)],
        5: [([*_ffn(4), "output"], True)],
    }
    for matrices, head in choices.get(len(rows), []):
        if all(_fits(launches["weight_type"].iat[r], m, last, geometry) for r, m in zip(rows, matrices, strict=True)):
            body = len(matrices) - head
            _name(names, where, rows[:body], matrices[:body], last)
            if head:
                _name(names, where, rows[body:], ["output"], -1)
            return head
    raise RolesUnknown(f"{len(rows)} products after the last attention are no o, gate, up, down and head")


def _fits(told: str, matrices: str, layer: int, geometry: Geometry) -> bool:
    """Whether a product whose name tells the weight type `told` can be these matrices."""
    # A name that tells one of the file's types must tell the right one; others are what a file's type was turned into.
    types = {geometry.weight_type(_tensor(m, layer)) for m in matrices.split("+")}
    return told not in set(geometry.weight_types.values()) or types == {told}


def _tensor(matrix: str, layer: int) -> str:
    return "output.weight" if matrix == "output" else f"blk.{layer}.{matrix}.weight"


def _check_types(forwards: list[Forward], launches: pd.DataFrame, geometry: Geometry) -> None:
    """Types that the names tell (of a product, or of the dequantise pass ahead of it) against the file's.

    k and v have one shape, and engines launch them in either order: the types decide, else k comes first.
    """
    told = launches["weight_type"].to_numpy(object)
    cls = launches["class"].to_numpy(object)
    known = set(geometry.weight_types.values())
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
                if seen and not seen <= types:
                    wrong[swapped].append(
                        f"layer {layer} {matrices} is {'+'.join(sorted(types))} in the file and {'+'.join(sorted(seen))} in the trace"
                    )
                previous = row
        if wrong[False] and wrong[True]:
            raise RolesUnknown(min(wrong.values(), key=len)[0])
        if wrong[False]:
            turned = {"attn_k": "attn_v", "attn_v": "attn_k"}
            forward.products = [(r, turned.get(m, m)) for r, (_, m) in zip(rows, forward.products, strict=True)]


class _Rows:
    """M of a forward, from the grid of the norm ahead of it: llama.cpp and vLLM launch one block a row."""

    _ENTRIES = ("rms_norm_f32", "vllm::rms_norm_kernel", "vllm::fused_add_rms_norm_kernel")

    def __init__(self, launches: pd.DataFrame, matches: dict[tuple[str, str], Match]) -> None:
        from harness.attribution.classify import split_name

        names = {n for (n, _), m in matches.items() if m.cls == "norm" and split_name(n)[0] in self._ENTRIES}
        self.rows = np.flatnonzero(launches["name"].isin(names).to_numpy())
        self.grid = launches["grid"].to_numpy(object)

    def of(self, row: int) -> int | None:
        """Rows of the last norm that ran before `row`."""
        at = np.searchsorted(self.rows, row) - 1
        return int(self.grid[self.rows[at]].split(",")[0]) if at >= 0 else None


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
        raise HarnessError(
            f"the trace's prefills have {', '.join(map(str, sorted(sizes)))} tokens, not {tokens}; give --tokens as recorded, or "
            "--occurrence for one of them."
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


def _book(launches: pd.DataFrame, forwards: list[Forward], geometry: Geometry) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(the table with `macs` and `layer`, the same launches classed by role)."""
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
