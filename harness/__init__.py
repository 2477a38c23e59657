"""Measuring, attributing, deciding, recording. Imports without a GPU and without CuPy."""

__version__ = "0.1.0"
