// Token embedding: residual[row] = table[ids[row]], f16 rows widened into the f32 residual stream.
//
//   ids   int32 [rows], each within the vocabulary (the host checks)
//   table f16 [vocab, hidden], hidden a multiple of 8
//   out   f32 [rows, hidden]
//
// kernel: embed_rows
//   One block copies one row, eight elements a thread and step. Launch: grid (rows), block 256.
//   allowed-spill-bytes: 0
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
embed_rows(const int* __restrict__ ids, const __half* __restrict__ table, float* __restrict__ out, int hidden) {
  const __half* from = table + static_cast<size_t>(ids[blockIdx.x]) * hidden;
  float* to = out + static_cast<size_t>(blockIdx.x) * hidden;
  for (int i = threadIdx.x * 8; i < hidden; i += 256 * 8) {
    float x[8];
    unpack8(*reinterpret_cast<const uint4*>(from + i), x);
    *reinterpret_cast<float4*>(to + i) = make_float4(x[0], x[1], x[2], x[3]);
    *reinterpret_cast<float4*>(to + i + 4) = make_float4(x[4], x[5], x[6], x[7]);
  }
}
