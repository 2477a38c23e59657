"""The record of a round: what `record.json` ("round/1") and each line of `samples.jsonl` hold.

Everything that a round concludes is recomputable from these two files: the preregistered numbers and the walls go in,
the estimate, interval, evidence and verdict come out (`harness.rounds.verify`).

Fractions are fractions (0.015 is 1.5 %), times are milliseconds unless a name says otherwise, moments are ISO 8601 UTC.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Verdict = Literal["LANDED", "REVERTED", "INCONCLUSIVE", "MEAS-ONLY", "INVALID"]
Outcome = Literal[
    "landed",  # at least the bar, by the landing rule
    "sub-bar",  # kept below the bar, with a written reason
    "gate-failed",
    "no-op",  # both arms compile to the same code and plan: nothing was timed
    "mechanism-positive/wall-negative",  # the changed ops got faster, the wall did not by the bar
    "share-not-yet",  # the mechanism works, its class is too small a share of the wall for the bar
    "no-effect",
    "regression",
    "inconclusive",
    "invalid-window",
    "analysis-negative",  # a roofline alone decided; nothing was run
    "measured",  # MEAS-ONLY: a table, no lever
]
Statistic = Literal["median", "midmean", "lower_quartile", "minimum"]
Regime = Literal["burst", "sustained"]
Phase = Literal["discard", "decide", "confirm"]


class Strict(BaseModel):
    """A model that refuses unknown keys and NaN."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, ser_json_inf_nan="strings", allow_inf_nan=False)


class Sample(Strict):
    """One half of a pair: one process of one arm, its forwards timed one by one. A line of samples.jsonl.

    In a basket each block has four halves: A base, B both levers, C the first alone, D the second alone.
    """

    pair: int  # 1-based over the whole round; 0 for the discarded run of each arm
    order: str  # the arms in the order they ran: "AB", "BA", or four letters in a basket
    arm: Literal["A", "B", "C", "D"]
    wall_ms: list[float]  # untraced, from submit to logits on the host; one per timed forward, in order
    dropped: str | None = None  # this half's own telemetry reason; a pair is dropped when either half has one
    boot: str = ""  # identity of the process that ran it
    gpu: dict[str, Any] = Field(default_factory=dict)  # per forward: sm_mhz, power_w, temp_c, throttle, foreign; memory
    phase: Phase = "decide"
    window: int = 1  # 1-based; a retry in another window counts on
    at: str = ""  # moment of the first timed forward
    gpu_ms: list[float] | None = None  # device time of each forward where the engine reports it
    logits: list[str] = Field(default_factory=list)  # hash of each forward's logits
    tokens_seed: int | None = None  # seed of the half's random tokens, the same in both halves of a pair
    process_s: float | None = None  # wall of the whole process, which any figure of a command must fit inside
    host: dict[str, Any] = Field(default_factory=dict)  # load average, foreign host load

    @field_validator("wall_ms")
    @classmethod
    def _walls_are_times(cls, value: list[float]) -> list[float]:
        if not value or min(value) <= 0:
            raise ValueError("wall_ms must hold one or more times above 0 ms")
        return value


class Frozen(Strict):
    """What is fixed before the first pair. Its hash is kept, so that a later edit shows."""

    bar: float = 0.015  # smallest gain that lands
    alpha: float = 0.05  # bound on P(LANDED | gain ≤ bar)
    beta: float = 0.05  # bound on P(REVERTED | gain ≥ bar + delta), gains as logarithms
    delta: float = 0.005  # in logarithms, as the landing rule has it
    seed: int = 0  # of the pair orders and of the tokens
    s0: float = 0.005  # sd of ln(wall ratio) of A/A pairs, from `harness calibrate`
    statistic: Statistic = "median"  # of a half's forwards
    inner: int = 5  # timed forwards of a half
    regime: Regime = "burst"
    min_pairs: int = 6
    max_pairs: int = 40
    confirm_pairs: int = 8
    boots: int | None = None  # processes per arm in the whole round; None: a fresh one for every half
    protocol: str = "landing"
    prediction: float | None = None  # predicted gain of the wall
    config_sha256: dict[str, str] = Field(default_factory=dict)  # arm letter → hash of its resolved config
    frozen_at: str = ""

    def frozen_sha256(self) -> str:
        """SHA-256 of these fields alone, whatever a subclass adds."""
        fields = {name: getattr(self, name) for name in Frozen.model_fields}
        return digest(fields)


class ArmWall(Strict):
    """An arm's walls over every kept forward of the deciding and confirming pairs."""

    forwards: int
    median_ms: float
    mean_ms: float
    p95_ms: float
    spread: float  # sd of ln(half wall) within the arm


class Arm(Strict):
    """One arm: its full config, and its identity by content."""

    name: str
    path: str = ""  # the YAML file, as given
    config: dict[str, Any] = Field(default_factory=dict)  # resolved: `extends:` applied, defaults filled
    config_sha256: str = ""
    identity: str = ""  # hash of everything that decides its speed: config, binary or commit, kernels, environment
    engine: dict[str, Any] = Field(
        default_factory=dict
    )  # what the engine says of itself: kernels, algorithms, versions
    device_memory_bytes: int | None = None  # peak that the arm holds on its device (CPU: of the process)
    wall: ArmWall | None = None


class ArmDiff(Strict):
    """One key in which two arms differ."""

    key: str  # dotted path
    before: Any = None
    after: Any = None


class OpsAffected(Strict):
    """Ops of the plan that a lever adds, removes or runs differently."""

    op: str  # name without its layer: "gate", "attention"
    cls: str = Field(alias="class")
    count: int
    change: Literal["added", "removed", "changed"]


class Gate(Strict):
    """A gate's result. `ok` None means not applicable, which is never passed."""

    name: str
    ok: bool | None
    value: float | str | None = None
    limit: float | str | None = None
    detail: str = ""


class Evidence(Strict):
    """The two e-values of the landing rule; landing needs `for` ≥ 1/alpha, reverting `against` ≥ 1/beta."""

    for_: float = Field(alias="for")
    against: float
    log_for: float
    log_against: float


class Window(Strict):
    """One quiet-window report: what disturbed it, and what could not be seen."""

    window: int = 1
    quiet: bool | None = None  # None: could not be judged
    disturbed_by: list[str] = Field(default_factory=list)
    unseen: list[str] = Field(default_factory=list)  # "no NVML: clocks, power and foreign processes unknown"
    before: dict[str, Any] = Field(default_factory=dict)
    after: dict[str, Any] = Field(default_factory=dict)


class Mechanism(Strict):
    """The second, separate question: did the changed ops' busy time move? From traced passes, not from samples."""

    before_ms: list[float] = Field(default_factory=list)  # busy of the changed ops, one per traced pass of arm A
    after_ms: list[float] = Field(default_factory=list)
    estimate: float | None = None  # before / after − 1
    interval: tuple[float, float] | None = None
    found: Literal["positive", "none", "negative", "not measured"] = "not measured"
    detail: str = ""


class Effect(Strict):
    """One effect of a basket, with its interval, all as gains of the wall."""

    estimate: float
    interval: tuple[float, float]


class Basket(Strict):
    """The 2 × 2: each lever alone, both, and their interaction (both ÷ the product of the two alone, − 1)."""

    a: Effect
    b: Effect
    both: Effect
    interaction: Effect


class Anchor(Strict):
    """The base arm against the last record of the same identity."""

    round: int
    wall_ms: float  # of that record
    now_ms: float
    regime: Regime
    limit: float = 0.03
    ok: bool


class Analysis(Strict):
    """A verdict by arithmetic: the most that a lever could give, and why that is not enough."""

    cls: str = Field(alias="class")
    class_ms: float
    wall_ms: float
    sol: float | None = None  # fraction of its roof that the class reaches
    claimed: float | None = None  # speed-up of the class that was claimed, where no roof is used
    best_gain: float  # gain of the wall if the class ran at its roof (or at the claim)
    arithmetic: str  # the sum, written out
    table: str = ""  # the decomposition that it is read from


class RoundRecord(Frozen):
    """`record.json`. A round in progress has verdict None and status "open"."""

    schema_: Literal["round/1"] = Field(default="round/1", alias="schema")
    round: int
    slug: str
    title: str = ""
    kind: Literal["AB", "MEAS-ONLY"] = "AB"
    aa: bool = False  # both arms are the same on purpose
    status: Literal["open", "finished", "closed"] = "open"  # closed: its lessons are written
    started: str = ""
    finished: str = ""

    verdict: Verdict | None = None
    outcome: Outcome | None = None
    reason: str = ""  # why this verdict, in one sentence; for a sub-bar landing, why it is kept
    pairs: int = 0  # complete pairs that entered the evidence
    dropped: int = 0  # pairs dropped for telemetry
    estimate: float | None = None  # exp(Hodges–Lehmann of d) − 1 over the deciding pairs
    interval: tuple[float | None, float | None] | None = None  # None on a side that the pairs do not bound yet
    confirmed: float | None = None  # the booked gain: the same over the fresh confirmation pairs
    evidence: Evidence | None = None
    p95_gain_interval: tuple[float, float] | None = None  # paired bootstrap of ln(p95_B / p95_A), where decided by it
    next_step: str = ""  # for INCONCLUSIVE and INVALID
    warnings: list[str] = Field(default_factory=list)
    stderr_tail: list[str] = Field(default_factory=list)  # last lines of a worker that ended the round

    arms: dict[str, Arm] = Field(default_factory=dict)  # "A" base, "B" lever; a basket adds "C" and "D"
    diff: list[ArmDiff] = Field(default_factory=list)
    ops_affected: list[OpsAffected] = Field(default_factory=list)
    hypothesis: str = ""
    mechanism_claim: str = ""  # the experiment's `mechanism:`
    gates: list[Gate] = Field(default_factory=list)
    windows: list[Window] = Field(default_factory=list)
    mechanism: Mechanism = Field(default_factory=Mechanism)
    anchor: Anchor | None = None
    basket: Basket | None = None
    analysis: Analysis | None = None
    vs_reference: dict[str, float] = Field(default_factory=dict)  # reference's name → reference wall / ours

    tokens: int | None = None
    model: str = ""
    device: str = ""
    provenance: dict[str, Any] = Field(default_factory=dict)  # gpu, driver, commit, dirty, model_sha256, versions
    environment: dict[str, str] = Field(default_factory=dict)  # names of inherited variables → salted hash of the value

    background: str = ""  # editable: in the README, between its comments
    lessons: str = ""  # editable
    retry_conditions: list[str] = Field(default_factory=list)  # editable; `harness.rounds.retry` reads them

    supersedes: int | None = None
    superseded_by: int | None = None
    correction: str = ""  # why this round corrects the one it supersedes
    promoted: str = ""  # the moment at which its lever became the base

    frozen_hash: str = ""  # frozen_sha256() as it was before the first pair
    samples_sha256: str = ""  # of samples.jsonl when the round finished
    attachments: dict[str, str] = Field(default_factory=dict)  # file in the round's directory → its SHA-256

    @property
    def number(self) -> str:
        """The round's number as it is written: 0004."""
        return f"{self.round:04d}"

    @property
    def directory_name(self) -> str:
        """NNNN-slug."""
        return f"{self.number}-{self.slug}"

    def to_json(self) -> dict[str, Any]:
        """The mapping of record.json, `schema` first."""
        data = self.model_dump(mode="json", by_alias=True)
        return {"schema": data.pop("schema"), "round": data.pop("round")} | data


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()).hexdigest()
