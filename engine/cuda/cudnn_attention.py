"""cuDNN's prefill attention, the peer of ours: SDPA graphs through `cudnn-frontend`, on plain device pointers.

Same layouts as `engine.cuda.attention`, for a prefill from an empty cache: there is no past. GQA needs no repeated
K and V: the graph's K and V simply have fewer heads. A plan is built once per shape; `bind_attention` does that ahead of a
timed window or a graph capture, for it takes about 0.1 s and allocates.

Start-up: `cudnnCreate` alone takes over four seconds with the full cuDNN, whose libraries hold every precompiled engine.
SDPA is a run-time compiled engine, so the package `nvidia-cudnn-jit-cu13` (graph API and run-time engines only: 180 MB of
libraries) is enough, and is loaded instead of `nvidia-cudnn-cu13` where both are installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import EngineError
from engine.extras import install_line

_Q, _K, _V, _OUT = 1, 2, 3, 4  # tensor uids


class _Shape(NamedTuple):
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    q_stride: int
    kv_stride: int
    out_stride: int
    scale: float


class _Plan(NamedTuple):
    graph: Any  # a built cudnn.pygraph
    workspace: Any  # cupy.cuda.MemoryPointer that the graph scribbles on, or None
    workspace_ptr: int


def version() -> str:
    """cuDNN's version, as "9.19.0"; part of the configuration that a record names."""
    return str(_cudnn().backend_version_string())


def bind_attention(
    stream: int,
    q_ptr: int,
    k_ptr: int,
    v_ptr: int,
    out_ptr: int,
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_stride: int,
    kv_stride: int,
    out_stride: int,
    scale: float,
) -> tuple[Callable[[], None], ...]:
    """The one submission of this attention, ready to run any number of times, also under graph capture.

    Builds the shape's plan and its workspace first. Raises EngineError where cuDNN is missing or has no such engine.
    """
    device = _device()
    plan = _plan(device, _Shape(rows, heads, kv_heads, head_dim, q_stride, kv_stride, out_stride, scale))
    cudnn, handle = _cudnn(), _handle(device)
    pointers = {_Q: q_ptr, _K: k_ptr, _V: v_ptr, _OUT: out_ptr}

    def submit() -> None:
        try:
            cudnn.set_stream(handle=handle, stream=stream)
            plan.graph.execute(pointers, plan.workspace_ptr, handle=handle)
        except Exception as error:
            raise EngineError(f"cuDNN's attention over {rows} rows failed: {_first_line(error)}") from error

    return (submit,)


@cache
def _plan(device: int, shape: _Shape) -> _Plan:
    """The SDPA graph of a shape, as [batch 1, heads, rows, head_dim] views with the caller's strides."""
    cudnn = _cudnn()
    try:
        graph = cudnn.pygraph(
            name="prefill_attention",
            io_data_type=cudnn.data_type.HALF,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=_handle(device),
        )

        def view(name: str, uid: int, heads: int, stride: int) -> Any:
            dim, strides = _view(shape, heads, stride)
            return graph.tensor(name=name, uid=uid, dim=dim, stride=strides, data_type=cudnn.data_type.HALF)

        out, _ = graph.sdpa(
            q=view("q", _Q, shape.heads, shape.q_stride),
            k=view("k", _K, shape.kv_heads, shape.kv_stride),
            v=view("v", _V, shape.kv_heads, shape.kv_stride),
            attn_scale=float(shape.scale),
            diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,  # rows = keys, so either corner is the same diagonal
            diagonal_band_right_bound=0,
            generate_stats=False,
            name="attention",
        )
        dim, strides = _view(shape, shape.heads, shape.out_stride)
        out.set_output(True).set_dim(dim).set_stride(strides).set_data_type(cudnn.data_type.HALF).set_uid(_OUT)
        graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        size = graph.get_workspace_size()
    except Exception as error:
        raise EngineError(
            f"cuDNN {version()} has no attention for {shape.rows} rows, {shape.heads} heads on {shape.kv_heads}, head_dim "
            f"{shape.head_dim} on this GPU ({_first_line(error)}); use `attention: ours`."
        ) from error
    if size == 0:
        return _Plan(graph, None, 0)
    from cupy.cuda import alloc

    workspace = alloc(size)
    return _Plan(graph, workspace, int(workspace.ptr))


def _view(shape: _Shape, heads: int, stride: int) -> tuple[list[int], list[int]]:
    """(dim, stride) of a [rows, heads, head_dim] tensor with row stride `stride`, as cuDNN's [1, heads, rows, head_dim]."""
    return [1, heads, shape.rows, shape.head_dim], [shape.rows * stride, shape.head_dim, stride, 1]


@cache
def _handle(device: int) -> int:
    """The process's handle on a device; its stream is set at every call."""
    try:
        return int(_cudnn().create_handle())
    except Exception as error:
        raise EngineError(
            f"cuDNN could not be started on GPU {device} ({_first_line(error)}); {install_line('cuda')}."
        ) from error


@cache
def _cudnn() -> Any:
    """The frontend, with cuDNN's libraries found.

    It looks in LD_LIBRARY_PATH, then in its own site-packages; a library of another environment on sys.path (PyTorch's, say)
    is found by appending its directory to that variable while the frontend imports. What the user put there still wins.
    """
    before = os.environ.get("LD_LIBRARY_PATH")
    directory = _library_directory()
    if directory is not None:
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (before, str(directory))))
    try:
        import cudnn
    except Exception as error:
        raise EngineError(
            f"cuDNN's frontend cannot be imported ({_first_line(error)}); {install_line('cuda')}."
        ) from error
    finally:
        if before is None:
            os.environ.pop("LD_LIBRARY_PATH", None)
        else:
            os.environ["LD_LIBRARY_PATH"] = before
    try:
        cudnn.backend_version()
    except Exception as error:
        raise EngineError(f"libcudnn.so.9 was not found ({_first_line(error)}); {install_line('cuda')}.") from error
    return cudnn


def _library_directory() -> Path | None:
    """The first directory of a cuDNN wheel on sys.path, the light package before the full one."""
    for package in ("cudnn_jit", "cudnn"):
        for entry in sys.path:
            directory = Path(entry or ".", "nvidia", package, "lib")
            if (directory / "libcudnn.so.9").exists():
                return directory.resolve()
    return None


def _device() -> int:
    from cupy.cuda import runtime

    return int(runtime.getDevice())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
