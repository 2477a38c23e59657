"""Finding nsys: the one on PATH is used as it is, and no folder above it is searched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.sources import nsys_driver
from harness.sources.nsys_driver import find_nsys


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def no_globs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any search of folders is an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a folder was searched")

    monkeypatch.delenv("HARNESS_NSYS", raising=False)
    monkeypatch.setattr(Path, "glob", refuse)
    monkeypatch.setattr(Path, "rglob", refuse)
    monkeypatch.setattr(os, "walk", refuse)


@pytest.mark.usefixtures("no_globs")
@pytest.mark.parametrize("place", ["bin/nsys", "a/b/c/tools/nsys"])
def test_nsys_anywhere_on_the_path_is_used_without_a_search(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = program(tmp_path / place)
    monkeypatch.setenv("PATH", str(nsys.parent))
    found = find_nsys()
    assert (found.nsys, found.importer) == (nsys, None)


def test_the_importer_beside_an_installation_is_found_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = tmp_path / "nsight-compute" / "2025.3.1" / "host"
    nsys, importer = program(host / "target-linux-x64" / "nsys"), program(host / "linux-desktop" / "QdstrmImporter")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").symlink_to(nsys)
    monkeypatch.delenv("HARNESS_NSYS", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_nsys().importer == importer


def test_without_one_on_the_path_the_usual_places_are_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nsys = program(tmp_path / "nsight-systems" / "2025.5.2" / "target-linux-sbsa-armv8" / "nsys")
    monkeypatch.delenv("HARNESS_NSYS", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(nsys_driver, "_NSIGHT_ROOTS", (str(tmp_path),))
    assert find_nsys().nsys == nsys
