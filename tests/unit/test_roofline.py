"""Ceilings: measured, cached per machine, only ever raised; floors against arithmetic done by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.geometry import tiny
from engine.plan import build_plan
from harness.attribution import roofline
from harness.attribution.roofline import Ceilings, ceilings_for

ROOF = Ceilings("cpu", "toy", "burst", "f32", tflop_per_s=2.0, gb_per_s=50.0, cache_gb_per_s=200.0)


def test_floors_are_flop_over_compute_and_bytes_over_memory() -> None:
    compute, memory = ROOF.floor_seconds(np.array([1e9, np.nan]), np.array([100e6, 25e6]))
    assert compute == pytest.approx([1e-3, 0])  # 2 · 10⁹ FLOP at 2 TFLOP/s
    assert memory == pytest.approx([2e-3, 5e-4])  # at 50 GB/s


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path))
    return tmp_path


def test_this_machine_is_measured_once_and_then_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(roofline, "IDLE_S", 0.0)
    monkeypatch.setattr(roofline, "BUSY", 2.0)  # whatever else runs here: this test is not about a quiet machine
    first = ceilings_for(
        "cpu", "burst", plan=build_plan(tiny(), 64), threads=1, report=lambda _, done, of: told.append((done, of))
    )
    assert first.tflop_per_s > 1e-3 and first.cache_gb_per_s >= first.gb_per_s > 0.1
    assert told[-1][0] == told[-1][1]
    monkeypatch.setattr(roofline, "_measure_cpu", lambda *_: pytest.fail("measured again"))
    assert ceilings_for("cpu", "burst", threads=1) == first
    (file,) = (cache / "ceilings").iterdir()
    assert json.loads(file.read_text())["key"]["threads"] == 1


def test_a_new_measurement_only_raises_a_ceiling(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([ROOF, replace(ROOF, tflop_per_s=1.0, gb_per_s=60.0)])
    monkeypatch.setattr(roofline, "_measure_cpu", lambda *_: next(values))
    ceilings_for("cpu", "burst", threads=1, fresh=True)
    best = ceilings_for("cpu", "burst", threads=1, fresh=True)
    assert (best.tflop_per_s, best.gb_per_s) == (2.0, 60.0)


def test_a_ceiling_of_a_busy_machine_is_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    monkeypatch.setattr(roofline, "_measure_cpu", lambda *_: count.append(1) or ROOF)
    monkeypatch.setattr(roofline.Sentinel, "host_load", lambda self: {"foreign": 0.9 if len(count) == 1 else 0.0})
    for _ in range(3):
        ceilings_for("cpu", "burst", threads=1)
    assert len(count) == 2


def test_a_damaged_cache_file_is_measured_over(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_measure_cpu", lambda *_: ROOF)
    ceilings_for("cpu", "sustained", threads=1)
    (file,) = (cache / "ceilings").iterdir()
    file.write_text('{"backend": "cpu", "surprise": 1}')
    assert ceilings_for("cpu", "sustained", threads=1).tflop_per_s == ROOF.tflop_per_s


@pytest.mark.parametrize("regime", ["burst", "sustained"])
def test_a_gpus_envelope_is_the_best_shape_and_the_best_stream_beyond_its_caches(
    cache: Path, monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    from engine.cuda import ceilings as device

    asked: list[tuple[float, float]] = []

    def gemm(m: int, n: int, k: int, *, idle_s: float, load_s: float) -> float:
        asked.append((idle_s, load_s))
        return 2 * m * n * k / (700e12 if m == 8192 else 500e12)

    monkeypatch.setattr(device, "identity", lambda: {"device": "toy", "cublaslt": 1})
    monkeypatch.setattr(device, "gemm_seconds", gemm)
    monkeypatch.setattr(device, "copy_seconds", lambda size, **_: 2 * size / (6e12 if size < 1 << 25 else 4e12))
    monkeypatch.setattr(device, "read_seconds", lambda size, **_: size / 4.5e12)
    c = ceilings_for("cuda", regime, plan=build_plan(tiny(), 64))
    assert (c.tflop_per_s, c.gb_per_s, c.cache_gb_per_s) == pytest.approx((700, 4500, 6000))
    assert c.device == "toy" and c.precision == "f16" and c.key["regime"] == regime
    assert asked[0] == ((roofline.IDLE_S, 0.0) if regime == "burst" else (0.0, roofline.LOAD_S))
