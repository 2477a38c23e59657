"""GEMMs through cublasLt: y[M, N] = x[M, K] · W[N, K]ᵀ in f16 with f32 sums, y in f16 or f32; all row-major.

cublasLt thinks in columns: read as column-major, W is [K, N] (leading dimension K, transposed), x is [K, M] and y is
[N, M], so y = op(W) · x with A = W. Descriptors are made once per shape, the workspace is the caller's, no call allocates.

Which algorithm: the heuristic's first, or (`timed`) the fastest of its eight, timed once per shape on random operands and
kept on disk for (device, cublasLt, shape, alignment, workspace). A choice is part of a configuration: `describe` lists it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.cache import publish
from engine.cuda.arena import Arena
from engine.errors import EngineError
from engine.extras import install_line

Output = Literal["f16", "f32"]

WORKSPACE_BYTES = 64 << 20
CANDIDATES = 8
_REPEATS = 7  # timed launches of each candidate
_ROTATION_BYTES = 160 << 20  # operands rotate over this much, so that no launch finds the last one's weights in the L2
_COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
_R_32F, _R_16F = 0, 2  # cudaDataType
_OP_T = 1

HEURISTIC = np.dtype(
    [("algo", "<u8", 8), ("workspace", "<u8"), ("state", "<i4"), ("waves", "<f4"), ("reserved", "<i4", 4)]
)
"""cublasLtMatmulHeuristicResult_t (cublasLt.h); the first 64 bytes are the opaque cublasLtMatmulAlgo_t."""


@dataclass(frozen=True)
class Shape:
    """One GEMM problem. Alignments are those of the operands' addresses, in bytes, at most 256."""

    m: int
    n: int
    k: int
    output: Output
    align_w: int
    align_x: int
    align_y: int

    def __str__(self) -> str:
        align = min(self.align_w, self.align_x, self.align_y)
        return f"{self.m}x{self.n}x{self.k} {self.output}" + (f" align {align}" if align < 256 else "")


class Algo:
    """A shape's descriptors and the algorithm chosen for it."""

    def __init__(
        self, layouts: tuple[int, int, int], algo: np.ndarray, workspace: int, how: str, about: dict[str, Any]
    ):
        self.layouts, self.algo, self.workspace, self.how, self.about = layouts, algo, workspace, how, about


class CublasLt:
    """A handle with its chosen algorithms, on one stream. `gemm` gives a call that is ready to be submitted."""

    def __init__(
        self, stream: int, heuristic: Literal["first", "timed"], *, cache_directory: Path | None = None
    ) -> None:
        """Raises EngineError where nvmath or cublasLt cannot be loaded."""
        try:
            from nvmath.bindings import cublasLt as lt

            self._handle = lt.create()
        except Exception as error:
            raise EngineError(f"cublasLt cannot be loaded ({error}); {install_line('cuda')}.") from error
        self._lt = lt
        self._stream = stream
        self._heuristic = heuristic
        self._directory = cache_directory
        self.version = int(lt.get_version())
        self._workspace = Arena("the GEMM workspace", {"gemm workspace": WORKSPACE_BYTES})
        self.bytes = self._workspace.bytes
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)
        self._chosen: dict[Shape, Algo] = {}
        self._desc = lt.matmul_desc_create(_COMPUTE_32F, _R_32F)
        transposed = ctypes.c_int32(_OP_T)
        lt.matmul_desc_set_attribute(self._desc, int(lt.MatmulDescAttribute.TRANSA), ctypes.addressof(transposed), 4)

    def gemm(self, m: int, n: int, k: int, x: int, w: int, y: int, output: Output) -> Callable[[], None]:
        """A call that submits y[m, n] = x[m, k] · w[n, k]ᵀ. x, w, y: device addresses of contiguous row-major matrices.

        Chooses the shape's algorithm the first time (see the module); raises EngineError where cublasLt offers none.
        """
        shape = Shape(m, n, k, output, _alignment(w), _alignment(x), _alignment(y))
        algo = self._chosen.get(shape)
        if algo is None:
            algo = self._chosen[shape] = self._choose(shape)
        return partial(self._submit, self._call(algo, x, w, y), shape)

    def _call(self, algo: Algo, x: int, w: int, y: int) -> Callable[[], None]:
        a, b, d = algo.layouts
        return partial(
            self._lt.matmul, self._handle, self._desc, ctypes.addressof(self._one), w, a, x, b,
            ctypes.addressof(self._zero), y, d, y, d, algo.algo.ctypes.data,
            self._workspace["gemm workspace"], WORKSPACE_BYTES, self._stream,
        )  # fmt: skip

    @staticmethod
    def _submit(call: Callable[[], None], shape: Shape) -> None:
        try:
            call()
        except Exception as error:
            raise EngineError(f"GEMM {shape} (M × N × K) failed in cublasLt: {error}.") from error

    def _choose(self, shape: Shape) -> Algo:
        layouts = self._layouts(shape)
        candidates = self._candidates(shape, layouts)
        if self._heuristic == "first" or len(candidates) == 1:
            return self._algo(layouts, candidates[0], "first of the heuristic")
        path = self._path(shape)
        if (kept := self._read(path, layouts)) is not None:
            return kept
        times = self._time(shape, layouts, candidates)
        best = min(range(len(candidates)), key=times.__getitem__)
        if not math.isfinite(times[best]):
            raise EngineError(
                f"none of cublasLt's {len(candidates)} algorithms for GEMM {shape} (M × N × K) runs here."
            )
        algo = self._algo(layouts, candidates[best], f"timed best, candidate {best} of {len(candidates)}")
        algo.about["us"] = round(times[best], 2)
        if math.isfinite(times[0]):
            algo.about["first_us"] = round(times[0], 2)
        record = {
            "shape": str(shape), "algo": candidates[best]["algo"].tobytes().hex(),
            "workspace": int(candidates[best]["workspace"]), "how": algo.how, "about": algo.about,
            "candidates_us": [round(t, 2) if math.isfinite(t) else None for t in times],
        }  # fmt: skip
        publish(path, json.dumps(record, indent=1).encode())
        return algo

    def _layouts(self, shape: Shape) -> tuple[int, int, int]:
        """Layouts of A = W, B = x and D = y, column-major."""
        create = self._lt.matrix_layout_create
        output = _R_16F if shape.output == "f16" else _R_32F
        return (
            create(_R_16F, shape.k, shape.n, shape.k),
            create(_R_16F, shape.k, shape.m, shape.k),
            create(output, shape.n, shape.m, shape.n),
        )

    def _candidates(self, shape: Shape, layouts: tuple[int, int, int]) -> np.ndarray:
        """HEURISTIC [≤ 8], best first by cublasLt's own estimate."""
        lt = self._lt
        attribute = lt.MatmulPreferenceAttribute
        results = np.zeros(CANDIDATES, HEURISTIC)
        count = ctypes.c_int(0)
        preference = lt.matmul_preference_create()
        try:
            for name, value in (
                ("MAX_WORKSPACE_BYTES", ctypes.c_uint64(WORKSPACE_BYTES)),
                ("MIN_ALIGNMENT_A_BYTES", ctypes.c_uint32(shape.align_w)),
                ("MIN_ALIGNMENT_B_BYTES", ctypes.c_uint32(shape.align_x)),
                ("MIN_ALIGNMENT_C_BYTES", ctypes.c_uint32(shape.align_y)),
                ("MIN_ALIGNMENT_D_BYTES", ctypes.c_uint32(shape.align_y)),
            ):
                lt.matmul_preference_set_attribute(
                    preference, int(attribute[name]), ctypes.addressof(value), ctypes.sizeof(value)
                )
            a, b, d = layouts
            lt.matmul_algo_get_heuristic(
                self._handle,
                self._desc,
                a,
                b,
                d,
                d,
                preference,
                CANDIDATES,
                results.ctypes.data,
                ctypes.addressof(count),
            )
        except Exception as error:
            raise EngineError(f"cublasLt has no algorithm for GEMM {shape} (M × N × K): {error}.") from error
        finally:
            lt.matmul_preference_destroy(preference)
        usable = results[: count.value]
        usable = usable[usable["state"] == 0]
        if not len(usable):
            raise EngineError(f"cublasLt has no algorithm for GEMM {shape} (M × N × K) on this GPU.")
        return usable

    def _algo(self, layouts: tuple[int, int, int], result: np.ndarray, how: str) -> Algo:
        algo = np.array(result["algo"], dtype="<u8")
        return Algo(layouts, algo, int(result["workspace"]), how, self._about(algo))

    def _about(self, algo: np.ndarray) -> dict[str, Any]:
        """What cublasLt says of an algorithm: its id, tile, stages, split-k, ..."""
        lt = self._lt
        about: dict[str, Any] = {}
        names = {"TILE_ID": getattr(lt, "MatmulTile", None), "STAGES_ID": getattr(lt, "MatmulStages", None)}
        for name in ("ID", "TILE_ID", "STAGES_ID", "SPLITK_NUM", "REDUCTION_SCHEME", "CTA_SWIZZLING", "CUSTOM_OPTION"):
            value, written = ctypes.c_uint32(0), ctypes.c_size_t(0)
            attribute = int(lt.MatmulAlgoConfigAttribute[name])
            try:
                lt.matmul_algo_config_get_attribute(
                    algo.ctypes.data, attribute, ctypes.addressof(value), 4, ctypes.addressof(written)
                )
            except Exception:  # an attribute that this algorithm does not have
                continue
            about[name.lower()] = value.value
            if (kind := names.get(name)) is not None and value.value in {int(v) for v in kind}:
                about[name.removesuffix("_ID").lower()] = kind(value.value).name
        return about

    def _time(self, shape: Shape, layouts: tuple[int, int, int], candidates: np.ndarray) -> list[float]:
        """Median µs of each candidate (∞ where it does not run): interleaved launches on random operands that rotate past the L2's size."""
        from cupy.cuda import Event, runtime

        from engine.cuda.weights import fill_random_f16

        bytes_w, bytes_x = 2 * shape.n * shape.k, 2 * shape.m * shape.k
        bytes_y = (2 if shape.output == "f16" else 4) * shape.m * shape.n
        sets = max(1, min(16, _ROTATION_BYTES // (bytes_w + bytes_x + bytes_y)))
        arena = Arena(
            f"timing GEMM {shape}",
            {
                f"{name}{i}": size
                for i in range(sets)
                for name, size in (("w", bytes_w), ("x", bytes_x), ("y", bytes_y))
            },
        )
        try:
            for i in range(sets):
                fill_random_f16(arena[f"w{i}"], bytes_w // 2, 2 * i + 1, self._stream)
                fill_random_f16(arena[f"x{i}"], bytes_x // 2, 2 * i + 2, self._stream)
            algos = [self._algo(layouts, candidate, "") for candidate in candidates]  # calls hold their addresses
            calls = [
                [self._call(algo, arena[f"x{i}"], arena[f"w{i}"], arena[f"y{i}"]) for i in range(sets)]
                for algo in algos
            ]
            times: list[list[float]] = [[] for _ in candidates]
            usable = [index for index, call in enumerate(calls) if self._runs(call[0])]  # also loads each kernel's code
            pending: list[tuple[int, Any, Any]] = []
            turn = 0
            for _ in range(_REPEATS):
                for index in usable:
                    start, end = Event(), Event()
                    runtime.eventRecord(start.ptr, self._stream)
                    calls[index][turn % sets]()
                    runtime.eventRecord(end.ptr, self._stream)
                    turn += 1
                    pending.append((index, start, end))
            runtime.streamSynchronize(self._stream)
            for index, start, end in pending:
                times[index].append(1e3 * runtime.eventElapsedTime(start.ptr, end.ptr))
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"timing GEMM {shape} (M × N × K) failed: {error}.") from error
        finally:
            runtime.streamSynchronize(self._stream)
            arena.close()
        return [statistics.median(t) if t else math.inf for t in times]

    def _runs(self, call: Callable[[], None]) -> bool:
        """Submits a candidate once and waits; False where cublasLt refuses what its heuristic offered."""
        from cupy.cuda import runtime

        try:
            call()
        except Exception:
            return False
        runtime.streamSynchronize(self._stream)
        return True

    def _path(self, shape: Shape) -> Path:
        from cupy.cuda import runtime

        from engine.cache import cache_dir

        properties = runtime.getDeviceProperties(runtime.getDevice())
        key = [properties["name"].decode(), properties["multiProcessorCount"], self.version, WORKSPACE_BYTES, *vars(shape).values()]  # fmt: skip
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
        directory = self._directory or cache_dir() / "cublaslt"
        return directory / f"{shape.m}x{shape.n}x{shape.k}-{shape.output}-{digest}.json"

    def _read(self, path: Path, layouts: tuple[int, int, int]) -> Algo | None:
        """A kept choice, or None where there is none or this cublasLt does not take it any more."""
        try:
            record = json.loads(path.read_bytes())
            algo = np.frombuffer(bytes.fromhex(record["algo"]), "<u8").copy()
            workspace, how, about = int(record["workspace"]), str(record["how"]), dict(record["about"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        a, b, d = layouts
        result = np.zeros(1, HEURISTIC)
        try:
            self._lt.matmul_algo_check(self._handle, self._desc, a, b, d, d, algo.ctypes.data, result.ctypes.data)
        except Exception:
            return None
        if algo.size != 8 or result["state"][0] != 0 or result["workspace"][0] > WORKSPACE_BYTES:
            return None
        return Algo(layouts, algo, workspace, how, about)

    def describe(self) -> dict[str, dict[str, Any]]:
        """ "MxNxK f16" → how its algorithm was chosen, its workspace bytes and configuration."""
        return {
            str(shape): {"how": algo.how, "workspace": algo.workspace, **algo.about}
            for shape, algo in self._chosen.items()
        }

    def close(self) -> None:
        """Destroys the descriptors and the handle. Idempotent."""
        if self._handle is None:
            return
        for algo in self._chosen.values():
            for layout in algo.layouts:
                self._lt.matrix_layout_destroy(layout)
        self._chosen.clear()
        self._lt.matmul_desc_destroy(self._desc)
        self._lt.destroy(self._handle)
        self._handle = None
        self._workspace.close()


def _alignment(address: int) -> int:
    """Largest power of two, at most 256, that divides a device address."""
    return min(256, address & -address)
