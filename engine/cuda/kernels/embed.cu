// Token embedding: residual[row] = table[ids[row]], in f32 straight from the table's ggml blocks: exact, and no f16 copy of it is kept.
//
//   ids   int32 [rows], each within the vocabulary (the host checks)
//   table the tensor's bytes as the file stores them, [vocab, hidden] weights in whole blocks a row; 16-byte aligned
//   out   f32 [rows, hidden], hidden a multiple of 8
//
// kernel: embed_rows<F32>
// kernel: embed_rows<F16>
// kernel: embed_rows<BF16>
// kernel: embed_rows<Q4_0>
// kernel: embed_rows<Q4_1>
// kernel: embed_rows<Q5_0>
// kernel: embed_rows<Q5_1>
// kernel: embed_rows<Q8_0>
// kernel: embed_rows<Q4_K>
// kernel: embed_rows<Q5_K>
// kernel: embed_rows<Q6_K>
//   One block copies one row, eight weights a thread and step. Launch: grid (rows), block 256.
//   allowed-spill-bytes: 0
#include "blocks.cuh"

template <class Type>
__global__ void __launch_bounds__(256)
embed_rows(const int* __restrict__ ids, const u8* __restrict__ table, float* __restrict__ out, int hidden) {
  constexpr int PER_BLOCK = Type::WEIGHTS / 8;
  const int eighths = hidden / 8;
  const u8* const row = table + static_cast<u64>(ids[blockIdx.x]) * (eighths / PER_BLOCK) * Type::BYTES;
  float4* const to = reinterpret_cast<float4*>(out + static_cast<u64>(blockIdx.x) * hidden);
  for (int i = threadIdx.x; i < eighths; i += 256) {
    float x[8];
    Type::eight(row + i / PER_BLOCK * Type::BYTES, i % PER_BLOCK, x);
    to[2 * i] = make_float4(x[0], x[1], x[2], x[3]);
    to[2 * i + 1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}
