"""Rounds and tables made by simulation: seeded noise through the rule's own code, written as a real round is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.ab.schedule import order
from harness.ab.verdict import conclude
from harness.attribution.decomposition import Check, ClassRow, Decomposition
from harness.rounds.make import conclude_into
from harness.rounds.record import Arm, ArmDiff, Frozen, Gate, OpsAffected, RoundRecord, Sample, Window
from harness.rounds.store import append_sample, attach, file_sha256, new_round_dir, save_record

LEVERS = {"attention": "ours", "gemm_heuristic": "timed", "concat": "off", "tail": "last_row"}


def a_table(rows: dict[str, float], *, wall: float | None = None, tokens: int = 3325, created: str = "2026-01-05T10:00:00+00:00",
            levers: dict[str, Any] | None = None, ratio: dict[str, float] | None = None, sol: dict[str, float] | None = None,
            **more: Any) -> Decomposition:  # fmt: skip
    """A decomposition of class → ms; a key may be "class/weight_type"."""
    busy = sum(rows.values())
    classes = []
    for key, ms in rows.items():
        cls, _, weight_type = key.partition("/")
        classes.append(
            ClassRow(
                cls=cls, weight_type=weight_type or "-", launches=28, sum_ms=ms, union_ms=ms, share=ms / busy,
                ratio=(ratio or {}).get(key), sol=(sol or {}).get(key), floor_ms=ms * sol[key] if sol and key in sol else None,
            )
        )  # fmt: skip
    wall = wall or busy * 1.03
    fields: dict[str, Any] = {
        "model": "qwen2.5-7b-q4_k_m", "source": "cupti", "device": "NVIDIA H200", "regime": "burst", "launches": 28 * len(rows),
        "checks": [Check(name="conservation", ok=True)],
    }  # fmt: skip
    return Decomposition(
        tokens=tokens, levers=levers or LEVERS, wall_ms=wall, traced_wall_ms=wall, busy_ms=busy, gap_ms=wall - busy, overlap_ms=0.0,
        tok_per_s=tokens / wall * 1e3, classes=classes, created=created, **(fields | more),
    )  # fmt: skip


def a_round(root: Path, slug: str, *, gain: float, noise: float = 0.003, wall: float = 60.0, seed: int = 1, drop: tuple[int, ...] = (),
            day: int = 6, before: Decomposition | None = None, after: Decomposition | None = None, lever: dict[str, Any] | None = None,
            frozen: dict[str, Any] | None = None, **record_fields: Any) -> Path:  # fmt: skip
    """A round run to its verdict on simulated walls: a true gain, log-normal noise, per-half process effects."""
    number, path = new_round_dir(slug, root)
    rng = np.random.default_rng(seed)
    numbers = Frozen(
        seed=seed, s0=0.003, prediction=0.02, frozen_at=f"2026-01-{day:02d}T10:00:00+00:00", **(frozen or {})
    )
    lever = lever if lever is not None else {"concat": "on"}
    record = RoundRecord(
        **numbers.model_dump(), round=number, slug=path.name.split("-", 1)[1], title=slug, status="finished",
        started=f"2026-01-{day:02d}T10:00:00+00:00", finished=f"2026-01-{day:02d}T10:20:00+00:00",
        arms={
            "A": Arm(name="base", path="experiments/base.yaml", config={"engine": {"kind": "embedded"}, "levers": LEVERS},
                     config_sha256="a" * 64, identity="1" * 64, device_memory_bytes=9_800_000_000),
            "B": Arm(name=slug, config={"engine": {"kind": "embedded"}, "levers": LEVERS | lever},
                     config_sha256="b" * 64, identity="2" * 64, device_memory_bytes=9_900_000_000),
        },
        diff=[ArmDiff(key=f"levers.{k}", before=LEVERS[k], after=v) for k, v in lever.items()],
        ops_affected=[OpsAffected(op="gate_up", cls="gate_up", count=28, change="added")],
        gates=[Gate(name="parity", ok=True, value=2e-4, limit=2e-3, detail="relative L2 of the last logits"), Gate(name="greedy", ok=None, detail="random weights")],
        windows=[Window(quiet=True, unseen=["host load of other users"])],
        hypothesis="One wide GEMM fills the last wave that two narrow ones leave half empty.", mechanism_claim="gate and up as one GEMM",
        tokens=3325, model="qwen2.5-7b-q4_k_m", device="NVIDIA H200", provenance={"gpu": "NVIDIA H200", "driver": "580.1", "commit": "0123abc"},
    )  # fmt: skip
    for name, value in record_fields.items():
        setattr(record, name, value)
    record.frozen_hash = record.frozen_sha256()
    samples: list[Sample] = []

    def half(pair: int, letters: str, arm: str, phase: str) -> Sample:
        true = wall / (1 + gain if arm == "B" else 1)
        walls = (
            true
            * np.exp(rng.normal(0, noise) + rng.normal(0, noise / 2, numbers.inner))
            * (1 + 0.4 * (rng.random(numbers.inner) < 0.01))
        )
        reason = "hw_thermal_slowdown" if pair in drop and arm == "A" else None
        return Sample(
            pair=pair, order=letters, arm=arm, wall_ms=[round(float(w), 4) for w in walls], dropped=reason, phase=phase, boot=f"{pair}{arm}",
            gpu={"sm_mhz": [1965.0] * numbers.inner},
        )  # fmt: skip

    def run(pair: int, phase: str) -> None:
        letters = order(seed, pair)
        for arm in letters:
            samples.append(half(pair, letters, arm, phase))
            append_sample(path, samples[-1])

    run(0, "discard")
    pair = 0
    while conclude(samples, numbers).verdict is None:
        pair += 1
        run(pair, "decide")
    if conclude(samples, numbers).verdict == "LANDED":
        for extra in range(numbers.confirm_pairs):
            run(pair + 1 + extra, "confirm")
    conclude_into(record, samples, numbers)
    record.samples_sha256 = file_sha256(path / "samples.jsonl")
    for name, table in (("before.json", before), ("after.json", after)):
        if table is not None:
            attach(path, record, name, table.to_dict())
    save_record(path, record)
    return path


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own: rounds live under ./reports of wherever a command runs."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.fixture(name="a_table", scope="session")
def _a_table() -> Callable[..., Decomposition]:
    return a_table


@pytest.fixture(name="a_round", scope="session")
def _a_round() -> Callable[..., Path]:
    return a_round


@pytest.fixture
def harness(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process: (exit status, stdout, stderr)."""
    from harness.cli import main

    def run(*args: str) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stop:
            main([str(a) for a in args])
        out, err = capfd.readouterr()
        return int(stop.value.code or 0), out, err

    return run
