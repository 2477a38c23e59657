"""A round from its configs to its record: freeze, gates, mechanism, pairs until the rule decides, confirmation, verdict.

Nothing here knows which backend it runs on. Every finished half is on disk before the next one starts, so a round that
was killed at any moment continues from its directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, cast

import numpy as np

from harness.ab import mechanism, schedule
from harness.ab.identity import arm_identity, drifted
from harness.ab.live import Status
from harness.ab.process import WorkerFailure
from harness.ab.protocol import GatesProtocol, LandingProtocol
from harness.ab.verdict import Conclusion, conclude, half_wall, outcome, pairs_of
from harness.config import ArmConfig
from harness.errors import HarnessError
from harness.gates.parity import rel_l2
from harness.gates.suite import NO_OP, Opened, run_gates
from harness.privacy import without_secrets
from harness.rounds.record import Anchor, ArmDiff, Evidence, Gate, RoundRecord, Sample, Window
from harness.rounds.store import append_sample, attach, file_sha256, load_rounds, read_samples, save_record
from harness.rounds.tables import AFTER, BEFORE
from harness.window.rules import QuietWindow, disturbances, drop_reason, mean_clock

Phase = Literal["decide", "confirm"]
RESIDUE_SHARE = 0.02
"""Share of a forward's wall that may still run after its clock stopped (median over a half)."""
SYNCHRONISE_MS = 0.1
"""Waiting for an idle GPU takes up to this long: no work was left running."""
POSSIBLE = 0.95
"""A wall below this share of the floor that the measured compute ceiling allows is not believed."""


class Watcher(Protocol):
    """The sentinel, as far as a round uses it."""

    unseen: list[str]

    def snapshot(self) -> dict[str, Any]: ...
    def host_load(self) -> dict[str, float]: ...
    def during(self, start_ns: int, end_ns: int) -> dict[str, Any]: ...
    def peak_memory_bytes(self) -> int | None: ...
    def foreign_pids(self) -> list[int]: ...


class Voice(Protocol):
    """The live line, as far as a round uses it."""

    def say(self, text: str) -> None: ...
    def show(self, status: Status) -> None: ...


Launch = Callable[[ArmConfig], AbstractContextManager[Opened]]


@dataclass
class Setup:
    """What a round runs on, beside its record. `launch` starts a worker with an arm open."""

    arms: dict[str, ArmConfig]
    protocol: LandingProtocol
    gates: GatesProtocol
    quiet: QuietWindow
    launch: Launch
    sentinel: Watcher
    voice: Voice
    machine: dict[str, Any]
    root: Path | None = None
    no_anchor: str = ""
    land_sub_bar: str = ""
    with_mechanism: bool = True


class Ends(Exception):
    """The round ends here, whatever the pairs say."""

    def __init__(self, verdict: Literal["REVERTED", "INVALID"], outcome: str, reason: str, next_step: str = "") -> None:
        super().__init__(reason)
        self.verdict, self.outcome, self.reason, self.next_step = verdict, outcome, reason, next_step


@dataclass
class Round:
    """One round being run. `record` is saved to `path` at every step."""

    path: Path
    record: RoundRecord
    setup: Setup
    samples: list[Sample] = field(default_factory=list)
    _floor_ms: float | None = None
    _workers: dict[str, tuple[int, Opened]] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _seen: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _memory: dict[str, int] = field(default_factory=dict)
    _began: float = 0.0

    def run(self) -> RoundRecord:
        """Runs or continues it to a verdict. KeyboardInterrupt passes through with everything finished on disk."""
        self.samples = read_samples(self.path)
        self._remember_hashes()
        self._began = time.monotonic()
        try:
            with self._stack:
                self._open_window()
                self._gates()
                self._mechanism()
                self._discard()
                self._decide()
        except Ends as end:
            self._finish(conclude(self.samples, self.record), end)
        except WorkerFailure as failure:
            self.record.stderr_tail = [without_secrets(line) for line in failure.tail]
            self._finish(
                conclude(self.samples, self.record),
                Ends("INVALID", "invalid-window", str(failure), "see the worker's last lines in the record; then retry with --resume"),
            )  # fmt: skip
        else:
            self._finish(conclude(self.samples, self.record), None)
        return self.record

    # --- before the first pair -----------------------------------------------------------------------------------------

    @property
    def letters(self) -> str:
        """The arms of a block: "AB", or "ABCD" in a basket."""
        return "".join(sorted(self.setup.arms))

    @property
    def window(self) -> int:
        """The number of the window that is open."""
        return self.record.windows[-1].window

    def _open_window(self) -> None:
        """A new window unless the round was cut off inside one; a foreign GPU process ends it before it starts."""
        if not self.record.windows or self.record.verdict is not None:
            self.record.verdict = self.record.outcome = None
            self.record.status = "open"
            self.record.reason = self.record.next_step = ""
            self.record.stderr_tail = []
            snapshot = self.setup.sentinel.snapshot()
            found = disturbances(snapshot, self.setup.quiet, idle=True)
            self.record.windows.append(
                Window(
                    window=len(self.record.windows) + 1,
                    quiet=None if self.setup.sentinel.unseen else not found,
                    disturbed_by=found,
                    unseen=list(self.setup.sentinel.unseen),
                    before=snapshot,
                )
            )
            for text in (*found, *self.setup.sentinel.unseen):
                self.setup.voice.say(f"window: {text}")
            self._save()
            if snapshot.get("gpu", {}).get("foreign"):
                raise Ends(
                    "INVALID",
                    "invalid-window",
                    "a foreign process computes on the GPU",
                    "stop it, then retry with --resume",
                )
        self._save()

    def _gates(self) -> None:
        """Gates and identities, once a round; a no-op ends it here."""
        setup, record = self.setup, self.record
        if not record.gates:
            base, lever = setup.arms["A"], setup.arms["B"]
            report = run_gates(
                base, lever, launch=setup.launch, limits=setup.gates, seed=record.seed, say=setup.voice.say,
                look_for_no_op=not record.aa,
            )  # fmt: skip
            record.gates = report.gates
            for letter, opened in report.opened.items():
                self._note_arm(letter, opened)
            self._save()
        if any(g.name == NO_OP and g.ok is False for g in record.gates):
            raise Ends("REVERTED", "no-op", "both arms have the same plan and the same machine code: nothing was timed",
                       "check that the lever reaches the engine")  # fmt: skip
        self._stop_on_failed_gate()

    def _stop_on_failed_gate(self) -> None:
        failed = next((g for g in self.record.gates if g.ok is False), None)
        if failed:
            raise Ends(
                "REVERTED",
                "gate-failed",
                f"gate {failed.name!r} failed: {failed.detail or f'{failed.value} (limit {failed.limit})'}",
            )

    def _note_arm(self, letter: str, opened: dict[str, Any]) -> None:
        arm = self.record.arms[letter]
        described = opened["described"]
        if arm.engine:
            self._same_arm(letter, described)
            return
        arm.identity, arm.engine = arm_identity(arm.config_sha256, described, self.setup.machine), described
        if letter == "A":
            self.record.model = str(described.get("model") or self.setup.arms["A"].model or "")
            engine = described.get("engine") or {}
            self.record.device = str(
                self.setup.machine.get("gpu") or engine.get("device") or self.setup.machine.get("cpu") or ""
            )
            if described.get("model_note") and described["model_note"] not in self.record.warnings:
                self.record.warnings.append(described["model_note"])
            if described.get("model_sha256"):
                self.record.provenance["model_sha256"] = described["model_sha256"]

    def _same_arm(self, letter: str, described: dict[str, Any]) -> None:
        """Refuses to go on with an arm whose code, model or algorithms changed since the round began."""
        arm = self.record.arms[letter]
        found = drifted(arm.engine, described)
        if arm_identity(arm.config_sha256, arm.engine, self.setup.machine) != arm.identity:
            found.append("the engine's code, the device or the driver")
        if found:
            raise HarnessError(
                f"arm {letter} ({arm.name}) is no longer what round {self.record.number} measured ({', '.join(found[:3])} changed); "
                "start a new round."
            )

    def _mechanism(self) -> None:
        """Traced passes of both arms in processes of their own: liveness, work missing, and the changed ops' busy time."""
        setup, record = self.setup, self.record
        if not setup.with_mechanism or record.mechanism.detail or record.mechanism.before_ms:
            return
        tables: dict[str, dict[str, Any]] = {}
        for letter in "AB":
            setup.voice.say(f"mechanism: traced passes of arm {letter}")
            with setup.launch(setup.arms[letter]) as worker:
                tables[letter] = worker.ask(
                    "traced", setup.protocol.half_timeout_s, passes=setup.protocol.traced_passes, **self._regime()
                )
                if letter == "A":
                    floor = worker.ask("floor", setup.protocol.half_timeout_s, regime=record.regime)
                    if floor["there"]:
                        record.provenance["floor_ms"] = floor["floor_ms"]
                    elif why := floor.get("why"):
                        record.warnings.append(why)
        record.gates += mechanism.gates(tables["A"], tables["B"], setup.arms["A"], setup.arms["B"])
        record.mechanism = mechanism.compare(tables["A"], tables["B"], setup.arms["B"])
        record.ops_affected = mechanism.ops_affected(tables["A"], tables["B"])
        for letter, name in (("A", BEFORE), ("B", AFTER)):
            if tables[letter]["there"]:
                attach(self.path, record, name, tables[letter]["decomposition"])
        self._save()
        self._stop_on_failed_gate()

    def _regime(self) -> dict[str, Any]:
        p = self.setup.protocol
        return {"regime": self.record.regime, "idle_s": p.burst_idle_s, "load_s": p.sustained_load_s}

    def _discard(self) -> None:
        """One discarded half per arm; planted fractions become microseconds of the arm's own wall here, once."""
        walls: dict[str, float] = {}
        done: dict[str, Sample] = {s.arm: s for s in self.samples if s.phase == "discard" and s.window == self.window}
        for letter in self.letters:
            sample = done.get(letter) or self._half(letter, 0, self.letters, "discard")
            walls[letter] = half_wall(sample.wall_ms, self.record.statistic)
            self._end_worker(letter)
        planted = self.record.provenance.setdefault("planted_us", {})
        for letter, arm in self.setup.arms.items():
            if arm.plant is None:
                continue
            plant = arm.plant
            if plant.fraction is not None:
                planted.setdefault(letter, 1e3 * walls[letter] * plant.fraction)
                spin = plant.model_copy(update={"fraction": None, "spin_us": planted[letter]})
                self.setup.arms[letter] = arm.model_copy(update={"plant": spin})
            else:
                planted[letter] = plant.spin_us
        if not planted:
            del self.record.provenance["planted_us"]
        self._save()

    # --- pairs ---------------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """Pairs until the rule stops, then the confirmation of a landing."""
        anchored = bool(self.record.anchor)
        now = conclude(self.samples, self.record)
        while True:
            if not anchored and self._kept("decide") >= self.record.min_pairs:
                self._anchor(now)
                anchored = True
            if now.verdict is not None:
                break
            now = self._pair("decide")
        attempts = 0
        while now.verdict == "LANDED" and self._kept("confirm") < self.record.confirm_pairs:
            if attempts >= 2 * self.record.confirm_pairs:
                raise Ends("INVALID", "invalid-window", "too many confirmation pairs were dropped", "find what disturbed the window, then retry with --resume")  # fmt: skip
            self._pair("confirm")
            attempts += 1

    def _kept(self, phase: Phase) -> int:
        windows = pairs_of([s for s in self.samples if s.window == self.window], phase).windows
        return len(windows[-1]) if windows else 0

    def _pair(self, phase: Phase) -> Conclusion:
        """One pair (or block): its halves in coin order, then what results and evidence say."""
        pair = 1 + max((s.pair for s in self.samples), default=0)
        order = schedule.order(self.record.seed, pair, self.letters)
        with TemporaryDirectory(prefix="pair-") as scratch:
            for letter in order:
                self._half(letter, pair, order, phase, Path(scratch) / f"{letter}.npy")
            self._compare_results(pair, order, Path(scratch))
        now = conclude(self.samples, self.record)
        done = self._kept(phase)
        of = self.record.max_pairs if phase == "decide" else self.record.confirm_pairs
        clocks = [c for s in self.samples[-2:] if (c := mean_clock(s.gpu.get("forwards", []))) is not None]
        clock = f"{np.mean(clocks):.0f} MHz" if clocks else "clock unseen"
        took = (time.monotonic() - self._began) / max(1, len({s.pair for s in self.samples}))
        self.setup.voice.show(Status(phase, done, of, now, self.record, took * max(of - done, 0), clock))
        return now

    def _half(self, letter: str, pair: int, order: str, phase: Literal["decide", "confirm", "discard"], logits: Path | None = None) -> Sample:  # fmt: skip
        """Times one half in its process, appends it to samples.jsonl, and judges its results."""
        setup, record = self.setup, self.record
        worker = self._worker(letter, pair)
        setup.sentinel.peak_memory_bytes()
        answer = worker.ask(
            "half", setup.protocol.half_timeout_s, seed=record.seed, pair=pair, inner=record.inner,
            warmup=setup.protocol.warmup, logits=str(logits) if logits else None, **self._regime(),
        )  # fmt: skip
        self._note_arm(letter, answer)
        forwards = answer["forwards"]
        telemetry = [setup.sentinel.during(f["start_ns"], f["end_ns"]) for f in forwards]
        foreign = setup.sentinel.foreign_pids()
        earlier = [c for s in self.samples if s.arm == letter and not s.dropped and s.phase != "discard"
                   and (c := mean_clock(s.gpu.get("forwards", []))) is not None]  # fmt: skip
        gpu: dict[str, Any] = {}
        if any(telemetry):
            gpu = {"forwards": telemetry, "foreign": foreign}
        peak = setup.sentinel.peak_memory_bytes()
        memory = answer["memory"] if answer["memory"] is not None else peak
        if memory is not None:
            gpu["memory_bytes"] = memory
            record.arms[letter].device_memory_bytes = max(record.arms[letter].device_memory_bytes or 0, int(memory))
        sample = Sample(
            pair=pair, order=order, arm=cast(Any, letter), wall_ms=[f["wall_ms"] for f in forwards],
            dropped=drop_reason(telemetry, foreign, earlier, setup.quiet) if phase != "discard" else None,
            boot=worker.opened["boot"], gpu=gpu, phase=phase, window=self.window, at=answer["at"], logits=answer["logits"],
            tokens_seed=schedule.tokens_seed(record.seed, pair), process_s=answer["process_s"], host=setup.sentinel.host_load(),
        )  # fmt: skip
        append_sample(self.path, sample)
        self.samples.append(sample)
        if record.boots is None:
            self._end_worker(letter)
        broken = list(answer["broken"]) + self._judge(letter, pair, forwards, answer["logits"])
        if broken:
            self._bad_results(letter, broken)
        return sample

    def _judge(self, letter: str, pair: int, forwards: list[dict[str, Any]], hashes: list[str]) -> list[str]:
        """What the clock and the hashes say against a half's results."""
        found = []
        late = float(np.median([f["residue_ms"] / f["wall_ms"] for f in forwards]))
        if late > RESIDUE_SHARE and float(np.median([f["residue_ms"] for f in forwards])) > SYNCHRONISE_MS:
            found.append(
                f"work was left running after the clock stopped, {late:.1%} of the wall: the engine does not synchronise"
            )
        for k, digest in enumerate(hashes):
            earlier = self._seen.setdefault((letter, digest), (pair, k))
            if earlier != (pair, k):
                found.append(
                    f"forward {k} of pair {pair} repeats the logits of forward {earlier[1]} of pair {earlier[0]} for other tokens"
                )
        floor = self.record.provenance.get("floor_ms")
        fastest = min(f["wall_ms"] for f in forwards)
        if floor and fastest < POSSIBLE * floor:
            found += self._confirm_impossible(letter, fastest)
        return found

    def _confirm_impossible(self, letter: str, fastest: float) -> list[str]:
        """A wall below the floor is believed to be impossible only after the ceiling was measured again."""
        self._end_worker(letter)
        with self.setup.launch(self.setup.arms[letter]) as worker:
            again = worker.ask("floor", self.setup.protocol.half_timeout_s, regime=self.record.regime, fresh=True)
        self.record.provenance["floor_ms"] = floor = again["floor_ms"]
        if fastest >= POSSIBLE * floor:
            return []
        return [
            f"a forward took {fastest:.3f} ms, but its MACs need {floor:.3f} ms at this machine's measured ceiling: work is missing"
        ]

    def _remember_hashes(self) -> None:
        for sample in self.samples:
            for k, digest in enumerate(sample.logits):
                self._seen.setdefault((sample.arm, digest), (sample.pair, k))

    def _compare_results(self, pair: int, order: str, scratch: Path) -> None:
        """Both arms computed the same tokens inside their clocks: their logits must agree as at the gates."""
        if not (scratch / "A.npy").exists():
            return
        base = np.load(scratch / "A.npy")
        for letter in order:
            if letter == "A" or not (scratch / f"{letter}.npy").exists():
                continue
            other = np.load(scratch / f"{letter}.npy")
            for k, (x, y) in enumerate(zip(base, other, strict=True)):
                if (l2 := rel_l2(x, y)) > self.setup.gates.rel_l2:
                    self._bad_results(
                        letter,
                        [f"the timed logits of forward {k} of pair {pair} are {l2:.2g} (relative L2) from arm A's"],
                    )

    def _bad_results(self, letter: str, broken: Iterable[str]) -> None:
        """A wrong result inside the clock: the base's makes the round invalid, another arm's is a failed gate."""
        reason = "; ".join(broken)
        self.record.gates.append(Gate(name=f"timed results of arm {letter}", ok=False, detail=reason))
        self._save()
        if letter == "A":
            raise Ends(
                "INVALID",
                "invalid-window",
                f"the base arm's timed results are wrong: {reason}",
                "mend the base arm, then start a new round",
            )
        raise Ends("REVERTED", "gate-failed", f"timed results of arm {letter}: {reason}")

    def _worker(self, letter: str, pair: int) -> Opened:
        """The process that serves this half: a fresh one, or the shared one of its boot."""
        boot = schedule.boot_of(pair, boots=self.record.boots, max_pairs=self.record.max_pairs)
        if letter in self._workers:
            if self._workers[letter][0] == boot:
                return self._workers[letter][1]
            self._end_worker(letter)
        context = self.setup.launch(self.setup.arms[letter])
        worker = self._stack.enter_context(context)
        self._workers[letter] = (boot, worker)
        return worker

    def _end_worker(self, letter: str) -> None:
        if letter in self._workers:
            self._workers.pop(letter)[1].close()

    def _anchor(self, now: Conclusion) -> None:
        """The base arm against its last record of the same identity, in the same regime."""
        identity = self.record.arms["A"].identity
        wall = now.walls["A"].median_ms
        for earlier in reversed(load_rounds(self.path.parent)):
            if earlier.round >= self.record.round or earlier.regime != self.record.regime or earlier.superseded_by:
                continue
            if earlier.verdict in (None, "INVALID"):
                continue
            match = next((a for a in earlier.arms.values() if a.identity == identity and a.wall), None)
            if match is None or match.wall is None:
                continue
            limit = self.setup.protocol.anchor_tolerance
            ok = abs(wall / match.wall.median_ms - 1) <= limit
            self.record.anchor = Anchor(
                round=earlier.round, wall_ms=match.wall.median_ms, now_ms=wall, regime=self.record.regime, limit=limit, ok=ok
            )  # fmt: skip
            self._save()
            if ok:
                return
            if not self.setup.no_anchor:
                raise Ends(
                    "INVALID", "invalid-window",
                    f"the base arm takes {wall:.3f} ms, and took {match.wall.median_ms:.3f} ms in round {earlier.number} under the same identity",
                    'find what changed on the machine, or say why in --no-anchor "reason"',
                )  # fmt: skip
            if not ok:
                self.record.warnings.append(
                    f"off its anchor ({wall:.3f} ms against {match.wall.median_ms:.3f} ms), accepted: {self.setup.no_anchor}"
                )
            return

    # --- after the last pair -------------------------------------------------------------------------------------------

    def _finish(self, now: Conclusion, end: Ends | None) -> None:
        """Writes what the samples say, and the verdict: theirs, or that of what ended the round early."""
        record = self.record
        record.pairs, record.dropped = now.pairs, now.dropped
        record.estimate, record.interval = now.estimate, now.interval
        record.confirmed, record.p95_gain_interval, record.basket = now.confirmed, now.p95_interval, now.basket
        record.evidence = Evidence.model_validate(
            {"for": capped_exp(now.log_for), "against": capped_exp(now.log_against), "log_for": now.log_for, "log_against": now.log_against}
        ) if now.pairs else None  # fmt: skip
        for letter, wall in now.walls.items():
            record.arms[letter].wall = wall
        record.warnings += [w for w in now.warnings if w not in record.warnings]
        if end is not None:
            record.verdict, record.outcome = end.verdict, cast(Any, end.outcome)
            record.reason, record.next_step = end.reason, end.next_step
        else:
            record.verdict, record.outcome = now.verdict, outcome(now, record.mechanism, record)
            record.reason, record.next_step = now.reason, now.next_step
            self._sub_bar(now)
        if record.windows:
            after = self.setup.sentinel.snapshot()
            window = record.windows[-1]
            window.after = after
            window.disturbed_by = list(
                dict.fromkeys(
                    [*window.disturbed_by, *disturbances(after, self.setup.quiet, idle=False), *self._drop_reasons()]
                )
            )
            if window.disturbed_by or record.verdict == "INVALID":
                window.quiet = False
        record.status, record.finished = "finished", now_utc()
        record.samples_sha256 = file_sha256(self.path / "samples.jsonl")
        self._save()

    def _drop_reasons(self) -> list[str]:
        return [f"pair {s.pair}: {s.dropped}" for s in self.samples if s.dropped and s.window == self.window][:5]

    def _sub_bar(self, now: Conclusion) -> None:
        """A gain below the bar is kept only with a written reason, and only where it is a gain at all."""
        reason = self.setup.land_sub_bar
        if not reason or now.verdict not in ("REVERTED", "INCONCLUSIVE"):
            return
        low = now.interval[0]
        if low is not None and low > 0:
            self.record.verdict, self.record.outcome = "LANDED", "sub-bar"
            self.record.reason = f"kept below the bar of {self.record.bar:.1%}: {reason}"
            self.record.next_step = ""
        else:
            self.record.warnings.append("--land-sub-bar was not followed: not even a gain above 0 is shown")

    def _save(self) -> None:
        save_record(self.path, self.record)


def capped_exp(log_value: float) -> float:
    """exp, at most 1e300: JSON has no infinity."""
    return float(np.exp(min(log_value, 690.0)))


def now_utc() -> str:
    """ISO 8601, seconds, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def arm_diff(changes: dict[str, tuple[Any, Any]]) -> list[ArmDiff]:
    """`harness.config.diff_arms` as the record keeps it."""
    return [ArmDiff(key=key, before=a, after=b) for key, (a, b) in changes.items()]
