"""The fastest matrix rate that a GPU has on paper: a bound where nobody measured a ceiling, and nothing else."""

from __future__ import annotations

import re

ON_PAPER = (
    ("Rubin|VR200", 50000, "fp4"), ("G?B300", 15000, "fp4"), ("G?B200", 10000, "fp4"), ("B100", 7000, "fp4"),
    ("RTX PRO 6000 Blackwell", 2000, "fp4"), ("RTX 5090", 1676, "fp4"),
    (r"H20(?!\d)", 296, "fp8"), ("H100|H200|H800|GH200", 1979, "fp8"),
    ("L40S", 733, "fp8"), (r"L40(?!\d|S)", 362, "fp8"), (r"L4(?!\d)", 242, "fp8"), ("RTX 6000 Ada", 1457, "int4"), ("RTX 4090", 1321, "int4"),
    ("A100|A800", 1248, "int4"), ("A40(?!00)", 599, "int4"), ("A30(?!00)", 661, "int4"), (r"A10(?!\d)", 500, "int4"),
    ("RTX A6000", 619, "int4"), ("RTX 3090", 568, "int4"), (r"T4(?!\d)", 260, "int4"), ("V100", 130, "f16"),
    ("MI355X", 10100, "fp4"), ("MI350X", 9200, "fp4"), ("MI300X|MI325X", 2615, "fp8"), ("MI250X", 383, "int8"), ("MI210", 181, "int8"),
)  # fmt: skip
"""Part of a GPU's name (regex), its fastest dense matrix rate in TFLOP/s (TOP/s), and the type that has it: NVIDIA's
datasheets of Blackwell Ultra, GB200 (a GPU's half), H100/H200, L40S, L4, A100, A30, A10, T4, V100 and its Ada, Ampere and
Blackwell RTX white papers; AMD's of MI355X, MI300X, MI250X, MI210. With 2:4 sparsity a sheet says twice as much."""


def paper_rate(gpu: str) -> tuple[float, str]:
    """(TFLOP/s, whose): the fastest matrix rate that a GPU of this name has on paper; of any GPU where it is not known."""
    for name, rate, kind in ON_PAPER:
        if re.search(rf"(?<![A-Za-z0-9])(?:{name})", gpu):
            return float(rate), f"the {kind} rate of {gpu} on paper"
    return float(max(rate for _, rate, _ in ON_PAPER)), "the rate of the fastest GPU on paper"
