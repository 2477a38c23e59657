"""How figures and names are written for people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.titles import gguf_title, title
from harness.report.words import MEMORY, WALL, Scale, clock, gigabytes, in_one_unit, memory_change
from harness.rounds.record import Arm, RoundRecord


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (clock(890, 1020), "890.0 … 1,020.0 ms"),
        (clock(9_890, 10_200), "9.89 … 10.20 s"),
        (clock(0.0123), "12.30 µs"),
        (clock(0.05, 0.2), "0.05 … 0.20 ms"),
        (clock(0.0), "0.00 µs"),
        (gigabytes(890_000_000), "890 MB"),
        (gigabytes(1_020_000_000), "1.02 GB"),
        (gigabytes(None), "–"),
    ],
)
def test_a_range_has_one_unit(text: str, written: str) -> None:
    assert text == written


def test_memory_before_and_after_is_in_one_unit() -> None:
    arms = {
        letter: Arm(name=letter, device_memory_bytes=held)
        for letter, held in (("A", 890_000_000), ("B", 1_020_000_000))
    }
    record = RoundRecord.model_construct(arms=arms)
    assert memory_change(record) == "; device memory 0.89 GB → 1.02 GB"


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=4), st.sampled_from([WALL, MEMORY]))
def test_the_unit_is_that_of_the_largest_whatever_stands_beside_it(values: list[float], scale: Scale) -> None:
    figures, unit = in_one_unit(values, scale)
    assert (in_one_unit([max(values)], scale)[0][0], unit) == (figures[values.index(max(values))], in_one_unit([max(values)], scale)[1])  # fmt: skip
    by = {name: divided for _, divided, _, name in scale}[unit]
    read = [float(figure.replace(",", "")) * by for figure in figures]
    assert read == pytest.approx(values, abs=0.51 * by)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("qwen2.5-7b-q4_k_m", "Qwen2.5 7B Q4_K_M"),
        ("smollm2-135m-instruct-q4_1", "SmolLM2 135M Instruct Q4_1"),
        ("SmolLM2-135M-Instruct.Q4_1", "SmolLM2 135M Instruct Q4_1"),
        ("Smollm2 135M 8k Lc100K", "SmolLM2 135M 8k Lc100K"),
        ("mixtral-8x7b-v0.1.Q5_0", "Mixtral 8x7B v0.1 Q5_0"),
        ("qwen2.5-7b-q4_k_m (synthetic, seed 0)", "Qwen2.5 7B Q4_K_M (synthetic, seed 0)"),
        ("Qwen2.5 7B Instruct", "Qwen2.5 7B Instruct"),
        ("tiny-llama", "Tiny Llama"),
        ("GGUF", "GGUF"),
        ("", ""),
    ],
)
def test_a_models_title_is_what_a_person_writes(name: str, written: str) -> None:
    assert title(name) == written
    assert title(written) == written, "a title is its own title"


@pytest.mark.parametrize(
    ("metadata", "stem", "written"),
    [
        ({"basename": "smollm2", "size_label": "135M", "finetune": "8k-lc100k-mix1-ep2", "file_type": 3, "name": "Smollm2 135M 8k"},
         "SmolLM2-135M-Instruct.Q4_1", "SmolLM2 135M Instruct Q4_1"),
        ({"basename": "Qwen2.5", "size_label": "7B", "finetune": "Instruct", "file_type": 15}, "model", "Qwen2.5 7B Instruct Q4_K_M"),
        ({"name": "Llama 3.1 8B", "file_type": 7}, "weights", "Llama 3.1 8B Q8_0"),
        ({}, "qwen2.5-7b-instruct-q4_k_m-00001-of-00002", "Qwen2.5 7B Instruct Q4_K_M"),
        ({"file_type": 9999}, "my_model", "my_model"),
    ],
)  # fmt: skip
def test_a_ggufs_title_is_its_files_name_or_what_its_metadata_says(
    metadata: dict[str, object], stem: str, written: str
) -> None:
    assert gguf_title({f"general.{key}": value for key, value in metadata.items()}, stem) == written
