"""The `harness` command: one click group; each file of harness/commands/ is one subcommand of the same name."""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from harness import __version__
from harness.errors import Exit, HarnessError
from harness.report.signs import register

COMMANDS = Path(__file__).parent / "commands"
NARROWEST = 20


class Room(Mapping[str, click.Command]):
    """Subcommands as files: `commands/NAME.py` defines a click command or group called `command`.

    Those files are imported when they are asked for, and import nothing heavy at the top, so that `--help` answers at once.
    """

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(p.stem for p in COMMANDS.glob("*.py") if not p.stem.startswith("_")))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> click.Command:
        if name not in list(self):
            raise KeyError(name)
        return importlib.import_module(f"harness.commands.{name}").command


class CommandRoom(click.Group):
    """A group over `Room`; click itself lists, finds and suggests."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands = Room()  # type: ignore[assignment]  # click only reads it

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What no command's own help says: the environment, and completion."""
        from harness.environment import COMPLETION, VARIABLES

        with formatter.section("Environment"):
            formatter.write_dl(list(VARIABLES))
        with formatter.section("Completion, as a line of the shell's start-up file"):
            formatter.write_dl([(shell, line) for shell, line, _ in COMPLETION])


@click.group(cls=CommandRoom, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version")
def group() -> None:
    """Where does the prefill's wall go, what is worth doing next, and did the lever work?"""


def main(args: list[str] | None = None) -> None:
    """Entry point: runs the group and turns every expected error into one sentence and its exit status."""
    _prepare_streams()
    try:
        status = group.main(args=args, prog_name="harness", standalone_mode=False)
        sys.exit(int(status or 0))
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        shown = io.StringIO()
        error.show(shown)
        _complain(shown.getvalue().rstrip())
        sys.exit(Exit.USAGE if isinstance(error, click.UsageError) else Exit.ERROR)
    except (click.Abort, KeyboardInterrupt):
        _complain("Interrupted; everything finished so far is kept.")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours.
        sys.stderr.close()
        sys.exit(Exit.DONE)
    except HarnessError as error:
        _complain(f"error: {error}")
        sys.exit(error.exit_status)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        _complain(f"error: {named}{error.strerror or error}; check the path and the space left.")
        sys.exit(Exit.ERROR)
    except Exception as error:
        if not _is_engine_error(error):
            raise
        _complain(f"error: {error}")
        sys.exit(Exit.ERROR)


def _complain(text: str) -> None:
    """A sentence on stderr: one line in a pipe, wrapped at words on a terminal."""
    if not sys.stderr.isatty():
        click.echo(text, err=True)
        return
    from rich.console import Console

    from harness.report.table import say

    say(text, console=Console(stderr=True, highlight=False))


def _prepare_streams() -> None:
    """Whatever the terminal is, output never fails on it: a sign that its encoding lacks is spelt plainly, a closed stream is
    no one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=register())
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < NARROWEST:
        del os.environ["COLUMNS"]  # 0 is what a shell without a terminal says; nothing can be printed at that width


def _is_engine_error(error: Exception) -> bool:
    """True for the engine's own errors, without importing the engine on the way to `--help`."""
    module = sys.modules.get("engine.errors")
    return module is not None and isinstance(error, module.EngineError)


if __name__ == "__main__":
    main()
