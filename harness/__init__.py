"""Measuring, attributing, deciding, recording. Imports without a GPU and without CuPy."""
