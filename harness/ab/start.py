"""From what a person asked for to a round that can run: arms, freeze, record, device, lock."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.cache import cache_dir
from engine.open import choose, gpu_available
from harness.ab import calibration
from harness.ab.live import Live
from harness.ab.process import ArmProcess, DeviceLock
from harness.ab.protocol import GatesProtocol, LandingProtocol
from harness.ab.runner import Round, Setup, arm_diff, now_utc
from harness.ab.simulate import Rule, smallest_decidable_gain
from harness.attribution.provenance import commit
from harness.config import ArmConfig, diff_arms, load_arm, load_protocol
from harness.errors import HarnessError
from harness.privacy import inherited, salt_of_this_machine, shown_change, shown_config
from harness.rounds.record import Arm, Frozen, RoundRecord
from harness.rounds.store import new_round_dir, save_record
from harness.window.rules import QuietWindow
from harness.window.sentinel import Sentinel


@dataclass
class Request:
    """What `harness ab` was asked to do. None leaves a choice to the protocol or the calibration."""

    arms: dict[str, ArmConfig]
    protocol: str = "landing"
    gates: str = "gates"
    quiet: str = "quiet-window"
    aa: bool = False
    regime: str | None = None
    statistic: str | None = None
    s0: float | None = None
    inner: int | None = None
    max_pairs: int | None = None
    boots: int | None = None
    seed: int | None = None
    title: str = ""
    no_anchor: str = ""
    land_sub_bar: str = ""
    with_mechanism: bool = True
    paths: dict[str, str] = field(default_factory=dict)
    root: Path | None = None
    warnings: list[str] = field(default_factory=list)


def basket(base: ArmConfig, a: ArmConfig, b: ArmConfig) -> dict[str, ArmConfig]:
    """The four arms of a 2 × 2: A base, B both levers, C the first alone, D the second alone.

    Raises HarnessError where the two levers set one key to different values.
    """
    for name, arm in (("first", a), ("second", b)):
        if not diff_arms(base, arm):
            raise HarnessError(f"the {name} lever ({arm.name}) runs the same as the base; a basket needs two levers.")
    both = base.model_dump(mode="json", by_alias=True)
    both |= _combined(base.what_runs(), a.what_runs(), b.what_runs())
    predicted = [arm.predicted_gain for arm in (a, b)]
    both |= {
        "name": f"{a.name}+{b.name}",
        "hypothesis": " / ".join(filter(None, (a.hypothesis, b.hypothesis))),
        "mechanism": " / ".join(filter(None, (a.mechanism, b.mechanism))),
        "kernels": [*a.kernels, *b.kernels],
        "ops": [*dict.fromkeys([*a.ops, *b.ops])] if a.ops and b.ops else [],
        "identity": max((a.identity, b.identity), key=("bitwise", "greedy", "tolerance").index),
        "predicted_gain": (1 + predicted[0]) * (1 + predicted[1]) - 1 if None not in predicted else None,  # type: ignore[operator]
    }
    return {"A": base, "B": ArmConfig.model_validate(both | {"source": base.source}), "C": a, "D": b}


_ABSENT = object()


def _combined(base: dict[str, Any], a: dict[str, Any], b: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Both changes to one mapping; a key that a lever leaves out of the base's is left out. Raises HarnessError as `basket`."""
    both: dict[str, Any] = {}
    for key in dict.fromkeys([*base, *a, *b]):
        where = f"{path}.{key}" if path else str(key)
        was, first, second = (arm.get(key, _ABSENT) for arm in (base, a, b))
        if isinstance(first, dict) and isinstance(second, dict):
            value: Any = _combined(was if isinstance(was, dict) else {}, first, second, where)
        elif first == second or second == was:
            value = first
        elif first == was:
            value = second
        else:
            shown = [
                "nothing" if v is _ABSENT else repr(shown_change(where, v, salt_of_this_machine()))
                for v in (first, second)
            ]
            raise HarnessError(f"both levers set {where!r}, to {shown[0]} and {shown[1]}; they cannot be combined.")
        if value is not _ABSENT:
            both[key] = value
    return both


def device_of(arms: dict[str, ArmConfig]) -> int | None:
    """The GPU that the arms run on, or None: an embedded CPU engine, or no GPU at all."""
    used = [
        choose(arm.engine.backend) == "cuda" if arm.engine.kind == "embedded" else gpu_available()
        for arm in arms.values()
    ]
    return 0 if any(used) else None


def machine_of(sentinel: Sentinel) -> dict[str, Any]:
    """What makes it another machine: GPU and driver, or CPU and cores."""
    if sentinel.gpu is not None:
        return {"gpu": sentinel.gpu.name, "driver": sentinel.gpu.driver}
    from engine.cpu.run import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def lock_for(device: int | None, sentinel: Sentinel) -> DeviceLock:
    """The lock file of the device that the arms run on."""
    name = f"gpu-{sentinel.gpu.uuid}" if sentinel.gpu else "cpu" if device is None else f"gpu-{device}"
    return DeviceLock(cache_dir() / "locks" / f"{name}.lock")


@contextmanager
def opened_setup(request: Request, protocol: LandingProtocol, voice: Live) -> Iterator[Setup]:
    """Sentinel, lock and launcher of the device, around a round."""
    device = device_of(request.arms)
    with Sentinel(device) as sentinel, lock_for(device, sentinel) as lock:

        def launch(arm: ArmConfig) -> ArmProcess:
            directory = arm.source.parent if arm.source else Path.cwd()
            return ArmProcess(arm.model_dump(mode="json", by_alias=True), directory, lock, sentinel.gpu)

        yield Setup(
            arms=dict(request.arms), protocol=protocol, gates=load_protocol(request.gates, GatesProtocol),
            quiet=load_protocol(request.quiet, QuietWindow), launch=launch, sentinel=sentinel, voice=voice,
            machine=machine_of(sentinel), no_anchor=request.no_anchor, land_sub_bar=request.land_sub_bar,
            with_mechanism=request.with_mechanism,
        )  # fmt: skip


def check_arms(request: Request) -> dict[str, tuple[Any, Any]]:
    """The arms' diff. Raises HarnessError where it is empty and no A/A was asked for, or where the arms cannot be paired."""
    base, lever = request.arms["A"], request.arms["B"]
    changes = diff_arms(base, lever)
    if not changes and not request.aa:
        raise HarnessError(
            f"{request.paths.get('B', lever.name)} runs exactly what {request.paths.get('A', base.name)} runs; change a lever, or ask for an A/A "
            "with `harness ab --aa`."
        )
    for arm in request.arms.values():
        if arm.tokens != base.tokens:
            raise HarnessError(
                f"arm {arm.name} runs {arm.tokens} tokens and the base {base.tokens}; both need the same work."
            )
    return changes


def new_round(request: Request, protocol: LandingProtocol, machine: dict[str, Any]) -> tuple[Path, RoundRecord]:
    """Freezes everything and claims a round's directory."""
    changes = check_arms(request)
    base, lever = request.arms["A"], request.arms["B"]
    regime = request.regime or protocol.regime
    found = calibration.load(machine, regime, base.workload_hash())
    frozen = Frozen(
        bar=protocol.bar, alpha=protocol.alpha, beta=protocol.beta, delta=protocol.delta,
        seed=request.seed if request.seed is not None else secrets.randbits(31),
        s0=request.s0 or (found.s0 if found else protocol.s0),
        statistic=request.statistic or (found.statistic if found else protocol.statistic),  # type: ignore[arg-type]
        inner=request.inner or (found.inner if found else protocol.inner),
        regime=regime,  # type: ignore[arg-type]
        min_pairs=min(protocol.min_pairs, request.max_pairs or protocol.min_pairs),
        max_pairs=request.max_pairs or protocol.max_pairs, confirm_pairs=protocol.confirm_pairs, boots=request.boots,
        protocol=request.protocol, prediction=lever.predicted_gain,
        config_sha256={letter: arm.hash() for letter, arm in request.arms.items()}, frozen_at=now_utc(),
    )  # fmt: skip
    salt = salt_of_this_machine()
    title = request.title or (f"A/A of {base.name}" if request.aa else f"{lever.name} against {base.name}")
    number, path = new_round_dir(title, request.root)
    record = RoundRecord.model_validate(
        frozen.model_dump()
        | {
            "schema": "round/1", "round": number, "slug": path.name.split("-", 1)[1], "title": title, "aa": request.aa,
            "started": now_utc(), "tokens": base.tokens, "frozen_hash": frozen.frozen_sha256(),
            "arms": {
                letter: Arm(name=arm.name, path=request.paths.get(letter, ""),
                            config=shown_config(arm.model_dump(mode="json", by_alias=True), salt),
                            config_sha256=arm.hash()).model_dump()
                for letter, arm in request.arms.items()
            },
            "diff": [d.model_dump() for d in arm_diff({k: tuple(shown_change(k, v, salt) for v in pair) for k, pair in changes.items()})],
            "hypothesis": lever.hypothesis, "mechanism_claim": lever.mechanism,
            "retry_conditions": [lever.retry_condition] if lever.retry_condition else [],
            "provenance": {**machine, "commit": commit()},
            "environment": inherited(os.environ, salt),
            "warnings": [*request.warnings, *plan_warnings(frozen, calibrated=found is not None or request.s0 is not None)],
        }
    )  # fmt: skip
    save_record(path, record)
    return path, record


def plan_warnings(frozen: Frozen, *, calibrated: bool) -> list[str]:
    """What the plan cannot do, said before it runs."""
    found = []
    if not calibrated:
        found.append(
            f"this workload was never calibrated here in the {frozen.regime} regime: s0 = {frozen.s0:.2%} is a guess (`harness calibrate`)"
        )
    rule = Rule(frozen.bar, frozen.alpha, frozen.beta, frozen.delta, frozen.s0, frozen.min_pairs, frozen.max_pairs)
    if calibrated:
        smallest = smallest_decidable_gain(frozen.s0, rule, trials=200)
        if smallest is None:
            found.append(
                f"at the calibrated noise of {frozen.s0:.2%} this plan cannot land anything within {frozen.max_pairs} pairs"
            )
        elif frozen.prediction is not None and frozen.bar < frozen.prediction < smallest:
            found.append(
                f"at the calibrated noise of {frozen.s0:.2%} the smallest gain that {frozen.max_pairs} pairs decide (4 times in 5) is {smallest:.2%}, "
                f"and {frozen.prediction:.2%} is predicted: raise --inner or --max-pairs"
            )
    if frozen.boots is not None:
        found.append("one process serves several pairs (--boots): an effect of the process itself can land falsely")
    return found


def resumed(path: Path, record: RoundRecord, request: Request | None) -> dict[str, ArmConfig]:
    """The arms of a round that goes on: its own; neither the files given, nor those it was started with, may have changed."""
    if record.verdict == "LANDED":
        raise HarnessError(f"round {record.number} has landed; start a new round.")
    if record.kind != "AB" or record.outcome in ("gate-failed", "no-op", "analysis-negative"):
        raise HarnessError(
            f"round {record.number} ended as {record.outcome}, which more pairs cannot change; start a new round."
        )
    if failed := next((g for g in record.gates if g.ok is False), None):
        raise HarnessError(
            f"gate {failed.name!r} of round {record.number} failed, which more pairs cannot change; start a new round."
        )
    if record.frozen_sha256() != record.frozen_hash:
        raise HarnessError(
            f"the preregistered numbers of round {record.number} were edited; restore {path / 'record.json'}."
        )
    arms = {}
    for letter, arm in record.arms.items():
        source = Path(arm.path) if arm.path else None
        arms[letter] = ArmConfig.model_validate(arm.config | {"source": source})
        if request is None and source and source.is_file():
            own = arms[letter]  # tokens and model may have come from the command line
            arms[letter] = load_arm(source).model_copy(update={"tokens": own.tokens, "model": own.model})
        elif request is None and "hidden:" in str(arm.config["engine"]):
            raise HarnessError(
                f"arm {letter} ({arm.name}) holds a credential that round {record.number} does not show, and {arm.path or 'its file'} is not "
                "there; give the config files again."
            )
    if request is None and "C" in arms:
        arms["B"] = basket(arms["A"], arms["C"], arms["D"])["B"]  # the file given for it is the base's
    if request is not None:
        arms |= request.arms
    for letter, config in arms.items():
        if letter not in record.arms or config.hash() != record.config_sha256[letter]:
            raise HarnessError(
                f"the config of arm {letter} ({config.name}) differs from the one that round {record.number} froze; start a new round."
            )
    return arms


def run(request: Request, *, resume: Path | None = None, voice: Live) -> tuple[Path, RoundRecord]:
    """A new round, or `resume` continued, run to its verdict."""
    from harness.rounds.store import load_record

    protocol = load_protocol(request.protocol, LandingProtocol)
    if resume is not None:
        record = load_record(resume)
        request.arms = resumed(resume, record, request if request.arms else None)
        protocol = load_protocol(record.protocol, LandingProtocol)
    with opened_setup(request, protocol, voice) as setup:
        if resume is None:
            path, record = new_round(request, protocol, setup.machine)
        else:
            path = resume
        for text in record.warnings:
            voice.say(f"note: {text}")
        try:
            return path, Round(path, record, setup).run()
        except KeyboardInterrupt:
            voice.say(f"every finished half is on disk; `harness ab --resume {record.round}` goes on")
            raise
