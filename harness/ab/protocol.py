"""What protocols/landing*.yaml and gates.yaml hold."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from harness.config import Strict


class LandingProtocol(Strict):
    """The landing rule's numbers and the way a half is run. Fractions of the wall unless a unit is named."""

    bar: float = Field(gt=0, lt=1)
    alpha: float = Field(gt=0, lt=1)
    beta: float = Field(gt=0, lt=1)
    delta: float = Field(gt=0, lt=1)
    min_pairs: int = Field(ge=1)
    max_pairs: int = Field(ge=1)
    confirm_pairs: int = Field(default=8, ge=1)
    anchor_tolerance: float = Field(default=0.03, gt=0)
    """The base arm's wall may lie this far from its last record of the same identity."""

    inner: int = Field(default=5, ge=1)
    statistic: Literal["median", "midmean", "lower_quartile", "minimum"] = "median"
    """Of a half's forwards; `harness calibrate` chooses it per machine and regime, and its choice goes before this one."""
    s0: float = Field(default=0.005, gt=0)
    """Pair sd of an A/A where this machine was never calibrated."""
    regime: Literal["burst", "sustained"] = "burst"
    burst_idle_s: float = Field(default=0.2, ge=0)
    sustained_load_s: float = Field(default=3.0, ge=0)
    warmup: int = Field(default=3, ge=1)
    """Forwards before the timed ones in every half, so that lazy loading stays outside the window. Odd as `inner` is: a
    half is then an even number of forwards, and an engine that alternates meets every half alike."""
    half_timeout_s: float = Field(default=600, gt=0)
    traced_passes: int = Field(default=5, ge=1)
    """Traced passes of each arm for the mechanism; on the CPU, where a forward takes seconds, three at most."""

    @model_validator(mode="after")
    def _reachable(self) -> LandingProtocol:
        if self.inner % 2 == 0:
            raise ValueError("inner must be odd, so that a median is one of the forwards")
        if self.warmup % 2 == 0:
            raise ValueError("warmup must be odd, so that a half is an even number of forwards")
        if self.min_pairs > self.max_pairs:
            raise ValueError("min_pairs must not exceed max_pairs")
        if 1.8**self.max_pairs < 1 / self.alpha:
            raise ValueError(f"max_pairs is too small: one pair multiplies evidence by at most 1.8, and 1/alpha is {1 / self.alpha:g}")  # fmt: skip
        return self


class GatesProtocol(Strict):
    """Limits of the gates that go before any timing."""

    rel_l2: float = Field(gt=0)
    """Relative L2 of the last row's logits: lever against base, at the timed shape."""
    reference_rel_l2: float = Field(gt=0)
    """The same against the reference (the CPU oracle), at `reference_tokens`."""
    kl: float = Field(gt=0)
    """Kullback–Leibler divergence of the next-token distributions, in nats."""
    top1: bool = True
    """The most likely token must agree, near-ties excepted."""
    greedy_tokens: int = Field(ge=1)
    reference_tokens: int = Field(ge=1)
    near_tie: float = Field(gt=0)
    """A flip is a near-tie when the top-two margin is below this many times max |Δlogit|."""
    determinism_rel_l2: float = Field(ge=0)
    """The same arm twice on the same tokens."""
