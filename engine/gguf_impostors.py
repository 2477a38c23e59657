"""What a file is that was given for a GGUF and is none: a person is told that, and how to get the model."""

from __future__ import annotations

import re

_AGAIN = "download the model itself again"
_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\s.*?\bsize (\d+)", re.DOTALL)
_TEXT = re.compile(rb"\s*(?:(?P<html><!doctype html|<html)|(?P<xml><\?xml|<error)|(?P<json>\{\s*\"))", re.IGNORECASE)

_MAGICS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x1f\x8b", "a gzip file", "unpack it with `gunzip`"),
    (0, b"BZh", "a bzip2 file", "unpack it with `bunzip2`"),
    (0, b"\xfd7zXZ\0", "an xz file", "unpack it with `unxz`"),
    (0, b"\x28\xb5\x2f\xfd", "a Zstandard file", "unpack it with `unzstd`"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it with `7z x`"),
    (257, b"ustar", "a tar archive", "unpack it with `tar x`"),
    (0, b"\x89HDF\r\n", "an HDF5 file", "convert the model with llama.cpp's convert_hf_to_gguf.py"),
    (0, b"PAR1", "a Parquet file", "give the model's .gguf"),
    (0, b"SQLite format 3\0", "an SQLite file, perhaps an nsys export", "give it to --trace, and the model's .gguf here"),
    (0, b"%PDF", "a PDF", _AGAIN),
    (0, b"lmgg", "a GGML file of before August 2023", "convert it with llama.cpp's convert_llama_ggml_to_gguf.py"),
    (0, b"fmgg", "a GGMF file of before August 2023", "convert it with llama.cpp's convert_llama_ggml_to_gguf.py"),
    (0, b"tjgg", "a GGJT file of before August 2023", "convert it with llama.cpp's convert_llama_ggml_to_gguf.py"),
    (0, b"algg", "a GGLA adapter of before 2024, no model", "give the model's .gguf"),
    (0, b"nsgg", "a llama.cpp session file", "give the model's .gguf"),
    (0, b"qsgg", "a llama.cpp sequence file", "give the model's .gguf"),
    (0, b"FUGG", "a GGUF with its magic in the other byte order", "convert it again with a current llama.cpp"),
)  # fmt: skip
"""(offset, bytes there, what that is, what to do). The old magics are 32-bit numbers ('ggml' …) in little-endian order."""


def what_it_is(data: memoryview) -> str:
    """One sentence without its subject on what these bytes are instead of a GGUF, or "" where they tell nothing."""
    head = bytes(data[:1024])
    if pointer := _POINTER.match(head):
        size = int(pointer[1])
        return f"a Git LFS pointer of {len(data)} bytes, not the model of {size:,} bytes that it stands for; fetch that with `git lfs pull`."
    if text := _TEXT.match(head):
        if text["json"]:
            index = b"weight_map" in head or b"architectures" in head
            if index:
                return "a JSON file of a Hugging Face model, not its weights; convert the folder with llama.cpp's convert_hf_to_gguf.py."
            return f"a JSON text, perhaps the error that a download ended with; {_AGAIN}."
        kind = "an HTML page" if text["html"] else "an XML text"
        return f"{kind}, perhaps the login or error page that a download ended with; {_AGAIN}."
    if head.startswith(b"PK\x03\x04"):
        if b"data.pkl" in head or b"/version" in head or b"byteorder" in head:
            return "a PyTorch checkpoint (zip); convert the model with llama.cpp's convert_hf_to_gguf.py."
        return "a zip archive; unpack it with `unzip`."
    if head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") < 1 << 32:
        return "a safetensors file; convert the model with llama.cpp's convert_hf_to_gguf.py."
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return (
            "a Python pickle, perhaps a PyTorch checkpoint; convert the model with llama.cpp's convert_hf_to_gguf.py."
        )
    for at, magic, what, advice in _MAGICS:
        if head[at : at + len(magic)] == magic:
            return f"{what}, not a GGUF; {advice}."
    if head and not head.strip(b"\0"):
        return f"nothing but zeros at its start: a download that never arrived; {_AGAIN}."
    return ""
