// Reads bytes and does nothing with them: what memory gives a kernel that writes nothing, such as a one-row GEMM.
//
//   from  [count] 16-byte vectors
//   sink  one 32-bit word, written only where the xor of everything a thread read equals `never`: no compiler can tell
//
// kernel: read_stream
//   Four independent 16-byte loads a thread and step, grid-strided. Launch: grid (multiprocessors × 8), block 256.
//   allowed-spill-bytes: 0
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
read_stream(const uint4* __restrict__ from, u64 count, u32* __restrict__ sink, u32 never) {
  const u64 step = static_cast<u64>(gridDim.x) * 256;
  u64 i = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  u32 seen = 0;
  for (; i + 3 * step < count; i += 4 * step) {
    const uint4 a = from[i], b = from[i + step], c = from[i + 2 * step], d = from[i + 3 * step];
    seen ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w ^ c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
  }
  for (; i < count; i += step) seen ^= from[i].x ^ from[i].y ^ from[i].z ^ from[i].w;
  if (seen == never) *sink = seen;
}
