"""Text ↔ ids: llama.cpp's own ids on the real vocabulary, and what each pre-tokenizer cuts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ModelError
from engine.geometry import tiny
from engine.gguf_model import open_model
from engine.synth import SynthModel
from engine.tokens import PRE_TOKENIZERS, Tokenizer, require


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return require(open_model(smollm2))


@pytest.fixture(scope="module")
def smollm2_letters(smollm2: Path) -> set[str]:
    return {token for token in open_model(smollm2).metadata["tokenizer.ggml.tokens"] if len(token) == 1}


@pytest.mark.parametrize("prompt", ["given_a", "given_b"])
def test_prompts_have_llama_cpps_ids(prompt: str, tokenizer: Tokenizer, shared_data: Path) -> None:
    recorded = json.loads((shared_data / "logits" / "smollm2_llama_cpp.json").read_text())[prompt]
    assert tokenizer.encode(recorded["prompt"]) == recorded["tokens"]
    assert tokenizer.decode(recorded["tokens"]) == recorded["prompt"]


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_comes_back(smollm2_letters: set[str], tokenizer: Tokenizer, text: str) -> None:
    """Text of the bytes that this vocabulary has: it lacks some control and rare lead bytes, which llama.cpp drops too."""
    known = "".join(c for c in text if all(LETTERS[b] in smollm2_letters for b in c.encode()))
    assert tokenizer.decode(tokenizer.encode(known)) == known


def test_control_tokens_in_a_text_are_one_id_each(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user\nHi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2) and len(ids) == 5
    assert tokenizer.decode(ids) == "<|im_start|>user\nHi<|im_end|>"


def test_digits_are_one_token_each_in_smollm(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("3325")) == 4


BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
LETTERS = {b: chr(b) for b in BYTES} | {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)}
"""GPT-2's printable letter of every byte (Radford et al. 2019, `bytes_to_unicode`)."""


def vocabulary(pre: str, merges: list[str] = [], extra: list[str] = [], **keys: object) -> dict[str, object]:  # noqa: B006
    """All 256 bytes, the merges' results and `extra` control tokens, as GGUF metadata."""
    tokens = [*LETTERS.values(), *(m.replace(" ", "") for m in merges), *extra]
    types = [1] * (256 + len(merges)) + [3] * len(extra)
    keyed = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges} | keyed  # fmt: skip


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(text=st.text(max_size=60))
def test_every_pre_tokenizer_keeps_every_byte(pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary(pre, add_bos_token=False), "m.gguf")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("pre", "ids"),
    [
        # "1 2" joins only where the pre-tokenizer leaves digits together; "12 3" only where three stay together.
        ("gpt-2", [257]), ("default", [257]), ("smollm", [16, 17, 18]), ("qwen2", [16, 17, 18]), ("llama-bpe", [257]),
    ],
)  # fmt: skip
def test_digits_are_cut_as_in_llama_cpp(pre: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_metadata(vocabulary(pre, ["1 2", "12 3"], add_bos_token=False), "m.gguf")
    assert tokenizer.encode("123") == ids
    four = {"llama-bpe": [257, 19], "gpt-2": [257, 19], "default": [257, 19]}.get(pre, [*ids, 19])
    assert tokenizer.encode("1234") == four


def test_a_contraction_is_cut_in_either_case_only_by_the_newer_rules() -> None:
    merges = ["' L", "'L L", "A '"]  # the first merge crosses the cut that gpt-2's rules do not make
    cut = {
        pre: Tokenizer.from_metadata(vocabulary(pre, merges, add_bos_token=False), "m").encode("A'LL")
        for pre in ("gpt-2", "qwen2")
    }
    assert cut["qwen2"] == [32, 257]
    assert cut["gpt-2"] != cut["qwen2"]


def test_bos_is_added_where_the_metadata_or_the_family_says_so() -> None:
    def first(pre: str, **keys: object) -> int:
        return Tokenizer.from_metadata(vocabulary(pre, extra=["<s>"], bos_token_id=256, **keys), "m").encode("a")[0]

    assert first("llama-bpe") == 256 and first("llama-bpe", add_bos_token=False) == 64
    assert first("qwen2") == 64 and first("qwen2", add_bos_token=True) == 256


def test_a_word_of_the_vocabulary_is_taken_whole_by_llama_3() -> None:
    metadata = vocabulary("llama-bpe", ["a b"], add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*LETTERS.values(), "ab", "abc"]  # no merge leads to "abc"
    metadata["tokenizer.ggml.token_type"] = [1] * 258
    assert Tokenizer.from_metadata(metadata, "m").encode("abc") == [257]
    assert Tokenizer.from_metadata(metadata | {"tokenizer.ggml.pre": "gpt-2"}, "m").encode("abc") == [256, 66]


def test_what_has_no_readable_vocabulary_says_why_in_one_sentence() -> None:
    with pytest.raises(
        ModelError, match=r"has no vocabulary, so text cannot be tokenised; give token ids with --ids\.$"
    ):
        require(SynthModel(tiny()))
    for metadata, words in (
        ({"tokenizer.ggml.model": "llama"}, "m.gguf has a 'llama' vocabulary, where only byte-level BPE"),
        (vocabulary("tekken"), "m.gguf: pre-tokenizer 'tekken'"),
        ({"tokenizer.ggml.model": "gpt2"}, "m.gguf: its vocabulary cannot be used"),
        (vocabulary("gpt-2") | {"tokenizer.ggml.merges": ["no such"]}, "m.gguf: its vocabulary cannot be used"),
        (vocabulary("gpt-2") | {"tokenizer.ggml.merges": ["nospace"]}, "m.gguf: its vocabulary cannot be used"),
        (vocabulary("gpt-2") | {"tokenizer.ggml.tokens": 7}, "m.gguf: its vocabulary cannot be used"),
        (vocabulary("gpt-2") | {"tokenizer.ggml.pre": 7}, "m.gguf: pre-tokenizer 7"),
    ):
        with pytest.raises(ModelError) as refused:
            Tokenizer.from_metadata(metadata, "m.gguf")
        assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_lone_surrogate_from_the_shell_does_not_stop_it(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("a\udcffb")
