"""Roles, layers and MACs from launch order: chunked prefills, joined products, orders of k and v, and traces that do not fit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.geometry import Geometry, tiny
from engine.levers import Levers
from engine.plan import build_plan
from harness import launches
from harness.attribution.classify import classify_launches, load_rules
from harness.attribution.occurrences import find_occurrences, repeating_run
from harness.attribution.roles import Attributed, RolesUnknown, attribute
from harness.errors import HarnessError

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
        r.add("void rope_neox<(bool)1, (bool)0, float, float>(int)")
        for name in ("attn_v", "attn_k") if v_first else ("attn_k", "attn_v"):
            product(f"{blk}{name}.weight", rows)
            r.add(add)
        r.add("void rope_neox<(bool)1, (bool)0, float, __half>(int)")
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


# Occurrences


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
