"""Starts an arm's process, talks to it, and makes sure that it is gone: one at a time per device."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from harness.ab.engines import exit_words
from harness.errors import HarnessError
from harness.window.sentinel import Gpu

OPEN_TIMEOUT_S = 1800
"""Loading a model and compiling kernels for the first time may take minutes."""
GONE_TIMEOUT_S = 20
MEMORY_SLACK = 256 << 20
"""Bytes by which device memory may still exceed its level before a worker, once the worker is gone."""


class WorkerFailure(Exception):
    """A worker that crashed, hung, ran out of memory or spoke nonsense. `tail`: the last lines of its stderr."""

    def __init__(self, reason: str, tail: list[str]) -> None:
        super().__init__(reason)
        self.tail = tail


class DeviceLock:
    """One round at a time on a device, across processes: a lock file that the workers inherit.

    It stays held while any worker of a killed round still lives, so a resumed round cannot run beside an orphan.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def acquire(self, *, wait_s: float = 15.0) -> None:
        """Takes the lock, or raises HarnessError naming the process that has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("a+")
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    file.seek(0)
                    holder = file.read().strip() or "unknown"
                    file.close()
                    raise HarnessError(
                        f"another round runs on this device (process {holder}, {self.path}); wait until it is done."
                    ) from None
                time.sleep(0.05)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        os.set_inheritable(file.fileno(), True)
        self._file = file

    @property
    def fd(self) -> int:
        """The descriptor that workers inherit."""
        assert self._file is not None, "acquire the lock before starting a worker"
        return self._file.fileno()

    def release(self) -> None:
        """Gives it back. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> DeviceLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class ArmProcess:
    """A worker with one arm open. Context manager: leaving it ends the process and waits until its memory is gone."""

    _alive = 0  # with several at once (`--boots`), only the last one's memory can be told from the others'

    def __init__(self, arm: dict[str, Any], directory: Path, lock: DeviceLock, gpu: Gpu | None) -> None:
        self._gpu = gpu
        self._memory_before = gpu.memory_used_bytes() if gpu else None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._buffer = b""
        self._idle = False  # a worker that owes an answer would not see its input close
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "harness.ab.worker", str(theirs_in), str(theirs_out)],
                stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr,
                pass_fds=(theirs_in, theirs_out, lock.fd), start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [*_import_roots(), os.environ.get("PYTHONPATH", "")]))},
            )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        ArmProcess._alive += 1
        self._send({"arm": arm, "directory": str(directory.resolve())})
        try:
            self.opened = self._receive(OPEN_TIMEOUT_S, "opening the engine")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The worker's process."""
        return self._child.pid

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Calls a method of the worker's Session. Raises WorkerFailure where no good answer comes in time."""
        self._send({"do": do, **arguments})
        return self._receive(timeout_s, do)

    def _send(self, message: dict[str, Any]) -> None:
        self._idle = False
        try:
            os.write(self._out, json.dumps(message).encode() + b"\n")
        except OSError:
            raise self._failure("the worker is gone") from None

    def _receive(self, timeout_s: float, what: str) -> dict[str, Any]:
        until = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                raise self._failure(f"the worker hung: no answer to {what!r} in {timeout_s:g} s")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                self._child.wait()
                raise self._failure(f"the worker {exit_words(self._child.returncode)} during {what!r}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        try:
            answer = json.loads(line)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise self._failure(f"the worker answered {what!r} with garbage: {line[:80]!r}")
        if "error" in answer:
            raise self._failure(f"{what} failed: {answer['error']}")
        self._idle = True
        return answer

    def _failure(self, reason: str) -> WorkerFailure:
        return WorkerFailure(reason, self.stderr_tail())

    def stderr_tail(self, lines: int = 24) -> list[str]:
        """The last lines that the worker and its engine printed."""
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - 16384))
        return self._stderr.read().decode(errors="replace").splitlines()[-lines:]

    def close(self) -> None:
        """Ends the worker (gently, then not), and returns once its device memory is back. Idempotent."""
        if self._in < 0:
            return
        os.close(self._out)
        try:
            self._child.wait(timeout=5 if self._idle else 0.01)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait()
        os.close(self._in)
        self._in = self._out = -1
        self._stderr.close()
        ArmProcess._alive -= 1
        self._await_memory()

    def _await_memory(self) -> None:
        if self._gpu is None or self._memory_before is None or ArmProcess._alive:
            return
        until = time.monotonic() + GONE_TIMEOUT_S
        while (used := self._gpu.memory_used_bytes() or 0) > self._memory_before + MEMORY_SLACK:
            if time.monotonic() > until:
                raise WorkerFailure(
                    f"{(used - self._memory_before) / 1e9:.1f} GB of device memory did not come back {GONE_TIMEOUT_S} s after the worker ended",
                    [],
                )
            time.sleep(0.02)

    def __enter__(self) -> ArmProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _import_roots() -> list[str]:
    """Where this package was imported from, so that a worker runs the same code."""
    import harness

    return [str(Path(harness.__file__).parents[1])]
