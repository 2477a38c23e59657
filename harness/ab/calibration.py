"""What `harness calibrate` found on this machine: per regime and workload, the statistic, `inner` and s0 to use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from engine.cache import cache_dir
from harness.files import to_json, write_atomic
from harness.rounds.record import Regime, Statistic


class Calibration(BaseModel):
    """A/A noise of one workload (engine, model, tokens) in one regime on one machine. Gains and sds are fractions."""

    schema_: str = Field(default="calibration/1", alias="schema")
    machine: dict[str, Any]
    base: str  # name of the arm that it was measured on; its levers do not change the machine's noise
    workload_sha256: str
    regime: Regime
    pairs: int
    inner: int
    statistic: Statistic
    s0: float  # sd of ln(wall_A / wall_B) of A/A pairs, robust
    noise_floor: float  # smallest |gain| that pairs of one A/A tell from 0 with max_pairs
    smallest_gain: float | None  # lands with 80 % within max_pairs at the protocol's bar; None: nothing within reach
    bar: float
    max_pairs: int
    candidates: list[dict[str, Any]] = []  # every (statistic, inner) tried, with its pair sd and cost
    planted: list[dict[str, Any]] = []  # what the whole chain decided on a planted lever
    measured: str = ""

    model_config = {"populate_by_name": True}


def path_of(machine: dict[str, Any], regime: str, workload_sha256: str) -> Path:
    """Where a calibration of this workload in this regime on this machine is kept."""
    key = hashlib.sha256(json.dumps([machine, regime, workload_sha256], sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "calibration" / f"{regime}-{key}.json"


def load(machine: dict[str, Any], regime: str, workload_sha256: str) -> Calibration | None:
    """The calibration, or None where there is none (or a damaged file, which can be measured again)."""
    try:
        return Calibration.model_validate_json(path_of(machine, regime, workload_sha256).read_bytes())
    except (OSError, ValueError):
        return None


def save(calibration: Calibration) -> Path:
    """Keeps it for `harness ab` on this machine."""
    path = path_of(calibration.machine, calibration.regime, calibration.workload_sha256)
    write_atomic(path, to_json(calibration.model_dump(mode="json", by_alias=True)))
    return path
