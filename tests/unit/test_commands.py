"""The command line itself: mistyped words, environment, completion, output names, and what a positional file means."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from harness.cli import group
from harness.environment import COMPLETION, VARIABLES

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("decompos",), "No such command 'decompos'. Did you mean 'decompose'?"),
        (("round", "lst"), "No such command 'lst'. Did you mean 'list'?"),
        (("trace", "inof"), "No such command 'inof'. Did you mean 'info'?"),
        (("model", "gredy"), "No such command 'gredy'. Did you mean 'greedy'?"),
        (("zzz",), "No such command 'zzz'."),
    ],
)
def test_a_mistyped_command_gets_its_suggestion(harness: Run, words: tuple[str, ...], says: str) -> None:
    status, out, err = harness(*words)
    assert (status, out) == (64, "") and err.rstrip().endswith(says)


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("3325",), 64, "a token count goes with --tokens 3325"),
        (("tiny-llama",), 64, "a model goes with --model tiny-llama"),
        (("model.gguf",), 64, "of a recorded trace: --gguf model.gguf"),
        (("base.yaml",), 64, "an arm's config goes with --config base.yaml"),
        (("d.json",), 64, "d.json is a decomposition already; `harness queue d.json` ranks it"),
        (("x.sqlite", "--trace", "y.sqlite"), 64, "are two traces; give one"),
        (("x.sqlite", "--model", "tiny-llama"), 64, "--model does not go with a recorded trace"),
        (("missing.sqlite",), 1, "missing.sqlite is no file"),
        (("x.ncu-rep",), 1, "read it with `harness sol --ncu-rep x.ncu-rep`"),
        (("--trace", "renamed"), 1, "read it with `harness sol --ncu-rep renamed`"),
    ],
)
def test_decompose_takes_a_file_and_says_what_another_word_means(
    harness: Run, in_tmp: Path, words: tuple[str, ...], status: int, says: str
) -> None:
    for name in ("x.ncu-rep", "renamed"):
        (in_tmp / name).write_bytes(b"NVR\0\2\0\0\0")
    (in_tmp / "d.json").write_text('{"schema": "decomposition/1"}')
    found, out, err = harness("decompose", *words)
    assert (found, out) == (status, "") and says in err
    if words == ("x.ncu-rep",):
        assert harness("trace", "info", *words)[2] == err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("model", "levers", "--json", "x.csv"), "x.csv is no name for JSON; end it in .json"),
        (("round", "list", "--json", "x.json.gz"), "no name for JSON"),
        (("doctor", "--json", "x.md"), "no name for JSON"),
        (("decompose", "--markdown", "x.png"), "no name for Markdown; end it in .md"),
        (("queue", "--plot", "x.csv"), "no name for a figure"),
        (("model", "synth", "tiny-llama", "-o", "x.json"), "no name for a GGUF; end it in .gguf"),
        (("trace", "scrub", "a.sqlite", "-o", "x.json"), "no name for an nsys export"),
    ],
)
def test_a_name_that_promises_another_format_is_refused(
    harness: Run, in_tmp: Path, words: tuple[str, ...], says: str
) -> None:
    status, out, err = harness(*words)
    assert (status, out) == (64, "") and says in err
    assert not list(in_tmp.iterdir())


def options(command: click.Command, path: str = "") -> Iterator[tuple[str, click.Option]]:
    """Every option of a command and of all below it."""
    yield from ((path, p) for p in command.params if isinstance(p, click.Option))
    for name, below in getattr(command, "commands", {}).items():
        yield from options(below, f"{path} {name}".strip())


def test_every_json_option_is_held_to_its_suffix() -> None:
    found = [(path, option) for path, option in options(group) if "--json" in option.opts]
    assert len(found) > 15
    for path, option in found:
        with click.Context(group) as context, pytest.raises(click.BadParameter):
            option.process_value(context, "x.csv")
        assert option.process_value(click.Context(group), "-") == "-", path


def test_the_environment_that_is_documented_is_the_one_that_is_read(harness: Run) -> None:
    read = re.compile(r"""environ(?:\.get\(|\[)\s*["'](\w+)["']""")
    sources = [p for room in ("harness", "engine") for p in (ROOT / room).rglob("*.py")]
    names = {name for p in sources for name in read.findall(p.read_text(encoding="utf-8"))}
    libraries = {"NO_COLOR", "FORCE_COLOR"}  # read by rich and click
    assert len(names) > 5 and names | libraries == {name for name, _ in VARIABLES}
    out = harness("--help")[1]
    assert all(name in out for name in names) and all(line in out for _, line, _ in COMPLETION)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in names)


def completed(cwd: Path, *words: str) -> list[str]:
    """What bash is offered after the words, the last of them unfinished."""
    variables = {
        "_HARNESS_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(("harness", *words)),
        "COMP_CWORD": str(len(words)),
    }
    code = "from harness.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_a_shell_completes_commands_options_models_levers_and_rounds(in_tmp: Path, a_round: Callable) -> None:
    a_round(Path("reports/rounds"), "concat", gain=0.0)
    assert completed(in_tmp, "de") == ["plain,decompose"]
    assert completed(in_tmp, "round", "sh") == ["plain,show"]
    assert "plain,--across-windows" in completed(in_tmp, "decompose", "--ac")
    assert completed(in_tmp, "decompose", "--set", "conc") == ["plain,concat=off", "plain,concat=on"]
    assert completed(in_tmp, "model", "info", "--model", "qw") == ["plain,qwen2.5-7b-q4_k_m"]
    assert completed(in_tmp, "decompose", "--gguf", "mod") == ["file,mod"]
    assert completed(in_tmp, "round", "show", "0") == ["plain,0001"]
    assert completed(in_tmp, "decompose", "tr") == ["file,tr"]


@pytest.mark.parametrize("shell", [shell for shell, _, _ in COMPLETION])
def test_each_shell_gets_its_script(shell: str) -> None:
    line = next(line for name, line, _ in COMPLETION if name == shell)
    assert f"_HARNESS_COMPLETE={shell}_source harness" in line
    done = subprocess.run(
        [sys.executable, "-c", "from harness.cli import main; main()"],
        env=os.environ | {"_HARNESS_COMPLETE": f"{shell}_source"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert f"_HARNESS_COMPLETE={shell}_complete" in done.stdout


def test_an_ascii_terminal_gets_plain_spellings(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness.cli", "model", "info", "--model", "tiny-llama", "--tokens", "8"], cwd=tmp_path,
        capture_output=True, check=True, env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    text = done.stdout.decode("ascii")
    assert "?" not in text and "-----" in text
