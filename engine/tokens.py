"""Text ↔ token ids through the GGUF's own vocabulary and merges (byte-level BPE), run by the `tokenizers` library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.extras import install_line, installed
from engine.tensors import Model

if TYPE_CHECKING:
    from tokenizers import Tokenizer as BpeTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_FAMILIES: list[tuple[list[str], tuple[str, ...]]] = [
    ([r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], ("default",)),
    ([_GPT2], ("gpt-2", "phi-2", "mpt", "olmo")),
    ([r"\p{N}", _GPT2], ("smollm", "starcoder", "refact", "command-r")),
    ([_QWEN2], ("qwen2", "deepseek-r1-qwen", "stablelm2")),
    ([_LLAMA3], ("llama-bpe", "llama3", "llama-v3", "falcon3")),
]
PRE_TOKENIZERS = {name: cuts for cuts, names in _FAMILIES for name in names}
"""`tokenizer.ggml.pre` → regular expressions that cut text one after another, as in llama.cpp's `llama-vocab.cpp`."""

# llama.cpp's ignore_merges: a word that is a token is never built from merges; these models also start with BOS.
_WHOLE_WORDS_FIRST = _FAMILIES[-1][1]
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type


class Tokenizer:
    """A GGUF's byte-level BPE vocabulary."""

    def __init__(self, bpe: BpeTokenizer, bos: int | None, eos: int | None) -> None:
        """`bos` is put before every text, or None."""
        self._bpe, self.bos, self.eos = bpe, bos, eos

    @staticmethod
    def reads(metadata: dict[str, Any]) -> bool:
        """True where `from_metadata` can be asked: the vocabulary is a byte-level BPE ("gpt2"), and the library is here."""
        return metadata.get("tokenizer.ggml.model") == "gpt2" and installed("tokenizers")

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any], where: str) -> Tokenizer:
        """Built from `tokenizer.ggml.*`. Raises ModelError, naming `where`, for a vocabulary that it cannot read."""
        if not cls.reads(metadata):
            raise ModelError(_no_text(metadata, where))
        pre = metadata.get("tokenizer.ggml.pre", "default")
        if pre not in PRE_TOKENIZERS:
            raise ModelError(
                f"{where}: pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported; give token ids with --ids."
            )
        try:
            tokens = list(metadata["tokenizer.ggml.tokens"])
            types = list(metadata.get("tokenizer.ggml.token_type", ()))
            merges = [_split_merge(m) for m in metadata["tokenizer.ggml.merges"]]
            bpe = _build(tokens, types, merges, PRE_TOKENIZERS[pre], whole_words=pre in _WHOLE_WORDS_FIRST)
        except Exception as error:  # the library raises bare Exceptions for a merge outside the vocabulary
            raise ModelError(
                f"{where}: its vocabulary cannot be used ({_one_line(error)}); give token ids with --ids."
            ) from error
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        add_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _WHOLE_WORDS_FIRST)
        return cls(bpe, bos if add_bos else None, metadata.get("tokenizer.ggml.eos_token_id"))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens in it parsed, BOS in front where the model asks for it."""
        clean = text.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate of a shell argument
        ids: list[int] = self._bpe.encode(clean, add_special_tokens=False).ids
        return ids if self.bos is None else [self.bos, *ids]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included; bytes that are no UTF-8 become U+FFFD."""
        return str(self._bpe.decode(ids, skip_special_tokens=False))


def require(model: Model) -> Tokenizer:
    """The model's tokenizer. Raises ModelError, saying why there is none."""
    tokenizer = model.tokenizer()
    if tokenizer is None:
        raise ModelError(_no_text(getattr(model, "metadata", {}), str(model.path or model.name)))
    return tokenizer


def missing_library(model: Model) -> str:
    """The sentence for a person where the model has a vocabulary and the library that reads it is not here; else ""."""
    if getattr(model, "metadata", {}).get("tokenizer.ggml.model") != "gpt2" or installed("tokenizers"):
        return ""
    return f"these are token ids: their text needs tokenizers; run {install_line('tokenizer')}."


def _no_text(metadata: dict[str, Any], where: str) -> str:
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "gpt2":
        return f"text of {where} needs tokenizers, which is not installed; run {install_line('tokenizer')}, or give token ids with --ids."
    why = (
        "has no vocabulary"
        if kind in ("none", "no_vocab")
        else f"has a {kind!r} vocabulary, where only byte-level BPE ('gpt2') is read"
    )
    return f"{where} {why}, so text cannot be tokenised; give token ids with --ids."


def _split_merge(merge: str) -> tuple[str, str]:
    """ "a b" → ("a", "b"); the first letter may itself be a space."""
    at = merge.index(" ", 1)
    return merge[:at], merge[at + 1 :]


def _build(
    tokens: list[str], types: list[int], merges: list[tuple[str, str]], cuts: list[str], *, whole_words: bool
) -> BpeTokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as BpeTokenizer

    vocab: dict[str, int] = {}
    for i, token in enumerate(tokens):
        vocab.setdefault(token, i)
    bpe = BpeTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    marked = [
        AddedToken(token, normalized=False, special=kind != _USER_DEFINED)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
    ]
    bpe.add_tokens(marked)
    return bpe


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
