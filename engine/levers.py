"""The levers of the embedded engine: every switch that an experiment may turn, with its values and what it changes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_type_hints

from engine.errors import LeverError

MOST_THREADS = 1024
"""Every op is cut into at least as many pieces as there are threads: far more threads than cores never end."""


@dataclass(frozen=True)
class Levers:
    """One configuration of the engine. Frozen: a lever never changes while an engine lives."""

    attention: Literal["ours", "cudnn"] = "ours"
    """CUDA: which prefill attention runs. Changes the `attention` ops of every layer (one-row tails stay ours)."""
    gemm_heuristic: Literal["first", "timed"] = "timed"
    """CUDA: cublasLt's first algorithm per shape, or the best of its candidates, timed once per shape and cached.
    Changes every GEMM's kernel, no op."""
    concat: Literal["off", "on"] = "off"
    """q/k/v as one GEMM and gate/up as one GEMM. Changes the ops `q`, `k`, `v` (→ `qkv`) and `gate`, `up` (→ `gate_up`)."""
    tail: Literal["last_row", "ffn_last_row", "full"] = "last_row"
    """What the last layer computes for the last row only: q, attention, o and FFN; FFN alone; or nothing."""
    cpu_threads: int = 0
    """CPU: BLAS threads; 0 means every core that this process may use. Changes no op."""
    cpu_attention_block: int = 64
    """CPU: query rows per attention block, which bounds its memory. Changes the CPU's `attention` ops."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Levers:
        """Levers from a config's mapping. Raises LeverError, naming the nearest lever or the allowed values."""
        hints = get_type_hints(cls)
        known = [f.name for f in fields(cls)]
        for key, value in values.items():
            if key not in hints:
                near = get_close_matches(key, known, n=1)
                raise LeverError(
                    f"lever {key!r} does not exist; "
                    + (f"did you mean {near[0]!r}?" if near else f"known levers: {', '.join(known)}.")
                )
            allowed = get_args(hints[key])
            if allowed and value not in allowed:
                raise LeverError(f"lever {key!r} cannot be {value!r}; use one of {', '.join(map(str, allowed))}.")
            if hints[key] is int and (type(value) is not int or value < 0):
                raise LeverError(f"lever {key!r} must be a whole number of 0 or more, not {value!r}.")
        levers = cls(**values)
        if levers.cpu_attention_block < 1:
            raise LeverError("lever 'cpu_attention_block' must be 1 or more query rows.")
        if levers.cpu_threads > MOST_THREADS:
            raise LeverError(f"lever 'cpu_threads' must be {MOST_THREADS} or less, not {levers.cpu_threads}.")
        return levers

    def to_dict(self) -> dict[str, Any]:
        """Field → value, in declaration order."""
        return asdict(self)


def describe() -> list[tuple[str, str, Any]]:
    """(name, allowed values, default) of every lever, for `harness model levers` and the docs."""
    hints = get_type_hints(Levers)
    return [
        (f.name, " | ".join(map(str, get_args(hints[f.name]))) or hints[f.name].__name__, f.default)
        for f in fields(Levers)
    ]
