// Bias, rotary embedding and KV store in one pass over q, k and v.
//
//   q       f16 [rows, heads · D], row stride q_stride; rows ≥ q_first are rotated in place, the others are not touched
//   k, v    f16 [rows, kv_heads · D], row stride kv_stride; read only
//   k_cache, v_cache  f16 [positions, kv_heads · D]; row past + r receives the rotated k and the v of row r
//   q_bias, k_bias, v_bias  f32 [heads · D] and [kv_heads · D], or null
//   table   float2 [positions, D / 2]: cos and sin of position · base^(−2i / D), computed in f64 on the host, because f32
//           arguments near 32768 radians carry an error of 1e-3
//
// D is a multiple of 16. A thread owns one unit of 16 elements (8 pairs) of one head and walks ROWS rows with its bias in
// registers; all loads of its rows are in flight before the first store.
// Launch: grid (⌈rows / 4⌉, ⌈units / block⌉), block ≤ 512, units = (heads + 2 · kv_heads) · D / 16.
//
// kernel: rope_kv<false>
//   Style "norm" (llama): rotates (2i, 2i + 1).
//   allowed-spill-bytes: 0
// kernel: rope_kv<true>
//   Style "neox" (qwen2): rotates (i, i + D / 2).
//   allowed-spill-bytes: 0
#include "common.cuh"

constexpr int ROWS = 4;

template <bool NEOX>
__global__ void __launch_bounds__(512)
rope_kv(__half* q, const __half* k, const __half* v, long long q_stride, long long kv_stride, __half* __restrict__ k_cache,
        __half* __restrict__ v_cache, const float* __restrict__ q_bias, const float* __restrict__ k_bias,
        const float* __restrict__ v_bias, const float2* __restrict__ table, int rows, int q_first, int past, int heads,
        int kv_heads, int head_dim) {
  const int parts = head_dim / 16;
  const int unit = blockIdx.y * blockDim.x + threadIdx.x;
  const int slot = unit / parts;  // q heads, then k heads, then v heads
  if (slot >= heads + 2 * kv_heads) return;
  const int pair = (unit - slot * parts) * 8;  // first of this thread's 8 pairs
  const bool is_q = slot < heads, is_v = slot >= heads + kv_heads;
  const int head = is_q ? slot : is_v ? slot - heads - kv_heads : slot - heads;
  // Element offsets of the thread's two vectors of eight within its head's row.
  const int low = head * head_dim + (NEOX ? pair : 2 * pair);
  const int high = low + (NEOX ? head_dim / 2 : 8);
  const __half* const from = is_q ? q : is_v ? v : k;
  const long long stride = is_q ? q_stride : kv_stride;
  const float* const bias = is_q ? q_bias : is_v ? v_bias : k_bias;
  const int first = blockIdx.x * ROWS;

  uint4 in[ROWS][2];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first + r;
    if (row < rows && (!is_q || row >= q_first)) {
      in[r][0] = *reinterpret_cast<const uint4*>(from + row * stride + low);
      in[r][1] = *reinterpret_cast<const uint4*>(from + row * stride + high);
    }
  }
  float bias_low[8] = {}, bias_high[8] = {};
  if (bias) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bias_low[i] = bias[low + i];
      bias_high[i] = bias[high + i];
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const int row = first + r;
    if (row >= rows || (is_q && row < q_first)) continue;
    float a[8], b[8];
    unpack8(in[r][0], a);
    unpack8(in[r][1], b);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] += bias_low[i];
      b[i] += bias_high[i];
    }
    if (!is_v) {
      const float4* const angles =
          reinterpret_cast<const float4*>(table + static_cast<size_t>(past + row) * (head_dim / 2) + pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 cs = __ldg(angles + i);  // cos, sin of pairs 2i and 2i + 1
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int p = 2 * i + j;  // pair p of this thread
          const float cosine = j ? cs.z : cs.x, sine = j ? cs.w : cs.y;
          float& x = NEOX ? a[p] : p < 4 ? a[2 * p % 8] : b[2 * p % 8];
          float& y = NEOX ? b[p] : p < 4 ? a[2 * p % 8 + 1] : b[2 * p % 8 + 1];
          const float rotated = x * cosine - y * sine;
          y = x * sine + y * cosine;
          x = rotated;
        }
      }
    }
    __half* const to = is_q ? q + row * q_stride
                            : (is_v ? v_cache : k_cache) + static_cast<size_t>(past + row) * (kv_heads * head_dim);
    *reinterpret_cast<uint4*>(to + low) = pack8_saturate(a);
    *reinterpret_cast<uint4*>(to + high) = pack8_saturate(b);
  }
}
