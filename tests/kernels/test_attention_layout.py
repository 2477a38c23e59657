"""The index maps of attention.cu against what the hardware documents, from the constants in the source itself."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine.cuda import attention, jit

SOURCE = Path(jit.__file__).with_name("kernels").joinpath("attention.cu").read_text()


def constant(name: str) -> int:
    match = re.search(rf"^constexpr int {name} = (\d+);", SOURCE, re.M)
    assert match, f"attention.cu has no constexpr int {name}"
    return int(match[1])


PANEL_BYTES = constant("PANEL_BYTES")


def tile_offset(rows: int, row: np.ndarray, chunk: np.ndarray) -> np.ndarray:
    """`tile_offset<rows>` of attention.cu; the test below keeps the two expressions equal."""
    return (chunk // 8 * rows + row) * PANEL_BYTES + (((chunk & 7) ^ (row & 7)) << 4)


def test_the_copy_of_tile_offset_is_the_kernels() -> None:
    assert "return (chunk / 8 * ROWS + row) * PANEL_BYTES + (((chunk & 7) ^ (row & 7)) << 4);" in SOURCE


def test_python_launches_with_the_kernels_constants() -> None:
    assert constant("Q_ROWS") == attention.Q_ROWS
    assert constant("SPLIT_KEYS") == attention.SPLIT_KEYS
    assert {"mma": constant("MMA_KEYS"), "wgmma": constant("WGMMA_KEYS")} == attention.KEYS
    assert {v: constant(f"{v.upper()}_THREADS") for v in ("mma", "wgmma", "split")} == attention.THREADS


@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("d", attention.HEAD_DIMS)
def test_a_tile_fills_its_bytes_exactly_once(rows: int, d: int) -> None:
    row, chunk = np.meshgrid(np.arange(rows), np.arange(d // 8), indexing="ij")
    assert sorted(tile_offset(rows, row, chunk).ravel()) == list(range(0, rows * d * 2, 16))


@pytest.mark.parametrize("rows", [64, 128])
def test_the_swizzle_is_wgmmas_of_128_bytes(rows: int) -> None:
    """Address bits 4–6 XOR bits 7–9 of a linear [rows, 128 bytes] panel (PTX ISA, shared memory matrix layout)."""
    row, chunk = np.meshgrid(np.arange(rows), np.arange(8), indexing="ij")
    linear = row * 128 + chunk * 16
    np.testing.assert_array_equal(tile_offset(rows, row, chunk), linear ^ ((linear >> 7 & 7) << 4))


def bank_groups(offsets: np.ndarray) -> np.ndarray:
    """Which of the eight 16-byte columns of the 32 banks an access lies in."""
    return offsets // 16 % 8


@pytest.mark.parametrize("step", range(8))
def test_ldmatrix_has_no_bank_conflict(step: int) -> None:
    """Each of an ldmatrix's four phases reads eight rows at one chunk: eight different bank groups."""
    lane = np.arange(32)
    offsets = (tile_offset(128, lane & 15, lane >> 4) ^ ((step & 3) << 5)) + step // 4 * 128 * PANEL_BYTES
    np.testing.assert_array_equal(offsets, tile_offset(128, lane & 15, 2 * step + (lane >> 4)))  # the XOR trick
    for phase in bank_groups(offsets).reshape(4, 8):
        assert len(set(phase)) == 8


@pytest.mark.parametrize("d", attention.HEAD_DIMS)
def test_copies_into_and_out_of_a_tile_have_no_bank_conflict(d: int) -> None:
    thread = np.arange(32)
    chunk, row = thread % (d // 8), thread // (d // 8)
    for phase in bank_groups(tile_offset(128, row, chunk)).reshape(4, 8):
        assert len(set(phase)) == 8
    for column in range(d // 8):  # stage_output: lane l stores 4 bytes of row l / 4
        words = (tile_offset(128, thread // 4, np.full(32, column)) + thread % 4 * 4) // 4 % 32
        assert len(set(words)) == 32


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
@pytest.mark.parametrize("past", [0, 5, 300])
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 127, 128, 129, 519, 2659, 3325])
def test_the_schedule_visits_every_visible_pair_once(variant: str, rows: int, past: int) -> None:
    """Steps of each 128-row block × keys that its masks leave: for each row exactly the keys 0 … past + row."""
    keys, step_keys = past + rows, attention.KEYS[variant]
    strip = constant("WARP_ROWS") if variant == "mma" else constant("GROUP_ROWS")
    for block_row in range(0, rows, attention.Q_ROWS):
        steps = (min(past + block_row + attention.Q_ROWS, keys) - 1) // step_keys + 1
        assert (steps - 1) * step_keys < keys, "a step starts beyond the last key"
        for first_row in range(block_row, min(block_row + attention.Q_ROWS, rows), strip):
            row = np.arange(first_row, min(first_row + strip, rows))
            visits = np.zeros((len(row), steps * step_keys), np.int64)
            for first_key in range(0, steps * step_keys, step_keys):
                if variant == "mma" and first_key > min(past + first_row + strip, keys) - 1:
                    continue
                key = np.arange(first_key, first_key + step_keys)
                limit = np.minimum(past + row, keys - 1)
                masked = first_key + step_keys - 1 > min(past + first_row, keys - 1)
                visits[:, key] += (key[None] <= limit[:, None]) if masked else 1
            np.testing.assert_array_equal(visits, np.arange(steps * step_keys)[None] <= (past + row)[:, None])


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("past", [0, 254, 255, 256, 3324])
def test_splits_cover_every_row_and_combine_reads_only_written_ones(rows: int, past: int) -> None:
    splits = attention._splits(rows, past)
    for row in range(rows):
        written = [s for s in range(splits) if s * attention.SPLIT_KEYS < past + row + 1]
        assert written == list(range((past + row) // attention.SPLIT_KEYS + 1))


@pytest.mark.parametrize(("variant", "head_dim"), [("mma", 64), ("mma", 128), ("wgmma", 64), ("wgmma", 128)])
def test_shared_memory_fits_the_smallest_gpu_of_the_kernel(variant: attention.Variant, head_dim: int) -> None:
    limit = 227 * 1024 if variant == "wgmma" else 99 * 1024  # sm_90; sm_89 and sm_120
    assert attention.shared_memory_bytes(variant, head_dim) <= limit


def test_each_architecture_gets_its_kernel() -> None:
    assert attention.choose_variant("sm_90a", 3325) == "wgmma"
    for arch in ("sm_80", "sm_89", "sm_100a", "sm_120a"):
        assert attention.choose_variant(arch, 3325) == "mma"
    assert attention.choose_variant("sm_90a", 1) == attention.choose_variant("sm_80", 1) == "split"
