"""Kernel names as people read them: what a profiler left mangled is demangled."""

from __future__ import annotations

from functools import lru_cache


def is_mangled(name: str) -> bool:
    """True for a symbol of the Itanium C++ ABI ("_Z…"), which nvcc and clang write."""
    return name.startswith(("_Z", "__Z"))


@lru_cache(maxsize=65_536)
def demangled(name: str) -> str:
    """The C++ signature of a mangled name; any other name, and one that is damaged, as it is.

    >>> demangled("_Z12rms_norm_f32ILi1024ELb1EEvPKfPfiiif")
    'void rms_norm_f32<1024, true>(float const*, float*, int, int, int, float)'
    """
    if not is_mangled(name):
        return name
    import demangle

    try:
        return str(demangle.demangle(name)) or name
    except (demangle.DemanglingError, RecursionError, ValueError):
        return name
