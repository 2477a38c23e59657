// Synthetic weights on the device: the bytes that engine/synth.py specifies ("synth/1"), which its docstring defines.
//
// kernel: fill_words
//   The random stream: word i = mix(key + (i + 1) · G), SplitMix64; two words a thread, the last one cut at the tensor's end.
//   Launch: grid ⌈bytes / 4096⌉, block 256.
//   allowed-spill-bytes: 0
// kernel: patch_halves<false>
//   f16 matrices: replaces every element's exponent with E or E − 1. Launch: grid ⌈elements / 256⌉, block 256.
//   allowed-spill-bytes: 0
// kernel: patch_halves<true>
//   bf16 matrices: the same with bf16's fields.
//   allowed-spill-bytes: 0
// kernel: patch_blocks<18, 0>
// kernel: patch_blocks<22, 0>
// kernel: patch_blocks<34, 0>
//   q4_0, q5_0, q8_0: d. One block a thread; launch: grid ⌈blocks / 256⌉, block 256.
//   allowed-spill-bytes: 0
// kernel: patch_blocks<20, 1>
// kernel: patch_blocks<24, 1>
//   q4_1, q5_1: d and m.
//   allowed-spill-bytes: 0
// kernel: patch_blocks<144, 2>
// kernel: patch_blocks<176, 2>
//   q4_K, q5_K: d, dmin and the top bits of the packed scales and mins.
//   allowed-spill-bytes: 0
// kernel: patch_blocks<210, 3>
//   q6_K: d (at byte 208) and 16 int8 scales of magnitude 32 … 63.
//   allowed-spill-bytes: 0
#include "common.cuh"

constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;

__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

extern "C" __global__ void __launch_bounds__(256) fill_words(u8* __restrict__ out, u64 bytes, u64 key) {
  const u64 first = (static_cast<u64>(blockIdx.x) * 256 + threadIdx.x) * 2;  // 16 bytes a thread
  const u64 at = first * 8;
  if (at >= bytes) return;
  const u64 low = mix(key + (first + 1) * GOLDEN), high = mix(key + (first + 2) * GOLDEN);
  if (at + 16 <= bytes) {
    *reinterpret_cast<ulonglong2*>(out + at) = make_ulonglong2(low, high);
  } else {
    for (u64 i = 0; i < bytes - at; ++i) out[at + i] = static_cast<u8>((i < 8 ? low : high) >> (i % 8 * 8));
  }
}

template <bool BF16>
__global__ void __launch_bounds__(256) patch_halves(u16* __restrict__ halves, u64 count, int exponent) {
  const u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  const int word = halves[i];
  halves[i] = static_cast<u16>(BF16 ? (word & 0x807F) | (exponent - (word >> 7 & 1)) << 7
                                    : (word & 0x83FF) | (exponent - (word >> 10 & 1)) << 10);
}

// `d` and `m` pack four f16 bit patterns, the first in the lowest 16 bits.
template <int BYTES, int KIND>
__global__ void __launch_bounds__(256) patch_blocks(u8* __restrict__ blocks, u64 count, u64 d, u64 m) {
  const u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= count) return;
  u8* const block = blocks + i * BYTES;
  u16* const head = reinterpret_cast<u16*>(block + (KIND == 3 ? 208 : 0));
  const int pick = (head[0] & 3) * 16;
  head[0] = static_cast<u16>(d >> pick);
  if (KIND == 1 || KIND == 2) head[1] = static_cast<u16>(m >> pick);
  if (KIND == 2) {
    u32* const packed = reinterpret_cast<u32*>(block + 4);
    packed[0] |= 0xA0A0A0A0u;
    packed[1] |= 0xA0A0A0A0u;
  }
  if (KIND == 3) {
    for (int j = 192; j < 208; ++j) {
      const int b = block[j], magnitude = 32 + (b & 31);
      block[j] = static_cast<u8>(b & 0x80 ? 256 - magnitude : magnitude);
    }
  }
}
