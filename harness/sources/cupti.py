"""CUPTI in process: a traced prefill of the CUDA engine, with the exact op of every kernel, copy and memset.

How an op is known: the engine's hook pushes an external correlation id (op index + 1) around the op's launches. CUPTI
writes that id beside the correlation id of every API call made meanwhile, and each kernel carries the correlation id of
the call that launched it. This reaches every launch only with RUNTIME *and* DRIVER records enabled (libraries launch
through either API). A CUDA graph's kernels share the correlation id of the graph's launch; their node ids count up in
capture order, so there the op is that of the (node − first node)-th captured node. No name is ever interpreted.

The module imports without CUPTI and without a GPU: everything that needs them is in `_Session`.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from engine.backend import Engine
from engine.extras import install_line
from engine.plan import Op, Plan
from harness import launches as table
from harness.errors import HarnessError
from harness.sources.charge import charge
from harness.sources.names import demangled
from harness.sources.trace import Trace

BUFFER_BYTES = 16 << 20
"""One activity buffer: room for some 30,000 launches, so that none is handed over inside a traced forward."""


class Activity(NamedTuple):
    """A kernel, copy or memset as CUPTI reports it, copied out of its buffer. Times in ns of CUPTI's clock."""

    kind: str  # kernel, memcpy, memset
    name: str  # mangled, or "[CUDA memcpy HtoD]"
    start: int
    end: int
    device: int
    stream: int
    correlation: int
    graph_node: int  # 0 outside graphs
    grid: str = ""
    block: str = ""
    registers: int | None = None
    smem: int | None = None
    bytes: int | None = None


@dataclass
class Records:
    """What one window recorded: activities, and correlation id → external id."""

    activities: list[Activity] = field(default_factory=list)
    external: dict[int, int] = field(default_factory=dict)


def launch_table(
    records: Records, plan: Plan, start_ns: int, *, graph_ops: Sequence[int] | None = None
) -> tuple[pd.DataFrame, list[str]]:
    """The charged launch table of a window that began at `start_ns` of CUPTI's clock, and notes for the reader.

    graph_ops: op index of each captured node in capture order; without it, nodes are ops one to one. Activities that
    ended before the window are none of its launches. Raises HarnessError when nothing was recorded.
    """
    mine = sorted((a for a in records.activities if a.end > start_ns), key=lambda a: (a.start, a.end))
    if not mine:
        raise HarnessError(
            "CUPTI recorded no kernel in the traced forward; another profiler may hold it: run `harness doctor`."
        )
    ops = _ops(mine, records.external, len(plan), graph_ops)
    frame = table.from_columns(
        name=pd.array([demangled(a.name) for a in mine], dtype="string"),
        kind=[a.kind for a in mine],
        start_ns=[a.start - start_ns for a in mine],
        end_ns=[a.end - start_ns for a in mine],
        device=[a.device for a in mine],
        stream=[a.stream for a in mine],
        graph_node=pd.array([a.graph_node or pd.NA for a in mine], dtype="Int64"),
        grid=pd.array([a.grid for a in mine], dtype="string"),
        block=pd.array([a.block for a in mine], dtype="string"),
        registers=pd.array([_na(a.registers) for a in mine], dtype="Int32"),
        smem_bytes=pd.array([_na(a.smem) for a in mine], dtype="Int64"),
        op=pd.array([_na(op) for op in ops], dtype="Int32"),
        bytes=pd.array([_na(a.bytes) for a in mine], dtype="Int64"),
    )
    notes = []
    lost = sum(op is None for op in ops)
    if lost:
        notes.append(f"{lost} of {len(mine)} launches carry no op: they ran outside the plan and count as `other`")
    return charge(frame, plan), notes


def _ops(
    activities: Iterable[Activity], external: dict[int, int], count: int, graph_ops: Sequence[int] | None
) -> list[int | None]:
    """The op index of each activity; None where nothing says."""
    activities = list(activities)
    first_node: dict[int, int] = {}
    for a in activities:
        if a.graph_node:
            first_node[a.correlation] = min(a.graph_node, first_node.get(a.correlation, a.graph_node))
    ops: list[int | None] = []
    for a in activities:
        if a.graph_node:
            at = a.graph_node - first_node[a.correlation]
            nodes = graph_ops if graph_ops is not None else range(count)
            op = nodes[at] if at < len(nodes) else None
        else:
            tag = external.get(a.correlation, 0)
            op = tag - 1 if 1 <= tag <= count else None
        ops.append(op)
    return ops


def _na(value: Any) -> Any:
    return pd.NA if value is None else value


def trace_prefill(engine: Engine, ids: np.ndarray) -> Trace:
    """One traced prefill of int32 [T]. Times in ns from submit; the wall is the host's, from submit to logits.

    Raises HarnessError where CUPTI is missing, blocked or dropped records, and EngineError as `Engine.prefill`.
    """
    session = _session()
    plan = engine.plan(len(ids))
    with session:
        start = session.now()
        host_start = time.perf_counter_ns()
        engine.prefill(ids, hook=session)
        wall_ns = time.perf_counter_ns() - host_start
    frame, notes = launch_table(session.records, plan, start, graph_ops=getattr(engine, "graph_ops", None))
    return Trace(frame, wall_ns, "cupti", notes)


def check_installed() -> None:
    """Raises HarnessError where CUPTI's package is missing; loads nothing, so that it can be asked before timing."""
    if find_spec("cupti") is None:
        raise HarnessError(f"in-process tracing needs CUPTI, which is not installed; {install_line('cuda')}.")


class _Session:
    """CUPTI's activity API, enabled inside a `with` block; also the engine's hook, which tags launches with their op.

    One per process: CUPTI's callbacks can be registered once.
    """

    def __init__(self) -> None:
        try:
            from cupti import cupti
        except ImportError as error:
            raise HarnessError(
                f"in-process tracing needs CUPTI, which does not import ({error}); {install_line('cuda')}."
            ) from None
        self.cupti = cupti
        kinds = cupti.ActivityKind
        self.kinds = [
            kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET, kinds.EXTERNAL_CORRELATION, kinds.RUNTIME, kinds.DRIVER,
        ]  # fmt: skip
        self.tag = int(cupti.ExternalCorrelationKind.CUSTOM0)
        self.records = Records()
        self._call("activity_register_callbacks", self._buffer, self._completed)

    def __enter__(self) -> _Session:
        for kind in self.kinds:
            self._call("activity_enable", kind)
        self._call("activity_flush_all", 1)  # whatever ran before belongs to nobody
        _touch_the_device()  # CUPTI takes its buffers at the first record: some 2 ms, which the window must not pay
        self.records = Records()
        return self

    def __exit__(self, *exc: object) -> None:
        self._call("activity_flush_all", 1)  # every launch has ended: the logits are on the host
        for kind in reversed(self.kinds):
            self._call("activity_disable", kind)
        dropped = ctypes.c_size_t(0)
        # Context 0 is the global queue. A CUPTI that cannot say is believed: the plan check sees a missing launch.
        with suppress(HarnessError):
            self._call("activity_get_num_dropped_records", 0, 0, ctypes.addressof(dropped))
        if dropped.value and exc[0] is None:
            raise HarnessError(
                f"CUPTI dropped {dropped.value} records of the traced forward; free host memory or trace fewer tokens."
            )

    def begin(self, op: Op) -> None:
        """Tags the launches from here on."""
        self.cupti.activity_push_external_correlation_id(self.tag, op.index + 1)

    def end(self, op: Op) -> None:
        """Ends the tag."""
        self.cupti.activity_pop_external_correlation_id(self.tag)

    def now(self) -> int:
        """ns of the clock that activities are stamped with."""
        return int(self._call("get_timestamp"))

    @staticmethod
    def _buffer() -> tuple[int, int]:
        return BUFFER_BYTES, 0  # 0: as many records as fit

    def _completed(self, activities: list[Any]) -> None:
        """Copies a buffer's records: they are gone when this returns."""
        kinds = self.cupti.ActivityKind
        kernel, memcpy, memset, external = (
            int(k) for k in (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET, kinds.EXTERNAL_CORRELATION)
        )
        for a in activities:
            kind = a.kind
            if kind == external:
                self.records.external[a.correlation_id] = a.external_id
            elif kind == kernel:
                self.records.activities.append(
                    Activity(
                        "kernel", a.name or "?", a.start, a.end, a.device_id, a.stream_id, a.correlation_id, a.graph_node_id,
                        f"{a.grid_x},{a.grid_y},{a.grid_z}", f"{a.block_x},{a.block_y},{a.block_z}",
                        a.registers_per_thread, a.static_shared_memory + a.dynamic_shared_memory,
                    )
                )  # fmt: skip
            elif kind in (memcpy, memset):
                name = f"[CUDA memcpy {self._direction(a.copy_kind)}]" if kind == memcpy else "[CUDA memset]"
                self.records.activities.append(
                    Activity(
                        "memcpy" if kind == memcpy else "memset", name, a.start, a.end, a.device_id, a.stream_id,
                        a.correlation_id, a.graph_node_id, bytes=a.bytes,
                    )
                )  # fmt: skip

    def _direction(self, copy_kind: int) -> str:
        """HTOD → HtoD, as Nsight Systems spells it."""
        name = str(self.cupti.ActivityMemcpyKind(copy_kind).name)
        return name.replace("TO", "to") if len(name) == 4 else name

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self.cupti, function)(*arguments)
        except Exception as error:  # cuptiError, or the bindings' own where a library is missing
            raise HarnessError(
                f"CUPTI refused {function} ({self._reason(error)}); another profiler may hold the GPU, or the container "
                "forbids profiling: run `harness doctor`, or trace with `harness decompose --source nsys`."
            ) from None

    def _reason(self, error: Exception) -> str:
        """The status's name, such as ERROR_INSUFFICIENT_PRIVILEGES; else what the error says."""
        try:
            return str(self.cupti.Result(error.status).name)  # type: ignore[attr-defined]
        except (AttributeError, ValueError, TypeError):
            return str(error)


def _touch_the_device() -> None:
    """One tiny memset, waited for. It ends before the window, so that it is none of its launches."""
    from cupy.cuda import memory, runtime

    word = memory.alloc(4)
    runtime.memsetAsync(word.ptr, 0, 4, 0)
    runtime.streamSynchronize(0)


_open: list[_Session] = []


def _session() -> _Session:
    """The process's session."""
    if not _open:
        _open.append(_Session())
    return _open[0]
