"""Kernel names as engines really spell them, against their class; and names that try to fool the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.tensors import type_name
from harness import launches
from harness.attribution.classify import (
    RULE_FILES,
    Rules,
    classify_launches,
    load_rules,
    parse_rules,
    split_name,
)
from harness.cli import group
from harness.errors import HarnessError
from harness.launches import FAMILIES

ATEN = "void at::native::vectorized_elementwise_kernel<(int)4, {}, std::array<char *, (unsigned long)2>>(int, T2, T3)"
NOCAST = (
    "void at::native::elementwise_kernel<(int)128, (int)4, void at::native::gpu_kernel_impl_nocast<{}>"
    "(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
)

# name, class, weight type ("-": none told), tile, from nsys and Kineto traces and profiles that people published
NAMES = [
    # llama.cpp, as nsys and as c++filt spell it
    ("void mul_mat_q<(ggml_type)12, (int)128, (bool)0, (ggml_prec)30>(const char *, const int *, int)", "gemm", "q4_K", ""),
    ("void mul_mat_q<(ggml_type)14, 128, false>(char const*, int const*, float*)", "gemm", "q6_K", ""),
    ("void mul_mat_q<(ggml_type)8, (int)128, (int)8, (bool)1>(const char *, const char *, float *)", "gemm", "q8_0", ""),
    ("void mul_mat_q<(ggml_type)39, (int)112, (bool)0>(const char *)", "gemm", "mxfp4", ""),
    ("void mul_mat_q_stream_k_fixup<(ggml_type)12, (int)128, (bool)0>(const int *, float *)", "gemm_fixup", "q4_K", ""),
    ("void mul_mat_vec_q<(ggml_type)14, (int)1, (bool)1, (bool)0, (bool)0>(const void *, const void *)", "gemv", "q6_K", ""),
    ("void mul_mat_vec_f<__half, float, (int)1, (int)128, (bool)0, (bool)0>(const T1 *, const float *)", "gemv", "f16", ""),
    ("void mul_mat_f<__half2, (int)32, (int)8, (int)4, (bool)0>(const T1 *, const float *)", "gemm", "f16", ""),
    ("void mmq_ids_helper<(int)0>(const int *, int *, int *, int *, int, int, int, int, int)", "gemm_fixup", "-", ""),
    ("quantize_q8_1(const float *, void *, long, long, long, long, long, unsigned int, uint3)", "quantize", "-", ""),
    ("void quantize_mmq_q8_1<(mmq_q8_1_ds_layout)0>(const float *, const int *, void *, long)", "quantize", "-", ""),
    ("void dequantize_block_q4_K<__half>(const void *, T1 *)", "dequantize", "q4_K", ""),
    ("void dequantize_block_iq3_xxs<float>(const void *, T1 *)", "dequantize", "iq3_xxs", ""),
    ("void dequantize_block<(int)32, (int)1, &dequantize_q4_1, __half>(const void *, T4 *, long)", "dequantize", "-", ""),
    ("void convert_unary_cont_vec4<__half, float>(const void *, T2 *, long)", "convert", "-", ""),
    ("void flash_attn_ext_f16<(int)128, (int)128, (int)8, (int)8, (bool)0, (bool)0, (bool)0>(const char *)", "attention", "-", ""),
    ("void flash_attn_mma_ext_f16<(int)256, (int)8, (int)8, (int)4, (int)32, (int)2, (bool)0>(const char *)", "attention", "-", ""),
    ("void flash_attn_stream_k_fixup_general<(int)128, (int)8, (int)8>(float *, const float2 *, int)", "attention", "-", ""),
    ("void flash_attn_mask_to_KV_max<(int)8>(const __half2 *, int *, int, long, long)", "attention", "-", ""),
    ("void soft_max_f32<(bool)1, (int)0, (int)0, __half>(const float *, const T4 *, float *)", "attention", "-", ""),
    ("void rms_norm_f32<(int)1024, (bool)1, (bool)0, (bool)0>(const float *, float *, int, long)", "norm", "-", ""),
    ("void rope_neox<(bool)1, (bool)0, float, __half>(const T3 *, T4 *, int, int, int)", "rope", "-", ""),
    ("void unary_gated_op_kernel<&op_silu, float>(const T2 *, const T2 *, T2 *, long, long, long, long)", "swiglu", "-", ""),
    ("void k_bin_bcast<&op_add, float, float, float, const float *>(const T2 *, const T3 *, T4 *, T5...)", "elementwise", "-", ""),
    ("void k_set_rows<float, long, __half>(const T1 *, const T2 *, T3 *, long, long)", "kv_store", "-", ""),
    ("void k_get_rows_float<float, float>(const T1 *, const int *, T2 *, long, long)", "embedding", "-", ""),
    ("void cpy_flt<&cpy_1_flt<float, __half>>(const char *, char *, int, int, int)", "copy", "-", ""),
    # PyTorch eager
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
     "gemm", "bf16", "128x128x64"),
    ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4, false>>(pytorch_flash::Flash_fwd_params)",
     "attention", "-", ""),
    (ATEN.format("at::native::bfloat16_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda(float) (instance 1)]"), "convert", "-", ""),
    (ATEN.format("void at::native::<unnamed>::pow_tensor_scalar_kernel_impl<float, float>(at::TensorIteratorBase &, T2)::[lambda(float) (instance 1)]"),
     "norm", "-", ""),
    (ATEN.format("at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const"), "swiglu", "-", ""),
    (ATEN.format("at::native::FillFunctor<float>"), "memset", "-", ""),
    (ATEN.format("at::native::CUDAFunctor_add<c10::BFloat16>"), "elementwise", "-", ""),
    (NOCAST.format("at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)]::operator ()() const"), "copy", "-", ""),
    (NOCAST.format("at::native::neg_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 2)]"), "rope", "-", ""),
    ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase &)::[lambda() (instance 3)], "
     "std::array<char *, (unsigned long)2>, (int)4, at::native::memory::LoadWithCast<(int)1>>(int, T1, T2)", "convert", "-", ""),
    ("void at::native::reduce_kernel<(int)512, (int)1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int>>(T3)",
     "norm", "-", ""),
    ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned int, long, 4>>(T3)", "sampling", "-", ""),
    ("void at::native::<unnamed>::vectorized_layer_norm_kernel<float, float, (bool)0>(int, T2, const T1 *)", "norm", "-", ""),
    ("void at::native::<unnamed>::CatArrayBatchedCopy_vectorized<at::native::<unnamed>::OpaqueType<(unsigned int)2>, unsigned int>(char *)", "copy", "-", ""),
    ("void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>(int)", "embedding", "-", ""),
    ("void at::native::index_elementwise_kernel<(int)128, (int)4, void at::native::gpu_index_kernel<void at::native::index_put_kernel_impl"
     "<at::native::OpaqueType<(int)2>>(at::TensorIterator &)::[lambda(char *, const char *, long) (instance 1)]>(at::TensorIteratorBase &)>(long, T3)",
     "kv_store", "-", ""),
    ("void (anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out(c10::Scalar const&)::{lambda()#1}>(int)",
     "elementwise", "-", ""),
    # Inductor
    ("triton_poi_fused_mul_silu_8", "swiglu", "-", ""),
    ("triton_red_fused__to_copy_add_embedding_mean_mul_pow_rsqrt_10", "norm", "-", ""),
    ("triton_red_fused_fused_add_rms_norm_0", "norm", "-", ""),
    ("triton_red_fused__to_copy_mean_pow_3", "norm", "-", ""),
    ("triton_poi_fused__to_copy_1", "convert", "-", ""),
    ("triton_poi_fused_clone_6", "copy", "-", ""),
    ("triton_poi_fused_add_cat_mul_2", "elementwise", "-", ""),
    ("triton_tem_fused_mm_12", "gemm", "-", ""),
    # vLLM, SGLang
    ("void vllm::rms_norm_kernel<c10::BFloat16>(c10::BFloat16*, c10::BFloat16 const*, c10::BFloat16 const*, float, int, int)", "norm", "-", ""),
    ("std::enable_if<T2>(int)0&&vllm::_typeConvert<T1>::exists, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, (int)8>(T1 *)",
     "norm", "-", ""),
    ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, (bool)1>(T1 *, const T1 *, int)", "swiglu", "-", ""),
    ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, c10::BFloat16*)", "rope", "-", ""),
    ("void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>(__hip_bfloat16 const*)", "kv_store", "-", ""),
    ("void vllm::scaled_fp8_quant_kernel<c10::BFloat16>(c10::Float8_e4m3fn*, c10::BFloat16 const*, float const*, long)", "quantize", "-", ""),
    ("void per_token_group_quant_8bit_kernel<c10::BFloat16, c10::Float8_e4m3fn, true, true, float>(c10::BFloat16 const*)", "quantize", "-", ""),
    ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals, vllm::Signal*)", "communication", "-", ""),
    ("void marlin::Marlin<(long)1125899906910725, (long)1125899906843648, (long)1125899906910725, (int)256>(const int4 *)", "gemm", "w4", ""),
    ("void cutlass::device_kernel<vllm::cutlass_3x_gemm_fp8_blockwise<cutlass::float_e4m3_t>>(int)", "gemm", "fp8", ""),
    ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90<2, cute::tuple<cute::C<1>>>>>>(int)",
     "attention", "-", ""),
    ("void flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<(int)128>, (int)4>(flash::Flash_fwd_params)", "attention", "-", ""),
    ("kernel_unified_attention_2d", "attention", "-", ""),
    ("fused_moe_kernel", "gemm", "-", ""),
    ("_w8a8_block_fp8_matmul", "gemm", "fp8", ""),
    ("_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1_swiglu", "gemm", "mxfp4", "128x128x128"),
    ("_topk_topp_kernel", "sampling", "-", ""),
    ("void flashinfer::norm::FusedAddRMSNormKernel<(unsigned int)8, __nv_bfloat16>(T2 *, T2 *, T2 *, unsigned int)", "norm", "-", ""),
    ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheHeadParallelismKernel<(bool)0, (unsigned int)128>(T5 *)", "rope", "-", ""),
    ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u, 4u, 8u>(int)", "attention", "-", ""),
    ("void flashinfer::sampling::TopPSamplingFromProbKernel<1024u, float>(float*)", "sampling", "-", ""),
    ("void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(flashinfer::trtllm_allreduce_fusion::AllReduceFusionPattern)1, "
     "__nv_bfloat16, 8, false, false>(int)", "communication", "-", ""),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<(unsigned long)4096>)", "communication", "-", ""),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication", "-", ""),
    ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT256x192x64_MI16x16x1_SN_LDSB1", "gemm", "bf16", "256x192x64"),
    # TensorRT-LLM
    ("fmha_v2_flash_attention_fp16_64_32_S_qkv_128_causal_sm86_kernel_nl", "attention", "-", ""),
    ("fmhaSm100fKernel_QkvFp16OFp16H128PagedKvCausalP64MultiCtasKvVarSeqQ8Kv128StaticSwap", "attention", "-", ""),
    ("void tensorrt_llm::kernels::generalRmsNorm<__half, false>(const __half *)", "norm", "-", ""),
    ("void tensorrt_llm::kernels::quantize_with_block_size<(tensorrt_llm::BlockScaleQuantizationType)2, __nv_bfloat16, 32>(int)", "quantize", "-", ""),
    ("void tensorrt_llm::kernels::cutlass_kernels::doActivationKernel<__nv_bfloat16>(int)", "swiglu", "-", ""),
    ("void tensorrt_llm::kernels::cutlass_kernels::expandInputRowsKernel<__nv_bfloat16, __nv_fp4>(int)", "elementwise", "-", ""),
    ("bmm_E4m3_E4m3E4m3_Fp32_t128x64x128u2_s6_et64x64_m64x64x32", "gemm", "fp8", "128x64x128"),
    ("void tensorrt_llm::kernels::weight_only::fpA_intB_gemv<int>(int)", "gemv", "w4", ""),
    # cuBLAS, cuDNN, CUTLASS
    ("turing_int8_i8816gemm_int8_128x128_ldg16_relu_singleBuffer_nn", "gemm", "int8", ""),
    ("sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize128x128x64_stage3_warpsize2x2x1_tensor16x8x32_kernel", "gemm", "int8", "128x128x64"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_256x128_128x3_tn_align16>(Params)", "gemm", "int8", "256x128x128"),
    ("void cutlass::Kernel2<cutlass_75_tensorop_f16_s1688gemm_f16_256x64_tn_align1>(Params)", "gemm", "f16", "256x64"),
    ("void cutlass::device_kernel<enable_sm90_or_later<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>>(int)", "gemm", "-", ""),
    ("fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t>::Params)", "attention", "-", ""),
    ("void dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensor<float const>>>(cublasDotParams)", "gemv", "-", ""),
    ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __half, __half, __half, float>(cublasGemvParamsEx<int>)", "gemv", "-", ""),
    ("sm90_fp8_gemm_1d1d_impl", "gemm", "fp8", ""),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForwardSmem<8, float, float, float>(float*)", "attention", "-", ""),
    ("nvjet_sm90_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", "gemm", "f16", "256x128x64"),
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "gemm", "bf16", "192x192x64"),
    ("nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT", "gemm", "fp8", "128x256x128"),
    ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x128_warpgroupsize1x1x1", "gemm", "fp8", "64x64x128"),
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_nn", "gemm", "bf16", "256x128"),
    ("volta_fp16_s884gemm_256x128_ldg8_f2f_nn", "gemm", "f16", "256x128"),
    ("ampere_sgemm_128x64_tn", "gemm", "f32", "128x64"),
    ("void cutlass::Kernel2<cutlass_80_simt_sgemm_128x32_8x5_nn_align1>(cutlass_80_simt_sgemm_128x32_8x5_nn_align1::Params)", "gemm", "f32", "128x32x8"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_64x4_tn_align8>(T1::Params)", "gemm", "bf16", "128x64x64"),
    ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>(int)", "gemm", "-", ""),
    ("_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEE", "gemm", "-", ""),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, false>(int)", "gemm_fixup", "-", ""),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x128x128_4x1x1", "attention", "-", ""),
    ("void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, false>(int)", "gemv", "-", ""),
]  # fmt: skip

TABLES = Path(__file__).parent
CASES = Path(__file__).parents[2].parent / "shared" / "cases" / "kernel_names.tsv"

# Names that hold another class's words where they mean nothing.
ADVERSARIAL = [
    # The word is in a lambda, a template argument or a parameter's type.
    (ATEN.format("gemm_epilogue(at::TensorIteratorBase &)::[lambda(float) (instance 1)]"), "elementwise"),
    (NOCAST.format("at::native::softmax_backward_flash_attn::rms_norm_dispatch()::[lambda() (instance 1)]"), "elementwise"),
    ("void my_kernel<mul_mat_q<(ggml_type)12, (int)128, (bool)0>>(int)", "other"),
    ("void my_dispatch_gemm_kernel(flash::Flash_fwd_params)", "other"),
    ("dispatch_rms_norm_Kernel(vllm::rms_norm_kernel<float> *)", "other"),
    ("void launch<&vllm::silu_kernel<c10::BFloat16>, ncclDevKernel_SendRecv>(T1 *)", "other"),
    ("void outer::Kernel<inner::flash_fwd_kernel<int>>(int)", "other"),
    ("gemm", "other"),
    ("void user::softmax_gemm_attention_copy<(int)1>(int)", "other"),
    ("rope_climbing_simulation(float *)", "other"),
    ("void nccl_like_kernel(int)", "other"),
    ("void xmul_mat_q<(ggml_type)12, 128, false>(int)", "other"),
    ("void foo::mul_mat_q_helper<(ggml_type)12>(int)", "other"),
    ("triton_poi_fused_index_select_using_8", "elementwise"),
    ("triton_poi_fused_resilu_like_9", "elementwise"),
    # An own template with CUTLASS's wrapper around it is whatever it is, not a GEMM by its wrapper.
    ("void cutlass::device_kernel<user::gemm_free_scan<int>>(int)", "other"),
    # Huge templates, brackets that close nothing, comparisons.
    ("void k<" + "a<" * 400 + "gemm" + ">" * 400 + ">(int)", "other"),
    ("void k<(x->y), (a > b), flash_fwd_kernel>(int)", "other"),
    ("", "other"),
    ("<<<>>>(((", "other"),
    ("[CUDA memcpy HtoD] of a gemm", "other"),
]  # fmt: skip


@pytest.fixture(scope="module")
def rules() -> Rules:
    return load_rules()


@pytest.mark.parametrize(("name", "cls", "weight_type", "tile"), NAMES, ids=[n[0][:60] for n in NAMES])
def test_real_names(rules: Rules, name: str, cls: str, weight_type: str, tile: str) -> None:
    found = rules.classify(name)
    assert (found.cls, found.weight_type, found.tile) == (cls, weight_type, tile), str(found.rule)


@pytest.mark.parametrize(("name", "cls"), ADVERSARIAL, ids=[n[0][:60] or "empty" for n in ADVERSARIAL])
def test_words_inside_templates_lambdas_and_parameters_do_not_fool_the_rules(rules: Rules, name: str, cls: str) -> None:
    assert rules.classify(name).cls == cls, str(rules.classify(name).rule)


def rows_of(table: Path) -> list[list[str]]:
    """[class, …, kernel name] of each line of a tab-separated table, comments left out."""
    lines = table.read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(
    ("table", "least"),
    [
        (TABLES / "kernel_names.tsv", 1.0),
        (TABLES / "kernel_names_holdout.tsv", 0.95),
        pytest.param(CASES, 0.95, marks=pytest.mark.skipif(not CASES.is_file(), reason=f"no table at {CASES}")),
    ],
    ids=["projects", "published profiles", "given"],
)
def test_names_of_a_table_are_right_or_other_but_never_wrong(rules: Rules, table: Path, least: float) -> None:
    found = [(row[0], rules.classify(row[-1]), row[-1]) for row in rows_of(table)]
    wrong = [f"{name}: {m.cls}, not {cls} ({m.rule})" for cls, m, name in found if m.cls not in (cls, "other")]
    assert not wrong
    assert sum(m.cls == cls for cls, m, _ in found) >= least * len(found)


def test_the_tables_share_no_name() -> None:
    own = [row[-1] for row in rows_of(TABLES / "kernel_names.tsv") + rows_of(TABLES / "kernel_names_holdout.tsv")]
    assert len(own) == len(set(own)) > 250
    if CASES.is_file():
        assert not set(own) & {row[-1] for row in rows_of(CASES)}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("_ZN7ck_tile6kentryILi2ENS_13FmhaFwdKernelINS_34BlockFmhaPipeline", ("ck_tile::kentry", "ck_tile::FmhaFwdKernel::ck_tile::BlockFmhaPipeline")),
        ("_ZN5aiter24bf16gemm_bf16_tn_256x256E.kd", ("aiter::bf16gemm_bf16_tn_256x256", "")),
        ("_Z16kn_mla_reduce_v1I23MlaRedu", ("kn_mla_reduce_v1", "MlaRedu")),
        ("_ZN12_GLOBAL__N_16kernelILi4ELb1EEEvPf", ("{unnamed}::kernel", "")),
        ("_ZL12my_kernel_f3Pf", ("my_kernel_f3", "")),
        ("_Z", ("_Z", "")),
        ("void k<int>(float*) [clone .kd]", ("k", "int")),
    ],
)  # fmt: skip
def test_a_mangled_name_is_read_even_where_it_was_cut(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


@given(st.from_regex(r"\A_Z[NLKSt]{0,3}[0-9a-zA-Z_]{0,40}\Z"))
def test_any_mangled_looking_text_is_split_without_error(text: str) -> None:
    entry, _ = split_name(text)
    assert entry


def test_copies_memsets_and_graphs_are_what_they_are_whatever_their_name(rules: Rules) -> None:
    assert [rules.classify("mul_mat_q<(ggml_type)12>", k).cls for k in ("memcpy", "memset", "graph")] == [
        "copy",
        "memset",
        "graph",
    ]


def test_no_rule_catches_everything(rules: Rules) -> None:
    """A name of no engine's must stay unclassified whatever rule it meets, or coverage would mean nothing."""
    for rule in rules.rules:
        for name in ("z", "void zz::Kernel<int>(float *)", "kernel", "void kernel(int)", "kernel_cutlass_kernel_zz"):
            assert Rules([rule]).classify(name).cls == "other", f"{rule} takes {name!r}"
        assert rule.cls != "other"


def test_every_packaged_rule_is_of_the_closed_list_and_files_are_all_listed(rules: Rules) -> None:
    assert {r.cls for r in rules.rules} <= set(FAMILIES)
    shipped = {p.stem for p in (Path(__file__).parents[2] / "protocols" / "classes").glob("*.yaml")}
    assert shipped == set(RULE_FILES)


@given(st.text(alphabet="abk_:<>()[]{}, *&0-9.~=!|\n", max_size=80))
def test_any_text_has_an_entry_and_a_class(text: str) -> None:
    entry, arguments = split_name(text)
    assert len(entry) <= len(text) + 20 and len(arguments) <= len(text)
    assert load_rules.__name__ and Rules([]).classify(text).cls == "other"


@given(
    st.from_regex(r"\A[a-z_]{1,8}(::[a-z_]{1,8}){0,3}\Z"),
    st.recursive(st.sampled_from(["int", "(bool)0", "f(int)::[lambda(int) (instance 1)]", "T *", "&op"]),
                 lambda x: st.lists(x, min_size=1, max_size=3).map(lambda parts: f"t<{', '.join(parts)}>"), max_leaves=8),
    st.sampled_from(["", "(int)", "(T1 *, g<int>)", "(const void (*)(int))"]),
)  # fmt: skip
def test_names_split_into_the_parts_that_they_were_made_of(entry: str, arguments: str, parameters: str) -> None:
    for result in ("void ", "std::pair<int, float> ", ""):
        assert split_name(f"{result}{entry}<{arguments}>{parameters}") == (entry, arguments)


def test_ggml_types_are_named_as_llama_cpp_prints_them() -> None:
    assert [type_name(n) for n in (0, 1, 3, 8, 12, 14, 16)] == [
        "f32",
        "f16",
        "q4_1",
        "q8_0",
        "q4_K",
        "q6_K",
        "iq2_xxs",
    ]
    assert type_name(133) == "ggml type 133"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('rules:\n  - {pattern: "ok", class: gemm}\n  - {pattern: "bad(", class: gemm}\n', r"mine.yaml rule 2, key 'pattern': 'bad\(' is no regular"),
        ('rules:\n  - {pattern: "x", class: matmul}\n', "rule 1, key 'class': 'matmul' is none of gemm, "),
        ('rules:\n  - {pattern: "x", class: gemm, wieght_type: q4_K}\n', "rule 1 has an unknown key 'wieght_type'"),
        ('rules:\n  - {class: gemm}\n', "rule 1 has neither `pattern`"),
        ('rules:\n  - {pattern: 3, class: gemm}\n', "rule 1, key 'pattern': 3 is no text"),
        ('rules:\n  - {pattern: "(?P<size>x)", class: gemm}\n', "unknown group 'size'"),
        ("rules: {a: b}\n", "no list `rules`"),
        ("- just text\n", "rule 1 is no mapping"),
        ("rules: [\n", r":1: this is not YAML|:2: this is not YAML"),
        ("", "no list `rules`"),
        ("rulez: []\nrules: []\n", "unknown key 'rulez'"),
    ],
)  # fmt: skip
def test_a_wrong_rule_file_names_file_rule_and_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(HarnessError, match=says) as caught:
        load_rules([path])
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_status == 1


def test_a_missing_rule_file_and_the_command_line_exit_1(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="does not exist"):
        load_rules([tmp_path / "absent.yaml"])
    done = CliRunner().invoke(
        group, ["trace", "classify", "x.sqlite", "--rules", str(tmp_path / "absent.yaml")], standalone_mode=False
    )
    assert isinstance(done.exception, HarnessError)


def test_user_rules_come_first_and_first_match_wins(tmp_path: Path) -> None:
    a, b = tmp_path / "a.yaml", tmp_path / "b.yaml"
    a.write_text(
        'rules:\n  - {entry: "^mul_mat_q$", class: gemv}\n  - {pattern: "my_", class: rope, weight_type: q8_0, tile: "64x64"}\n'
    )
    b.write_text('rules:\n  - {pattern: "my_|mul", class: norm}\n')
    named = load_rules([a, b])
    assert named.classify("void mul_mat_q<(ggml_type)12>(int)").cls == "gemv"
    mine = named.classify("my_kernel")
    assert (mine.cls, mine.weight_type, mine.tile, str(mine.rule)) == ("rope", "q8_0", "64x64", f"{a} rule 2")
    assert named.classify("mul_other").cls == "norm"
    assert named.classify("quantize_q8_1(int)").cls == "quantize"


def test_rules_run_once_per_distinct_name() -> None:
    seen: list[str] = []

    class Counting(Rules):
        def classify(self, name: str, kind: str = "kernel"):  # type: ignore[no-untyped-def]
            seen.append(name)
            return super().classify(name, kind)

    n = 10_000
    table = launches.from_columns(
        name=[f"kernel_{i % 3}" for i in range(n)], kind=["kernel"] * n, start_ns=range(n), end_ns=range(1, n + 1), device=[0] * n, stream=[0] * n
    )  # fmt: skip
    named, found = classify_launches(
        table, Counting(parse_rules('rules: [{pattern: "kernel_1", class: gemm, weight_type: f16}]', "x"))
    )
    assert sorted(seen) == ["kernel_0", "kernel_1", "kernel_2"] and len(found) == 3
    assert (named["class"] == "gemm").sum() == (table["name"] == "kernel_1").sum()
    assert set(named.loc[named["class"] == "gemm", "weight_type"]) == {"f16"}
    launches.check(named)
