"""kill -9 at random moments: nothing that was finished is lost, and the round resumes to the verdict that it would have had."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import simulated
from conftest import MACHINE_NAME, make_setup, simulated_arm

from harness.ab import schedule
from harness.ab.runner import Round
from harness.ab.start import Request, new_round, resumed
from harness.config import load_arm
from harness.errors import HarnessError
from harness.rounds.record import RoundRecord
from harness.rounds.store import load_record, read_samples
from harness.rounds.verify import verify

KILLS = 50


def run_in_child(path: Path, log: Path) -> int:
    """Continues the round in a forked child and returns its PID."""
    pid = os.fork()
    if pid == 0:
        try:
            record = load_record(path)
            arms = resumed(path, record, None)
            simulated.CLOCK.pass_ms(1e3 * random.random())
            Round(path, record, make_setup(arms, log=log, min_pairs=100, max_pairs=120)).run()
        finally:
            os._exit(0)
    return pid


def test_fifty_kills_lose_no_finished_half_and_the_round_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path / "cache"))
    arms = {"A": simulated_arm("base"), "B": simulated_arm("lever", gain=0.0175)}  # between bar and bar + delta
    setup = make_setup(arms, min_pairs=100, max_pairs=120)
    path, record = new_round(Request(arms=arms, seed=5), setup.protocol, MACHINE_NAME)
    log, rng = tmp_path / "halves.log", random.Random(7)
    before = b""
    for _ in range(KILLS):
        pid = run_in_child(path, log)
        time.sleep(rng.uniform(0.0, 0.25))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        now = (path / "samples.jsonl").read_bytes() if (path / "samples.jsonl").exists() else b""
        kept = before[: before.rfind(b"\n") + 1]
        assert now.startswith(kept), "a finished half vanished"
        before = now
        load_record(path)  # never half-written
        finished = [s for s in read_samples(path) if s.pair > 0]
        logged = [line for line in (log.read_text().splitlines() if log.exists() else []) if not line.startswith("0 ")]
        # The log is written before the sample: each kill may fall between the two once.
        assert len(finished) <= len(logged) <= len(finished) + KILLS
    os.waitpid(run_in_child(path, log), 0)

    record = load_record(path)
    samples = [s for s in read_samples(path) if s.pair > 0]
    assert record.verdict in ("LANDED", "INCONCLUSIVE", "REVERTED")
    assert verify(path) == []
    assert len({(s.pair, s.arm, s.phase) for s in samples}) == len(samples), "a half was timed twice"
    assert all(s.order == schedule.order(record.seed, s.pair) for s in samples)
    halves = {s.pair: sum(o.pair == s.pair for o in samples) for s in samples}
    cut = sum(n == 1 for n in halves.values())
    assert record.pairs == sum(
        n == 2 for p, n in halves.items() if next(s for s in samples if s.pair == p).phase == "decide"
    )
    assert cut <= KILLS and (not cut or any("cut off" in w for w in record.warnings))


def test_resume_refuses_changed_configs_and_edited_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arms = {"A": simulated_arm("base"), "B": simulated_arm("lever", gain=0.1)}
    path, record = new_round(Request(arms=arms, seed=5), make_setup(arms).protocol, MACHINE_NAME)
    assert resumed(path, record, Request(arms=arms)).keys() == {"A", "B"}
    with pytest.raises(HarnessError, match="config of arm B"):
        resumed(path, record, Request(arms={**arms, "B": simulated_arm("lever", gain=0.2)}))
    with pytest.raises(HarnessError, match="preregistered numbers"):
        resumed(path, record.model_copy(update={"bar": 0.01}), None)
    with pytest.raises(HarnessError, match="has landed"):
        resumed(path, record.model_copy(update={"verdict": "LANDED"}), None)


def test_resume_by_number_alone_refuses_a_file_edited_since(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = "engine: {kind: python, setup: 'simulated:setup', args: {gain: %s}}\n"
    (tmp_path / "base.yaml").write_text(engine % 0)
    (tmp_path / "lever.yaml").write_text(engine % 0.1)
    paths = {"A": "base.yaml", "B": "lever.yaml"}
    arms = {letter: load_arm(Path(p)).model_copy(update={"tokens": 8}) for letter, p in paths.items()}
    path, record = new_round(Request(arms=arms, paths=paths, seed=5), make_setup(arms).protocol, MACHINE_NAME)
    assert {letter: arm.hash() for letter, arm in resumed(path, record, None).items()} == record.config_sha256
    (tmp_path / "lever.yaml").write_text(engine % 0.2)
    with pytest.raises(HarnessError, match="config of arm B"):
        resumed(path, record, None)


def test_a_retry_in_another_window_multiplies_the_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(simulated, "MACHINE", simulated.Machine(3))
    arms = {"A": simulated_arm("base", sd=0.02), "B": simulated_arm("lever", sd=0.02, gain=0.02)}
    setup = make_setup(arms, max_pairs=8)
    path, record = new_round(Request(arms=arms, seed=5, max_pairs=8), setup.protocol, MACHINE_NAME)
    first = Round(path, record, setup).run()
    assert (first.verdict, first.pairs) == ("INCONCLUSIVE", 8)
    before = first.evidence
    again: RoundRecord = Round(
        path, load_record(path), make_setup(resumed(path, load_record(path), None), max_pairs=8)
    ).run()
    assert len(again.windows) == 2 and again.pairs >= 8 + 6
    samples = read_samples(path)
    assert {s.window for s in samples} == {1, 2}
    assert verify(path) == []
    from harness.ab.verdict import conclude

    alone = [conclude([s for s in samples if s.window == w], again) for w in (1, 2)]
    assert before is not None and again.evidence is not None
    assert again.evidence.log_for == pytest.approx(alone[0].log_for + alone[1].log_for)
