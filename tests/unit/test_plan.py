"""The plan and its ledger, against the figures that the campaign counted by hand for Qwen2.5-7B Q4_K_M."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EngineError
from engine.geometry import Geometry, q4_k_m_types, qwen2_5_7b, smollm2_135m, tiny
from engine.levers import Levers
from engine.plan import ROLES, Plan, build_plan

T = 3325
TAILS = ("last_row", "ffn_last_row", "full")


def gmac(plan: Plan, *matrices: str, weight_type: str | None = None, part: tuple[str, ...] = ()) -> float:
    """GMAC of ledger rows of these matrices (roles for ops without weights), to what the notes print."""
    rows = [
        r
        for r in plan.ledger()
        if (r.matrix in matrices or r.role in matrices)
        and (weight_type is None or r.weight_type == weight_type)
        and (not part or r.part in part)
    ]
    return sum(r.macs for r in rows) / 1e9


BODY, TAIL = ("body", "last_layer"), ("tail",)

HAND_COUNTED = [
    # matrices, weight type, part, GMAC at 3325 tokens (design notes, "the ledger at 3325 tokens")
    (("ffn_gate", "ffn_up"), "q4_K", BODY, 12190.600397),
    (("ffn_gate", "ffn_up"), "q4_K", TAIL, 0.135791),
    (("ffn_down",), "q4_K", (), 3160.526029),
    (("ffn_down",), "q6_K", BODY, 2934.774170),
    (("ffn_down",), "q6_K", TAIL, 0.067895),
    (("attn_q", "attn_output"), "q4_K", BODY, 2306.329805),
    (("attn_q", "attn_output"), "q4_K", TAIL, 0.025690),
    (("attn_k",), "q4_K", ("body",), 164.737843),
    (("attn_k",), "q4_K", ("last_layer",), 6.101402),
    (("attn_v",), "q4_K", (), 85.419622),
    (("attn_v",), "q6_K", ("body",), 79.318221),
    (("attn_v",), "q6_K", ("last_layer",), 6.101402),
    (("attention",), None, BODY, 1070.152474),
    (("attention",), None, TAIL, 0.023834),
    (("output",), "q6_K", ("head",), 0.544997),
]


@pytest.mark.parametrize(("matrices", "weight_type", "part", "expected"), HAND_COUNTED)
def test_the_ledger_at_3325_tokens_equals_the_hand_count(matrices, weight_type, part, expected) -> None:
    plan = build_plan(qwen2_5_7b(), T)
    assert gmac(plan, *matrices, weight_type=weight_type, part=part) == pytest.approx(expected, abs=1e-6)


def test_the_totals_at_3325_tokens_equal_the_hand_count() -> None:
    plan = build_plan(qwen2_5_7b(), T)
    rows = plan.ledger()
    assert sum(r.gmac for r in rows if r.weight_type == "q4_K") == pytest.approx(17913.876578, abs=1e-6)
    assert sum(r.gmac for r in rows if r.weight_type == "q6_K" and r.part != "head") == pytest.approx(
        3020.261687, abs=1e-6
    )
    assert sum(r.gmac for r in rows if r.matrix != "-") == pytest.approx(20934.683263, abs=2e-6)
    assert plan.macs / 1e9 == pytest.approx(22004.859570, abs=1e-6)


def test_llama_cpps_own_tail_has_the_gmac_of_its_recorded_table() -> None:
    """`ffn_last_row` is what llama.cpp's CUDA graph computes: figures counted from its trace."""
    plan = build_plan(qwen2_5_7b(), T, Levers(tail="ffn_last_row"))
    q4 = sum(r.gmac for r in plan.ledger() if r.weight_type == "q4_K")
    assert q4 == pytest.approx(17999.1, abs=0.2)
    assert gmac(plan, "attention") == pytest.approx(28 * 39.6353, abs=0.01)


def test_the_structure_says_which_layers_are_whole() -> None:
    assert build_plan(qwen2_5_7b(), T).structure().startswith("27 full layers + one-row tail")
    assert build_plan(qwen2_5_7b(), T, Levers(tail="full")).structure().startswith("28 full layers")


def test_a_longer_tail_only_adds_work() -> None:
    macs = [build_plan(qwen2_5_7b(), T, Levers(tail=tail)).macs for tail in TAILS]
    assert macs == sorted(macs) and len(set(macs)) == 3


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("make", [qwen2_5_7b, smollm2_135m, tiny])
def test_one_gemm_for_several_matrices_conserves_macs_and_weight_bytes(make, tail) -> None:
    apart, joined = (build_plan(make(), 519, Levers(tail=tail, concat=c)) for c in ("off", "on"))
    assert len(joined) < len(apart)
    assert joined.macs == apart.macs

    def per_matrix(plan: Plan) -> dict[tuple[str, str, str], tuple[int, ...]]:
        return {
            (r.matrix, r.weight_type, r.part): (r.macs, r.file_bytes, r.path_bytes)
            for r in plan.ledger()
            if r.matrix != "-"
        }

    assert per_matrix(joined) == per_matrix(apart)


@pytest.mark.parametrize("tail", TAILS)
def test_one_token_has_no_tail_and_one_key(tail) -> None:
    g = qwen2_5_7b()
    plan = build_plan(g, 1, Levers(tail=tail))
    assert "tail" not in {op.cls for op in plan}
    weights = g.layers * (2 * g.hidden * g.q_dim + 2 * g.hidden * g.kv_dim + 3 * g.hidden * g.ffn) + g.hidden * g.vocab
    assert plan.macs == weights + g.layers * 2 * g.q_dim


def test_all_logits_runs_the_last_layer_and_the_head_for_every_row() -> None:
    g, t = tiny(), 129
    plan = build_plan(g, t, all_logits=True)
    assert all(op.m == t for op in plan if op.kind in ("gemm", "attention"))
    assert plan.macs - build_plan(g, t, Levers(tail="full")).macs == (t - 1) * g.hidden * g.vocab


def test_decoding_one_row_after_a_cache_counts_every_cached_key() -> None:
    g = tiny()
    plan = build_plan(g, 1, past=99)
    assert [op.n for op in plan if op.kind == "attention"] == [100, 100]
    assert sum(op.macs for op in plan if op.kind == "attention") == g.layers * 2 * g.q_dim * 100


@pytest.mark.parametrize(("tokens", "past"), [(0, 0), (-1, 0), (1, -1), (32769, 0), (1, 32768)])
def test_rows_that_cannot_be_planned_are_refused_in_one_sentence(tokens, past) -> None:
    with pytest.raises(EngineError) as refused:
        build_plan(qwen2_5_7b(), tokens, past=past)
    assert "\n" not in str(refused.value)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    layers, head_dim = draw(st.integers(1, 9)), 64 * draw(st.integers(1, 2))
    tied = draw(st.booleans())
    heads = kv_heads * group
    base = tiny(draw(st.sampled_from(["llama", "qwen2"])))
    return replace(
        base, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim, hidden=256 * draw(st.integers(1, 4)),
        ffn=256 * draw(st.integers(1, 6)), vocab=draw(st.integers(8, 999)), weight_types=q4_k_m_types(layers, tied=tied),
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    geometries(), st.integers(1, 600), st.sampled_from(TAILS), st.sampled_from(["off", "on"]), st.booleans(),
    st.sampled_from(["f16", "f32"]), st.integers(0, 300),
)  # fmt: skip
def test_the_ledger_sums_to_the_plan_for_any_geometry(g, tokens, tail, concat, all_logits, precision, past) -> None:
    plan = build_plan(
        g, tokens, Levers(tail=tail, concat=concat), precision=precision, past=past, all_logits=all_logits
    )
    rows = plan.ledger()
    assert sum(r.macs for r in rows) == plan.macs
    assert sum(r.path_bytes + r.io_bytes for r in rows) == sum(op.bytes for op in plan)
    assert [op.index for op in plan] == list(range(len(plan)))
    assert {op.cls for op in plan} | {r.role for r in rows} <= set(ROLES)


@settings(max_examples=60, deadline=None)
@given(geometries(), st.integers(2, 400), st.sampled_from(TAILS))
def test_gemm_macs_equal_rows_times_weights_counted_another_way(g, tokens, tail) -> None:
    """Independent count: every matrix of every layer times the rows that its tail leaves."""
    plan = build_plan(g, tokens, Levers(tail=tail))
    expected: dict[str, int] = defaultdict(int)
    for layer in range(g.layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            n, k = g.matrix_shape(f"blk.{layer}.{name}.weight")
            one_row = {
                "last_row": name not in ("attn_k", "attn_v"),
                "ffn_last_row": name.startswith("ffn"),
                "full": False,
            }[tail]
            expected[name] += n * k * (1 if one_row and layer == g.layers - 1 else tokens)
    counted: dict[str, int] = defaultdict(int)
    for row in plan.ledger():
        if row.matrix not in ("-", "output"):
            counted[row.matrix] += row.macs
    assert counted == expected
