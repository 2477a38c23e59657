"""Kernels from source to a checked launch: NVRTC (through `cuda.core`) → cubin → function → launch.

Compiling needs neither a GPU nor a driver: NVRTC assembles a cubin for any architecture, and `-Xptxas -v` makes its log
name registers, shared memory, stack frame and spills of every kernel. Cubins are cached by name, compiler, architecture,
flags and the hash of the source and of our headers that it includes; with a warm cache nothing of NVRTC is loaded.

A `.cu` file's header names its kernels in lines that this module reads:

    // kernel: norm_rows<4>            a name expression to compile (extern "C" names too)
    //   only: sm_90a sm_100a          (optional) the architectures that have it; else all of them
    //   allowed-spill-bytes: 0        spill stores + loads that the compiler may report; above every kernel: their default

`python -m engine.cuda.kernel_report` compiles everything for every architecture and prints what it takes.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from engine.cache import cache_dir, publish
from engine.errors import EngineError
from engine.extras import install_line

KERNELS = Path(__file__).with_name("kernels")
ARCHES = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""Architectures that every kernel must compile for: A100, L40S/4090, H100/H200, B200, RTX 50 and RTX PRO Blackwell."""
CACHE_FORMAT = 2
FLAGS = ("std=c++17", "ptxas -v")

_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SMEM_WITHOUT_OPT_IN = 48 * 1024


@dataclass(frozen=True)
class Resources:
    """What ptxas says that one kernel takes: registers a thread, bytes of static shared memory, stack and spills."""

    registers: int
    static_smem: int
    stack: int
    spill_stores: int
    spill_loads: int


@dataclass(frozen=True)
class Declared:
    """One `// kernel:` entry of a source's header."""

    expression: str
    allowed_spill_bytes: int = 0
    only: tuple[str, ...] = ()

    def on(self, arch: str) -> bool:
        """True where this kernel exists for `arch`."""
        return not self.only or arch in self.only


@dataclass(frozen=True)
class Cubin:
    """Machine code of one source for one architecture. `symbols` and `resources` are keyed by name expression."""

    name: str
    arch: str
    path: Path
    code: bytes
    sha256: str
    symbols: dict[str, str]
    resources: dict[str, Resources]


def sources() -> tuple[str, ...]:
    """Names of the kernel sources, without `.cu`."""
    return tuple(sorted(path.stem for path in KERNELS.glob("*.cu")))


@cache
def declared(name: str) -> tuple[Declared, ...]:
    """The kernels that a source's header declares. Raises EngineError where there are none."""
    entries: list[dict[str, Any]] = []
    default = {"allowed_spill_bytes": 0}
    for line in _source(name).splitlines():
        if match := re.fullmatch(r"//\s*kernel:\s*(\S.*?)\s*", line):
            entries.append({"expression": match[1], **default})
        elif match := re.fullmatch(r"//\s*allowed-spill-bytes:\s*(\d+)\s*", line):
            (entries[-1] if entries else default)["allowed_spill_bytes"] = int(match[1])
        elif entries and (match := re.fullmatch(r"//\s*only:\s*(sm_\w+(?:[ ,]+sm_\w+)*)\s*", line)):
            entries[-1]["only"] = tuple(re.split(r"[ ,]+", match[1]))
    if not entries:
        raise EngineError(f"{KERNELS / name}.cu declares no kernel; add `// kernel: NAME` lines to its header.")
    return tuple(Declared(**entry) for entry in entries)


def compile_file(
    name: str,
    arch: str,
    defines: Mapping[str, str | int] | None = None,
    names: tuple[str, ...] | None = None,
    *,
    lineinfo: bool = False,
    cache_directory: Path | None = None,
) -> Cubin:
    """The cubin of `kernels/{name}.cu` for `arch` ("sm_90a"), from the cache or compiled now.

    `names`: the name expressions to instantiate; None means those that the header declares for `arch`.
    Raises EngineError with the compiler's log when it does not compile, or when no compiler or header is found.
    """
    if names is None:
        names = tuple(entry.expression for entry in declared(name) if entry.on(arch))
    defines = dict(sorted((defines or {}).items()))
    flags = [*FLAGS, *(["lineinfo"] if lineinfo else [])]
    key = hashlib.sha256(
        json.dumps([CACHE_FORMAT, name, arch, compiler_version(), flags, defines, names, _source_hash(name)]).encode()
    ).hexdigest()[:24]
    directory = cache_directory or cache_dir() / "cubins"
    path = directory / f"{name}-{arch}-{key}.cubin"
    if (cubin := _read(name, arch, path)) is not None:
        return cubin
    code, symbols, log = _nvrtc(name, arch, defines, names, lineinfo)
    by_symbol = parse_ptxas_log(log)
    missing = [n for n in names if symbols[n] not in by_symbol]
    if missing:
        raise EngineError(f"the compiler's log for {name}.cu ({arch}) says nothing of {missing[0]!r}:\n{log.strip()}")
    info = {
        "sha256": hashlib.sha256(code).hexdigest(),
        "symbols": symbols,
        "resources": {n: asdict(by_symbol[symbols[n]]) for n in names},
    }
    publish(path, code)
    publish(path.with_suffix(".json"), json.dumps(info, indent=1).encode())
    cubin = _read(name, arch, path)
    assert cubin is not None
    return cubin


def parse_ptxas_log(log: str) -> dict[str, Resources]:
    """Mangled kernel name → resources, from what ptxas prints with `-v`."""
    found: dict[str, Resources] = {}
    for block in re.split(r"(?=Compiling entry function ')", log)[1:]:
        symbol = re.match(r"Compiling entry function '(\w+)'", block)
        # Device functions that were not inlined have their own "Function properties": the entry's are those under its name.
        frame = symbol and re.search(
            rf"Function properties for {symbol[1]}\s*\n[^\n]*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
            r"(\d+) bytes spill loads",
            block,
        )
        used = re.search(r"Used (\d+) registers([^\n]*)", block)
        if symbol and frame and used:
            smem = re.search(r"(\d+)(?:\+\d+)? bytes smem", used[2])
            found[symbol[1]] = Resources(
                int(used[1]), int(smem[1]) if smem else 0, int(frame[1]), int(frame[2]), int(frame[3])
            )
    return found


@cache
def compiler_version() -> str:
    """NVRTC's version: the installed package's (no library is loaded for it), else what the library answers."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    try:
        from cuda.bindings import nvrtc

        _status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        raise EngineError(f"no NVRTC was found to compile kernels with ({error}); {install_line('cuda')}.") from error
    return f"{major}.{minor}"


def _source(name: str) -> str:
    path = KERNELS / f"{name}.cu"
    try:
        return path.read_text()
    except OSError as error:
        raise EngineError(f"kernel source {path} cannot be read ({error.strerror}); reinstall the package.") from error


@cache
def _source_hash(name: str) -> str:
    """SHA-256 over the source and the headers of ours that it includes (directly or through one another)."""
    digest = hashlib.sha256()
    queue, seen = [KERNELS / f"{name}.cu"], set()
    while queue:
        path = queue.pop()
        if path in seen:
            continue
        seen.add(path)
        text = path.read_text()
        digest.update(path.name.encode() + b"\0" + text.encode() + b"\0")
        queue += [KERNELS / h for h in re.findall(r'^\s*#include\s+"([^"]+)"', text, re.M) if (KERNELS / h).exists()]
    return digest.hexdigest()


def _nvrtc(
    name: str, arch: str, defines: Mapping[str, str | int], names: tuple[str, ...], lineinfo: bool
) -> tuple[bytes, dict[str, str], str]:
    """(cubin, name expression → mangled name, compiler's log)."""
    try:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError:  # before 0.5 it lived in `experimental`
            from cuda.core.experimental import Program, ProgramOptions  # type: ignore[no-redef]
    except ImportError as error:
        raise EngineError(f"compiling kernels needs cuda-core ({error}); {install_line('cuda')}.") from error

    class Log:
        """What `Program.compile(logs=…)` writes into; some versions write bytes."""

        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str | bytes) -> None:
            self.text += text.decode(errors="replace") if isinstance(text, bytes) else text

    log = Log()
    options = ProgramOptions(
        name=f"{name}.cu",
        arch=arch,
        std="c++17",
        lineinfo=lineinfo,
        include_path=[str(KERNELS), *cuda_headers()],
        define_macro=[(key, str(value)) for key, value in defines.items()] or None,
        ptxas_options=["-v"],
    )
    try:
        built = Program(_source(name), "c++", options).compile("cubin", name_expressions=names, logs=log)
    except Exception as error:
        raise EngineError(f"{KERNELS / name}.cu does not compile for {arch}: {error}\n{log.text}".strip()) from error
    mapping = getattr(built, "symbol_mapping", None) or getattr(built, "_sym_map", {}) or {}
    symbols = {_text(key): _text(value) for key, value in mapping.items()}
    return bytes(built.code), {n: symbols.get(n, n) for n in names}, log.text


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


@cache
def cuda_headers() -> tuple[str, ...]:
    """Directories of cuda_fp16.h, mma.h and the like: from the wheels, else a CUDA toolkit."""
    from cuda import pathfinder

    found = []
    for part in ("cudart", "cccl"):
        try:
            directory = pathfinder.find_nvidia_header_directory(part)
        except Exception:
            directory = None
        if directory:
            found.append(directory)
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found += [
        str(Path(root, part))
        for root in roots
        if root
        for part in ("include", "include/cccl")
        if Path(root, part).is_dir()
    ]
    usable = [d for d in dict.fromkeys(found) if Path(d).is_dir()]
    if not any(Path(d, "cuda_fp16.h").exists() for d in usable):
        raise EngineError(
            f"cuda_fp16.h was not found, which kernels include; {install_line('cuda')}, or set CUDA_HOME to a CUDA toolkit."
        )
    return tuple(usable)


def _read(name: str, arch: str, path: Path) -> Cubin | None:
    """A cached cubin, or None where it is absent, torn, or its description is of other code."""
    try:
        code = path.read_bytes()
        info = json.loads(path.with_suffix(".json").read_bytes())
        if hashlib.sha256(code).hexdigest() != info["sha256"]:
            return None
        resources = {n: Resources(**r) for n, r in info["resources"].items()}
        return Cubin(name, arch, path, code, info["sha256"], info["symbols"], resources)
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---------------------------------------------------------------------------------------------------- on a GPU


def device_arch() -> str:
    """The current device's architecture, with its own instructions where it has such ("sm_90a" on an H200)."""
    from cupy.cuda import Device

    capability = Device().compute_capability  # "90"
    return f"sm_{capability}" + ("a" if int(capability) >= 90 else "")


_ParamInfo = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)
)


@cache
def _param_info() -> Any:
    """cuFuncGetParamInfo of the driver (CUDA 12.4 and newer), or None."""
    try:
        return _ParamInfo(("cuFuncGetParamInfo", ctypes.CDLL("libcuda.so.1")))
    except (OSError, AttributeError):
        return None


class Kernel:
    """One compiled kernel on the current device. `bind` prepares a launch, calling the kernel launches it at once."""

    def __init__(self, cubin: Cubin, expression: str, module: Any) -> None:
        self.cubin, self.expression = cubin, expression
        self.resources = cubin.resources[expression]
        self._function = module.get_function(cubin.symbols[expression])
        self.pointer: int = self._function.ptr
        self.parameter_bytes = self._parameters()
        self._dynamic_smem = _SMEM_WITHOUT_OPT_IN - self.resources.static_smem

    def _parameters(self) -> tuple[int, ...] | None:
        """Sizes of the kernel's parameters as the driver knows them, or None where it cannot say."""
        query = _param_info()
        if query is None:
            return None
        sizes: list[int] = []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        while query(self.pointer, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
            sizes.append(size.value)
        return tuple(sizes)

    def bind(self, stream: int, grid: Sequence[int], block: Sequence[int], *args: Any, smem: int = 0) -> Launch:
        """A launch ready to be submitted any number of times.

        stream: the CUDA stream's address. args: ctypes values (c_void_p for pointers), one for each parameter.
        Raises EngineError when arguments do not fit the parameters or the shared memory is refused.
        """
        if self.parameter_bytes is not None:
            given = tuple(ctypes.sizeof(arg) for arg in args)
            if given != self.parameter_bytes:
                raise EngineError(
                    f"kernel {self.expression} takes parameters of {self.parameter_bytes} bytes, not {given}; "
                    "fix the call's argument types."
                )
        if smem > self._dynamic_smem:
            self._opt_in(smem)
        return Launch(self, stream, grid, block, args, smem)

    def __call__(self, stream: int, grid: Sequence[int], block: Sequence[int], *args: Any, smem: int = 0) -> None:
        """Launches once."""
        self.bind(stream, grid, block, *args, smem=smem)()

    def _opt_in(self, smem: int) -> None:
        from cupy.cuda import driver

        try:
            driver.funcSetAttribute(self.pointer, _DYNAMIC_SMEM, smem)
        except Exception as error:
            raise EngineError(
                f"kernel {self.expression} was refused {smem} bytes of dynamic shared memory ({error}); "
                f"it has {self.resources.static_smem} static bytes: use a smaller tile on this GPU."
            ) from error
        self._dynamic_smem = smem


class Launch:
    """One kernel launch with its arguments packed; calling it submits, and raises EngineError where that fails."""

    __slots__ = ("_block", "_driver", "_grid", "_keep", "_params", "_smem", "_stream", "kernel")

    def __init__(
        self, kernel: Kernel, stream: int, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], smem: int
    ) -> None:
        from cupy.cuda import driver

        self.kernel = kernel
        self._driver = driver
        self._stream, self._smem = stream, smem
        self._grid = (*grid, 1, 1)[:3]
        self._block = (*block, 1, 1)[:3]
        addresses = (ctypes.c_void_p * max(1, len(args)))(*(ctypes.addressof(arg) for arg in args))
        self._keep = (args, addresses)
        self._params = ctypes.addressof(addresses)

    def __call__(self) -> None:
        try:
            self._driver.launchKernel(
                self.kernel.pointer, *self._grid, *self._block, self._smem, self._stream, self._params, 0
            )
        except Exception as error:
            raise EngineError(
                f"launch of {self.kernel.expression} failed: {error} "
                f"(grid {self._grid}, block {self._block}, {self._smem} bytes of dynamic shared memory)."
            ) from error


_loaded: dict[tuple[int, str], Any] = {}
_used: dict[str, Cubin] = {}


def kernel(name: str, defines: Mapping[str, str | int] | None = None, symbol: str | None = None) -> Kernel:
    """The kernel `symbol` (a name expression; default: `name`) of `kernels/{name}.cu` on the current device.

    Compiles every kernel that the header declares, once; the module stays loaded for the process.
    """
    return _kernel(name, tuple(sorted((defines or {}).items())), symbol or name, _device_id())


def _device_id() -> int:
    from cupy.cuda import runtime

    return runtime.getDevice()


@cache
def _kernel(name: str, defines: tuple[tuple[str, str | int], ...], symbol: str, device: int) -> Kernel:
    from cupy.cuda import function, runtime

    names = tuple(entry.expression for entry in declared(name) if entry.on(device_arch()))
    if symbol not in names:
        raise EngineError(f"{name}.cu declares no kernel {symbol!r} for {device_arch()}; it has {', '.join(names)}.")
    cubin = compile_file(name, device_arch(), dict(defines), names)
    module = _loaded.get((device, cubin.sha256))
    if module is None:
        runtime.free(0)  # makes the device's primary context current, which loading a module needs
        module = function.Module()
        module.load(cubin.code)
        _loaded[device, cubin.sha256] = module
        _used[f"{name}{dict(defines) or ''}"] = cubin
    return Kernel(cubin, symbol, module)


def used_cubins() -> dict[str, str]:
    """Source → SHA-256 of the cubin that this process loaded: what an arm's kernels are, whatever their names."""
    return {name: cubin.sha256 for name, cubin in sorted(_used.items())}
