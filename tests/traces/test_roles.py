"""Roles, layers and MACs from launch order: chunked prefills, joined products, orders of k and v, and traces that do not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.geometry import PRESETS, Geometry, tiny
from engine.levers import Levers
from engine.plan import build_plan
from harness import launches
from harness.attribution.classify import classify_launches, load_rules
from harness.attribution.occurrences import find_forwards, find_occurrences, find_repeats, repeating_run
from harness.attribution.roles import Attributed, RolesUnknown, attribute
from harness.errors import HarnessError
from harness.sources.kineto import read_kineto

RULES = load_rules()
NUMBER = {"q4_K": 12, "q6_K": 14}


class Recorder:
    """Writes launches one after another, as an engine's stream would run them."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add(self, name: str, grid: str = "1,1,1", kind: str = "kernel") -> None:
        self.rows.append((name, grid, kind))

    def table(self) -> pd.DataFrame:
        """Launches of 9 ns, attention 90, one every 100; the device waits a microsecond after every copy to the host."""
        name = [r[0] for r in self.rows]
        wait = np.array([0] + [1000 if n == "[CUDA memcpy DtoH]" else 100 for n in name[:-1]])
        start = np.cumsum(wait)
        long = np.array([n.startswith("void flash_attn_ext") for n in name])
        return launches.from_columns(
            name=[r[0] for r in self.rows], grid=[r[1] for r in self.rows], kind=[r[2] for r in self.rows], start_ns=start,
            end_ns=start + np.where(long, 90, 9), device=np.zeros(len(start), np.int32), stream=np.zeros(len(start), np.int64),
        )  # fmt: skip


def llama_cpp(r: Recorder, g: Geometry, rows: int, *, last_chunk: bool = True, v_first: bool = True) -> None:
    """One forward as llama.cpp launches it: k and v in either order, the last layer's FFN fused and for one row."""

    def product(tensor: str, m: int) -> None:
        number = NUMBER[g.weight_type(tensor)]
        if m == 1:
            r.add("quantize_q8_1(const float *)")
            r.add(f"void mul_mat_vec_q<(ggml_type){number}, (int)1, (bool)1>(const void *)")
        else:
            r.add("void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)1, (bool)0>(const float *)")
            r.add(
                f"void mul_mat_q<(ggml_type){number}, (int)128, (bool)0>(const char *)",
                f"{g.matrix_shape(tensor)[0]},{m},1",
            )
            r.add(f"void mul_mat_q_stream_k_fixup<(ggml_type){number}, (int)128, (bool)0>(const int *)")

    norm, add = (
        "void rms_norm_f32<(int)256, (bool)1>(const float *)",
        "void k_bin_bcast<&op_add, float, float, float>(T1 *)",
    )
    for layer in range(g.layers):
        blk = f"blk.{layer}."
        r.add(norm, f"{rows},1,1")
        product(blk + "attn_q.weight", rows)
        r.add(add)
        r.add("void rope_neox<(bool)1, (bool)0, float, float>(int)", f"{rows * g.heads},1,1")
        for name in ("attn_v", "attn_k") if v_first else ("attn_k", "attn_v"):
            product(f"{blk}{name}.weight", rows)
            r.add(add)
        r.add("void rope_neox<(bool)1, (bool)0, float, __half>(int)", f"{rows * g.kv_heads},1,1")
        r.add("void k_set_rows<float, long, __half>(int)")
        r.add("void flash_attn_mask_to_KV_max<(int)8>(int)")
        r.add("void flash_attn_ext_f16<(int)64, (int)64, (int)8, (int)8>(const char *)", f"{rows},1,1")
        product(blk + "attn_output.weight", rows)
        last = layer == g.layers - 1
        if last and not last_chunk:
            return
        m = 1 if last else rows
        if last:
            r.add("void k_get_rows_float<float, float>(int)")
        r.add(add)
        r.add(norm, f"{m},1,1")
        product(blk + "ffn_gate.weight", m)
        if not last:
            product(blk + "ffn_up.weight", m)
            r.add("void unary_gated_op_kernel<&op_silu, float>(int)")
        product(blk + "ffn_down.weight", m)
        if not last:
            r.add(add)
    r.add(norm, "1,1,1")
    product("output.weight", 1)
    r.add("[CUDA memcpy DtoH]", "", "memcpy")


def attributed(r: Recorder, g: Geometry, *, tokens: int | None = None, tail: str = "ffn_last_row") -> Attributed:
    table, matches = classify_launches(r.table(), RULES)
    return attribute(table, matches, g, tokens=tokens, tail=tail)


def gmac(table: pd.DataFrame) -> dict[str, int]:
    return table["macs"].fillna(0).groupby(table["class"]).sum().astype(int).to_dict()


def expected(g: Geometry, tokens: int, tail: str = "ffn_last_row") -> dict[str, int]:
    sums: dict[str, int] = {}
    for op in build_plan(g, tokens, Levers.from_dict({"tail": tail})):
        sums[op.cls] = sums.get(op.cls, 0) + op.macs
    return {k: v for k, v in sums.items() if v}


@pytest.mark.parametrize("v_first", [True, False])
def test_a_whole_prefill_has_the_plans_macs_by_role(v_first: bool) -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 96, v_first=v_first)
    found = attributed(r, g)
    assert (found.prefills, found.tokens, found.chunks) == (1, 96, [96])
    assert {k: v for k, v in gmac(found.roles).items() if v} == expected(g, 96)
    assert "other" not in set(found.roles["class"])
    # Every launch but the copy of the logits, the first norm and the head's preparation knows its layer.
    assert set(found.roles["layer"].dropna()) == {0, 1}


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 60), st.integers(2, 7), st.integers(1, 2))
def test_chunks_of_a_prefill_sum_to_the_same_ledger(full: int, count: int, prefills: int) -> None:
    """llama-bench's -ub splits a prefill; only its last chunk has an FFN in the last layer, and a head."""
    g, r = tiny(), Recorder()
    chunks = [full] * (count - 1) + [max(2, full // 2)]
    for _ in range(prefills):
        for i, rows in enumerate(chunks):
            llama_cpp(r, g, rows, last_chunk=i == len(chunks) - 1)
    for tokens in (None, sum(chunks)):
        found = attributed(r, g, tokens=tokens)
        assert (found.prefills, found.tokens, found.chunks) == (prefills, sum(chunks), chunks)
        assert {k: v for k, v in gmac(found.roles).items() if v} == {
            k: v * prefills for k, v in expected(g, sum(chunks)).items()
        }


def test_biases_residuals_and_the_gathered_rows_go_where_the_plan_puts_them() -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 32)
    roles = attributed(r, g).roles
    adds = roles[roles["name"].str.startswith("void k_bin_bcast")]
    # Per layer: biases of q, k, v; residuals after o and down. The last layer's residual after o is of gathered rows.
    assert adds["class"].tolist() == ["rope_kv"] * 3 + ["norm"] * 2 + ["rope_kv"] * 3 + ["tail"]
    gathered = roles[roles["name"].str.startswith("void k_get_rows")]
    assert gathered["class"].tolist() == ["tail"]
    assert roles["class"].iloc[-2] == "lm_head" and roles["class"].iloc[-1] == "copy"
    fixups = roles[roles["name"].str.contains("stream_k_fixup<")]
    assert set(fixups["class"]) == {"q_o", "k_v", "gate_up", "down"} and fixups["macs"].isna().all()


def test_joined_products_of_other_engines_are_named_by_their_count() -> None:
    """vLLM's order: qkv, attention, o, gate_up, down in one type; every row in the last layer, a head for the last."""
    g, r = tiny(), Recorder()
    rows = 40
    for _ in range(g.layers):
        r.add("void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*)", f"{rows},1,1")
        r.add("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN")
        r.add("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(int)")
        r.add("void vllm::reshape_and_cache_flash_kernel<int>(int)")
        r.add("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<int>>>(int)")
        r.add("nvjet_tst_128x128_64x4_2x1_v_bz_coopB_TNN")
        r.add("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(int)", f"{rows},1,1")
        r.add("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN")
        r.add("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>(int)")
        r.add("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN")
    r.add("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(int)", f"{rows},1,1")
    r.add("nvjet_tst_64x8_64x16_4x2_h_bz_TNT")
    found = attributed(r, g, tail="full")
    assert found.tokens == rows
    macs = gmac(found.roles)
    want = expected(g, rows, "full")
    assert macs["gate_up"] == want["gate_up"] and macs["down"] == want["down"] and macs["lm_head"] == want["lm_head"]
    assert macs["q_o"] == want["q_o"] + want["k_v"]  # one product holds q, k and v
    assert macs["attention"] == want["attention"]


def test_weight_types_that_contradict_the_file_give_no_roles() -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 32)
    at = next(i for i, row in enumerate(r.rows) if row[0].startswith("void mul_mat_q<"))
    r.rows[at] = (r.rows[at][0].replace("(ggml_type)12", "(ggml_type)14"), *r.rows[at][1:])
    with pytest.raises(RolesUnknown, match="layer 0 attn_q is q4_K in the file and q6_K in the trace"):
        attributed(r, g)


@pytest.mark.parametrize("drop", ["flash_attn_ext_f16", "mul_mat_q<"])
def test_a_missing_launch_gives_no_roles(drop: str) -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 32)
    at = next(i for i, row in enumerate(r.rows) if drop in row[0] and i > 8)
    del r.rows[at]
    with pytest.raises(RolesUnknown):
        attributed(r, g)


def test_a_trace_that_tells_no_rows_needs_tokens() -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 32)
    r.rows = [(n.replace("rms_norm_f32", "my_rms_norm_kernel"), grid, k) for n, grid, k in r.rows]
    with pytest.raises(HarnessError, match="give --tokens"):
        attributed(r, g)
    assert attributed(r, g, tokens=32).tokens == 32


# What the trace tells against the model, the tokens and the tail


GEOMETRIES = {
    "GQA": tiny(),
    "MHA": replace(tiny(), heads=4, kv_heads=4, head_dim=64, name="mha"),
    "MQA": replace(tiny(), heads=4, kv_heads=1, head_dim=64, name="mqa"),
}


def eager(g: Geometry, rows: int, *, joined: str = "", angles: bool = True, head: bool = True) -> pd.DataFrame:
    """One forward as an eager framework launches it: element-wise kernels of 128 threads × 4 elements, persistent GEMMs whose
    time is their work's, RoPE's angles as a small f32 product ahead of the first layer."""
    found: list[tuple[str, str, int, int]] = []  # name, kind of launch's class by name, blocks, ns

    def sized(name: str, width: int) -> None:
        found.append((name, f"{-(-rows * width // 512)},1,1", 0, 1000))

    def product(weights: int, m: int = rows) -> None:
        kernel = (
            "nvjet_sm90_hsh_384x8_64x4_2x1_v_bz_TNT" if m == 1 else "nvjet_sm90_hsh_128x240_64x4_2x1_v_bz_coopA_TNT"
        )
        found.append((kernel, "2,66,1" if m > 1 else "1,66,1", 0, 2000 + weights * m // 2000))

    add = "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float>>>(int)"
    silu = "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel(int)>(int)"
    found.append(("void at::native::vectorized_gather_kernel<16, long>(char*)", f"{rows},2,1", 0, 1000))
    if angles:
        found.append(("cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(int)", "16,4,1", 0, 100))
    n = {
        m: int(np.prod(g.matrix_shape(f"blk.0.{m}.weight")))
        for m in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    for _ in range(g.layers):
        sized(add, g.hidden)
        qkv = [n["attn_q"], n["attn_k"], n["attn_v"]]
        for weights in [sum(qkv)] if "qkv" in joined else qkv:
            product(weights)
        sized(add, g.q_dim)
        found.append(
            (
                "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4>>(int)",
                f"{-(-rows // 64)},1,{g.heads}",
                0,
                5000,
            )
        )
        product(n["attn_output"])
        sized(add, g.hidden)
        for weights in [2 * n["ffn_gate"]] if "gate_up" in joined else [n["ffn_gate"]]:
            product(weights)
        sized(silu, g.ffn)
        if "gate_up" not in joined:
            product(n["ffn_up"])
        product(n["ffn_down"])
        sized(add, g.hidden)
    if head:
        product(g.vocab * g.hidden, 1)
    ns = np.array([f[3] for f in found])
    start = np.cumsum(np.r_[0, ns[:-1] + 100])
    return launches.from_columns(
        name=[f[0] for f in found], kind=["kernel"] * len(found), grid=[f[1] for f in found], block=["128,1,1"] * len(found),
        start_ns=start, end_ns=start + ns, device=[0] * len(found), stream=[7] * len(found),
    )  # fmt: skip


def fit(table: pd.DataFrame, g: Geometry, **more: Any) -> Attributed:
    return attribute(*classify_launches(table, RULES), g, **({"tokens": None, "tail": "full"} | more))


@pytest.mark.parametrize("g", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("joined", ["", "qkv", "gate_up", "qkv gate_up"])
@pytest.mark.parametrize("angles", [False, True])
def test_any_grouping_of_a_layers_products_fits_and_strays_cost_nothing(g: Geometry, joined: str, angles: bool) -> None:
    rows = 1500
    found = fit(eager(g, rows, joined=joined, angles=angles), g)
    want, got = expected(g, rows, "full"), {k: v for k, v in gmac(found.roles).items() if v}
    if "qkv" in joined:
        want["q_o"] += want.pop("k_v")
    assert got == want
    small = found.launches[found.launches["name"].str.contains("sgemm")]
    assert small["macs"].isna().all() and len(found.stray) == len(small) == angles
    assert (
        "rows in grids of a block a row" in found.fits and "rows and widths" in found.fits and "types" not in found.fits
    )


@given(rows=st.integers(700, 4000), other=st.integers(700, 4000))
@settings(deadline=None, max_examples=15)
def test_tokens_that_the_grids_contradict_fail_and_those_of_the_recording_never(rows: int, other: int) -> None:
    g = GEOMETRIES["GQA"]
    table = eager(g, rows)
    assert fit(table, g, tokens=rows).tokens == rows
    if other != rows:
        with pytest.raises(RolesUnknown, match=f"have {rows} tokens, not {other}") as why:
            fit(table, g, tokens=other)
        assert why.value.contradicted
    blind = table[~table["name"].str.contains("gather")].reset_index(drop=True)
    assert "rows and widths" in fit(blind, g, tokens=rows).fits
    if not 0.45 < other / rows < 2.2:  # the grids of two numbers of rows share no width
        with pytest.raises(RolesUnknown, match="element-wise launches") as why:
            fit(blind, g, tokens=other)
        assert why.value.contradicted


def test_where_nothing_tells_rows_tokens_are_as_given() -> None:
    g = GEOMETRIES["GQA"]
    blind = eager(g, 1500)
    blind = blind[~blind["name"].str.contains("gather")].reset_index(drop=True)
    blind["block"] = pd.array([""] * len(blind), dtype="string")
    assert fit(blind, g, tokens=999).fits.endswith("tokens as given, not checked")
    with pytest.raises(HarnessError, match="give --tokens"):
        fit(blind, g)


def test_another_model_of_as_many_layers_fails_by_its_widths() -> None:
    g = GEOMETRIES["GQA"]
    other = replace(g, hidden=320, ffn=960, heads=5, kv_heads=1, name="other")
    with pytest.raises(RolesUnknown, match="element-wise launches are not 1500 rows of other's widths") as why:
        fit(eager(g, 1500), other)
    assert why.value.contradicted


def test_another_number_of_layers_fails_by_its_attentions() -> None:
    g = GEOMETRIES["GQA"]
    with pytest.raises(RolesUnknown, match="2 attention launches are no multiple of the 3 layers") as why:
        fit(eager(g, 1500), replace(g, layers=3))
    assert why.value.contradicted


@pytest.mark.parametrize(
    ("tail", "why"), [("full", None), ("last_row", "ran for every row"), ("ffn_last_row", "ran for every row")]
)
def test_the_tail_is_held_to_the_last_layers_products(tail: str, why: str | None) -> None:
    g = GEOMETRIES["GQA"]
    if why is None:
        assert "tail full" in fit(eager(g, 1500), g, tail=tail).fits
        return
    with pytest.raises(RolesUnknown, match=why) as raised:
        fit(eager(g, 1500), g, tail=tail)
    assert raised.value.contradicted


def test_llama_cpps_one_row_tail_contradicts_a_full_one() -> None:
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 32)
    assert "tail ffn_last_row" in attributed(r, g).fits
    with pytest.raises(RolesUnknown, match=r"ffn_gate.* of the last layer ran for one row"):
        attributed(r, g, tail="full")


@pytest.mark.parametrize(("every", "shared"), [(1, True), (99, False)], ids=["a rank of two", "one exchange"])
def test_a_rank_that_shares_each_product_is_not_charged_the_whole_model(every: int, shared: bool) -> None:
    """Tensor parallelism exchanges after every o and down; a single broadcast does not share the products."""
    g = GEOMETRIES["GQA"]
    table = eager(g, 1500)
    names = table["name"].to_numpy(object).copy()
    adds = np.flatnonzero(["CUDAFunctor_add" in n for n in names])
    names[adds[2::3] if every == 1 else adds[:1]] = (
        "ncclDevKernel_AllReduce_Sum_f16_RING_LL(ncclDevKernelArgsStorage<4096>)"
    )
    table["name"] = pd.array(names, dtype="string")
    if not shared:
        assert fit(table, g).tokens == 1500
        return
    with pytest.raises(RolesUnknown, match="launches exchange data between devices") as why:
        fit(table, g)
    assert not why.value.contradicted and "one device" in why.value.hint


def test_one_token_is_a_prefill_too() -> None:
    g = GEOMETRIES["GQA"]
    table = eager(g, 1, angles=False)
    found = fit(table, g, tokens=1)
    assert found.tokens == 1 and int(found.launches["macs"].fillna(0).sum()) == found.plan.macs


def test_a_layer_with_fewer_products_than_another_has_lost_one() -> None:
    g = replace(tiny(), layers=3, weight_types={})
    g = replace(g, weight_types={k.replace("blk.0", f"blk.{i}"): "f16" for k in tiny().weight_types for i in range(3)})
    table = eager(g, 1500, angles=False)
    q = np.flatnonzero(table["name"].str.contains("nvjet").to_numpy())
    with pytest.raises(RolesUnknown, match="q, k and v are"):
        fit(table.drop(index=q[8]).reset_index(drop=True), g)  # k of the second layer


# Occurrences


@given(layers=st.integers(2, 5), prefills=st.integers(1, 4))
@settings(deadline=None, max_examples=12)
def test_an_occurrence_is_a_whole_prefill_and_never_a_layer(layers: int, prefills: int) -> None:
    types = {k.replace("blk.0", f"blk.{i}"): v for k, v in tiny().weight_types.items() for i in range(layers)}
    g = replace(tiny(), layers=layers, weight_types=types)
    one = classify_launches(eager(g, 1500), RULES)[0]
    length = int(one["end_ns"].max()) + 50_000
    table = pd.concat(
        [one.assign(start_ns=one["start_ns"] + i * length, end_ns=one["end_ns"] + i * length) for i in range(prefills)],
        ignore_index=True,
    )
    found = find_repeats(table)
    assert [len(f) for f in found.prefills] == ([len(one)] * prefills if prefills > 1 else [])
    # Layers alone, without anything that runs once: only the model's layers tell prefills from them.
    inside = np.flatnonzero(one["name"].str.contains("elementwise_kernel<128, 4").to_numpy())
    layer = one.iloc[inside[0] : inside[-1] + 1].reset_index(drop=True)
    span = int(layer["end_ns"].max()) + 100
    bare = pd.concat(
        [
            layer.assign(start_ns=layer["start_ns"] + i * span, end_ns=layer["end_ns"] + i * span)
            for i in range(prefills)
        ],
        ignore_index=True,
    )
    assert find_repeats(bare).prefills == []
    told = find_repeats(bare, layers).prefills
    assert len(told) == (prefills if prefills > 1 else 0) and len({len(t) for t in told}) <= 1


def test_forwards_repeat_and_layers_do_not_pass_for_them() -> None:
    g, r = tiny(), Recorder()
    for i in range(30):
        r.add("[CUDA memcpy HtoD]", "", "memcpy")
        if i == 20:
            r.add("upload_done")
    for _ in range(3):
        r.add("[CUDA memcpy HtoD]", "", "memcpy")
        llama_cpp(r, g, 64)
    found = find_occurrences(r.table())
    assert len(found) == 3 and len({len(f) for f in found}) == 1
    one = Recorder()
    llama_cpp(one, g, 64)
    assert len(found[0]) == len(one.rows) + 1  # with the copy ahead of it


def test_a_chunked_prefill_is_one_occurrence() -> None:
    g, r = tiny(), Recorder()
    for _ in range(2):
        for rows, last in [(64, False), (64, False), (20, True)]:
            llama_cpp(r, g, rows, last_chunk=last)
    found = find_occurrences(r.table())
    assert len(found) == 2 and len(found[0]) * 2 == len(r.rows)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=4, max_size=30), st.integers(2, 5), st.lists(st.integers(5, 9), max_size=6),
    st.lists(st.integers(5, 9), max_size=6),
)  # fmt: skip
def test_any_forward_repeated_is_found_between_whatever_surrounds_it(
    forward: list[int], count: int, before: list[int], after: list[int]
) -> None:
    forward = [*forward, 100]  # something that runs once a forward, such as the head
    keys = np.array([*before, *forward * count, *after])
    found = repeating_run(keys)
    assert found is not None
    first, period, times = found
    assert period == len(forward) and times == count
    assert first >= len(before) - 0 and first + period * times <= len(keys) - 0
    assert (keys[first : first + period * (times - 1)] == keys[first + period : first + period * times]).all()


def test_what_prepares_the_first_product_belongs_to_layer_0() -> None:
    g, r = tiny(), Recorder()
    for _ in range(2):
        llama_cpp(r, g, 32)
    roles = attributed(r, g).roles
    forward = len(r.rows) // 2
    for at in (0, forward):
        assert roles["layer"].iloc[at : at + 3].tolist() == [0, 0, 0]
        assert roles["class"].iloc[at : at + 3].tolist() == ["norm", "quantize", "q_o"]


# Layers, chunks and heads: what runs between two forwards


def of_layers(layers: int) -> Geometry:
    types = {k.replace("blk.0", f"blk.{i}"): v for k, v in tiny().weight_types.items() for i in range(layers)}
    return replace(tiny(), layers=layers, weight_types=types, name=f"{layers} layers")


def forward(layers: int, rows: int, *, head: bool = True, past: int = 0) -> pd.DataFrame:
    """One eager forward after `past` cached rows: its attention takes as much longer as it attends to more keys."""
    table = eager(of_layers(layers), rows, angles=False, head=head)
    ns = np.where(table["class"].eq("attention") | table["name"].str.contains("flash"), 1 + 2 * past / rows, 1.0)
    ns = ((table["end_ns"] - table["start_ns"]).to_numpy() * ns).astype(np.int64)
    start = np.cumsum(np.r_[0, ns[:-1] + 100])
    return table.assign(start_ns=start, end_ns=start + ns)


def joined(*parts: pd.DataFrame, wait: int = 50_000) -> pd.DataFrame:
    found, at = [], 0
    for part in parts:
        found.append(part.assign(start_ns=part["start_ns"] + at, end_ns=part["end_ns"] + at))
        at = int(found[-1]["end_ns"].max()) + wait
    return pd.concat(found, ignore_index=True)


def chunked(layers: int, rows: int, count: int) -> list[pd.DataFrame]:
    """A prefill in chunks, of which the last alone has a head."""
    return [forward(layers, rows, head=i == count - 1, past=i * rows) for i in range(count)]


@given(layers=st.integers(2, 28), prefills=st.integers(1, 3), data=st.data())
@settings(deadline=None, max_examples=25)
def test_a_model_of_other_layers_is_contradicted_and_its_own_never(
    layers: int, prefills: int, data: st.DataObject
) -> None:
    """Of the divisors and the multiples too: a layer's end is no forward's end, and a head ends one."""
    table = joined(*[forward(layers, 1500)] * prefills)
    found = fit(table, of_layers(layers), tokens=1500)
    assert (found.prefills, found.tokens) == (prefills, 1500)
    total = layers * prefills
    others = [n for n in range(1, total + 1) if total % n == 0 and n != layers] + [total + 1]
    with pytest.raises(RolesUnknown, match=f"forwards of {layers} layers") as why:
        fit(table, of_layers(data.draw(st.sampled_from(others))), tokens=1500)
    assert why.value.contradicted


@given(wrong=st.sampled_from([1, 3, 6, 24, 48]))
@settings(deadline=None, max_examples=5)
def test_llama_cpps_micro_batches_have_the_layers_that_they_show(wrong: int) -> None:
    """No embedding on the device, chunks that end without an FFN: a place between two layers is another all the same."""
    g, r = of_layers(12), Recorder()
    for _ in range(2):
        for last in (False, True):
            llama_cpp(r, g, 64, last_chunk=last)
    assert attributed(r, g, tokens=128).chunks == [64, 64]
    with pytest.raises(RolesUnknown, match="forwards of 12 layers") as why:
        attributed(r, of_layers(wrong))
    assert why.value.contradicted


def test_one_layer_is_a_model_too() -> None:
    table = joined(*[forward(1, 1500)] * 5)
    assert fit(table, of_layers(1), tokens=1500).prefills == 5
    with pytest.raises(RolesUnknown) as why:
        fit(table, of_layers(5), tokens=1500)
    assert why.value.contradicted


def test_a_copy_in_one_layer_ends_no_forward() -> None:
    """An engine that reads a value back in the middle of a forward."""
    table = forward(6, 1500)
    at = int(np.flatnonzero(table["name"].str.contains("flash"))[2]) + 1
    columns = {
        c: table[c].tolist() for c in ("name", "kind", "grid", "block", "start_ns", "end_ns", "device", "stream")
    }
    between = int(table["end_ns"].iloc[at - 1])
    for c, value in zip(
        columns, ("[CUDA memcpy DtoH]", "memcpy", "", "", between + 10, between + 20, 0, 7), strict=True
    ):
        columns[c].insert(at, value)
    assert fit(launches.from_columns(**columns), of_layers(6), tokens=1500).prefills == 1


@pytest.mark.parametrize("prefills", [1, 3])
def test_an_engine_without_a_head_has_the_ledger_without_it(prefills: int) -> None:
    """Embeddings: no logits are computed."""
    g = of_layers(6)
    found = fit(joined(*[forward(6, 1500, head=False)] * prefills), g, tokens=1500)
    want = sum(v for k, v in expected(g, 1500, "full").items() if k != "lm_head")
    assert found.prefills == prefills and int(found.launches["macs"].fillna(0).sum()) == prefills * want


def test_chunks_with_one_head_are_one_prefill_whatever_the_tokens_say() -> None:
    g = of_layers(4)
    table = joined(*chunked(4, 512, 4) * 3)
    found = fit(table, g, tokens=2048)
    assert (found.prefills, found.chunks) == (3, [512] * 4)
    with pytest.raises(RolesUnknown, match="have 2048 tokens, not 512") as why:
        fit(table, g, tokens=512)
    assert why.value.contradicted


@pytest.mark.parametrize(
    ("parts", "tokens", "why"),
    [
        ([forward(4, 512, past=512 * i) for i in range(4)], 512, "attention takes .* chunks of one prefill"),
        ([forward(4, 512, past=512 * i) for i in range(4)], 2048, "as in chunks of one prefill of 2048 tokens"),
        ([forward(4, 512), *[forward(4, 1)] * 3], 512, "3 of 4 forwards are decode steps"),
        ([*chunked(4, 512, 4), *chunked(4, 512, 4)[:2]], 2048, "ends inside a prefill"),
        ([*chunked(4, 512, 4)[2:], *chunked(4, 512, 4)], 2048, "the first of 2 prefills holds 1024 of 2048 tokens"),
    ],
    ids=["heads in every chunk", "and their sum", "decode steps", "cut at its end", "cut at its start"],
)  # fmt: skip
def test_what_is_no_whole_prefill_is_charged_nothing_and_contradicts_nothing(
    parts: list[pd.DataFrame], tokens: int, why: str
) -> None:
    with pytest.raises(RolesUnknown, match=why) as raised:
        fit(joined(*parts), of_layers(4), tokens=tokens)
    assert not raised.value.contradicted


def test_a_ledger_of_other_macs_contradicts() -> None:
    """A chunk whose rows nobody reads is no prefill, whatever its rows."""
    g, r = tiny(), Recorder()
    llama_cpp(r, g, 64, last_chunk=False)
    with pytest.raises(RolesUnknown, match="GMAC, the ledger's to") as why:
        attributed(r, g, tokens=64)
    assert why.value.contradicted


@given(cut=st.floats(0.1, 0.9), layers=st.integers(3, 12))
@settings(deadline=None, max_examples=20)
def test_a_cut_trace_says_where_it_is_cut(cut: float, layers: int) -> None:
    """Whole forwards are not: neither alone nor one after another."""
    whole = classify_launches(joined(*[forward(layers, 1500)] * 3), RULES)[0]
    each = len(whole) // 3
    found = find_forwards(whole)
    assert found is not None and (found.lengths, found.cut) == ([layers] * 3, "")
    assert (one := find_forwards(whole.iloc[:each])) is not None and one.cut == ""
    attentions = np.flatnonzero((whole["class"] == "attention").to_numpy()[:each])
    at = int(attentions[0] + cut * (attentions[-1] - attentions[0]))
    for part, says in ((whole.iloc[: 2 * each + at], "ends"), (whole.iloc[at + 1 :], "starts")):
        told = find_forwards(part.reset_index(drop=True))
        assert told is not None and told.cut == says and set(told.whole) == {layers}


def test_a_cut_forward_of_the_right_model_contradicts_nothing() -> None:
    table = joined(*[forward(6, 1500)] * 3)
    at = int(np.flatnonzero(table["name"].str.contains("flash"))[2]) + 1
    for part in (table.iloc[at:], table.iloc[:-at]):
        with pytest.raises(RolesUnknown, match="inside a forward of 6 layers") as why:
            fit(part.reset_index(drop=True), of_layers(6), tokens=1500)
        assert not why.value.contradicted
        with pytest.raises(RolesUnknown) as wrong:
            fit(part.reset_index(drop=True), of_layers(4), tokens=1500)
        assert wrong.value.contradicted


# What determines a dimension, and what does not


FIELDS = {"hidden": "hidden", "ffn": "ffn", "q": "heads", "kv": "kv_heads", "vocab": "vocab"}
SILU = "void at::native::vectorized_elementwise_kernel<{}, at::native::(anonymous namespace)::silu_kernel(int), std::array<char*, 2ul> >(int)"


def claimed(fits: str) -> set[str]:
    found = re.search(r"widths of ([\w, ]+) in", fits)
    return set(found[1].split(", ")) if found else set()


def with_column(table: pd.DataFrame, name: str, values: list[str]) -> pd.DataFrame:
    return table.assign(**{name: pd.array(values, dtype=pd.StringDtype("python"))})


def with_shapes(table: pd.DataFrame, g: Geometry, rows: int, vocab: int | None = None) -> pd.DataFrame:
    """The table as a profiler with record_shapes=True tells it: M, N, K of every product in place."""
    roles = fit(table, g, tokens=rows).roles
    widths = [n for n, _ in (g.matrix_shape(f"blk.0.{m}.weight") for m in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"))]  # fmt: skip
    products = [i for i, n in enumerate(table["name"]) if "nvjet" in n]
    told = [""] * len(roles)
    for at, i in enumerate(products[:-1]):
        told[i] = f"{rows},{widths[at % 7]},{g.ffn if at % 7 == 6 else g.q_dim if at % 7 == 3 else g.hidden}"
    told[products[-1]] = f"1,{vocab or g.vocab},{g.hidden}"
    return with_column(table, "shape", told)


@given(
    heads=st.integers(2, 16), kv=st.integers(1, 4), ffn=st.integers(6, 40), hidden=st.integers(4, 24),
    rows=st.integers(200, 4000), name=st.sampled_from(list(FIELDS)), factor=st.sampled_from([0.5, 0.75, 1.25, 1.5, 2, 3]),
    joined=st.sampled_from(["", "qkv", "gate_up", "qkv gate_up"]), dims=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_what_is_claimed_fails_when_it_is_wrong_and_honest_geometries_never_fail(
    heads: int, kv: int, ffn: int, hidden: int, rows: int, name: str, factor: float, joined: str, dims: bool
) -> None:
    g = replace(tiny(), heads=heads * kv, kv_heads=kv, head_dim=64, ffn=ffn * 64, hidden=hidden * 64, name="any")
    table = eager(g, rows, joined=joined)
    if dims and not joined:
        table = with_shapes(table, g, rows)
    fits = fit(table, g, tokens=rows).fits
    if dims and not joined:
        assert claimed(fits) == set(FIELDS)
    other = max(1, round(getattr(g, FIELDS[name]) * factor))
    if name in claimed(fits) and not 0.8 < other / getattr(g, FIELDS[name]) < 1.25:
        with pytest.raises(RolesUnknown) as why:
            fit(table, replace(g, **{FIELDS[name]: other}), tokens=rows)
        assert why.value.contradicted


@pytest.mark.parametrize(("vector", "told"), [(8, True), (4, False)])
def test_a_vector_of_8_cannot_be_4_elements_and_one_of_4_alone_tells_no_ffn(vector: int, told: bool) -> None:
    g = replace(tiny(), ffn=768)
    rows, threads = 1500, 128
    table = eager(g, rows)
    silu = ["silu" in n for n in table["name"]]
    table = with_column(
        table, "name", [SILU.format(vector) if s else n for s, n in zip(silu, table["name"], strict=True)]
    )
    grid = f"{-(-rows * g.ffn // (threads * 8))},1,1"
    table = with_column(table, "grid", [grid if s else n for s, n in zip(silu, table["grid"], strict=True)])
    assert ("ffn" in claimed(fit(table, g).fits)) is told
    half = replace(g, ffn=g.ffn // 2)
    if told:
        with pytest.raises(RolesUnknown, match="element-wise launches are not 1500 rows"):
            fit(table, half)
    else:
        assert "ffn" not in claimed(fit(table, half).fits)
    # Another kernel of the same template that can be 8 only tells the number of all of them.
    add = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul> >(int)"
    is_hidden = [g_ == f"{-(-rows * g.hidden // 512)},1,1" for g_ in table["grid"]]
    table = with_column(table, "name", [add if h else n for h, n in zip(is_hidden, table["name"], strict=True)])
    table = with_column(table, "grid", [f"{-(-rows * g.hidden // 1024)},1,1" if h else n for h, n in zip(is_hidden, table["grid"], strict=True)])  # fmt: skip
    assert "ffn" in claimed(fit(table, g).fits)
    with pytest.raises(RolesUnknown):
        fit(table, half)


def test_a_few_launches_of_another_width_are_strays_and_those_of_every_layer_are_not() -> None:
    types = {k.replace("blk.0", f"blk.{i}"): v for k, v in tiny().weight_types.items() for i in range(6)}
    g = replace(tiny(), layers=6, weight_types=types)
    table = eager(g, 1500)
    silu = np.flatnonzero(table["name"].str.contains("silu"))
    odd = f"{-(-1500 * 1024 // 512)},1,1"

    def change(rows: np.ndarray) -> pd.DataFrame:
        return with_column(table, "grid", [odd if i in rows else x for i, x in enumerate(table["grid"])])

    assert fit(change(silu[:2]), g).tokens == 1500
    with pytest.raises(RolesUnknown, match="element-wise launches"):
        fit(change(silu), g)


def test_tiles_in_a_products_name_tell_its_width_unless_it_is_persistent() -> None:
    g = replace(tiny(), ffn=16384, hidden=1024, heads=16, kv_heads=16)
    rows, kernel = 4000, "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm_f16_128x256_32x3_tn_align8>(int)"
    table = eager(g, rows, angles=False)
    blind = table[~table["name"].str.contains("elementwise")].reset_index(drop=True)
    products = [i for i, n in enumerate(blind["name"]) if "nvjet" in n and "384x8" not in n]
    width = [g.hidden] * 4 + [g.ffn, g.ffn, g.hidden]

    def tiled(grids: list[str]) -> pd.DataFrame:
        names, grid = blind["name"].tolist(), blind["grid"].tolist()
        for at, i in enumerate(products):
            names[i], grid[i] = kernel, grids[at % 7]
        return with_column(with_column(blind, "name", names), "grid", grid)

    across = -(-rows // 128)
    for swizzle in (1, 2, 4):
        tiles = [-(-w // 256) for w in width]
        grids = [f"{across * swizzle},{-(-t // swizzle)},1" for t in tiles]
        grids = [
            x if across * w / 256 > 304 else f"{across},{-(-w // 256)},1" for x, w in zip(grids, width, strict=True)
        ]
        table = tiled(grids)
        assert "ffn" in claimed(fit(table, g).fits)
        for factor in (0.5, 1.25, 2):
            with pytest.raises(RolesUnknown, match="tells other tiles of ffn_"):
                fit(table, replace(g, ffn=int(g.ffn * factor)))
    persistent = tiled(["132,1,1"] * 7)
    for ffn in (g.ffn, 2 * g.ffn):
        assert "ffn" not in claimed(fit(persistent, replace(g, ffn=ffn)).fits)


def test_the_profilers_dimensions_tell_rows_and_every_width_and_a_padded_vocabulary_is_honest() -> None:
    g = GEOMETRIES["GQA"]
    table = with_shapes(eager(g, 1500), g, 1500)
    blind = table[~table["name"].str.contains("gather")].reset_index(drop=True)
    found = fit(blind, g)
    assert found.tokens == 1500 and claimed(found.fits) == set(FIELDS) and "dimensions of 15 products" in found.fits
    with pytest.raises(RolesUnknown, match="1500 tokens, not 1400"):
        fit(blind, g, tokens=1400)
    for field, value in (("ffn", 1152), ("kv_heads", 1), ("heads", 8), ("hidden", 384), ("vocab", 32000)):
        with pytest.raises(RolesUnknown) as why:
            fit(blind, replace(g, **{field: value}))
        assert why.value.contradicted
    padded = with_shapes(eager(g, 1500), g, 1500, vocab=g.vocab + 64)
    assert fit(padded, g).tokens == 1500


def test_flash_attention_2_tells_heads_in_its_grid() -> None:
    g = GEOMETRIES["MHA"]
    table = eager(g, 1500)
    bare = table[~table["name"].str.contains("elementwise")].reset_index(drop=True)
    assert "q" in claimed(fit(bare, g).fits)
    with pytest.raises(RolesUnknown, match="other heads"):
        fit(bare, replace(g, heads=8))
    other = [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7" if "flash" in n else n
        for n in bare["name"]
    ]
    assert "q" not in claimed(fit(with_column(bare, "name", other), g).fits)


@pytest.mark.parametrize(("field", "factor"), [("ffn", 0.5), ("ffn", 2), ("ffn", 1.25), ("kv_heads", 1.75), ("kv_heads", 0.5), ("kv_heads", 2), ("heads", 0.5), ("hidden", 1 + 128 / 3584), ("hidden", 1 - 128 / 3584)])  # fmt: skip
def test_a_recorded_pytorch_prefill_fits_its_model_and_no_neighbour(field: str, factor: float) -> None:
    path = Path(__file__).parents[2].parent / "shared/cases/traces/h200_hf_qwen2_7b_prefill_3325.pt.trace.json.gz"
    if not path.is_file():
        pytest.skip(f"no recorded trace at {path}")
    g = PRESETS["qwen2.5-7b-q4_k_m"]()
    g = replace(g, weight_types=dict.fromkeys(g.weight_types, "f16"))
    table, matches = classify_launches(read_kineto(path).launches, RULES)
    assert claimed(attribute(table, matches, g, tokens=3325, tail="full").fits) == {"hidden", "ffn", "q", "kv"}
    wrong = replace(g, **{field: round(getattr(g, field) * factor)})
    with pytest.raises(RolesUnknown) as why:
        attribute(table, matches, wrong, tokens=3325, tail="full")
    assert why.value.contradicted
