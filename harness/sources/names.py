"""Kernel names as people read them: what a profiler left mangled is demangled."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

LONGEST = 65_536
"""Characters of a symbol that is looked at; nothing that a compiler writes is longer."""


@lru_cache(maxsize=65_536)
def demangled(name: str) -> str:
    """The C++ signature of a symbol of the Itanium C++ ABI ("_Z…", which nvcc and clang write), by libstdc++'s demangler; any
    other name, and one that is damaged, as it is.

    >>> demangled("_Z12rms_norm_f32ILi1024ELb1EEvPKfPfiiif")
    'void rms_norm_f32<1024, true>(float const*, float*, int, int, int, float)'
    """
    symbol = name.removeprefix("_") if name.startswith("__Z") else name
    if not symbol.startswith("_Z") or not symbol.isascii() or "\0" in symbol or len(symbol) > LONGEST:
        return name
    libraries = _libraries()
    if libraries is None:
        return name
    libstdcxx, libc = libraries
    status = ctypes.c_int(0)
    pointer = libstdcxx.__cxa_demangle(symbol.encode(), None, None, ctypes.byref(status))
    if not pointer or status.value:
        return name
    try:
        return (ctypes.cast(pointer, ctypes.c_char_p).value or name.encode()).decode()
    finally:
        libc.free(pointer)


@cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """(libstdc++, libc), or None where there is no libstdc++; NumPy and pandas need it too."""
    try:
        libstdcxx, libc = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
    except OSError:
        return None
    libstdcxx.__cxa_demangle.restype = ctypes.c_void_p
    libstdcxx.__cxa_demangle.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int),
    ]
    libc.free.argtypes = [ctypes.c_void_p]
    return libstdcxx, libc
