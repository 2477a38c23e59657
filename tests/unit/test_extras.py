"""What is optional: a sentence with the line that brings it, valid where it is typed; and a driver that is too old."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import driver, extras
from engine.errors import EngineError
from engine.geometry import PRESETS
from engine.levers import Levers
from engine.synth import SynthModel
from harness import doctor

ROOT = Path(__file__).parents[2]


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes optional modules unfindable, as in an installation without extras."""
    real = importlib.util.find_spec

    def hide(*modules: str) -> None:
        monkeypatch.setattr(extras, "find_spec", lambda name: None if name in modules else real(name))

    return hide


class Distribution:
    """An installed prefill-harness, as PEP 610 says where it came from."""

    def __init__(self, url: str | None) -> None:
        self.url = url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self.url and json.dumps({"url": self.url})


@pytest.fixture
def from_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Pretends that the code lies in site-packages, installed from a URL."""

    def pretend(url: str | None) -> None:
        monkeypatch.setattr(extras, "ROOT", tmp_path / "site-packages")
        monkeypatch.setattr(extras.metadata, "distribution", lambda name: Distribution(url))
        extras._origin.cache_clear()

    yield pretend
    extras._origin.cache_clear()


def test_in_the_checkout_the_line_is_short_and_elsewhere_it_names_the_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ROOT)
    assert extras.install_line("ncu").endswith("pip install -e '.[ncu]'")
    monkeypatch.chdir(tmp_path)
    assert extras.install_line("ncu").endswith(f"pip install -e '{ROOT}[ncu]'")


def test_an_installation_from_a_directory_or_a_wheel_names_it_while_it_is_there(from_url: Any, tmp_path: Path) -> None:
    checkout, wheel = tmp_path / "a b", tmp_path / "prefill_harness-1-py3-none-any.whl"
    checkout.mkdir()
    (checkout / "pyproject.toml").touch()
    wheel.touch()
    from_url(f"{tmp_path.as_uri()}/a%20b")
    assert extras.install_line("parquet").endswith(f"pip install '{checkout}[parquet]'")
    from_url(wheel.as_uri())
    assert extras.install_line("parquet").endswith(f"pip install '{wheel}[parquet]'")


@pytest.mark.parametrize("url", [None, "file:///gone/prefill_harness-1-py3-none-any.whl", "https://host/x.whl"])
def test_where_nothing_is_left_to_install_from_the_packages_themselves_are_named(
    from_url: Any, url: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_url(url)
    monkeypatch.setattr(
        extras.metadata, "requires",
        lambda name: ["click>=8", 'a>=1; extra == "one"', 'prefill-harness[one,two]; extra == "all"',
                      'b<2; python_version > "3" and extra == "two"', 'prefill-harness[all]; extra == "two"'],
    )  # fmt: skip
    assert extras.install_line("one").endswith("pip install 'a>=1'")
    assert extras.install_line("all").endswith("pip install 'a>=1' 'b<2'")
    assert extras.install_line("other").endswith("pip install 'prefill-harness[other]'")


def test_the_pip_that_is_named_is_this_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.shutil, "which", lambda name: str(Path(sys.executable).with_name(name)))
    assert extras.install_line("ncu").startswith("pip install ")
    monkeypatch.setattr(extras.shutil, "which", lambda name: "/somewhere/else/pip")
    monkeypatch.chdir("/")
    assert extras.install_line("ncu").startswith(f"{sys.executable[1:]} -m pip install ")


def test_every_extra_that_code_names_exists() -> None:
    import ast

    known = set(metadata.metadata(extras.NAME).get_all("Provides-Extra") or [])
    named = set()
    for file in [*(ROOT / "engine").rglob("*.py"), *(ROOT / "harness").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("install_line", "require")
            ):
                position = 0 if node.func.id == "install_line" else 1
                if len(node.args) > position and isinstance(node.args[position], ast.Constant):
                    named.add(node.args[position].value)  # type: ignore[attr-defined]
    assert {"cuda", "ncu", "parquet", "tokenizer"} <= named <= known


def test_without_extras_a_command_says_which_line_brings_what_it_needs(
    without: Any, harness: Any, in_tmp: Path, smollm2: Path
) -> None:
    without("ncu_report", "pyarrow", "tokenizers")
    Path("x.ncu-rep").touch()
    status, _, err = harness("sol", "--ncu-rep", "x.ncu-rep")
    assert status == 1 and err.count("\n") == 1 and "[ncu]'" in err
    Path("launches.parquet").write_bytes(b"PAR1")
    status, _, err = harness("decompose", "--trace", "launches.parquet")
    assert status == 1 and err.count("\n") == 1 and "[parquet]'" in err
    status, _, err = harness(
        "model", "greedy", "--model", smollm2, "--prompt", "The capital", "-n", "1", "--backend", "cpu"
    )
    assert status == 1 and err.count("\n") == 1 and "[tokenizer]'" in err and "--ids" in err


def test_without_extras_everything_else_of_a_table_is_saved(without: Any, harness: Any, in_tmp: Path) -> None:
    without("ncu_report", "pyarrow", "tokenizers")
    status, out, err = harness("decompose", "--model", "tiny-llama", "--tokens", "32", "--backend", "cpu", "--runs", "2",
                               "--no-ceilings", "--save", "all")  # fmt: skip
    assert status in (0, 6) and "busy" in out, err
    assert sorted(p.name for p in Path("all").iterdir()) == ["README.md", "decomposition.json", "decomposition.png"]
    assert "launches.parquet is left out" in err and "[parquet]'" in err


def test_greedy_ids_need_no_tokenizer_and_a_note_says_what_text_needs(
    without: Any, harness: Any, in_tmp: Path, smollm2: Path
) -> None:
    without("tokenizers")
    Path("ids.json").write_text("[1, 2]")
    status, out, err = harness(
        "model", "greedy", "--model", smollm2, "--ids", "ids.json", "-n", "2", "--backend", "cpu"
    )
    assert status == 0 and [i.isdecimal() for i in out.split()] == [True, True] and "[tokenizer]'" in err


class Nvml:
    """A driver by its own version and the CUDA version that it runs."""

    class NVMLError(Exception):
        pass

    def __init__(self, version: str | bytes, cuda: int) -> None:
        self.version, self.cuda, self.open = version, cuda, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str | bytes:
        return self.version

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return self.cuda


OLD = Nvml(b"570.86.15", 12080)
SAYS = "the NVIDIA driver 570.86.15 runs CUDA 12.8 and the CUDA backend needs 13.0; install driver 580 or newer"


def test_a_driver_that_is_too_old_is_one_sentence_before_cupy_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.cuda.run import CudaEngine

    monkeypatch.setitem(sys.modules, "pynvml", OLD)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EngineError, match=SAYS) as error:
        CudaEngine(SynthModel(PRESETS["tiny-llama"](), 0), Levers())
    assert str(error.value).count("\n") == 0 and OLD.open == 0
    from engine.cuda import ceilings

    with pytest.raises(EngineError, match=SAYS):
        ceilings.identity()


@pytest.mark.parametrize(("version", "cuda"), [("580.65.06", 13000), ("590.1", 13010), ("600.0", 14000)])
def test_a_driver_that_is_new_enough_says_nothing(version: str, cuda: int) -> None:
    nvml = Nvml(version, cuda)
    driver.check_driver(nvml)
    assert nvml.open == 0 and doctor._driver(nvml) == ("ok", f"{version}, CUDA {cuda // 1000}.{cuda % 1000 // 10}", "")


def test_doctor_says_the_same_of_an_old_driver() -> None:
    state, found, fix = doctor._driver(OLD)
    assert (state, found) == ("warning", "570.86.15, CUDA 12.8") and fix.startswith(SAYS)


def test_without_nvml_the_check_is_silent() -> None:
    class Absent(Nvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("Shared Library Not Found")

    driver.check_driver(Absent("", 0))


def test_the_module_runs_and_the_version_has_one_source() -> None:
    import harness

    for argument in ("-V", "--version"):
        said = subprocess.run([sys.executable, "-m", "harness", argument], capture_output=True, text=True, check=True)
        assert said.stdout == f"harness, version {harness.__version__}\n"
    assert metadata.version(extras.NAME) == harness.__version__
    assert np.all(
        [(ROOT / package / "py.typed").is_file() for package in ("engine", "harness", "protocols", "experiments")]
    )
