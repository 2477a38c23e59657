"""Feeds damaged and hostile files to every reader: each must be read, or refused by one sentence of bounded length.

    python benchmarks/fuzz_readers.py --examples 20000          all readers, some minutes each
    python benchmarks/fuzz_readers.py --reader gguf --examples 1000

CI runs a few dozen examples of each (tests/unit/test_fuzz_readers.py). A reader joins by an entry in READERS.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from harness.errors import HarnessError

LONGEST = 1200
"""Characters of the longest sentence, beside the path in it."""


@dataclass(frozen=True)
class Reader:
    """One reader: the files that it is given, and how it is asked."""

    file: str  # the name that it is given under
    contents: Callable[[], st.SearchStrategy[bytes]]
    read: Callable[[Path], object]


def check(reader: Reader, content: bytes, folder: Path) -> str:
    """ "read" or "refused". Raises whatever else the reader raised, and AssertionError for a refusal that is no sentence."""
    path = folder / reader.file
    path.write_bytes(content)
    try:
        reader.read(path)
    except (HarnessError, EngineError) as error:
        sentence = str(error)
        assert sentence and "\n" not in sentence and "\r" not in sentence, repr(sentence)
        assert len(sentence) < LONGEST + 2 * len(str(path)), f"{len(sentence)} characters: {sentence[:200]}…"
        return "refused"
    return "read"


# --- damage that fits any file -----------------------------------------------------------------------------------------


def damaged(whole: bytes, *, within: int | None = None) -> st.SearchStrategy[bytes]:
    """The bytes with flips, absurd words and cuts, in the first `within` of them."""
    reach = min(within or len(whole), len(whole))
    return st.builds(
        lambda flips, words, cut: _damage(whole, flips, words, cut),
        st.lists(st.tuples(st.integers(0, reach - 1), st.integers(1, 255)), max_size=8),
        st.lists(st.tuples(st.integers(0, max(reach - 8, 0)), st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1])), max_size=2),
        st.one_of(st.none(), st.integers(0, len(whole))),
    )  # fmt: skip


def _damage(whole: bytes, flips: list[tuple[int, int]], words: list[tuple[int, int]], cut: int | None) -> bytes:
    raw = bytearray(whole)
    for at, word in words:
        raw[at : at + 8] = struct.pack("<Q", word)
    for at, mask in flips:
        raw[at] ^= mask
    return bytes(raw[:cut])


ODD_JSON = ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000, "-1", "0", "null", "true", '""', '"\\u0000"', '"\\ud800"', "[]", "{}", "[" * 5000 + "]" * 5000, "99999999999999999999", '"x"']  # fmt: skip
"""What may stand in a JSON file where a value is expected."""


def odd_json(value: Any) -> st.SearchStrategy[bytes]:
    """A JSON document with one of its values, or some of its bytes, replaced."""
    leaves = list(_paths(value))
    swapped = st.builds(lambda path, odd: _swap(value, path, odd), st.sampled_from(leaves), st.sampled_from(ODD_JSON))
    return st.one_of(swapped, damaged(json.dumps(value).encode()))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in children:
        yield from _paths(inner, (*path, key))


def _swap(value: Any, path: tuple[Any, ...], odd: str) -> bytes:
    marker = "\x01swapped\x01"
    if not path:
        return odd.encode()
    copy = json.loads(json.dumps(value))
    node = copy
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = marker
    return json.dumps(copy).replace(json.dumps(marker), odd).encode()


# --- the readers' own files --------------------------------------------------------------------------------------------

YAML_PIECES = ["name: x\n", "tokens: ", "1", "-1", "1e400", ".nan", ".inf", "extends: ", "base.yaml\n", '"a\\0b"\n', "levers: ", "{", "}", "[", "]", "&a ", "*a", "*b", "&b ",
               "- ", ": ", "\n", "  ", "? ", "!!python/object:os.system ", "!!timestamp 2001-99-99", "!!int ", "9" * 5000, "\x00", "\x07", "\x85", "\ufeff", "|\n", ">", "%YAML 9.9\n",
               "---\n", "...\n", "<<: *a\n", "[" * 300, "{a: " * 300, "engine: {kind: command, argv: [x]}\n", "plant: {fraction: ", "}\n", "rules:\n", "  - {pattern: ", "'('", ", class: gemm}\n", "\t", "#", "'", '"', "e\u0301", "on"]  # fmt: skip


def yaml_texts() -> st.SearchStrategy[bytes]:
    """Texts of YAML's own pieces, and of any characters."""
    pieces = st.lists(st.sampled_from(YAML_PIECES), max_size=24).map("".join)
    return st.one_of(pieces, st.text(max_size=60)).map(lambda text: text.encode("utf-8", "surrogatepass"))


@cache
def small_gguf() -> bytes:
    """A Llama of one layer and 32 channels, with a vocabulary."""
    import gguf
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_block_count(1)
        writer.add_context_length(64)
        writer.add_embedding_length(32)
        writer.add_feed_forward_length(64)
        writer.add_head_count(4)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(1e4)
        writer.add_token_list(["a", "b"])
        shapes = {"token_embd": (2, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32),
                  "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}  # fmt: skip
        for name, shape in shapes.items():
            writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float16 if len(shape) == 2 else np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def read_gguf(path: Path) -> None:
    """Geometry, sizes, vocabulary and, where it runs, every weight."""
    from engine.gguf_model import open_model
    from engine.plan import build_plan

    model = open_model(path)
    build_plan(model.geometry, 2)
    for name in model.tensors:
        if not model.refusal:
            model.dequantize(name)
    model.tokenizer()


@cache
def launches_parquet() -> bytes:
    """A launch table of three rows."""
    from harness import launches

    table = launches.from_columns(
        name=["a", "b", "c"], kind=["kernel"] * 3, start_ns=[0, 5, 9], end_ns=[4, 8, 12], device=[0] * 3, stream=[7] * 3
    )
    return bytes(table.to_parquet(None, index=False))


def parquets() -> st.SearchStrategy[bytes]:
    """Damaged launch tables, and whole ones with a column of another type or with values that are none."""
    return st.one_of(damaged(launches_parquet()), st.builds(_other_column, st.integers(0, 16), st.integers(0, 9)))


def _other_column(column: int, what: int) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    table = parquet.read_table(BytesIO(launches_parquet()))
    odd = [
        pa.nulls(3, pa.string()), pa.array(["x", None, "y"]), pa.array([b"\xff\xfe"] * 3, pa.binary()), pa.array([1.5, float("nan"), 1e300]),
        pa.array([2**63 - 1] * 3), pa.array([[1], [2], [3]]), pa.array(["no such class"] * 3), pa.array([-(2**63)] * 3), pa.array([True, False, None]),
        pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(struct.pack("<4i", 0, 1, 2, 3)), pa.py_buffer(b"\xff\xfe\xfd")]),
    ][what]  # fmt: skip
    name = table.column_names[column % table.num_columns]
    sink = BytesIO()
    parquet.write_table(table.set_column(table.column_names.index(name), name, odd), sink)
    return sink.getvalue()


@cache
def decomposition_json() -> Any:
    """A small decomposition."""
    row = {
        "class": "gemm",
        "weight_type": "f16",
        "launches": 3,
        "sum_ms": 1.0,
        "union_ms": 1.0,
        "share": 1.0,
        "gmac": 2.0,
    }
    check_row = {"name": "conservation", "ok": True, "value": 0.0, "limit": 1e-6, "detail": "x"}
    return {"schema": "decomposition/1", "tokens": 5, "wall_ms": 1.5, "traced_wall_ms": 1.5, "busy_ms": 1.0, "gap_ms": 0.5, "overlap_ms": 0.0, "launches": 3,
            "classes": [row], "checks": [check_row], "provenance": {"gpu": "x", "n": 1}, "notes": ["n"], "walls_ms": [1.5], "created": "2026-01-01T00:00:00+00:00"}  # fmt: skip


@cache
def record_json() -> Any:
    """A small round."""
    from harness.rounds.record import RoundRecord

    frozen = {"bar": 0.015, "alpha": 0.05, "beta": 0.1, "delta": 0.005, "seed": 1, "s0": 0.01, "statistic": "median", "inner": 3, "regime": "burst",
              "min_pairs": 4, "max_pairs": 20, "confirm_pairs": 2, "boots": None, "protocol": "landing", "prediction": None}  # fmt: skip
    return RoundRecord.model_validate({"schema": "round/1", "round": 1, "slug": "x", **frozen}).to_json()


def read_record(path: Path) -> None:
    """record.json of a round's directory."""
    from harness.rounds.store import load_record

    load_record(path.parent)


def read_samples(path: Path) -> None:
    """samples.jsonl of a round's directory."""
    from harness.rounds import store

    store.read_samples(path.parent)


def read_config(path: Path) -> None:
    """An arm's YAML."""
    from harness.config import load_arm

    load_arm(path)


def read_rules(path: Path) -> None:
    """A file of class rules."""
    from harness.attribution.classify import parse_rules

    parse_rules(path.read_text(encoding="utf-8", errors="replace"), str(path))


def read_launches(path: Path) -> None:
    """A launch table."""
    from harness import launches

    launches.load(path)


def read_decomposition(path: Path) -> None:
    """A decomposition's JSON."""
    from harness.attribution.decomposition import load_decomposition

    load_decomposition(path).to_dict()


SAMPLE = {"pair": 1, "order": "AB", "arm": "A", "wall_ms": [1.0, 2.0], "gpu": {"sm_mhz": [1], "temp_c": 3.5}}

READERS: dict[str, Reader] = {
    "config": Reader("arm.yaml", yaml_texts, read_config),
    "rules": Reader("rules.yaml", yaml_texts, read_rules),
    "gguf": Reader("m.gguf", lambda: damaged(small_gguf(), within=2048), read_gguf),
    "launches": Reader("launches.parquet", parquets, read_launches),
    "decomposition": Reader("d.json", lambda: odd_json(decomposition_json()), read_decomposition),
    "record": Reader("record.json", lambda: odd_json(record_json()), read_record),
    "samples": Reader("samples.jsonl", lambda: odd_json(SAMPLE).map(lambda line: line + b"\n"), read_samples),
}


def fuzz(reader: Reader, examples: int) -> Counter[str]:
    """Runs `examples` files through a reader; the first that is neither read nor refused by a sentence is shrunk and raised."""
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:

        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(reader.contents())
        def one(content: bytes) -> None:
            seen[check(reader, content, Path(folder))] += 1

        one()
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=5000, help="files for each reader (default 5000)")
    parser.add_argument("--reader", choices=sorted(READERS), action="append", help="only this one; may be repeated")
    options = parser.parse_args()
    failed = 0
    for name in options.reader or READERS:
        start = time.perf_counter()
        try:
            seen = fuzz(READERS[name], options.examples)
        except BaseException as error:  # hypothesis has already printed the smallest example
            if isinstance(error, KeyboardInterrupt):
                raise
            print(f"{name:14} FAILED: {type(error).__name__}: {str(error)[:400]}", flush=True)
            failed += 1
            continue
        seconds = time.perf_counter() - start
        print(f"{name:14} {sum(seen.values()):7,} files: {seen['read']:,} read, {seen['refused']:,} refused by a sentence; {seconds:.1f} s", flush=True)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
