"""`harness model` as a person and a script use it: 80 columns in a pipe, JSON alone on stdout, one sentence on error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.errors import EngineError
from harness.commands.model import command
from harness.errors import HarnessError


def harness(*args: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, "-m", "harness.cli", "model", *args], capture_output=True, text=True)
    assert run.returncode == status, run.stderr
    return run


def refused(*args: str) -> str:
    """The sentence of a command that fails, in this process."""
    with pytest.raises((HarnessError, EngineError)) as error:
        command.main(list(args), standalone_mode=False)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_info_prints_the_hand_counted_ledger_in_80_columns() -> None:
    out = harness("info", "--model", "qwen2.5-7b-q4_k_m", "--tokens", "3325", "--precision", "f16").stdout
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "27 full layers + one-row tail" in out.replace("\n", " ")
    for figure in ("12190.600397", "2306.329805", "3160.526029", "17913.876578", "3020.261687", "22004.859570"):
        assert figure in out
    row = next(line.split() for line in out.splitlines() if line.startswith("down") and "q4_K" in line)
    assert row[6:8] == ["0.5625", "3.56"]  # bytes per weight in the file; f16 over it


def test_info_as_json_sums_to_its_total() -> None:
    value = json.loads(
        harness(
            "info", "--model", "tiny-qwen2", "--tokens", "129", "--concat", "on", "--tail", "full", "--json", "-"
        ).stdout
    )
    assert value["schema"] == "model/1" and value["structure"].startswith("2 full layers")
    assert sum(row["macs"] for row in value["ledger"]) / 1e9 == pytest.approx(
        value["totals_gmac"]["everything"], rel=1e-12
    )


def test_a_synthetic_file_and_its_preset_generate_the_same_tokens(tmp_path: Path) -> None:
    harness("synth", "tiny-llama", "-o", str(tmp_path / "x.gguf"), "--seed", "4")
    (tmp_path / "ids.json").write_text('{"ids": [1, 2, 3, 500]}')
    common = ["greedy", "--ids", str(tmp_path / "ids.json"), "-n", "3", "--backend", "cpu", "--json", "-"]
    a = harness(*common, "--model", str(tmp_path / "x.gguf"), "--logits", str(tmp_path / "l.npy"))
    b = harness(*common, "--model", "tiny-llama", "--seed", "4")
    assert a.stdout == b.stdout
    value = json.loads(a.stdout)
    assert list(value) == ["prompt_ids", "generated", "text", "margins"]
    assert value["prompt_ids"] == [1, 2, 3, 500] and len(value["generated"]) == len(value["margins"]) == 3
    assert value["text"] is None and min(value["margins"]) >= 0
    logits = np.load(tmp_path / "l.npy")
    assert logits.dtype == np.float32 and logits.shape == (512,) and logits.argmax() == value["generated"][0]


def test_a_prompt_on_real_weights_gives_llama_cpps_tokens_and_text(smollm2: Path, shared_data: Path) -> None:
    recorded = json.loads((shared_data / "logits" / "smollm2_llama_cpp.json").read_text())["given_b"]
    value = json.loads(
        harness(
            "greedy", "--prompt", recorded["prompt"], "--model", str(smollm2), "--backend", "cpu", "--json", "-"
        ).stdout
    )
    assert value["prompt_ids"] == recorded["tokens"]
    assert value["generated"] == recorded["f32"]["greedy32"]
    assert value["text"] and "\ufffd" not in value["text"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["info", "--model", "qwen2.5-7b"], "did you mean the model 'qwen2.5-7b-q4_k_m'?"),
        (["info", "--model", "tiny-llama", "--tokens", "5000"], "do not fit the context of 4096"),
        (["synth", "tiny", "-o", "x.gguf"], "geometry 'tiny' does not exist"),
        (["greedy", "--prompt", "x", "--model", "tiny-llama"], "has no vocabulary"),
        (["greedy", "--prompt", "", "--model", "tiny-llama"], "has no vocabulary"),
        (["greedy", "--prompt", "x", "--lever", "tail=whole"], "lever 'tail' cannot be 'whole'"),
        (["greedy", "--prompt", "x", "--lever", "tail"], "is no lever=value pair"),
        (["greedy", "--prompt", "x", "--model", "/dev/null"], "/dev/null is not a regular file"),
    ],
)
def test_an_error_is_one_sentence(args: list[str], words: str) -> None:
    assert words in refused(*args)


def test_the_sentence_goes_to_stderr_alone_with_exit_status_1() -> None:
    run = harness("greedy", "--prompt", "x", "--model", "tiny-llama", status=1)
    assert (
        run.stdout == ""
        and run.stderr.startswith("error: tiny-llama has no vocabulary")
        and run.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    "text", ["", "[1, 2", "7", '{"ids": "x"}', "[1, -2]", "[true]", "[1.5]", "[4294967296]", "[" * 5000]
)
def test_token_ids_that_are_none_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(text)
    sentence = refused("greedy", "--ids", str(tmp_path / "ids.json"), "--model", "tiny-llama")
    assert sentence.startswith(f"{tmp_path / 'ids.json'}: not ")


def test_a_prompt_and_ids_together_are_a_usage_error() -> None:
    assert "one of the two" in harness("greedy", status=64).stderr
