// Runs the element-wise kernels of engine/cuda/kernels on a CPU, thread by thread, through the CUDA headers' own host side of
// cuda_fp16.h. Threads of a block are fibres that take turns, so that shuffles and barriers meet: each turn runs every thread up
// to its next meeting, and all threads of these kernels meet the same number of times.
#include <cuda_runtime.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#undef __global__
#undef __device__
#undef __forceinline__
#undef __launch_bounds__
#undef __shared__
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#include <cuda_fp16.h>

struct Index { unsigned x, y; };
static Index threadIdx, blockIdx, blockDim;

static float __fmul_rn(float a, float b) { return a * b; }  // built with -ffp-contract=off
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdividef(float a, float b) { return a / b; }
static float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
#define __expf expf
template <class T> static T __ldg(const T* p) { return *p; }
template <class T> static T __ldcs(const T* p) { return *p; }

static std::vector<ucontext_t> fibres;
static std::vector<std::vector<char>> stacks(1024, std::vector<char>(1 << 15));
static std::vector<float> exchanged(1024);
static ucontext_t scheduler;
static std::function<void()> body;
static unsigned running;
static unsigned finished;

static void meet() { swapcontext(&fibres[running], &scheduler); }
static void __syncthreads() { meet(); }
static float __shfl_xor_sync(unsigned, float value, int mask) {
  exchanged[running] = value;
  meet();
  const float other = exchanged[(running & ~31u) | ((running ^ mask) & 31)];
  meet();
  return other;
}
static void enter() {
  body();
  ++finished;
  while (true) meet();
}

template <class F>
static void launch(unsigned grid_x, unsigned grid_y, unsigned block, F kernel) {
  body = kernel;
  blockDim = {block, 1};
  for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
      fibres.assign(block, ucontext_t());
      finished = 0;
      for (unsigned t = 0; t < block; ++t) {
        getcontext(&fibres[t]);
        fibres[t].uc_stack.ss_sp = stacks[t].data();
        fibres[t].uc_stack.ss_size = stacks[t].size();
        makecontext(&fibres[t], enter, 0);
      }
      while (finished < block) {
        for (running = 0; running < block; ++running) {
          threadIdx = {running, 0};
          swapcontext(&scheduler, &fibres[running]);
        }
      }
    }
  }
}

#define ROWS ROPE_ROWS  // a constant of rope_kv.cu
#include "dequant.cu"
#include "embed.cu"
#include "norm.cu"
#include "rope_kv.cu"
#include "swiglu.cu"
#include "synth.cu"

// Grids and blocks are those of the headers of the kernels' files.
static unsigned grid(u64 items, u64 per_block) { return static_cast<unsigned>((items + per_block - 1) / per_block); }

extern "C" {
#define DEQUANTIZE(T) \
  void dequantize_##T(const u8* b, __half* out, u64 n) { launch(grid(n, 256), 1, 256, [=] { dequantize<T>(b, out, n); }); }
DEQUANTIZE(F32) DEQUANTIZE(F16) DEQUANTIZE(BF16) DEQUANTIZE(Q4_0) DEQUANTIZE(Q4_1) DEQUANTIZE(Q5_0)
DEQUANTIZE(Q5_1) DEQUANTIZE(Q8_0) DEQUANTIZE(Q4_K) DEQUANTIZE(Q5_K) DEQUANTIZE(Q6_K)

#define PATCH(NAME, BYTES, KIND) \
  void patch_##NAME(u8* b, u64 n, u64 d, u64 m) { launch(grid(n, 256), 1, 256, [=] { patch_blocks<BYTES, KIND>(b, n, d, m); }); }
PATCH(q4_0, 18, 0) PATCH(q5_0, 22, 0) PATCH(q8_0, 34, 0) PATCH(q4_1, 20, 1) PATCH(q5_1, 24, 1)
PATCH(q4_K, 144, 2) PATCH(q5_K, 176, 2) PATCH(q6_K, 210, 3)
void patch_f16(u16* h, u64 n, int e) { launch(grid(n, 256), 1, 256, [=] { patch_halves<false>(h, n, e); }); }
void patch_bf16(u16* h, u64 n, int e) { launch(grid(n, 256), 1, 256, [=] { patch_halves<true>(h, n, e); }); }
void fill(u8* out, u64 bytes, u64 key) { launch(grid(bytes, 4096), 1, 256, [=] { fill_words(out, bytes, key); }); }

#define EMBED(T) \
  void embed_##T(const int* ids, const u8* table, float* out, unsigned rows, int hidden) { \
    launch(rows, 1, 256, [=] { embed_rows<T>(ids, table, out, hidden); }); \
  }
EMBED(F32) EMBED(F16) EMBED(BF16) EMBED(Q4_0) EMBED(Q4_1) EMBED(Q5_0) EMBED(Q5_1) EMBED(Q8_0) EMBED(Q4_K) EMBED(Q5_K) EMBED(Q6_K)
void norm(int vecs, bool add, float* residual, const float* delta, const float* weight, __half* out, unsigned rows, int hidden,
          float eps) {
  const unsigned block = grid(grid(hidden / 4, vecs), 32) * 32;
#define NORM(V, A) if (vecs == V && add == A) launch(rows, 1, block, [=] { norm_rows<V, A>(residual, delta, weight, out, hidden, eps); });
  NORM(1, false) NORM(1, true) NORM(2, false) NORM(2, true) NORM(4, false) NORM(4, true)
}
void rope(bool neox, __half* q, const __half* k, const __half* v, long long q_stride, long long kv_stride, __half* k_cache,
          __half* v_cache, const float* q_bias, const float* k_bias, const float* v_bias, const float2* table, int rows, int q_first,
          int past, int heads, int kv_heads, int head_dim, unsigned block) {
  const unsigned units = (heads + 2 * kv_heads) * head_dim / 16;
  launch(grid(rows, 4), grid(units, block), block, [=] {
    auto kernel = neox ? rope_kv<true> : rope_kv<false>;
    kernel(q, k, v, q_stride, kv_stride, k_cache, v_cache, q_bias, k_bias, v_bias, table, rows, q_first, past, heads, kv_heads, head_dim);
  });
}
void swiglu(const __half* gate, const __half* up, __half* out, u32 rows, u32 vecs, u32 in_stride) {
  launch(grid(rows * vecs, 512), 1, 256, [=] { swiglu_rows(gate, up, out, rows * vecs, vecs, in_stride); });
}
}
