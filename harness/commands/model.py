"""`harness model`: what a model is before it runs, synthetic weights as a file, greedy text, the levers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from harness.commands._options import FILE, TAIL, complete_lever, complete_model, json_named, lever_values, written_as
from harness.errors import Exit, HarnessError

if TYPE_CHECKING:
    from engine.plan import LedgerRow, Plan
    from engine.tensors import Model

MODEL = click.option(
    "--model",
    shell_complete=complete_model,
    metavar="NAME|PATH",
    help="A .gguf file or a name of `harness model list`. Default: this machine's.",
)
JSON = click.option(
    "--json",
    "json_target",
    callback=json_named,
    metavar="PATH",
    help='Write JSON here; "-" for stdout, and nothing else there.',
)
SEED = click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**63 - 1), help="Seed of synthetic weights."
)


@click.group(short_help="What a model is, before it runs.")
def command() -> None:
    """What a model is, before it runs: geometry, ledger, weights, tokens."""


@command.command("list")
@JSON
def list_(json_target: str | None) -> int:
    """Model names that need no file."""
    from engine.models import known

    rows = known()
    if json_target:
        return _emit({"schema": "models/1", "models": [{"name": n, "what": w} for n, w in rows]}, json_target)
    from harness.report.table import print_table

    print_table(["name<", "what it is<"], rows)
    return Exit.DONE


@command.command(short_help="Geometry and the ledger, per class.")
@MODEL
@click.option("--tokens", default=3325, show_default=True, type=click.IntRange(1), help="Rows of the prefill.")
@click.option(
    "--tail",
    default="last_row",
    show_default=True,
    type=TAIL,
    help="What the last layer computes for one row only.",
)
@click.option(
    "--concat",
    default="off",
    show_default=True,
    type=click.Choice(["off", "on"]),
    help="q/k/v and gate/up as one GEMM each.",
)
@click.option("--all-logits", is_flag=True, help="The head on every row (the fidelity mode).")
@click.option(
    "--precision",
    type=click.Choice(["f16", "f32"]),
    help="The path's element type. Default: f16 with a GPU, f32 without.",
)
@SEED
@JSON
def info(
    model: str | None,
    tokens: int,
    tail: str,
    concat: str,
    all_logits: bool,
    precision: str | None,
    seed: int,
    json_target: str | None,
) -> int:
    """Geometry, structure and the ledger per class: GMAC and bytes, before any kernel runs."""
    from engine.levers import Levers
    from engine.open import choose
    from engine.plan import build_plan

    gpu = choose() == "cuda"
    opened = _resolve(model, gpu=gpu, seed=seed)
    levers = Levers.from_dict({"tail": tail, "concat": concat})
    path = precision or ("f16" if gpu else "f32")
    plan = build_plan(opened.geometry, tokens, levers, precision=path, all_logits=all_logits)  # type: ignore[arg-type]
    if json_target:
        return _emit(_info_json(opened, plan), json_target)
    _print_info(opened, plan)
    return Exit.DONE


@command.command(short_help="Write synthetic weights as a GGUF.")
@click.argument("geometry")
@click.option("-o", "--output", required=True, type=FILE, callback=written_as("a GGUF", ".gguf"), metavar="FILE.gguf")
@SEED
@JSON
def synth(geometry: str, output: Path, seed: int, json_target: str | None) -> int:
    """Write the synthetic weights of GEOMETRY as a GGUF that llama.cpp loads (it has no vocabulary)."""
    from difflib import get_close_matches

    from engine.geometry import PRESETS
    from engine.synth import SynthModel, write_gguf
    from harness.files import check_writable
    from harness.report.progress import Reporter

    if geometry not in PRESETS:
        near = get_close_matches(geometry, PRESETS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(PRESETS)}."
        raise HarnessError(f"geometry {geometry!r} does not exist; {hint}")
    check_writable(output, whole=True)
    made = SynthModel(PRESETS[geometry](), seed)
    with Reporter() as report:
        write_gguf(made, output, report)
    size = output.stat().st_size
    if json_target:
        return _emit(
            {"schema": "synth/1", "path": str(output), "bytes": size, "seed": seed, "geometry": geometry}, json_target
        )
    click.echo(f"{output}: {made.title}, seed {seed}, {len(made.tensors)} tensors, {size / 1e6:.1f} MB.")
    return Exit.DONE


@command.command(short_help="Greedy text with a KV cache.")
@click.option("--prompt", metavar="TEXT", help="Text, tokenised by the model's own vocabulary.")
@click.option(
    "--ids",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE.json",
    help='Token ids: [1, 2] or {"ids": [1, 2]}.',
)
@click.option("-n", "count", default=32, show_default=True, type=click.IntRange(1), help="Tokens to generate.")
@MODEL
@click.option(
    "--logits",
    type=FILE,
    callback=written_as("a NumPy array", ".npy"),
    metavar="FILE.npy",
    help="Save the prefill's last-token logits (float32 [vocab]).",
)
@click.option("--backend", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda"]))
@click.option(
    "--lever",
    "lever_settings",
    shell_complete=complete_lever,
    multiple=True,
    metavar="NAME=VALUE",
    help="Turn a lever (`harness model levers`); may be repeated.",
)
@SEED
@JSON
def greedy(
    prompt: str | None, ids: Path | None, count: int, model: str | None, logits: Path | None, backend: str,
    lever_settings: tuple[str, ...], seed: int, json_target: str | None,
) -> int:  # fmt: skip
    """Prefill, then COUNT greedy tokens with a KV cache."""
    if (prompt is None) == (ids is None):
        raise click.UsageError("give --prompt TEXT or --ids FILE.json, one of the two.")
    from harness.files import check_writable

    check_writable(logits)
    check_writable(json_target)
    given = _read_ids(ids) if ids else None

    import numpy as np

    from engine.levers import Levers
    from engine.open import choose, open_engine
    from engine.tokens import missing_library, require
    from harness.report.progress import Reporter

    levers = Levers.from_dict(lever_values(lever_settings, "--lever"))
    with Reporter() as report:
        gpu = choose(backend) == "cuda"  # type: ignore[arg-type]
        opened = _resolve(model, gpu=gpu, seed=seed, progress=report)
        prompt_ids = given if given is not None else require(opened).encode(prompt or "")
        if not prompt_ids:
            raise HarnessError("the prompt holds no tokens; give at least one.")
        with open_engine(opened, levers, backend=backend, progress=report) as engine:  # type: ignore[arg-type]
            result = engine.greedy(np.array(prompt_ids, np.int32), count)
    tokenizer = opened.tokenizer()
    text = tokenizer.decode(result.generated) if tokenizer else None
    if text is None and (missing := missing_library(opened)):
        click.echo(f"note: {missing}", err=True)
    if logits:
        _save_npy(logits, result.prefill_logits)
    if json_target:
        value = {
            "prompt_ids": result.prompt_ids,
            "generated": result.generated,
            "text": text,
            "margins": result.margins,
        }
        return _emit(value | ({"note": opened.note} if opened.note else {}), json_target)
    if opened.note:
        click.echo(opened.note, err=True)
    click.echo(text if text is not None else " ".join(map(str, result.generated)))
    return Exit.DONE


@command.command(short_help="Every switch of the embedded engine.")
@JSON
def levers(json_target: str | None) -> int:
    """Every switch of the embedded engine, its values and default."""
    from engine.levers import describe

    rows = describe()
    if json_target:
        return _emit(
            {"schema": "levers/1", "levers": [{"name": n, "values": v, "default": d} for n, v, d in rows]}, json_target
        )
    from harness.report.table import print_table

    print_table(["lever<", "values<", "default<"], [(n, v, str(d)) for n, v, d in rows])
    return Exit.DONE


@command.command(short_help="Fetch SmolLM2-135M-Instruct, 98 MB.")
@JSON
def fetch(json_target: str | None) -> int:
    """Fetch SmolLM2-135M-Instruct (98 MB) into the cache, checked by SHA-256."""
    from engine.fetch import SHA256, SMOLLM2, fetch_smollm2
    from harness.report.progress import Reporter

    with Reporter() as report:
        path = fetch_smollm2(report)
    if json_target:
        return _emit({"schema": "fetch/1", "model": SMOLLM2, "path": str(path), "sha256": SHA256}, json_target)
    click.echo(str(path))
    return Exit.DONE


def _emit(value: Any, target: str) -> int:
    from harness.files import emit_json

    emit_json(value, target)
    return Exit.DONE


def _resolve(
    model: str | None, *, gpu: bool, seed: int, progress: Callable[[str, int, int], None] | None = None
) -> Model:
    from engine.models import resolve
    from harness.report.progress import Reporter

    if progress:
        return resolve(model, gpu=gpu, progress=progress, seed=seed)
    with Reporter() as report:
        return resolve(model, gpu=gpu, progress=report, seed=seed)


def _read_ids(path: Path) -> list[int]:
    """Token ids of a JSON file: a list, or an object with "ids". Raises HarnessError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HarnessError(f"{path}: not readable as JSON ({error}); give a list of token ids.") from error
    ids = value.get("ids") if isinstance(value, dict) else value
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise HarnessError(f'{path}: not a list of token ids; write [1, 2] or {{"ids": [1, 2]}}.')
    return ids


def _save_npy(path: Path, logits: Any) -> None:
    import io

    import numpy as np

    from harness.files import write_atomic

    buffer = io.BytesIO()
    np.save(buffer, np.asarray(logits, np.float32))
    write_atomic(path, buffer.getvalue())


MERGED = {"attn_q": "q+o", "attn_output": "q+o", "attn_k": "k", "attn_v": "v", "ffn_gate": "gate+up", "ffn_up": "gate+up",
          "ffn_down": "down", "output": "output", "-": "-"}  # fmt: skip
"""Matrices that share a row of the printed ledger: they have one shape or its transpose, and one class."""


def _merged_rows(rows: list[LedgerRow]) -> list[dict[str, Any]]:
    """The ledger's rows summed over matrices of one label, as figures."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        key = (row.role, MERGED[row.matrix], row.weight_type, row.part)
        into = sums.setdefault(
            key, {"class": key[0], "matrix": key[1], "weight_type": key[2], "part": key[3], "ops": 0, "macs": 0,
                  "file_bytes": 0, "path_bytes": 0, "io_bytes": 0},
        )  # fmt: skip
        for field in ("ops", "macs", "file_bytes", "path_bytes", "io_bytes"):
            into[field] += getattr(row, field)
    classes, matrices = list(dict.fromkeys(k[0] for k in sums)), list(dict.fromkeys(k[1] for k in sums))
    ordered = sorted(sums.values(), key=lambda r: (classes.index(r["class"]), matrices.index(r["matrix"])))
    return [row | _widths(row) for row in ordered]


def _widths(row: dict[str, Any]) -> dict[str, Any]:
    """GMAC, and the bytes of a weight in the file and on the path (None where there are no weights)."""
    ratio = row["path_bytes"] / row["file_bytes"] if row["file_bytes"] else None
    return {"gmac": row["macs"] / 1e9, "byte_width_ratio": ratio}


def _totals(plan: Plan) -> dict[str, float]:
    """GMAC: per weight type without the head, the head, all weights, attention, everything."""
    rows = plan.ledger()
    totals: dict[str, float] = {}
    for row in rows:
        if row.matrix not in ("-", "output"):
            totals[row.weight_type] = totals.get(row.weight_type, 0.0) + row.gmac
    totals["head"] = sum(r.gmac for r in rows if r.matrix == "output")
    totals["weights"] = sum(r.macs for r in rows if r.matrix != "-") / 1e9
    totals["attention"] = sum(r.macs for r in rows if r.role == "attention") / 1e9
    totals["everything"] = plan.macs / 1e9
    return totals


def _info_json(model: Model, plan: Plan) -> dict[str, Any]:
    from dataclasses import asdict

    geometry = asdict(plan.geometry)
    geometry["tied_embedding"] = plan.geometry.tied_embedding
    return {
        "schema": "model/1",
        "model": model.name,
        "path": str(model.path) if model.path else None,
        "synthetic": model.synthetic,
        "seed": model.seed,
        "note": model.note,
        "refusal": model.refusal,
        "geometry": geometry,
        "tokens": plan.tokens,
        "levers": plan.levers.to_dict(),
        "precision": plan.precision,
        "all_logits": plan.all_logits,
        "structure": plan.structure(),
        "weight_bytes": sum(t.n_bytes for t in model.tensors.values()),
        "ledger": [_row_json(row, plan) for row in _merged_rows(plan.ledger())],
        "totals_gmac": _totals(plan),
    }


def _row_json(row: dict[str, Any], plan: Plan) -> dict[str, Any]:
    return row | {"bytes_per_weight": _bytes_per_weight(row, plan)}


def _bytes_per_weight(row: dict[str, Any], plan: Plan) -> float | None:
    """Bytes of one weight in the file; the path's bytes are those of its element type."""
    element = 2 if plan.precision == "f16" else 4
    return row["file_bytes"] / (row["path_bytes"] / element) if row["path_bytes"] else None


def _print_info(model: Model, plan: Plan) -> None:
    from harness.report.table import print_table, say

    g = plan.geometry
    stored = sum(t.n_bytes for t in model.tensors.values())
    where = f"synthetic, seed {model.seed}" if model.synthetic else str(model.path)
    say(f"{model.title} ({where})", "bold")
    if model.note:
        say(model.note)
    if model.refusal:
        say(f"Sizes only, this engine does not run it: {model.refusal.removeprefix(f'{model.path}: ')}")
    rope = f"RoPE {'' if g.rope_style == 'unknown' else g.rope_style + ' '}base {g.rope_base:g}"
    window = f", sliding window {g.window}" if g.window else ""
    say(
        f"{g.architecture}: {g.layers} layers, hidden {g.hidden}, FFN {g.ffn}, {g.heads} heads / {g.kv_heads} KV heads of {g.head_dim}, "
        f"vocabulary {g.vocab}{' (tied embedding)' if g.tied_embedding else ''}, {rope}, "
        f"RMS epsilon {g.rms_eps:.3g}, q/k/v biases {'yes' if g.qkv_bias else 'no'}, context {g.context}{window}, {stored / 1e6:.1f} MB of weights."
    )
    say(f"{plan.tokens} tokens, {plan.precision} path: {plan.structure()}.")
    say()
    table = []
    for row in _merged_rows(plan.ledger()):
        per_weight, ratio = _bytes_per_weight(row, plan), row["byte_width_ratio"]
        table.append([
            row["class"], row["matrix"], row["weight_type"], row["part"].removesuffix("_layer"),
            f"{row['gmac']:.6f}" if row["macs"] else "-",
            f"{row['file_bytes'] / 1e6:.1f}" if row["file_bytes"] else "-",
            f"{per_weight:.4f}" if per_weight else "-", f"{ratio:.2f}" if ratio else "-",
            f"{(row['path_bytes'] + row['io_bytes']) / 1e6:.1f}",
        ])  # fmt: skip
    print_table(["class<", "matrix<", "type<", "part<", "GMAC", "file MB", "B/w", "ratio", "moved MB"], table,
                drop=["ratio", "B/w", "file MB", "type", "matrix"])  # fmt: skip
    say(
        "B/w: bytes per weight in the file; ratio: the path's over it; moved: bytes that must cross memory once.",
        style="dim",
    )
    say()
    rows = [[name, f"{gmac:.6f}"] for name, gmac in _totals(plan).items()]
    last = len(rows) - 1
    print_table(["total<", "GMAC"], rows, rule_before=[last], styles=[""] * last + ["bold"])
