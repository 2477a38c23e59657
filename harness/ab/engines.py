"""What a worker can time: the embedded engine, Python code, or a command, each behind the same few methods."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from harness.errors import HarnessError

UNIT_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


class EmbeddedArm:
    """The engine of this project with one arm's levers."""

    kind = "embedded"

    def __init__(self, arm: dict[str, Any], directory: Path) -> None:
        from engine.levers import Levers
        from engine.models import resolve
        from engine.open import choose, open_engine

        backend = choose(arm["engine"]["backend"])
        self.model = resolve(model_path(arm["model"], directory), gpu=backend == "cuda")
        self.engine = open_engine(self.model, Levers.from_dict(arm["levers"]), backend=backend)
        self.vocab = self.model.geometry.vocab

    def forward(self, ids: np.ndarray) -> np.ndarray | None:
        """int32 [T] → the last row's logits on the host, float32 [vocab]."""
        return self.engine.prefill(ids)

    def synchronize(self) -> None:
        """Waits for everything that the forward may have left running."""
        _synchronize(self.engine)

    def describe(self) -> dict[str, Any]:
        """Backend, model identity, and what the engine says decides its speed."""
        return {
            "backend": self.engine.name,
            "model": self.model.name,
            "model_sha256": self.model.sha256(),
            "model_note": self.model.note,
            "synthetic": self.model.synthetic,
            "engine": self.engine.describe(),
        }

    def memory_bytes(self) -> int | None:
        """Bytes that the engine holds on its device."""
        return self.engine.device_memory_bytes()

    def close(self) -> None:
        """Frees the model."""
        self.engine.close()


class PythonArm:
    """A Python callable, or what a set-up function returns."""

    kind = "python"

    def __init__(self, arm: dict[str, Any], directory: Path) -> None:
        engine = arm["engine"]
        sys.path[:0] = [str(directory / p) for p in engine["path"]]
        self.vocab = engine["vocab"]
        if engine["call"]:
            self.target = _import(engine["call"])
        else:
            self.target = _import(engine["setup"])(levers=arm["levers"], **engine["args"])
        prefill = getattr(self.target, "prefill", self.target)
        if not callable(prefill):
            raise HarnessError(
                f"{engine['setup'] or engine['call']} gives a {type(self.target).__name__}, which cannot be called and has no "
                "`prefill`; return a function ids → logits."
            )
        self._prefill: Callable[[np.ndarray], np.ndarray | None] = prefill

    def forward(self, ids: np.ndarray) -> np.ndarray | None:
        """int32 [T] → logits as an array, or None where the callable gives none."""
        return self._prefill(ids)

    def synchronize(self) -> None:
        """The object's own `synchronize`, and that of PyTorch and CuPy where the code loaded them."""
        _synchronize(self.target)

    def describe(self) -> dict[str, Any]:
        """The code's own description and its file's hash."""
        from harness.ab.identity import sha256_of

        module = sys.modules.get(getattr(self.target, "__module__", None) or type(self.target).__module__)
        file = getattr(module, "__file__", None)
        own = getattr(self.target, "describe", None)
        return {
            "backend": "python",
            "code": {Path(file).name: sha256_of(Path(file))} if file else {},
            "engine": own() if callable(own) else {},
        }

    def memory_bytes(self) -> int | None:
        """The object's own figure where it has one."""
        own = getattr(self.target, "device_memory_bytes", None)
        return int(own()) if callable(own) else None

    def close(self) -> None:
        """The object's own `close`, where it has one."""
        if callable(own := getattr(self.target, "close", None)):
            own()


class CommandArm:
    """A program: each run is one process, its figures read from what it prints or from its wall."""

    kind = "command"

    def __init__(self, arm: dict[str, Any], directory: Path) -> None:
        self.arm, self.engine, self.directory = arm, arm["engine"], directory

    def run(self, seed: int) -> tuple[list[float], int, int]:
        """One process: (wall of each inner run in ms, start_ns, end_ns of the process on perf_counter's clock).

        Raises HarnessError where it cannot start, fails, hangs beyond its timeout, prints no such metric, or reports
        more time than its process took.
        """
        start = time.perf_counter_ns()
        stdout = self.output(tuple(self.engine["argv"]), seed)
        end = time.perf_counter_ns()
        process_ms = (end - start) / 1e6
        metric = self.engine["metric"]
        if metric == "wall":
            return [process_ms], start, end
        walls = read_metric(metric, stdout, tokens=self.arm["tokens"])
        if sum(walls) > process_ms:
            raise HarnessError(
                f"{self._name()} reports {sum(walls):.3f} ms of work, but its whole process took {process_ms:.3f} ms; "
                "its metric or its unit is wrong."
            )
        return walls, start, end

    def output(self, argv: tuple[str, ...], seed: int, *, check: bool = True) -> str:
        """Standard output of one run of `argv`. Raises HarnessError as `run`."""
        return self.process(argv, seed, check=check)[1]

    def process(self, argv: tuple[str, ...], seed: int, *, check: bool = True) -> tuple[int, str]:
        """(exit status, standard output) of one run of `argv`."""
        fill = {"{model}": str(self.arm["model"] or ""), "{tokens}": str(self.arm["tokens"]), "{seed}": str(seed)}
        command = [_fill(part, fill) for part in argv]
        env = os.environ | {key: _fill(value, fill) for key, value in self.engine["env"].items()}
        cwd = self.directory / self.engine["cwd"] if self.engine["cwd"] else self.directory
        try:
            child = subprocess.Popen(
                command, cwd=cwd, env=env, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, start_new_session=True, preexec_fn=die_with_parent,
            )  # fmt: skip
        except OSError as error:
            raise HarnessError(
                f"command {command[0]!r} cannot be started ({error.strerror}); check argv and cwd."
            ) from None
        try:
            stdout, stderr = child.communicate(timeout=self.engine["timeout_s"])
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            sys.stderr.write(child.communicate()[1])  # its last lines say where it hung
            sys.stderr.flush()
            raise HarnessError(
                f"{self._name()} ran longer than timeout_s = {self.engine['timeout_s']:g}; raise it, or see why it hangs."
            ) from None
        if stderr:
            sys.stderr.write(stderr)
            sys.stderr.flush()
        if check and child.returncode != 0:
            raise HarnessError(f"{self._name()} {exit_words(child.returncode)}; run it by hand.")
        return child.returncode, stdout

    def _name(self) -> str:
        return f"command {self.engine['argv'][0]!r}"

    def describe(self) -> dict[str, Any]:
        """Content hashes of the program and of every file that argv names."""
        from harness.ab.identity import command_files

        return {"backend": "command", "files": command_files(self.arm, self.directory)}

    def memory_bytes(self) -> int | None:
        """Peak resident set of the largest run so far; the device's memory is seen by the sentinel."""
        import resource

        return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 or None

    def close(self) -> None:
        """Nothing outlives a run."""


Arm = EmbeddedArm | PythonArm | CommandArm
KINDS: dict[str, type[Arm]] = {"embedded": EmbeddedArm, "python": PythonArm, "command": CommandArm}


def open_arm(arm: dict[str, Any], directory: Path) -> Arm:
    """The arm of a config (as ArmConfig dumps it); relative paths are relative to `directory`."""
    return KINDS[arm["engine"]["kind"]](arm, directory)


def read_metric(metric: dict[str, Any], stdout: str, *, tokens: int) -> list[float]:
    """Walls in ms of each inner run, from a command's output. Raises HarnessError where the figure is not there."""
    if "json" in metric:
        try:
            value: Any = json.loads(stdout)
        except json.JSONDecodeError as error:
            raise HarnessError(f"the command's output is not JSON ({error}); it begins {stdout[:60]!r}.") from None
        for key in metric["json"].split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise HarnessError(
                    f"the command's JSON has no {metric['json']!r} (no {key!r}); correct `metric`."
                ) from None
        figures = value if isinstance(value, list) else [value]
    else:
        figures = re.findall(metric["regex"], stdout)
        if not figures:
            raise HarnessError(
                f"the regex {metric['regex']!r} matches nothing in the command's output, which begins {stdout[:60]!r}."
            )
    try:
        numbers = [float(f) for f in figures]
    except (TypeError, ValueError):
        raise HarnessError(f"the command's metric is {figures!r}, which is no number; correct `metric`.") from None
    if not numbers or not all(np.isfinite(numbers)) or min(numbers) <= 0:
        raise HarnessError(f"the command's metric is {numbers!r}; times and rates must be above 0.")
    unit = metric["unit"]
    return [1e3 * tokens / n if unit == "tok/s" else n * UNIT_MS[unit] for n in numbers]


def exit_words(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in signal.valid_signals() else str(-status)
    return f"was killed by {name}" + (" (out of memory?)" if -status == signal.SIGKILL else "")


def die_with_parent() -> None:
    """Linux: this process gets SIGKILL when its parent dies, so that nothing of a killed round goes on running."""
    import ctypes

    PR_SET_PDEATHSIG = 1
    with contextlib.suppress(OSError, AttributeError):  # not Linux: an orphan ends when its pipe closes
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def model_path(model: str | None, directory: Path) -> str | None:
    """A model that is a file beside the config, as a path; presets and defaults as they are."""
    if model and (directory / model).is_file():
        return str(directory / model)
    return model


def _fill(text: str, values: dict[str, str]) -> str:
    for key, value in values.items():
        text = text.replace(key, value)
    return text


def _import(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise HarnessError(f"{target!r} cannot be imported ({error}); check `path` and the name.") from None
    return value


def _synchronize(target: Any) -> None:
    if callable(own := getattr(target, "synchronize", None)):
        own()
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    if cupy is not None:
        cupy.cuda.runtime.deviceSynchronize()
