"""Attention on a GPU, ours and cuDNN's, against float64 NumPy. Operands sit among NaN: columns beside them, rows after them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engine.cuda import attention, cudnn_attention, jit
from engine.errors import EngineError

pytestmark = pytest.mark.gpu

EDGES = [1, 7, 8, 9, 127, 128, 129, 519, 2659, 3325]
GUARD_ROWS, PAD = 150, 8  # more rows than a tile; eight columns keep 16-byte alignment


@pytest.fixture(scope="module", autouse=True)
def cupy() -> Any:
    return pytest.importorskip("cupy")


@dataclass
class Case:
    """One problem on the device, with its operands on the host."""

    rows: int
    past: int
    d: int
    heads: int
    kv_heads: int
    q: np.ndarray  # f16 [rows, heads, d]
    k: np.ndarray  # f16 [past + rows, kv_heads, d]
    v: np.ndarray
    device: tuple[Any, Any, Any, Any]  # q, k, v, out with guards
    workspace: Any

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.d)

    def arguments(self) -> dict[str, Any]:
        q, k, _, out = self.device
        return {
            "rows": self.rows, "past": self.past, "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.d,
            "q_stride": q.shape[1], "kv_stride": k.shape[1], "out_stride": out.shape[1], "scale": self.scale,
        }  # fmt: skip

    def pointers(self) -> list[int]:
        return [x.data.ptr for x in self.device]

    def submit(self, stream: Any, which: str) -> None:
        for submit in self.bind(stream, which):
            submit()

    def bind(self, stream: Any, which: str) -> tuple[Callable[[], None], ...]:
        arguments = self.arguments()
        if which == "cudnn":
            past = arguments.pop("past")
            assert past == 0, "cuDNN's attention starts at an empty cache"
            return cudnn_attention.bind_attention(stream.ptr, *self.pointers(), **arguments)
        return attention.bind_attention(
            stream.ptr, *self.pointers(), **arguments, variant=None if which == "ours" else which,  # type: ignore[arg-type]
            workspace_ptr=self.workspace.data.ptr, workspace_bytes=self.workspace.nbytes,
        )  # fmt: skip

    def run(self, which: str) -> np.ndarray:
        """f16 [rows, heads, d]; the output was NaN before, and every NaN around it must still be there."""
        import cupy as cp

        out = self.device[3]
        stream = cp.cuda.Stream(non_blocking=True)
        out.fill(np.nan)
        cp.cuda.runtime.deviceSynchronize()
        self.submit(stream, which)
        stream.synchronize()
        return self.result()

    def result(self) -> np.ndarray:
        host = self.device[3].get()
        width = self.heads * self.d
        assert np.isnan(host[self.rows :]).all() and np.isnan(host[:, width:]).all(), (
            "wrote outside its rows or columns"
        )
        return host[: self.rows, :width].reshape(self.rows, self.heads, self.d)

    def expected(self, sampled: np.ndarray) -> np.ndarray:
        """float64 attention of the sampled rows, [len(sampled), heads, d]."""
        out = np.empty((len(sampled), self.heads, self.d))
        visible = np.arange(self.past + self.rows)[None] <= self.past + sampled[:, None]
        for head in range(self.heads):
            kv = head // (self.heads // self.kv_heads)
            scores = self.q[sampled, head].astype(np.float64) @ self.k[:, kv].astype(np.float64).T * self.scale
            scores = np.where(visible, scores, -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = p / p.sum(axis=1, keepdims=True) @ self.v[:, kv].astype(np.float64)
        return out

    def check(self, which: str, tolerance: float = 1e-3) -> None:
        got = self.run(which).astype(np.float64)
        assert np.isfinite(got).all()
        edges = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, self.rows - 2, self.rows - 1]
        sampled = np.unique(
            np.r_[[r for r in edges if 0 <= r < self.rows], np.linspace(0, self.rows - 1, 40).astype(int)]
        )
        expected = self.expected(sampled)
        error = np.linalg.norm(got[sampled] - expected) / np.linalg.norm(expected)
        assert error <= tolerance, f"{which}: relative L2 {error:.2e}"
        by_row = np.linalg.norm(got[sampled] - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert by_row.max() <= 5 * tolerance, (
            f"{which}: row {sampled[by_row.max(axis=1).argmax()]} is off by {by_row.max():.2e}"
        )


def make(
    rows: int,
    past: int = 0,
    *,
    d: int = 128,
    heads: int = 7,
    kv_heads: int = 1,
    q_magnitude: float = 1.0,
    seed: int = 0,
) -> Case:
    import cupy as cp

    rng = np.random.default_rng([seed, rows, past, d])

    def draw(count: int, width: int, magnitude: float) -> tuple[np.ndarray, Any]:
        host = np.full((count + GUARD_ROWS, width + PAD), np.nan, np.float16)
        host[:count, :width] = rng.standard_normal((count, width), dtype=np.float32) * magnitude
        return host[:count, :width].reshape(count, -1, d), cp.asarray(host)

    q, q_device = draw(rows, heads * d, q_magnitude)
    k, k_device = draw(past + rows, kv_heads * d, 1.0)
    v, v_device = draw(past + rows, kv_heads * d, 1.0)
    out = cp.full((rows + GUARD_ROWS, heads * d + PAD), np.nan, np.float16)
    need = attention.attention_workspace_bytes(rows=rows, past=past, heads=heads, head_dim=d, variant="split")
    workspace = cp.full(need // 4 if rows <= 8 else 1, np.nan, np.float32)
    return Case(rows, past, d, heads, kv_heads, q, k, v, (q_device, k_device, v_device, out), workspace)


def needs(variant: str) -> None:
    if variant == "wgmma" and jit.device_arch() != "sm_90a":
        pytest.skip("wgmma is sm_90a's")
    if variant == "cudnn":
        pytest.importorskip("cudnn")


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("rows", EDGES)
def test_tiles_at_every_edge_length(variant: str, d: int, rows: int) -> None:
    needs(variant)
    make(rows, d=d).check(variant)


@pytest.mark.parametrize("rows", EDGES)
def test_the_default_choice_at_every_edge_length(rows: int) -> None:
    make(rows, d=128, heads=14, kv_heads=2).check("ours")


@pytest.mark.parametrize("variant", ["mma", "wgmma"])
@pytest.mark.parametrize(("rows", "past"), [(1, 300), (64, 1), (65, 5), (129, 127), (130, 63), (519, 300), (9, 3316)])
def test_tiles_after_a_past(variant: str, rows: int, past: int) -> None:
    needs(variant)
    for d in (64, 128):
        make(rows, past, d=d).check(variant)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("past", [0, 1, 7, 126, 127, 254, 255, 256, 517, 2658, 3324])
def test_decode_at_every_length(d: int, past: int) -> None:
    make(1, past, d=d, heads=28, kv_heads=4).check("ours")
    make(4, past, d=d).check("split")


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split", "cudnn"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (28, 4)])
def test_query_heads_share_their_kv_head(variant: str, heads: int, kv_heads: int) -> None:
    needs(variant)
    make(4 if variant == "split" else 200, d=64, heads=heads, kv_heads=kv_heads).check(variant)


@pytest.mark.parametrize("rows", EDGES[1:])
def test_cudnn_at_every_edge_length(rows: int) -> None:
    needs("cudnn")
    make(rows, d=128, heads=14, kv_heads=2).check("cudnn")


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split", "cudnn"])
def test_zero_queries_give_the_mean_of_the_visible_values(variant: str) -> None:
    needs(variant)
    make(4 if variant == "split" else 300, q_magnitude=0.0).check(variant)


@pytest.mark.parametrize("variant", ["mma", "wgmma", "split", "cudnn"])
def test_scores_of_hundreds_stay_finite(variant: str) -> None:
    """Qwen2's scores reach ±300, which f16 scores or an unshifted exponential would not survive."""
    needs(variant)
    make(4 if variant == "split" else 300, q_magnitude=100.0).check(variant, 2e-3)


@pytest.mark.parametrize("which", ["ours", "mma", "cudnn"])
def test_repeated_runs_are_bit_equal(which: str) -> None:
    """An error that moves between runs is a race."""
    needs(which)
    case = make(3325, heads=28, kv_heads=4)
    first = case.run(which)
    for _ in range(3):
        np.testing.assert_array_equal(case.run(which).view(np.uint16), first.view(np.uint16))


@pytest.mark.parametrize(("which", "rows"), [("ours", 519), ("ours", 1), ("cudnn", 519)])
def test_it_replays_from_a_graph(which: str, rows: int) -> None:
    import cupy as cp

    needs(which)
    case = make(rows)
    plain = case.run(which)
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        case.submit(stream, which)
        graph = stream.end_capture()
    case.device[3].fill(np.nan)
    cp.cuda.runtime.deviceSynchronize()
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(case.result().view(np.uint16), plain.view(np.uint16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 96}, "no kernel for head_dim 96"),
        ({"kv_heads": 2}, "heads a multiple of kv_heads"),
        ({"kv_stride": 132}, "strides to 8 elements"),
        ({"rows": 1, "workspace_bytes": 8}, "needs a workspace of"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_in_one_sentence(change: dict[str, int], message: str) -> None:
    case = make(130)
    with pytest.raises(EngineError, match=message):
        attention.bind_attention(0, *case.pointers(), **(case.arguments() | change))
