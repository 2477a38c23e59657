"""The trace readers' fuzz tests for as long as they are given: any value in any cell, any value in any field, any bytes.

    python benchmarks/fuzz_traces.py [--examples 20000] [--seed 1]

Runs tests/traces/test_fuzz.py, which CI runs with 60 examples a kind, with as many as asked for. Exit status 1: some file
gave a traceback, a sentence of several lines, or a table that does not add up; the smallest such file's making is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import pytest


def main() -> int:
    """Parses the options and runs; the exit status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--examples", type=int, default=20_000, help="files of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    root = Path(__file__).parents[1]
    os.environ["FUZZ_EXAMPLES"] = str(options.examples)
    return pytest.main(
        [str(root / "tests" / "traces" / "test_fuzz.py"), f"--rootdir={root}", f"--hypothesis-seed={options.seed}", "--timeout=0",
         "-p", "no:xdist", "-v", "--durations=0"]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
