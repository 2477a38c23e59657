// ggml's block types, and eight consecutive weights of each as f32: equal to the bit to the gguf package's dequantisers (the same
// f32 operations in the same order, never contracted to FMA).
//
// `Type::eight(block, eighth, x)`: weights 8 · eighth … 8 · eighth + 7 of a block. Blocks lie one after another, the first 16-byte aligned.
// Layouts: ggml/src/ggml-common.h (block_q4_0 … block_q6_K); arithmetic: dequantize_row_* of ggml/src/ggml-quants.c.
#pragma once
#include "common.cuh"

// Eight bytes from an address that is a multiple of ALIGN only.
template <int ALIGN>
__device__ __forceinline__ u64 load8(const u8* p) {
  if constexpr (ALIGN >= 8) return *reinterpret_cast<const u64*>(p);
  if constexpr (ALIGN == 4) {
    const u32* w = reinterpret_cast<const u32*>(p);
    return w[0] | static_cast<u64>(w[1]) << 32;
  }
  const u16* h = reinterpret_cast<const u16*>(p);
  return h[0] | static_cast<u64>(h[1]) << 16 | static_cast<u64>(h[2]) << 32 | static_cast<u64>(h[3]) << 48;
}

__device__ __forceinline__ float half_at(const u8* p) {
  return __half2float(__ushort_as_half(*reinterpret_cast<const u16*>(p)));
}

__device__ __forceinline__ int byte_of(u64 bytes, int i) { return static_cast<int>(bytes >> (8 * i)) & 0xFF; }

struct F32 {
  static constexpr int WEIGHTS = 8, BYTES = 32;
  static __device__ void eight(const u8* b, int, float (&x)[8]) {
    const float4 lo = reinterpret_cast<const float4*>(b)[0], hi = reinterpret_cast<const float4*>(b)[1];
    x[0] = lo.x, x[1] = lo.y, x[2] = lo.z, x[3] = lo.w, x[4] = hi.x, x[5] = hi.y, x[6] = hi.z, x[7] = hi.w;
  }
};

struct F16 {
  static constexpr int WEIGHTS = 8, BYTES = 16;
  static __device__ void eight(const u8* b, int, float (&x)[8]) { unpack8(*reinterpret_cast<const uint4*>(b), x); }
};

struct BF16 {
  static constexpr int WEIGHTS = 8, BYTES = 16;
  static __device__ void eight(const u8* b, int, float (&x)[8]) {
    const uint4 v = *reinterpret_cast<const uint4*>(b);
    const u32 w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(w[i] << 16);
      x[2 * i + 1] = __uint_as_float(w[i] & 0xFFFF0000u);
    }
  }
};

// Blocks of 32: d [m] [qh] qs. `eighth` 0–3 of a block: 0, 1 are low nibbles of qs[0–7], qs[8–15]; 2, 3 the high ones.
template <int BITS, bool HAS_MIN, int ALIGN>
struct Block32 {
  static constexpr int WEIGHTS = 32, HEAD = HAS_MIN ? 4 : 2, BYTES = HEAD + (BITS == 5 ? 4 : 0) + 16;
  static __device__ void eight(const u8* b, int eighth, float (&x)[8]) {
    const float d = half_at(b);
    const u64 qs = load8<ALIGN>(b + BYTES - 16 + (eighth & 1) * 8) >> (eighth & 2 ? 4 : 0);
    u32 high = 0;
    if (BITS == 5) {
      const u16* h = reinterpret_cast<const u16*>(b + HEAD);
      high = (h[0] | static_cast<u32>(h[1]) << 16) >> (8 * eighth);  // bit i of the block is weight i's fifth bit
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int q = byte_of(qs, i) & 15;
      if (BITS == 5) q |= (high >> i & 1) << 4;
      if (HAS_MIN) {
        x[i] = __fadd_rn(__fmul_rn(d, static_cast<float>(q)), half_at(b + 2));
      } else {
        x[i] = __fmul_rn(d, static_cast<float>(q - (BITS == 5 ? 16 : 8)));
      }
    }
  }
};

typedef Block32<4, false, 2> Q4_0;  // 18 bytes
typedef Block32<4, true, 4> Q4_1;   // 20
typedef Block32<5, false, 2> Q5_0;  // 22
typedef Block32<5, true, 8> Q5_1;   // 24

struct Q8_0 {
  static constexpr int WEIGHTS = 32, BYTES = 34;
  static __device__ void eight(const u8* b, int eighth, float (&x)[8]) {
    const float d = half_at(b);
    const u64 qs = load8<2>(b + 2 + 8 * eighth);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(static_cast<float>(static_cast<signed char>(byte_of(qs, i))), d);
  }
};

// Q4_K: d, dmin, 12 bytes of 6-bit scales and mins, qs[128]. Q5_K: the same with qh[32] before qs.
template <int BITS>
struct Block256 {
  static constexpr int WEIGHTS = 256, BYTES = 144 + (BITS == 5 ? 32 : 0);
  static __device__ void eight(const u8* b, int eighth, float (&x)[8]) {
    const int sub = eighth / 4, within = (eighth & 3) * 8;  // sub-block of 32, and its first weight here
    const u8* s = b + 4;
    int scale, min;
    if (sub < 4) {
      scale = s[sub] & 63;
      min = s[sub + 4] & 63;
    } else {
      scale = (s[sub + 4] & 15) | (s[sub - 4] >> 6) << 4;
      min = s[sub + 4] >> 4 | (s[sub] >> 6) << 4;
    }
    const float d = __fmul_rn(half_at(b), static_cast<float>(scale));
    const float m = __fmul_rn(half_at(b + 2), static_cast<float>(min));
    const u64 qs = load8<8>(b + BYTES - 128 + sub / 2 * 32 + within) >> (sub & 1 ? 4 : 0);
    const u64 high = BITS == 5 ? load8<8>(b + 16 + within) >> sub : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      int q = byte_of(qs, i) & 15;
      if (BITS == 5) q |= (byte_of(high, i) & 1) << 4;
      x[i] = __fsub_rn(__fmul_rn(d, static_cast<float>(q)), m);
    }
  }
};

typedef Block256<4> Q4_K;
typedef Block256<5> Q5_K;

// ql[128], qh[64], int8 scales[16], d. Each half of 128 weights: nibbles of 64 ql bytes (low, then high), and two bits of
// 32 qh bytes for each quarter.
struct Q6_K {
  static constexpr int WEIGHTS = 256, BYTES = 210;
  static __device__ void eight(const u8* b, int eighth, float (&x)[8]) {
    const int half = eighth / 16, r = eighth % 16 * 8;  // weight r … r + 7 of this half
    const u64 ql = load8<2>(b + 64 * half + r % 64) >> (r < 64 ? 0 : 4);
    const u64 qh = load8<2>(b + 128 + 32 * half + r % 32) >> (r / 32 * 2);
    const float scale = static_cast<float>(static_cast<signed char>(b[192 + eighth / 2]));
    const float d = __fmul_rn(half_at(b + 208), scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int q = (byte_of(ql, i) & 15) | (byte_of(qh, i) & 3) << 4;
      x[i] = __fmul_rn(d, static_cast<float>(q - 32));
    }
  }
};
