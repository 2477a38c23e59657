"""Fresh virtual environments with what a user installs. Minutes and a package index: only `make test-install` runs these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "install" not in config.getoption("-m"):
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="makes fresh environments: make test-install"))


class Environment:
    """A virtual environment of this Python, and a shell in an empty folder that knows nothing of the checkout."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder / "venv", folder / "work"
        self.work.mkdir(parents=True)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        self.env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self.env |= {"PATH": f"{self.folder / 'bin'}{os.pathsep}{self.env['PATH']}", "COLUMNS": "100"}

    def run(self, *argv: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """A program of the environment."""
        program = str(self.folder / "bin" / str(argv[0]))
        return subprocess.run(
            [program, *map(str, argv[1:])], capture_output=True, text=True, cwd=self.work, env=self.env | env
        )

    def pip(self, *arguments: str | Path) -> None:
        """pip, which must succeed."""
        done = self.run("python", "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments)
        assert done.returncode == 0, done.stderr

    @property
    def site_packages(self) -> Path:
        return next(self.folder.glob("lib/python3*/site-packages"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked files and those about to be: what a clean clone builds."""
    clone = tmp_path_factory.mktemp("clone")
    listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)  # fmt: skip
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, clone / name)
    out = tmp_path_factory.mktemp("wheel")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run(pip, cwd=clone, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Environment]:
    """Makes an environment."""
    return lambda name: Environment(tmp_path_factory.mktemp(name))
