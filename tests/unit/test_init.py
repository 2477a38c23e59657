"""`harness init`: what it writes is whole and loads, and it never takes a file away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands.init import starter, write_new
from harness.config import load_arm, load_protocol
from harness.errors import HarnessError

ROOT = Path(__file__).parents[2]


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_base_levers_and_a_protocol_are_written_and_load(harness: Any, in_tmp: Path) -> None:
    from harness.ab.protocol import LandingProtocol

    status, out, err = harness("init")
    assert (status, err) == (0, "") and "\n  harness ab experiments/base" in out
    written = tree(in_tmp)
    packaged = {str(p.relative_to(ROOT)): p.read_text() for p in (ROOT / "experiments").rglob("*.yaml")}
    assert {k: v for k, v in written.items() if k.startswith("experiments/")} == packaged
    for name in written:
        if name.startswith("experiments/"):
            load_arm(Path(name))
    mine = load_protocol("protocols/mine.yaml", LandingProtocol)
    assert mine == load_protocol("landing", LandingProtocol), "every choice is commented out"
    Path("protocols/mine.yaml").write_text(written["protocols/mine.yaml"].replace("# bar: 0.015 ", "bar: 0.25"))
    assert load_protocol("protocols/mine.yaml", LandingProtocol).bar == 0.25


def test_the_line_that_it_says_to_type_starts_a_round(harness: Any, in_tmp: Path) -> None:
    _, out, _ = harness("init", "a b")
    line = out.splitlines()[-1].strip()
    assert line.startswith("cd 'a b' && harness ab ")
    words = line.split(" harness ", 1)[1].split()
    for word in words:
        if word.endswith(".yaml"):
            assert Path("a b", word).is_file()


def test_nothing_is_overwritten_and_nothing_is_written_beside_it(harness: Any, in_tmp: Path) -> None:
    mine = Path("experiments", "levers", "concat.yaml")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = tree(in_tmp)
    status, out, err = harness("init")
    assert status == 1 and out == "" and err.count("\n") == 1
    assert f"{mine} exists already, so nothing was written" in err
    assert tree(in_tmp) == before


def test_other_files_in_the_same_folders_are_left_alone(harness: Any, in_tmp: Path) -> None:
    other = Path("protocols", "other.yaml")
    other.parent.mkdir()
    other.write_text("mine")
    assert harness("init")[0] == 0 and other.read_text() == "mine"


def test_a_write_that_fails_half_way_leaves_nothing(in_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import harness.files as files

    real, count = files.write_atomic, iter(range(100))

    def full(path: Path, text: str) -> None:
        if next(count) == 9:
            raise HarnessError(f"cannot write {path} (No space left on device); give another path.")
        real(path, text)

    monkeypatch.setattr(files, "write_atomic", full)
    with pytest.raises(HarnessError, match="No space left"):
        write_new(in_tmp / "new" / "folder", starter())
    assert list(in_tmp.iterdir()) == []


def test_a_protocol_of_ones_own_extends_the_packaged_one_and_its_own_neighbour_first(in_tmp: Path) -> None:
    from harness.ab.protocol import LandingProtocol

    Path("mine.yaml").write_text("extends: landing.yaml\nbar: 0.2\n")
    assert load_protocol("mine.yaml", LandingProtocol).bar == 0.2
    strict = load_protocol("landing-strict", LandingProtocol)
    Path("mine.yaml").write_text("extends: landing-strict.yaml\n")
    assert load_protocol("mine.yaml", LandingProtocol) == strict, "which itself extends landing.yaml"
    Path("landing.yaml").write_text("extends: landing.yaml\nbar: 0.4\n")
    assert load_protocol("landing.yaml", LandingProtocol).bar == 0.4, "a file of the same name extends it, too"
    Path("landing.yaml").write_text("extends: landing-strict.yaml\nbar: 0.3\n")
    Path("mine.yaml").write_text("extends: landing.yaml\n")
    assert load_protocol("mine.yaml", LandingProtocol).bar == 0.3
    Path("mine.yaml").write_text("extends: landign.yaml\n")
    with pytest.raises(HarnessError, match=r"landign\.yaml does not exist"):
        load_protocol("mine.yaml", LandingProtocol)
