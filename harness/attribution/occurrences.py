"""The K-th prefill of a trace, found by its repeating launch sequence.

A trace of a benchmark holds what came before (a model's upload), and then the same forward several times. Layers repeat
too, but their repetition breaks at every forward's end, so only the forward's own period holds from its first launch to
its last one. Names and grids are compared, never times.

A window of one forward has no other repetition than its layers, and they must not pass for prefills: what repeats with
one attention is a layer, and so is a group of layers with a head's product after the last repetition. Where a model says
how many layers a forward has, its attentions count the forwards; what runs between two of them must then be more than what
runs between two layers (`find_forwards`): a final norm, a head, an embedding.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pandas as pd

MIN_LAUNCHES = 4
"""Shorter repetitions are loops of one operator, not forwards."""


@dataclass(frozen=True)
class Repeats:
    """What repeats in a launch table, and the whole prefills among it."""

    prefills: list[np.ndarray] = field(default_factory=list)  # row positions of each; [] where no whole prefill repeats
    count: int = 0  # repetitions of the sequence that was found, prefills or not
    launches: int = 0  # kernels of one repetition
    attentions: int = 0  # of one repetition
    everything: bool = False  # no kernel lies outside the repetitions: nothing runs once a forward

    def why_none(self) -> str:
        """Why no whole prefill repeats, as a clause."""
        if not self.count:
            return "no launch sequence repeats"
        each = "one attention" if self.attentions == 1 else f"{self.attentions} attentions"
        return f"what repeats are {self.count} layers or groups of layers ({self.launches} launches, {each} each)"


def find_occurrences(launches: pd.DataFrame) -> list[np.ndarray]:
    """Row positions of every whole prefill that repeats, in order; see `find_repeats`."""
    return find_repeats(launches).prefills


def find_repeats(launches: pd.DataFrame, layers: int | None = None) -> Repeats:
    """Every repetition of a prefill: kernels, and the copies and memsets that go with them.

    `launches` is one device's table, ordered by start; its classes tell attentions, where it is classified.
    `layers`: of the model, where it is known.
    """
    kernels = np.flatnonzero(launches["kind"].isin(["kernel", "graph"]).to_numpy())
    if len(kernels) < 2 * MIN_LAUNCHES:
        return Repeats()
    name, _ = pd.factorize(launches["name"].to_numpy(object)[kernels])
    grid, _ = pd.factorize(launches["grid"].to_numpy(object)[kernels])
    exact = np.unique(name * (grid.max() + 1) + grid, return_inverse=True)[1]
    # Grids first: the chunks of one prefill have the same names and differ in their grids.
    keys = exact
    found = repeating_run(exact)
    if found is None:
        keys, found = name, repeating_run(name)
    if found is None:
        return Repeats()
    first, period, count = found
    end = _extended(keys, first, first + (count - 1) * period, period)[1]
    first += _phase(launches, kernels, first, period, count, end)
    attention = np.isin(kernels, main_attentions(launches))
    each = int(attention[first : first + period].sum())
    about = Repeats([], count, period, each, first == 0 and first + period * count == len(kernels))
    together = _in_a_prefill(launches, kernels, keys, attention, (first, period, count), each, layers)
    if not together or count // together < 2:
        return about
    period, count = period * together, count // together
    bounds = [kernels[first + i * period] for i in range(count)]
    last = kernels[first + count * period - 1]
    return Repeats(_with_copies(launches, bounds, last), about.count, about.launches, each, about.everything)


def _in_a_prefill(launches: pd.DataFrame, kernels: np.ndarray, keys: np.ndarray, attention: np.ndarray,
                  run: tuple[int, int, int], each: int, layers: int | None) -> int:  # fmt: skip
    """How many repetitions one prefill is made of; 0 where they are layers of prefills that nothing tells apart."""
    first, period, count = run
    if layers is not None and attention.any():
        if each and each % layers == 0:
            return 1
        return layers // each if each and layers % each == 0 and count % (layers // each) == 0 else 0
    if not attention.any():
        return 1  # no attention is known by name: what repeats is all there is to go by
    if each < 2:
        return 0
    # A head's product that ran once, after the last repetition and no other attention: those were groups of layers.
    after = slice(first + period * count, len(keys))
    inside = set(keys[first : first + period].tolist())
    product = launches["class"].isin(PRODUCTS).to_numpy()[kernels]
    head = any(k not in inside for k in keys[after][product[after]].tolist())
    return 0 if head and all(k in inside for k in keys[after][attention[after]].tolist()) else 1


PRODUCTS = ("gemm", "gemv")
"""Families of a matrix product."""


def main_attentions(launches: pd.DataFrame) -> np.ndarray:
    """Rows of the attention kernel that does the work (fix-ups and masks beside it take little time)."""
    from harness.attribution.classify import split_name

    rows = np.flatnonzero((launches["class"] == "attention").to_numpy())
    if len(rows) == 0:
        return rows
    name = launches["name"].to_numpy(object)[rows]
    time = pd.Series((launches["end_ns"] - launches["start_ns"]).to_numpy()[rows]).groupby(name).sum()
    # One name may come in variants (block sizes by length of the keys): those of the same function count together.
    main = split_name(str(time.idxmax()))[0]
    return rows[np.isin(name, [n for n in time.index if split_name(n)[0] == main])]


def repeating_run(keys: np.ndarray) -> tuple[int, int, int] | None:
    """(first, period, count) of the longest stretch keys[first : first + count · period] that repeats, count ≥ 2.

    The period is anchored on a key whose every two neighbouring occurrences enclose the same sequence: keys of a layer
    do not qualify once a forward ends between them. Among such anchors the widest stretch wins, then the most rows that
    one repetition explains.
    """
    order = np.argsort(keys, kind="stable")
    bounds = np.flatnonzero(np.diff(keys[order])) + 1
    best: tuple[int, int, int] | None = None
    seen: set[tuple[int, int]] = set()
    # Rare keys first: an anchor that occurs once a forward is settled by one comparison.
    for rows in sorted(np.split(order, bounds), key=len):
        if len(rows) < 2:
            continue
        gaps = np.diff(rows)
        period = int(gaps[0])
        if period < MIN_LAUNCHES or (gaps != period).any() or (period, int(rows[0]) % period) in seen:
            continue
        seen.add((period, int(rows[0]) % period))
        low, high = int(rows[0]), int(rows[-1])
        if not np.array_equal(keys[low : high - period], keys[low + period : high]):
            continue
        low, end = _extended(keys, low, high, period)
        count = (end - low) // period
        if count >= 2 and (best is None or count * period > best[1] * best[2]):
            best = (low, period, count)
    return best


def _extended(keys: np.ndarray, low: int, high: int, period: int) -> tuple[int, int]:
    """The widest [low, end) around a periodic stretch in which keys[i] == keys[i + period]."""
    same = keys[:-period] == keys[period:]
    before = np.flatnonzero(~same[:low])
    low = int(before[-1]) + 1 if len(before) else 0
    start = high - period
    after = np.flatnonzero(~same[start:])
    return low, (start + int(after[0]) if len(after) else len(same)) + period


def _phase(launches: pd.DataFrame, kernels: np.ndarray, first: int, period: int, count: int, end: int) -> int:
    """Where in the spare rows a repetition starts: after the device's longest wait, which separates two forwards."""
    spare = end - first - count * period
    if spare <= 0:
        return 0
    start = launches["start_ns"].to_numpy()[kernels]
    reach = np.maximum.accumulate(launches["end_ns"].to_numpy()[kernels])
    waits = []
    for offset in range(spare + 1):
        at = first + offset + np.arange(count) * period
        at = at[at > 0]
        waits.append(float(np.median(start[at] - reach[at - 1])) if len(at) else -np.inf)
    return int(np.argmax(waits))


def _with_copies(launches: pd.DataFrame, bounds: list[int], last: int) -> list[np.ndarray]:
    """Adds the copies around each repetition's kernels: cut where the device waits longest between two repetitions."""
    start = launches["start_ns"].to_numpy()
    reach = np.maximum.accumulate(launches["end_ns"].to_numpy())
    cuts = []
    kinds = launches["kind"].to_numpy(object)
    for row in bounds[1:]:
        low = row
        while low > 0 and kinds[low - 1] not in ("kernel", "graph"):
            low -= 1
        between = np.arange(low, row + 1)
        cuts.append(int(between[np.argmax(start[between] - reach[between - 1])]))
    # The first repetition takes as many copies ahead of it as the second one has, if they are the same ones.
    ahead = bounds[1] - cuts[0]
    lead = bounds[0] - ahead
    same = lead >= 0 and _alike(launches, lead, cuts[0], ahead)
    tail = last + 1
    while tail < len(launches) and kinds[tail] not in ("kernel", "graph"):
        tail += 1
    # And the last one as many after it as lie between the one before it and its cut.
    before = launches.iloc[bounds[-2] : cuts[-1]]
    behind = len(before) - int(np.flatnonzero(before["kind"].isin(["kernel", "graph"]).to_numpy())[-1]) - 1
    edges = [lead if same else bounds[0], *cuts, min(tail, last + 1 + behind)]
    return [np.arange(a, b) for a, b in pairwise(edges)]


def _alike(launches: pd.DataFrame, a: int, b: int, count: int) -> bool:
    columns = ["name", "bytes"]
    left = launches[columns].iloc[a : a + count].reset_index(drop=True)
    return left.equals(launches[columns].iloc[b : b + count].reset_index(drop=True))


# Forwards, as far as the launches alone tell


PASSES = ("gemm_fixup", "attention", "quantize", "dequantize", "convert", "memset")
"""Families that come and go with shapes and weight types, in one layer and not in the next: no sign of a forward's end."""
CUT_LEAST = 3
"""Attentions that must be there before a trace's edges are compared with its layers."""


@dataclass(frozen=True)
class Between:
    """What runs between two attentions, counted by what tells a layer from a forward."""

    sequence: bytes  # families (and the direction of copies from and to the host) in order, without `PASSES`
    products: int
    norms: int
    embeddings: int
    others: int  # sampling, and copies from and to the host

    def ends_a_forward(self, layer: Between) -> bool:
        """Whether this is more than (or, of a chunk whose rows nobody reads, less than) what runs between two layers."""
        if self.sequence == layer.sequence:
            return False
        if self.embeddings > layer.embeddings or self.norms > layer.norms or self.products < layer.products:
            return True
        return self.products > layer.products and self.others > layer.others

    @property
    def plain(self) -> bool:
        """Nothing of it runs once a forward: no embedding, sampling or copy, and no more products than a layer has."""
        return not self.embeddings and not self.others and self.products <= MOST_PRODUCTS


MOST_PRODUCTS = 7
"""q, k, v, o, gate, up and down."""


@dataclass(frozen=True)
class Forwards:
    """A launch table cut at its attentions. Positions are rows of the table."""

    attentions: np.ndarray
    between: list[Between]  # of every two neighbouring attentions
    ahead: Between  # of the first attention
    first: list[int]  # number of each forward's first attention
    ends: list[bool] | None  # of each forward: the logits of a prefill follow; None where nothing tells
    starts_inside: bool  # the table starts inside a forward
    ends_inside: bool

    @property
    def lengths(self) -> list[int]:
        """Attentions of each forward: the model's layers, but for one that is cut."""
        return np.diff([*self.first, len(self.attentions)]).tolist()

    @property
    def whole(self) -> list[int]:
        """`lengths` of the forwards that the table's ends do not cut."""
        return self.lengths[int(self.starts_inside) : len(self.first) - int(self.ends_inside)]

    @property
    def cut(self) -> str:
        """ "starts", "ends" or "starts and ends" where the table does so inside a forward, else ""."""
        return " and ".join(w for w, inside in (("starts", self.starts_inside), ("ends", self.ends_inside)) if inside)


def find_forwards(launches: pd.DataFrame) -> Forwards | None:
    """The forwards of one device's classified table, ordered by start; None without an attention.

    What runs between two layers is what runs most often between two attentions; where that holds an embedding, it is a
    forward's end (a model of one layer).
    """
    attentions = main_attentions(launches)
    if len(attentions) == 0:
        return None
    cls = launches["class"].to_numpy(object)
    name = launches["name"].to_numpy(object)
    kind = launches["kind"].to_numpy(object)
    word = np.where(np.isin(cls, PRODUCTS), "product", cls)
    copies = np.flatnonzero(kind == "memcpy")
    word[copies] = [next((way for way in ("HtoD", "DtoH") if way in name[i]), "") for i in copies]
    kept = np.flatnonzero(~np.isin(word, [*PASSES, ""]))
    codes, words = pd.factorize(word[kept])
    edges = np.searchsorted(kept, attentions)
    of_word = {str(w): i for i, w in enumerate(words)}

    def between(part: np.ndarray) -> Between:
        products, norms, embeddings = (
            int((part == of_word.get(w, -2)).sum()) for w in ("product", "norm", "embedding")
        )
        others = sum(int((part == of_word.get(w, -2)).sum()) for w in ("sampling", "HtoD", "DtoH"))
        return Between(part.tobytes(), products, norms, embeddings, others)

    seen: dict[bytes, Between] = {}
    parts = []
    for a, b in pairwise(edges.tolist()):
        key = codes[a:b].tobytes()
        if key not in seen:
            seen[key] = between(codes[a:b])
        parts.append(seen[key])
    bounds = [0]
    inner = set(range(len(parts)))
    if parts:
        common = pd.Series([p.sequence for p in parts]).value_counts()
        layer = seen[common.index[0]]
        one_layer = layer.embeddings > 0
        bounds += [i + 1 for i, p in enumerate(parts) if one_layer or p.ends_a_forward(layer)]
        inner -= {b - 1 for b in bounds}
    names = pd.factorize(name)[0].astype(np.int64)
    grids = pd.factorize(launches["grid"].to_numpy(object))[0].astype(np.int64)
    exact = names * (grids.max() + 2) + grids
    at = [0, *edges.tolist(), len(kept)]

    def keys(j: int) -> np.ndarray:  # of part j: 0 ahead of the first attention, j behind the j-th
        return exact[kept[at[j] : at[j + 1]]]

    layers = (
        {keys(i + 1).tobytes(): keys(i + 1) for i in sorted(inner)}.values() if len(attentions) >= CUT_LEAST else []
    )
    # The end of a layer alone ahead of the first attention, the start of one alone behind the last; where both together
    # are one layer, the table may hold nothing but layers from the first to the last.
    ahead, behind = keys(0), keys(len(attentions))
    bare = any(np.array_equal(k, np.r_[behind, ahead]) for k in layers)
    starts_inside = not bare and any(_ends_with(k, ahead) for k in layers)
    ends_inside = not bare and any(_ends_with(k[::-1], behind[::-1]) for k in layers)
    lengths = np.diff([*bounds, len(attentions)])
    starts_inside |= bool(lengths[0] < lengths.max())
    ends_inside |= bool(lengths[-1] < lengths.max())
    # What ends a prefill runs in no layer and starts none: a head, sampling, the copy of the logits.
    starts = set(names[kept[np.isin(word[kept], ["embedding", "HtoD"])]].tolist())
    usual = {i for j in inner for i in names[kept[at[j + 1] : at[j + 2]]].tolist()} | starts
    last = [bool(set(names[kept[at[j] : at[j + 1]]].tolist()) - usual) for j in [*bounds[1:], len(attentions)]]
    ends = last if any(last) else None
    return Forwards(attentions, parts, between(codes[: edges[0]]), bounds, ends, starts_inside, ends_inside)


def _ends_with(layer: np.ndarray, part: np.ndarray) -> bool:
    """Whether `part` is the end of `layer` and less than all of it."""
    return len(part) < len(layer) and np.array_equal(part, layer[len(layer) - len(part) :])
