"""All gates of a pair of arms, in processes of their own, before any timing. None is skipped silently.

A gate that does not apply to an engine is in the list with `ok` None and the reason; only what ran can have passed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.ab import schedule
from harness.ab.identity import what_decides
from harness.ab.protocol import GatesProtocol
from harness.config import ArmConfig, CommandEngine, CommandGate
from harness.gates.bitwise import bitwise, determinism
from harness.gates.greedy import greedy
from harness.gates.parity import parity, rel_l2
from harness.rounds.record import Gate

TIMEOUT_S = 1800.0


class Opened(Protocol):
    """A worker with an arm open: `harness.ab.process.ArmProcess`, or a simulated one."""

    opened: dict[str, Any]

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Calls a method of its Session."""

    def close(self) -> None:
        """Ends it and frees what it held. Idempotent."""


Launch = Callable[[ArmConfig], AbstractContextManager[Opened]]


@dataclass
class _Results:
    """What one arm computed for the gates. Arrays are float32 [vocab]."""

    opened: dict[str, Any]
    timed: np.ndarray | None = None
    again: np.ndarray | None = None
    checked: np.ndarray | None = None  # at reference_tokens on the gate model
    greedy: dict[str, Any] = field(default_factory=dict)
    prompt_logits: np.ndarray | None = None
    declared: dict[str, tuple[dict[str, Any], np.ndarray | None]] = field(default_factory=dict)


@dataclass
class GateReport:
    """The gates' results and what each arm said of itself when it was opened."""

    gates: list[Gate]
    opened: dict[str, dict[str, Any]]

    @property
    def failed(self) -> Gate | None:
        """The first failed gate."""
        return next((g for g in self.gates if g.ok is False), None)


def run_gates(
    base: ArmConfig,
    lever: ArmConfig,
    *,
    launch: Launch,
    limits: GatesProtocol,
    seed: int,
    say: Callable[[str], None],
    look_for_no_op: bool = False,
) -> GateReport:
    """Runs every gate that applies. Raises WorkerFailure where an arm does not open or dies.

    look_for_no_op: arms with the same plan and machine code end it at once, with the one gate that says so.
    """
    with tempfile.TemporaryDirectory(prefix="gates-") as scratch:
        return _Suite(base, lever, launch, limits, seed, say, Path(scratch)).run(look_for_no_op)


NO_OP = "not a no-op"


def is_no_op(base: ArmConfig, lever: ArmConfig, opened: dict[str, dict[str, Any]]) -> bool:
    """Same plan and same description (kernel hashes, algorithms): the lever changes nothing that runs."""
    a, b = opened["A"], opened["B"]
    if a["plan"] is None or base.plant != lever.plant:
        return False
    return a["plan"] == b["plan"] and what_decides(a["described"]) == what_decides(b["described"])


@dataclass
class _Suite:
    base: ArmConfig
    lever: ArmConfig
    launch: Launch
    limits: GatesProtocol
    seed: int
    say: Callable[[str], None]
    scratch: Path
    prompt: list[int] | None = None

    def run(self, look_for_no_op: bool) -> GateReport:
        a, b = (self.compute(letter, arm) for letter, arm in (("A", self.base), ("B", self.lever)))
        opened = {"A": a.opened, "B": b.opened}
        if look_for_no_op and is_no_op(self.base, self.lever, opened):
            return GateReport([Gate(name=NO_OP, ok=False, detail="identical plan, kernels and algorithms")], opened)
        if isinstance(self.base.engine, CommandEngine) or isinstance(self.lever.engine, CommandEngine):
            return GateReport(self.declared(a, b), opened)
        return GateReport([*self.at_timed_shape(a, b), *self.on_real_weights(a, b)], opened)

    def compute(self, letter: str, arm: ArmConfig) -> _Results:
        """One process of one arm: the timed shape twice, and (on real weights) the reference shape and greedy tokens."""
        self.say(f"gates: arm {letter} ({arm.name})")
        with self.launch(arm) as worker:
            found = _Results(worker.opened)
            if isinstance(arm.engine, CommandEngine):
                for name, gate in arm.engine.gates.items():
                    found.declared[name] = self.declared_run(worker, gate)
                return found
            found.timed = self.logits(worker, arm.tokens, 0)
            found.again = self.logits(worker, arm.tokens, 0)
            if not found.opened["described"].get("synthetic"):
                self.checked(worker, found)
        return found

    def logits(self, worker: Opened, tokens: int, number: int) -> np.ndarray | None:
        path = self.scratch / "logits.npy"
        answer = worker.ask(
            "logits", TIMEOUT_S, seed=schedule.gate_seed(self.seed, number), tokens=tokens, path=str(path)
        )
        if not answer["there"]:
            return None
        if tokens == self.base.tokens and number == 0:
            worker.opened["described"] = answer["described"]  # kernels and algorithms are known after a forward
        return np.load(path)

    def checked(self, worker: Opened, found: _Results) -> None:
        found.checked = self.logits(worker, self.limits.reference_tokens, 1)
        path = self.scratch / "greedy.npy"
        found.greedy = worker.ask(
            "greedy", TIMEOUT_S, prompt=self.prompt, count=self.limits.greedy_tokens, path=str(path)
        )
        if found.greedy["there"]:
            self.prompt = found.greedy["prompt"]
            found.prompt_logits = np.load(path)

    def parity(self, base: np.ndarray, other: np.ndarray, against: str, limit_l2: float) -> list[Gate]:
        return parity(
            base, other, against=against, limit_l2=limit_l2, limit_kl=self.limits.kl, near_tie=self.limits.near_tie,
            top1=self.limits.top1,
        )  # fmt: skip

    def at_timed_shape(self, a: _Results, b: _Results) -> list[Gate]:
        if a.timed is None or b.timed is None or a.again is None or b.again is None:
            why = "the engine returns no logits"
            return [Gate(name=name, ok=None, detail=why) for name in ("parity vs base", "bitwise", "determinism")]
        return [
            *self.parity(a.timed, b.timed, f"base at {self.base.tokens} tokens", self.limits.rel_l2),
            bitwise(a.timed, b.timed, claimed=self.lever.identity == "bitwise"),
            *(
                determinism(r.timed, r.again, arm=letter, limit=self.limits.determinism_rel_l2)
                for letter, r in (("A", a), ("B", b))
                if r.timed is not None and r.again is not None
            ),
        ]

    def on_real_weights(self, a: _Results, b: _Results) -> list[Gate]:
        """Greedy identity and parity with the oracle, on the arms' own weights if those are real, else on SmolLM2's."""
        names = ("parity vs reference", f"greedy {self.limits.greedy_tokens} tokens")
        model = ""
        if self.base.engine.kind == "embedded" and a.opened["described"].get("synthetic"):
            from engine.errors import ModelError
            from engine.models import SMOLLM2, resolve

            try:
                resolve(SMOLLM2, gpu=False)
            except ModelError as error:
                why = f"the weights are synthetic, and real ones are not at hand ({error})"
                return [Gate(name=name, ok=None, detail=why) for name in names]
            model = f"{SMOLLM2}, "
            a, b = (self.compute(letter, arm.model_copy(update={"model": SMOLLM2, "tokens": self.limits.reference_tokens}))
                    for letter, arm in (("A", self.base), ("B", self.lever)))  # fmt: skip
        gates = self.reference(a, b, model)
        if not (a.greedy.get("there") and b.greedy.get("there")):
            return [*gates, Gate(name=names[1], ok=None, detail="the engine does not decode")]
        assert a.prompt_logits is not None and b.prompt_logits is not None
        gates.append(
            greedy(
                a.greedy["generated"], b.greedy["generated"], margins=a.greedy["margins"], base_logits=a.prompt_logits,
                other_logits=b.prompt_logits, near_tie=self.limits.near_tie, claimed=self.lever.identity != "tolerance",
            )
        )  # fmt: skip
        return gates

    def reference(self, a: _Results, b: _Results, model: str) -> list[Gate]:
        name = "parity vs reference"
        if self.base.engine.kind != "embedded" or a.checked is None or b.checked is None:
            return [Gate(name=name, ok=None, detail="the CPU oracle runs the embedded engine's models only")]
        from engine.levers import Levers

        on_cpu = a.opened["described"]["backend"] == "cpu"
        if on_cpu and Levers.from_dict(self.base.levers) == Levers():
            return [
                Gate(name=name, ok=None, detail="arm A is the oracle itself: parity vs base is parity vs reference")
            ]
        from engine.models import SMOLLM2

        oracle = ArmConfig(name="oracle", engine={"kind": "embedded", "backend": "cpu"},  # type: ignore[arg-type]
                           model=SMOLLM2 if model else self.base.model, tokens=self.limits.reference_tokens,
                           source=self.base.source)  # fmt: skip
        self.say("gates: the CPU oracle")
        with self.launch(oracle) as worker:
            right = self.logits(worker, self.limits.reference_tokens, 1)
        assert right is not None
        gates = []
        for letter, found in (("A", a), ("B", b)):
            assert found.checked is not None
            against = f"reference ({model}{self.limits.reference_tokens} tokens), arm {letter}"
            gates += self.parity(right, found.checked, against, self.limits.reference_rel_l2)
        return gates

    def declared_run(self, worker: Opened, gate: CommandGate) -> tuple[dict[str, Any], np.ndarray | None]:
        path = self.scratch / "gate.npy"
        answer = worker.ask(
            "command_gate", TIMEOUT_S, gate=gate.model_dump(), seed=schedule.gate_seed(self.seed, 0), path=str(path)
        )
        return answer, np.load(path) if gate.file else None

    def declared(self, a: _Results, b: _Results) -> list[Gate]:
        """A command's gates: those that both arms declare are compared, the others are not applicable."""
        gates = []
        for name in ("parity", "greedy", "bitwise", "determinism"):
            if name not in b.declared:
                gates.append(Gate(name=name, ok=None, detail="not declared in the command's `gates`"))
                continue
            assert isinstance(self.lever.engine, CommandEngine)
            gate = self.lever.engine.gates[name]  # type: ignore[index]
            answer, array = b.declared[name]
            if gate.compare == "exit":
                gates.append(Gate(name=name, ok=answer["status"] == 0, value=str(answer["status"]), limit="status 0"))
            elif name not in a.declared:
                gates.append(
                    Gate(name=name, ok=None, detail="arm A does not declare it, so there is nothing to compare with")
                )
            elif gate.compare == "npy":
                right = a.declared[name][1]
                l2 = rel_l2(right, array) if right is not None and array is not None else float("inf")
                gates.append(Gate(name=name, ok=l2 <= gate.rel_l2, value=l2 if np.isfinite(l2) else "not finite", limit=gate.rel_l2))  # fmt: skip
            else:
                gates.append(_same_text(name, a.declared[name][0]["stdout"], answer["stdout"]))
        return gates


def _same_text(name: str, base: str, other: str) -> Gate:
    if base == other:
        return Gate(name=name, ok=True, value="identical", limit="base's stdout")
    at = next((i for i, (x, y) in enumerate(zip(base, other, strict=False)) if x != y), min(len(base), len(other)))
    line = base.count("\n", 0, at) + 1
    detail = f"stdout first differs in line {line}: {base[at : at + 30]!r} became {other[at : at + 30]!r}"
    return Gate(name=name, ok=False, value=f"line {line}", limit="base's stdout", detail=detail)
