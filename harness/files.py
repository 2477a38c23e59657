"""Writing so that nothing is lost: whole files through a temporary name, samples by append and fsync."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from harness.errors import HarnessError


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Turns the system's refusal to write into the one sentence about `path`."""
    try:
        yield
    except OSError as error:
        raise HarnessError(f"cannot write {path} ({error.strerror or error}); give another path.") from error


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replaces `path` in one step: a reader, or a kill at any moment, sees the old content or the new one.

    A link stays one: the file that it names is replaced. A pipe or a device (/dev/stdout, /dev/null) is written to.
    Raises HarnessError where the system refuses.
    """
    raw = _encoded(data) if isinstance(data, str) else data
    with _told(path):
        if _is_stream(path):
            path.write_bytes(raw)
            return
        with replacing(path) as part, part.open("wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`, which the file written there takes at the end, or never."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def check_writable(path: Path | str | None, *, whole: bool = False) -> None:
    """Tells a wrong output path before the work and not after it; its folder is made. None and "-" are right.

    whole: `path` gets a file of its own, and cannot be a pipe or a device. Raises HarnessError.
    """
    if path is None or path in ("-", ""):
        return
    path = Path(path)
    with _told(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if _is_stream(path):
            if whole:
                raise OSError(errno.EINVAL, "it is no regular file")
            return
        parent = Path(os.path.realpath(path)).parent
        parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=parent):
            pass


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Appends one JSON object and a newline, and fsyncs: what returned is on disk. Raises HarnessError."""
    with _told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write((json.dumps(record, allow_nan=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())


def _encoded(text: str) -> bytes:
    """UTF-8 on every machine. A path that is not UTF-8 holds lone surrogates, which become escapes that JSON knows, too."""
    return text.encode("utf-8", "backslashreplace")


def read_json(path: Path, hint: str) -> Any:
    """JSON of a file as the standard has it: a number that is not finite is refused, as is nesting beyond reading.

    Raises HarnessError, one sentence that ends in `hint` (what to do), for a file that is not there or is no such JSON.
    """

    def finite(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"{text} is no finite number")
        return value

    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=finite, parse_float=finite)
    except FileNotFoundError:
        raise HarnessError(f"{path} does not exist; {hint}.") from None
    except RecursionError:
        raise HarnessError(f"{path} is not readable JSON (nested too deeply); {hint}.") from None
    except (OSError, ValueError) as error:
        raise HarnessError(f"{path} is not readable JSON ({error}); {hint}.") from None


def to_json(value: Any) -> str:
    """JSON as the project writes it: two spaces, keys in their order, no NaN."""
    return json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def emit_json(value: Any, target: str) -> None:
    """The value of a `--json PATH` option: to the file, or to stdout for "-" (and then nothing else goes there)."""
    if target == "-":
        sys.stdout.flush()
        sys.stdout.buffer.write(_encoded(to_json(value)))
        sys.stdout.buffer.flush()
    else:
        write_atomic(Path(target), to_json(value))
