"""A model's name as a person writes it: "Qwen2.5 7B Q4_K_M" for qwen2.5-7b-q4_k_m. Identifiers stay what they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

FAMILIES = {
    "smollm": "SmolLM", "tinyllama": "TinyLlama", "codellama": "CodeLlama", "deepseek": "DeepSeek", "internlm": "InternLM",
    "minicpm": "MiniCPM", "stablelm": "StableLM", "starcoder": "StarCoder", "chatglm": "ChatGLM", "olmo": "OLMo", "gpt": "GPT",
    "glm": "GLM", "qwq": "QwQ",
}  # fmt: skip
"""Families whose makers do not write them with one capital first."""

_QUANT = r"(?:i?q|tq)\d(?:_[a-z0-9]+)*|b?f16|fp?32|fp16|mxfp4(?:_\w+)?|nvfp4"
_QUANTISED = re.compile(_QUANT, re.IGNORECASE)
_SIZE = re.compile(r"(?:\d+x)?\d+(?:\.\d+)?[bmkt]", re.IGNORECASE)
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")


def title(name: str) -> str:
    """A name's words as people spell them: sizes and weight types in capitals, families as their makers do.

    What stands behind a blank is a person's already and stays; so does a single word without a figure.
    """
    first, blank, rest = name.partition(" ")
    words = re.sub(rf"[.-]({_QUANT})$", r"-\1", first, flags=re.IGNORECASE).split("-")
    if len(words) == 1 and not any(sign.isdigit() for sign in first):
        return name
    return " ".join(filter(None, map(_spelt, words))) + blank + rest


def gguf_title(metadata: Mapping[str, Any], stem: str) -> str:
    """The title of a GGUF: its file's name where that says family and size, else what its metadata says of them.

    metadata: `general.*` of the file, of which none needs to be there. stem: the file's name without .gguf.
    """
    stem = _SHARD.sub("", stem)
    base, size, tune = (str(metadata.get(f"general.{key}") or "") for key in ("basename", "size_label", "finetune"))
    words = re.split(r"[-.]", stem)
    if base and size:
        if base.lower() in stem.lower() and size.lower() in map(str.lower, words):
            return _with_type(title(stem), metadata)
        return _with_type(" ".join(filter(None, [title(base), size, tune if tune.isalpha() else ""])), metadata)
    if any(map(_SIZE.fullmatch, words)):
        return _with_type(title(stem), metadata)
    return _with_type(title(str(metadata.get("general.name") or stem)), metadata)


def _with_type(text: str, metadata: Mapping[str, Any]) -> str:
    """The text with the weights' main type behind it, unless it names one."""
    from gguf.constants import LlamaFileType

    number = metadata.get("general.file_type")
    if any(map(_QUANTISED.fullmatch, text.split())) or number not in list(LlamaFileType):
        return text
    return f"{text} {LlamaFileType(number).name.removeprefix('MOSTLY_').removeprefix('ALL_')}"


def _spelt(word: str) -> str:
    if re.fullmatch(r"v\d.*", word):
        return word
    if _QUANTISED.fullmatch(word):
        return word.upper()
    if _SIZE.fullmatch(word):
        return word[:-1] + word[-1].upper()
    for plain, spelling in FAMILIES.items():
        if word.lower().startswith(plain):
            return spelling + word[len(plain) :]
    return word[:1].upper() + word[1:] if word.islower() else word
