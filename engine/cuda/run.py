"""The CUDA backend: executes a plan's ops in order on one stream, with every weight resident in f16."""

from __future__ import annotations

import gc
from collections import OrderedDict

import numpy as np

from engine.backend import Greedy, OpHook, Progress
from engine.cuda import jit
from engine.cuda.arena import Arena
from engine.cuda.cublaslt import CublasLt
from engine.cuda.program import Binder, HostBuffers, Program, buffer_sizes, rope_table
from engine.cuda.weights import Weights
from engine.decode import checked_ids, continue_greedily, positions_of
from engine.driver import check_driver
from engine.errors import EngineError
from engine.levers import Levers
from engine.plan import Plan, build_plan
from engine.tensors import Model, require_runnable

_KEPT_PROGRAMS = 16  # bound plans; decoding needs a new one each step


class CudaEngine:
    """A model in f16 with f32 sums and an f32 residual stream on the current CUDA device (see `engine.backend.Engine`)."""

    name = "cuda"

    def __init__(self, model: Model, levers: Levers, progress: Progress | None = None) -> None:
        """Loads the weights. Raises EngineError without a usable GPU and driver, or where the model does not fit it."""
        require_runnable(model)
        self.geometry, self.levers, self.model_name = model.geometry, levers, model.name
        self._progress = progress
        self._check_geometry()
        check_driver()
        try:
            import cupy

            self._stream = cupy.cuda.Stream(non_blocking=True)
        except Exception as error:
            raise EngineError(
                f"no CUDA device can be used here ({error}); run `harness doctor` to see what is missing, or take the CPU backend."
            ) from error
        self._arena: Arena | None = None
        self._rows = self._positions = self._head_rows = 0
        self._programs: OrderedDict[tuple[int, int, bool], Program] = OrderedDict()
        self._pinned_logits = _pinned(4 * self.geometry.vocab)
        self._pinned_ids = _pinned(4)
        self._host = HostBuffers(0, 0)
        self._gemms: CublasLt | None = None
        self._weights: Weights | None = Weights(model, self._stream.ptr, progress)
        try:
            self._gemms = CublasLt(self._stream.ptr, levers.gemm_heuristic)
        except EngineError:
            self.close()
            raise

    def plan(self, tokens: int, *, all_logits: bool = False) -> Plan:
        """The plan that `prefill` would execute. Raises EngineError where the rows do not fit the context."""
        return build_plan(self.geometry, tokens, self.levers, precision="f16", all_logits=all_logits)

    def prefill(self, ids: np.ndarray, *, hook: OpHook | None = None, all_logits: bool = False) -> np.ndarray:
        """One forward of int32 [T] from an empty cache: float32 [vocab], or [T, vocab] with `all_logits`.

        Raises EngineError for an id outside the vocabulary, more rows than the context, or a launch that fails.
        """
        ids = checked_ids(ids, self.geometry.vocab, self.model_name)
        plan = self.plan(len(ids), all_logits=all_logits)
        self._reserve(len(ids), len(ids), len(ids) if all_logits else 1)
        return self._forward(plan, ids, hook)

    def greedy(self, ids: np.ndarray, count: int) -> Greedy:
        """Prefill of int32 [T], then `count` greedy tokens with a KV cache. Raises EngineError as `prefill`."""
        ids = checked_ids(ids, self.geometry.vocab, self.model_name)
        positions = positions_of(len(ids), count)
        build_plan(self.geometry, positions, self.levers)  # fits the context, or says so before anything runs
        self._reserve(len(ids), positions, 1)

        def forward(token: np.ndarray, past: int) -> np.ndarray:
            return self._forward(build_plan(self.geometry, 1, self.levers, past=past), token, None)

        return continue_greedily(ids, self._forward(self.plan(len(ids)), ids, None), count, forward)

    def _forward(self, plan: Plan, ids: np.ndarray, hook: OpHook | None) -> np.ndarray:
        """Executes the plan's ops and waits: float32 [vocab], or [T, vocab] where the plan asks for all logits."""
        program = self._program(plan)
        if len(self._pinned_ids) < ids.nbytes:
            self._pinned_ids = _pinned(ids.nbytes)
        self._pinned_ids[: ids.nbytes].view(np.int32)[:] = ids
        everything = np.empty((plan.tokens, self.geometry.vocab), np.float32) if plan.all_logits else None
        self._host.ids = self._pinned_ids.ctypes.data
        self._host.logits = self._pinned_logits.ctypes.data if everything is None else everything.ctypes.data
        try:
            if hook is None:
                for _op, submits in program:
                    for submit in submits:
                        submit()
            else:
                for op, submits in program:
                    hook.begin(op)
                    for submit in submits:
                        submit()
                    hook.end(op)
            self._stream.synchronize()
        except EngineError:
            raise
        except Exception as error:  # a copy, or what the GPU reports at the wait
            raise EngineError(
                f"a forward of {plan.tokens} tokens failed on the GPU: {error}; run it under compute-sanitizer to see where."
            ) from error
        return self._pinned_logits.view(np.float32).copy() if everything is None else everything

    def _program(self, plan: Plan) -> Program:
        """The plan's launches, bound now or taken from the last few."""
        if self._weights is None or self._gemms is None or self._arena is None:
            raise EngineError(f"the engine of {self.model_name} is closed; open it again.")
        key = (plan.tokens, plan.past, plan.all_logits)
        if (program := self._programs.get(key)) is None:
            binder = Binder(
                plan, self._stream.ptr, self._weights, self._arena, self._positions, self._gemms, self._host
            )
            program = self._programs[key] = binder.program(self._progress if plan.tokens > 1 else None)
            while len(self._programs) > _KEPT_PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return program

    def _reserve(self, rows: int, positions: int, head_rows: int) -> None:
        """Buffers for forwards of these sizes; those that are large enough are used again, with the programs bound to them."""
        if self._weights is None:
            raise EngineError(f"the engine of {self.model_name} is closed; open it again.")
        if self._arena and rows <= self._rows and positions <= self._positions and head_rows <= self._head_rows:
            return
        rows, positions, head_rows = (
            max(rows, self._rows), max(positions, self._positions), max(head_rows, self._head_rows),
        )  # fmt: skip
        self._release()
        sizes = buffer_sizes(self.geometry, rows, positions, head_rows)
        self._arena = Arena(f"a forward of {rows} tokens", sizes)
        self._rows, self._positions, self._head_rows = rows, positions, head_rows
        table = rope_table(self.geometry, positions)
        from cupy.cuda import runtime

        # On our stream: a plain cudaMemcpy may return before its data has arrived, and our stream does not wait for it.
        runtime.memcpyAsync(
            self._arena["rope"], table.ctypes.data, table.nbytes, runtime.memcpyHostToDevice, self._stream.ptr
        )

    def _release(self) -> None:
        """Frees the activations and forgets what was bound to them."""
        self._programs.clear()
        if self._arena:
            self._arena.close()
        self._arena = None
        self._rows = self._positions = self._head_rows = 0

    def _check_geometry(self) -> None:
        g = self.geometry
        for what, value, of in (("hidden", g.hidden, 8), ("FFN", g.ffn, 8), ("head_dim", g.head_dim, 16)):
            if value % of:
                raise EngineError(
                    f"the CUDA engine reads {what} in vectors and needs a multiple of {of}, but {self.model_name} has {value}; "
                    "use the CPU backend."
                )

    def overrun_buffers(self) -> list[str]:
        """Buffers whose canary some kernel has overwritten: none, in a correct engine."""
        arenas = [self._arena, self._weights.arena if self._weights else None]
        return [name for arena in arenas if arena for name in arena.overrun()]

    def device_memory_bytes(self) -> int:
        """Bytes of the f16 cache, activations, KV cache and workspaces."""
        parts = [self._arena, self._weights.arena if self._weights else None, self._gemms]
        return sum(part.bytes for part in parts if part)

    def describe(self) -> dict[str, object]:
        """GPU, driver, library versions, the chosen GEMM algorithms and the hash of every cubin that was loaded."""
        import cupy
        from cupy.cuda import runtime

        properties = runtime.getDeviceProperties(self._stream.device_id if self._stream.device_id >= 0 else 0)
        about: dict[str, object] = {
            "device": properties["name"].decode(),
            "arch": jit.device_arch(),
            "driver": runtime.driverGetVersion(),
            "cupy": cupy.__version__,
            "cublaslt": self._gemms.version if self._gemms else None,
            "nvrtc": jit.compiler_version(),
            "precision": "f16",
            "gemm": self._gemms.describe() if self._gemms else {},
            "kernels": jit.used_cubins(),
        }
        if self.levers.attention == "cudnn":
            from engine.cuda import cudnn_attention

            about["cudnn"] = cudnn_attention.version()
        return about

    def close(self) -> None:
        """Frees everything. Idempotent."""
        self._release()
        if self._gemms:
            self._gemms.close()
        if self._weights:
            self._weights.close()
        self._gemms = self._weights = None
        gc.collect()

    def __enter__(self) -> CudaEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pinned(size: int) -> np.ndarray:
    """uint8 [size] of page-locked host memory, which copies need in order not to wait for the host."""
    from cupy.cuda import alloc_pinned_memory

    return np.frombuffer(alloc_pinned_memory(size), np.uint8, size)
