"""`harness init`: a base, levers and a protocol to start from, in a folder of one's own."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import click

from harness.commands._options import FOLDER
from harness.errors import Exit, HarnessError

PROTOCOL = "landing.yaml"
OWN_PROTOCOL = Path("protocols", "mine.yaml")


@click.command(short_help="Write a base, levers and a protocol here.")
@click.argument("directory", type=FOLDER, default=Path(), metavar="[DIR]")
def command(directory: Path) -> int:
    """Write a base, levers and a protocol to start from into DIR/experiments and DIR/protocols.

    DIR is the current folder unless given. Nothing is overwritten: where one of the files exists, none is written.
    """
    import shlex

    from engine.open import choose

    files = starter()
    write_new(directory, files)
    where = "" if directory == Path() else f"cd {shlex.quote(str(directory))} && "
    arms = (
        "experiments/base.yaml experiments/levers/concat.yaml"
        if choose() == "cuda"
        else "experiments/base-one-thread.yaml experiments/levers/cpu_threads.yaml --tokens 256 --inner 1"
    )
    click.echo(
        f"Wrote {len(files)} files into {directory / 'experiments'} and {directory / 'protocols'}; now type", nl=False
    )
    click.echo(f"\n  {where}harness ab {arms} --protocol {OWN_PROTOCOL.as_posix()}")
    return Exit.DONE


def starter() -> dict[Path, str]:
    """Relative path → text: the packaged experiments as they are, and a protocol that extends the packaged one."""
    from importlib import resources

    files = {}
    root = resources.files("experiments")
    for folder in (root, root / "levers"):
        for file in sorted(folder.iterdir(), key=lambda f: f.name):
            if file.name.endswith(".yaml"):
                below = Path("experiments") if folder is root else Path("experiments", "levers")
                files[below / file.name] = file.read_text(encoding="utf-8")
    packaged = (resources.files("protocols") / PROTOCOL).read_text(encoding="utf-8")
    choices = "\n".join(line if line.startswith("#") else f"# {line}" for line in packaged.splitlines()[1:])
    files[OWN_PROTOCOL] = (
        f"# Your landing rule: the packaged {PROTOCOL}, and what you change of it. Take the # off a line to set it.\n"
        f"extends: {PROTOCOL}\n{choices}\n"
    )
    return files


def write_new(directory: Path, files: dict[Path, str]) -> None:
    """All of the files, or none of them. Raises HarnessError where one exists or cannot be written."""
    taken = [path for path in files if (directory / path).exists() or (directory / path).is_symlink()]
    if taken:
        more = f" (and {len(taken) - 1} more)" if len(taken) > 1 else ""
        raise HarnessError(
            f"{directory / taken[0]} exists already{more}, so nothing was written; give another folder, or move it away."
        )
    from harness.files import write_atomic

    made: list[Path] = []
    try:
        for path, text in files.items():
            target = directory / path
            made += [p for p in reversed(target.parents) if not p.exists()]
            made.append(target)
            write_atomic(target, text)
    except BaseException:  # an interrupt, too, leaves nothing half done
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
        raise
