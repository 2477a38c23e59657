"""Rounds on disk: `reports/rounds/NNNN-slug/` of the directory that the command runs in."""

from __future__ import annotations

import hashlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from harness.errors import HarnessError, one_line
from harness.files import append_line, read_json, strict_json, to_json, write_atomic
from harness.rounds.record import RoundRecord, Sample

ROUND_DIR = re.compile(r"(\d{4,})-[a-z0-9][a-z0-9._-]*")
RECORD, SAMPLES, README = "record.json", "samples.jsonl", "README.md"


def reports_dir() -> Path:
    """`reports/` of the working directory."""
    return Path("reports")


def rounds_dir() -> Path:
    """`reports/rounds/` of the working directory."""
    return reports_dir() / "rounds"


def slugify(text: str) -> str:
    """A directory-name part from a title: lower-case words joined by hyphens, at most 60 characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")
    return slug or "round"


def new_round_dir(slug: str, root: Path | None = None) -> tuple[int, Path]:
    """Claims the next free number and makes its directory. Never returns a directory that existed.

    Several processes may ask at once: a number is taken by whoever makes its claim directory (mkdir either makes or
    fails), and is checked again while the claim is held.
    """
    root = root or rounds_dir()
    root.mkdir(parents=True, exist_ok=True)
    slug = slugify(slug)
    number = max(_numbers(root), default=0) + 1
    while True:
        claim = root / f".claim-{number:04d}"
        try:
            claim.mkdir()
        except FileExistsError:
            number += 1
            continue
        try:
            if number not in _numbers(root):
                path = root / f"{number:04d}-{slug}"
                path.mkdir()
                return number, path
        finally:
            claim.rmdir()
        number += 1


def _numbers(root: Path) -> set[int]:
    return {int(m[1]) for p in root.iterdir() if (m := ROUND_DIR.fullmatch(p.name))}


def round_dirs(root: Path | None = None) -> list[Path]:
    """Directories of all rounds that have a record, by number."""
    root = root or rounds_dir()
    if not root.is_dir():
        return []
    found = [(int(m[1]), p) for p in root.iterdir() if (m := ROUND_DIR.fullmatch(p.name)) and (p / RECORD).is_file()]
    return [p for _, p in sorted(found)]


def find_round(number: int | str, root: Path | None = None) -> Path:
    """The directory of a round by its number ("4", "0004" or "0004-slug"). Raises HarnessError for one not there."""
    root = root or rounds_dir()
    head = str(number).split("-", 1)[0]
    if not head.isdigit():
        raise HarnessError(f"{number!r} is no round's number; give one such as 4 or 0004.")
    for path in round_dirs(root):
        if int(path.name.split("-", 1)[0]) == int(head):
            return path
    raise HarnessError(f"there is no round {int(head):04d} under {root}; `harness round list` shows what is there.")


def load_record(path: Path) -> RoundRecord:
    """The record of a round's directory. Raises HarnessError naming the file and the first key that is wrong."""
    file = path / RECORD
    data = read_json(file, "give a round's directory, or restore that file")
    try:
        return RoundRecord.model_validate(data, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise HarnessError(f"{file}: {where}: {first['msg']}; restore the file or fix that key.") from None


def save_record(path: Path, record: RoundRecord) -> None:
    """Writes record.json in one step."""
    write_atomic(path / RECORD, to_json(record.to_json()))


def load_rounds(root: Path | None = None) -> list[RoundRecord]:
    """All records by number."""
    return [load_record(path) for path in round_dirs(root)]


def append_sample(path: Path, sample: Sample) -> None:
    """Appends one half to samples.jsonl and fsyncs. A last line torn by a power cut is cut off first."""
    file = path / SAMPLES
    if file.exists():
        _cut_torn_line(file)
    append_line(file, sample.model_dump(mode="json"))


def _cut_torn_line(file: Path) -> None:
    raw = file.read_bytes()
    if raw and not raw.endswith(b"\n"):
        os.truncate(file, raw.rfind(b"\n") + 1)


def read_samples(path: Path) -> list[Sample]:
    """All halves in the order they ran; [] where none was timed. A torn last line is not a sample.

    Raises HarnessError naming the line that cannot be read.
    """
    file = path / SAMPLES
    if not file.exists():
        return []
    samples = []
    *lines, _torn = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            samples.append(Sample.model_validate(strict_json(line)))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise HarnessError(
                f"{file}, line {number}: {where + ': ' if where else ''}{first['msg']}; restore that line."
            ) from None
        except (ValueError, RecursionError) as error:
            raise HarnessError(f"{file}, line {number}: no JSON ({one_line(error)}); restore that line.") from None
    return samples


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes; of nothing where it does not exist."""
    return hashlib.sha256(path.read_bytes() if path.exists() else b"").hexdigest()


def attach(path: Path, record: RoundRecord, name: str, value: object) -> None:
    """Writes a JSON file (a decomposition, a diff) into a round's directory and notes its hash in the record."""
    write_atomic(path / name, to_json(value))
    record.attachments[name] = file_sha256(path / name)


def now() -> str:
    """This moment, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
