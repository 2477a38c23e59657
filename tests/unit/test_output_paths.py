"""Output paths as a person mistypes them: one sentence, no traceback, and nothing that is not ours is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.files import append_line, check_writable, write_atomic


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
    )


@pytest.mark.parametrize("target", ["folder", "/proc/levers.json", "a-file/levers.json"])
def test_a_path_that_cannot_be_written_is_one_sentence(tmp_path: Path, target: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a-file").write_text("mine")
    done = run("model", "levers", "--json", target, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
    assert target.split("/")[-1] in done.stderr
    assert (tmp_path / "a-file").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a-file", "folder"]


def test_every_writer_names_the_path_it_was_given(tmp_path: Path) -> None:
    for write in (lambda p: write_atomic(p, "x"), lambda p: append_line(p, {}), check_writable):
        with pytest.raises(HarnessError, match=str(tmp_path)):
            write(tmp_path)


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to("real.json")
    write_atomic(link, "new")
    assert link.is_symlink() and (tmp_path / "real.json").read_text() == "new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE) as reader:
        check_writable(pipe)
        write_atomic(pipe, b"through")
        assert reader.stdout is not None
        assert reader.stdout.read() == b"through"
    assert pipe.is_fifo()
    with pytest.raises(HarnessError, match="no regular file"):
        check_writable(pipe, whole=True)


def test_json_to_stdout_by_its_device_name(tmp_path: Path) -> None:
    done = run("model", "levers", "--json", "/dev/stdout", cwd=tmp_path)
    assert json.JSONDecoder().raw_decode(done.stdout)[0]["schema"] == "levers/1"
    assert Path("/dev/stdout").is_symlink()


def test_options_of_our_own_engine_do_not_go_with_a_trace(tmp_path: Path) -> None:
    for option in (["--model", "tiny-llama"], ["--set", "concat=on"], ["--runs", "2"], ["--tail", "full"]):
        done = run("decompose", "--trace", "x.sqlite", *option, cwd=tmp_path)
        assert done.returncode == 64 and option[0] in done.stderr
