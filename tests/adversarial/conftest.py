"""A whole round on simulated engines, in one process and in no time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import simulated  # noqa: E402

from harness.ab.protocol import GatesProtocol, LandingProtocol  # noqa: E402
from harness.ab.runner import Round, Setup  # noqa: E402
from harness.ab.session import Session  # noqa: E402
from harness.ab.start import Request, new_round  # noqa: E402
from harness.config import ArmConfig, load_protocol  # noqa: E402
from harness.rounds.record import RoundRecord  # noqa: E402
from harness.window.rules import QuietWindow  # noqa: E402

MACHINE_NAME = {"cpu": "simulated", "cores": 1}


class LocalWorker:
    """A Session on the virtual clock, with the methods of an ArmProcess."""

    def __init__(self, arm: ArmConfig, log: Path | None = None) -> None:
        self.session = Session(
            arm.model_dump(mode="json", by_alias=True), HERE, clock=simulated.CLOCK.ns, sleep=simulated.CLOCK.sleep
        )
        self.opened = self.session.open()
        self.arm, self.log = arm, log

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        answer = getattr(self.session, do)(**arguments)
        if do == "half" and self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{arguments['pair']} {answer['forwards'][0]['wall_ms']!r}\n")
        return answer

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class NoSentinel:
    """Sees nothing, and says so."""

    unseen = ("simulated: nothing is seen",)

    def snapshot(self) -> dict[str, Any]:
        return {"host": {"foreign": 0.0, "own": 0.0, "load_1min": 0.0}}

    def host_load(self) -> dict[str, float]:
        return {}

    def during(self, start_ns: int, end_ns: int) -> dict[str, Any]:
        return {}

    def peak_memory_bytes(self) -> int | None:
        return None

    def foreign_pids(self) -> list[int]:
        return []


class Quiet:
    """A live line that nobody reads."""

    def say(self, text: str) -> None:
        pass

    def show(self, status: object) -> None:
        pass


def simulated_arm(name: str, **args: Any) -> ArmConfig:
    """An arm on the simulated engine."""
    engine = {"kind": "python", "setup": "simulated:setup", "args": args, "vocab": 1000}
    return ArmConfig.model_validate({"name": name, "engine": engine, "tokens": 8})


def make_setup(arms: dict[str, ArmConfig], *, log: Path | None = None, sentinel: Any = None, **changes: Any) -> Setup:
    """What a round runs on, all of it simulated."""
    return Setup(
        arms=dict(arms), protocol=load_protocol("landing", LandingProtocol).model_copy(update=changes),
        gates=load_protocol("gates", GatesProtocol), quiet=load_protocol("quiet-window", QuietWindow),
        launch=lambda arm: LocalWorker(arm, log), sentinel=sentinel or NoSentinel(), voice=Quiet(), machine=MACHINE_NAME,
    )  # fmt: skip


@pytest.fixture
def run_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RoundRecord]:
    """Runs a round of two simulated arms, given as keyword arguments of `simulated.setup`, to its verdict."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(simulated, "MACHINE", simulated.Machine())

    def run(base: dict[str, Any], lever: dict[str, Any], *, aa: bool = False, seed: int = 1, sentinel: Any = None,
            request: dict[str, Any] | None = None, alone: bool = False, **setup: Any) -> RoundRecord:  # fmt: skip
        if alone:  # in a directory of its own: no anchor
            monkeypatch.chdir(tempfile.mkdtemp(dir=tmp_path))
        arms = {"A": simulated_arm("base", **base), "B": simulated_arm("base" if aa else "lever", **lever)}
        asked = Request(arms=arms, aa=aa, seed=seed, **(request or {}))
        ready = make_setup(arms, sentinel=sentinel)
        for name, value in setup.items():
            setattr(ready, name, value)
        path, record = new_round(asked, ready.protocol, MACHINE_NAME)
        return Round(path, record, ready).run()

    return run
