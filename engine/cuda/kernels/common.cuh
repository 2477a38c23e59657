// What the element-wise kernels share: 16-byte vectors of eight halves, and stores that never turn a finite f32 into ±∞.
#pragma once
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// f32 → f16, round to nearest even, clamped to ±65504. NaN stays NaN: a broken value must reach the logits, not hide.
__device__ __forceinline__ float clamp_f16(float x) {
  x = x > 65504.0f ? 65504.0f : x;
  return x < -65504.0f ? -65504.0f : x;
}

__device__ __forceinline__ u32 pack_half2(float a, float b) {
  const __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<const u32*>(&h);
}

__device__ __forceinline__ float2 unpack_half2(u32 bits) { return __half22float2(*reinterpret_cast<const __half2*>(&bits)); }

// Eight halves → eight floats.
__device__ __forceinline__ void unpack8(const uint4& v, float (&x)[8]) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack_half2(w[i]);
    x[2 * i] = f.x;
    x[2 * i + 1] = f.y;
  }
}

// Eight floats → eight halves, saturating.
__device__ __forceinline__ uint4 pack8_saturate(const float (&x)[8]) {
  u32 w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = pack_half2(clamp_f16(x[2 * i]), clamp_f16(x[2 * i + 1]));
  return make_uint4(w[0], w[1], w[2], w[3]);
}
