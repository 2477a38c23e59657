"""The `harness` command: one click group; each file of harness/commands/ is one subcommand of the same name."""

from __future__ import annotations

import importlib
import io
import os
import sys
from pathlib import Path

import click

from harness.errors import Exit, HarnessError

COMMANDS = Path(__file__).parent / "commands"
NARROWEST = 20


class CommandRoom(click.Group):
    """Finds subcommands as files: `commands/NAME.py` defines a click command or group called `command`.

    Those files import nothing heavy at the top, so that `--help` answers at once.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(p.stem for p in COMMANDS.glob("*.py") if not p.stem.startswith("_"))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"harness.commands.{name}").command


@click.group(cls=CommandRoom, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="prefill-harness")
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
    except click.UsageError as error:
        error.show()
        sys.exit(Exit.USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(Exit.ERROR)
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted; everything finished so far is kept.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours.
        sys.stderr.close()
        sys.exit(Exit.DONE)
    except HarnessError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_status)
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        click.echo(f"error: {named}{error.strerror or error}; check the path and the space left.", err=True)
        sys.exit(Exit.ERROR)
    except Exception as error:
        if not _is_engine_error(error):
            raise
        click.echo(f"error: {error}", err=True)
        sys.exit(Exit.ERROR)


def _prepare_streams() -> None:
    """Whatever the terminal is, output never fails on it: a sign that its encoding lacks is a "?", a closed stream is no one."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) < NARROWEST:
        del os.environ["COLUMNS"]  # 0 is what a shell without a terminal says; nothing can be printed at that width


def _is_engine_error(error: Exception) -> bool:
    """True for the engine's own errors, without importing the engine on the way to `--help`."""
    module = sys.modules.get("engine.errors")
    return module is not None and isinstance(error, module.EngineError)


if __name__ == "__main__":
    main()
