"""Signs that a poor terminal lacks (LC_ALL=C without UTF-8, Latin-1), in the nearest letters that it has."""

from __future__ import annotations

import codecs
import unicodedata
from functools import cache

HANDLER = "harness.signs"
"""Name of the codec error handler that `register` makes."""

PLAIN = {
    "–": "-", "−": "-", "─": "-", "…": "..", "·": "|", "×": "x", "µ": "u", "→": "->", "≥": ">=", "≤": "<=", "±": "+/-", "∞": "inf",
    "≈": "~", "Σ": "sum ", "∘": "o", "█": "#", "▉": "#", "▊": "#", "▋": "#", "▌": "#", "▍": "-", "▎": "-", "▏": "-", "°": " deg",
    "“": '"', "”": '"', "‘": "'", "’": "'", "⁹": "^9", "²": "^2", "³": "^3",
}  # fmt: skip


@cache
def _lacks(encoding: str) -> frozenset[str]:
    """Of the signs that tables use, those that an encoding cannot write."""
    lacking = set()
    for sign in PLAIN:
        try:
            sign.encode(encoding)
        except (UnicodeEncodeError, LookupError):
            lacking.add(sign)
    return frozenset(lacking)


def printable(text: str, encoding: str) -> str:
    """The text in signs that `encoding` has, as far as tables use them: what is laid out is what is printed."""
    lacking = _lacks(encoding)
    return "".join(PLAIN[sign] if sign in lacking else sign for sign in text) if lacking else text


def _nearest(error: UnicodeError) -> tuple[str | bytes, int]:
    """A codec error handler: our plain spelling, else the letter without its accents, else "?"."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    spelt = []
    for sign in error.object[error.start : error.end]:
        letters = unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()
        spelt.append(PLAIN.get(sign) or letters or "?")
    return "".join(spelt), error.end


def register() -> str:
    """Makes the handler known to Python's codecs; its name, for a stream's `errors`."""
    codecs.register_error(HANDLER, _nearest)
    return HANDLER
