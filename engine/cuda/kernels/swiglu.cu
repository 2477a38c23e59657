// SwiGLU: out = f16(silu(gate) · up) with silu(x) = x / (1 + e⁻ˣ), f32 inside, saturating.
//
//   gate, up f16, rows of 8 · vecs elements, row stride in_stride elements: two matrices, or the halves of one (gate, then
//            up = gate + ffn, in_stride = 2 · ffn)
//   out      f16 [rows, 8 · vecs]
//
// kernel: swiglu_rows
//   Two 16-byte vectors of each input a thread. Launch: grid ⌈rows · vecs / 512⌉, block 256.
//   allowed-spill-bytes: 0
#include "common.cuh"

// e⁻ˣ overflows to +∞ for x < −88, and x / ∞ is the right −0: no branch. Both approximations are within 2 ulp of f32.
__device__ __forceinline__ float silu(float x) { return x * __fdividef(1.0f, 1.0f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(256)
swiglu_rows(const __half* __restrict__ gate, const __half* __restrict__ up, __half* __restrict__ out, u32 total, u32 vecs,
            u32 in_stride) {
  const u32 first = blockIdx.x * 512 + threadIdx.x;
  uint4 g[2], u[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 at = first + i * 256;
    if (at < total) {
      const u32 row = at / vecs, column = at - row * vecs;
      const size_t from = static_cast<size_t>(row) * in_stride + column * 8;
      g[i] = __ldcs(reinterpret_cast<const uint4*>(gate + from));
      u[i] = __ldcs(reinterpret_cast<const uint4*>(up + from));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 at = first + i * 256;
    if (at < total) {
      float a[8], b[8];
      unpack8(g[i], a);
      unpack8(u[i], b);
#pragma unroll
      for (int j = 0; j < 8; ++j) a[j] = silu(a[j]) * b[j];
      reinterpret_cast<uint4*>(out)[at] = pack8_saturate(a);
    }
  }
}
