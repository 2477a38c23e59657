// ggml blocks → f16, once per weight at load time. Equal to the bit to the gguf package's dequantisers rounded to f16
// (nearest even).
//
//   blocks  the tensor's bytes as the file stores them: rows of whole blocks, no padding; 16-byte aligned
//   out     f16 [N, K] row-major, so element i is weight i mod B of block i div B
//   eighths N · K / 8
//
// Every version: a thread writes eight consecutive halves with one 16-byte store. Launch: grid ⌈eighths / 256⌉, block 256.
//
// kernel: dequantize<F32>
// kernel: dequantize<F16>
// kernel: dequantize<BF16>
//   Plain elements, rounded (or copied).
//   allowed-spill-bytes: 0
// kernel: dequantize<Q4_0>
// kernel: dequantize<Q4_1>
// kernel: dequantize<Q5_0>
// kernel: dequantize<Q5_1>
// kernel: dequantize<Q8_0>
//   Blocks of 32 with one f16 scale, and a min for _1: nibbles 0–15 are the low halves of the bytes, 16–31 the high ones.
//   allowed-spill-bytes: 0
// kernel: dequantize<Q4_K>
// kernel: dequantize<Q5_K>
// kernel: dequantize<Q6_K>
//   Super-blocks of 256 with 6-bit (Q4_K, Q5_K: 32 wide) or 8-bit (Q6_K: 16 wide) sub-scales.
//   allowed-spill-bytes: 0
#include "blocks.cuh"

template <class Type>
__global__ void __launch_bounds__(256) dequantize(const u8* __restrict__ blocks, __half* __restrict__ out, u64 eighths) {
  const u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= eighths) return;
  constexpr int PER_BLOCK = Type::WEIGHTS / 8;
  float x[8];
  Type::eight(blocks + i / PER_BLOCK * Type::BYTES, static_cast<int>(i % PER_BLOCK), x);
  // Not saturating: like NumPy's float16, a weight beyond f16 becomes ±∞ and shows.
  reinterpret_cast<uint4*>(out)[i] =
      make_uint4(pack_half2(x[0], x[1]), pack_half2(x[2], x[3]), pack_half2(x[4], x[5]), pack_half2(x[6], x[7]));
}
