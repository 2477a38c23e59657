"""Output paths as a person mistypes them: one sentence, no traceback, and nothing that is not ours is replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.files import append_line, check_writable, to_json, write_atomic


def run(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "harness.cli", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"} | variables,
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


@pytest.mark.parametrize("strange", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "0"}])
def test_a_poor_terminal_still_gets_the_table(tmp_path: Path, strange: dict[str, str]) -> None:
    done = run("model", "info", "--model", "tiny-llama", "--tokens", "8", cwd=tmp_path, **strange)
    assert done.returncode == 0 and "everything" in done.stdout and not done.stderr
    as_json = run("model", "info", "--model", "tiny-llama", "--json", "-", cwd=tmp_path, **strange)
    assert json.loads(as_json.stdout)["model"] == "tiny-llama"


def test_a_closed_stream_is_no_error(tmp_path: Path) -> None:
    command = f"{sys.executable} -m harness.cli model levers"
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        assert (
            subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=tmp_path, stdout=subprocess.DEVNULL).returncode == 0
        )


def test_a_name_that_is_not_utf8_reaches_the_json(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x.json", to_json({"trace": os.fsdecode(b"bad\xff.sqlite")}))
    assert os.fsencode(json.loads((tmp_path / "x.json").read_bytes())["trace"]) == b"bad\xff.sqlite"
