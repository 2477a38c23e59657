// RMSNorm of the f32 residual stream: residual += delta (ADD), out = f16(residual · weight / sqrt(mean(residual²) + eps)).
//
//   residual f32 [rows, hidden], read and (ADD) written; values far above 65504 are expected and stay f32
//   delta    f32 [rows, hidden], the previous GEMM's output (ADD)
//   weight   f32 [hidden]
//   out      f16 [rows, hidden], saturating
//   hidden is a multiple of 4 and at most VECS · 4 · 1024
//
// One block a row; the row stays in registers between the sum of squares and the scaling, so each byte crosses memory once.
// A thread holds VECS float4, `blockDim.x` apart. Launch: grid (rows), block ⌈hidden / 4 / VECS⌉ rounded up to whole warps.
//
// kernel: norm_rows<1, false>
// kernel: norm_rows<1, true>
//   Rows of up to 4096, few registers, one load in flight.
//   allowed-spill-bytes: 0
// kernel: norm_rows<2, false>
// kernel: norm_rows<2, true>
//   Two loads of each stream in flight.
//   allowed-spill-bytes: 0
// kernel: norm_rows<4, false>
// kernel: norm_rows<4, true>
//   Four loads of each stream in flight: hidden 3584 is exactly 224 threads.
//   allowed-spill-bytes: 0
#include "common.cuh"

template <int VECS, bool ADD>
__global__ void __launch_bounds__(1024)
norm_rows(float* __restrict__ residual, const float* __restrict__ delta, const float* __restrict__ weight,
          __half* __restrict__ out, int hidden, float eps) {
  const int vecs = hidden / 4;
  const size_t row = static_cast<size_t>(blockIdx.x) * vecs;
  float4* const x_row = reinterpret_cast<float4*>(residual) + row;
  const float4* const delta_row = reinterpret_cast<const float4*>(delta) + row;

  float4 x[VECS], w[VECS];
#pragma unroll
  for (int i = 0; i < VECS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    x[i] = at < vecs ? x_row[at] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  if (ADD) {
    float4 d[VECS];
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      d[i] = at < vecs ? __ldcs(delta_row + at) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);  // read once: evict first
    }
#pragma unroll
    for (int i = 0; i < VECS; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      x[i].x += d[i].x;
      x[i].y += d[i].y;
      x[i].z += d[i].z;
      x[i].w += d[i].w;
      if (at < vecs) x_row[at] = x[i];
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < VECS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    sum += x[i].x * x[i].x + x[i].y * x[i].y + x[i].z * x[i].z + x[i].w * x[i].w;
    if (at < vecs) w[i] = __ldg(reinterpret_cast<const float4*>(weight) + at);  // in flight while the block reduces
  }

  __shared__ float warp_sum[32];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  if (threadIdx.x % 32 == 0) warp_sum[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x % 32 < blockDim.x / 32 ? warp_sum[threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lane);
  const float scale = 1.0f / sqrtf(sum / hidden + eps);

#pragma unroll
  for (int i = 0; i < VECS; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vecs) {
      uint2 packed;
      packed.x = pack_half2(clamp_f16(x[i].x * scale * w[i].x), clamp_f16(x[i].y * scale * w[i].y));
      packed.y = pack_half2(clamp_f16(x[i].z * scale * w[i].z), clamp_f16(x[i].w * scale * w[i].w));
      reinterpret_cast<uint2*>(out)[row + at] = packed;
    }
  }
}
