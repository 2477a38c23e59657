// Causal attention with grouped KV heads: out = softmax(q · kᵀ · scale, keys ≤ past + row) · v.
// f16 in and out; f32 scores, softmax and accumulators. head_dim D is 64 or 128.
//
//   q    [rows, heads, D]          row stride q_stride elements
//   k, v [past + rows, kv_heads, D] row stride kv_stride; key j is row j, so row r of q sits at position past + r
//   out  [rows, heads, D]          row stride out_stride; no row beyond `rows` is written
//
// Versions:
//   attention_mma      FlashAttention-2's shape with mma.sync: 128 query rows a block, 64 keys a step, four warps of 32 rows.
//   attention_wgmma    sm_90a: 128 query rows a block, 128 keys a step, two warpgroups; P·V of one step runs under the softmax of
//                      the next.
//   attention_split    for a few rows (decode, the one-row tail): a block takes 256 keys of one row and head, on CUDA cores;
//   attention_combine  merges what the blocks of attention_split found.
//
// Launch: attention_mma     grid (heads, ⌈rows/128⌉), 128 threads, shared memory (128 + 4·64)·D·2 bytes
//         attention_wgmma   grid (heads, ⌈rows/128⌉), 256 threads, shared memory (128 + 4·128)·D·2 + 1024 bytes
//         attention_split   grid (⌈(past+rows)/256⌉, heads, rows), 128 threads
//         attention_combine grid (heads, rows), D threads
//
// allowed-spill-bytes: 0
// kernel: attention_mma<64>
// kernel: attention_mma<128>
// kernel: attention_wgmma<64>
//   only: sm_90a
// kernel: attention_wgmma<128>
//   only: sm_90a
// kernel: attention_split<64>
// kernel: attention_split<128>
// kernel: attention_combine<64>
// kernel: attention_combine<128>
#include "attention_ptx.cuh"

// Softmax runs in base 2: scale_log2 = scale · log2(e) > 0 turns exp(scale · (s − max)) into one FFMA and one EX2.
constexpr int Q_ROWS = 128;      // query rows of a block, mma and wgmma
constexpr int MMA_KEYS = 64;     // keys of a step
constexpr int MMA_THREADS = 128;
constexpr int WARP_ROWS = 32;    // query rows of a warp: every K and V fragment feeds two m16 tiles, which halves shared-memory reads
constexpr int WGMMA_KEYS = 128;
constexpr int WGMMA_THREADS = 256;
constexpr int GROUP_ROWS = 64;   // query rows of a warpgroup
constexpr int SPLIT_KEYS = 256;  // keys of a block of attention_split
constexpr int SPLIT_THREADS = 128;
constexpr int PANEL_BYTES = 128;  // a row of a shared-memory panel: 64 columns

#define NEGATIVE_INFINITY __int_as_float(0xff800000)

// A ROWS × D tile in shared memory: D/64 panels of ROWS rows of 128 bytes. Each row's eight 16-byte chunks are permuted by XOR
// with the row's low bits (wgmma's 128-byte swizzle), so the eight rows of an ldmatrix matrix, read at one chunk, lie in eight
// different bank groups. Byte offset of chunk `chunk` (columns 8·chunk …) of row `row`:
template <int ROWS>
__device__ __forceinline__ u32 tile_offset(int row, int chunk) {
  return (chunk / 8 * ROWS + row) * PANEL_BYTES + (((chunk & 7) ^ (row & 7)) << 4);
}

// One thread's share of loading a ROWS × D tile: `row` and `chunk` of its first 16 bytes, then every STEP-th row. STEP is a
// multiple of 8, so all its chunks have one swizzle. Rows ≥ `valid_rows` become zeros: a V row beyond the last key may hold NaN,
// and 0 · NaN would leak.
template <int ROWS, int D, int THREADS>
struct TileLoad {
  static constexpr int CHUNKS = D / 8, STEP = THREADS / CHUNKS;
  static_assert(STEP % 8 == 0 && ROWS % STEP == 0, "a thread's chunks share one swizzle");
  const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;

  // Element offset of the thread's first chunk from the tile's first row.
  __device__ __forceinline__ long long offset(int stride) const { return (long long)row * stride + chunk * 8; }

  __device__ __forceinline__ void operator()(u32 tile, const u16* from, int stride, int valid_rows) const {
    tile += tile_offset<ROWS>(row, chunk);
#pragma unroll
    for (int i = 0; i < ROWS / STEP; ++i) {
      cp_async_16(tile + i * STEP * PANEL_BYTES, from, row + i * STEP < valid_rows);
      from += STEP * stride;
    }
  }
};

// Replaces scores of keys above a row's limit. s[i][2r + c] is the score of row r of the thread's two and key first_key + 8i + c.
template <int N>
__device__ __forceinline__ void mask_scores(float (&s)[N][4], int first_key, int limit0, int limit1) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int key = first_key + 8 * i;
    if (key > limit0) s[i][0] = NEGATIVE_INFINITY;
    if (key + 1 > limit0) s[i][1] = NEGATIVE_INFINITY;
    if (key > limit1) s[i][2] = NEGATIVE_INFINITY;
    if (key + 1 > limit1) s[i][3] = NEGATIVE_INFINITY;
  }
}

// One step of the online softmax over 16 rows of a warp (two a thread): scores become probabilities relative to the new
// maximum, `alpha` is what older sums must be multiplied by. Key 0 is visible to every row, so a maximum is never −∞ after the
// first step. `sum` stays per thread; its four lanes are added once, at the end.
template <int N>
__device__ __forceinline__ void softmax_step(float (&s)[N][4], float (&maximum)[2], float (&sum)[2], float (&alpha)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float m = maximum[r];
#pragma unroll
    for (int i = 0; i < N; ++i) m = fmaxf(m, fmaxf(s[i][2 * r], s[i][2 * r + 1]));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
    alpha[r] = exp2_fast((maximum[r] - m) * scale_log2);
    maximum[r] = m;
    const float shift = -m * scale_log2;
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i][2 * r] = exp2_fast(fmaf(s[i][2 * r], scale_log2, shift));
      s[i][2 * r + 1] = exp2_fast(fmaf(s[i][2 * r + 1], scale_log2, shift));
      total += s[i][2 * r] + s[i][2 * r + 1];
    }
    sum[r] = fmaf(sum[r], alpha[r], total);
  }
}

// Whether any row of the warp has a new maximum, so that its accumulators need `rescale`: rare after the first steps.
__device__ __forceinline__ bool maximum_moved(const float (&alpha)[2]) {
  return __any_sync(0xffffffffu, alpha[0] != 1.f || alpha[1] != 1.f);
}

// Multiplies the accumulators of 16 rows by alpha.
template <int N>
__device__ __forceinline__ void rescale(float (&o)[N][4], const float (&alpha)[2]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    o[i][0] *= alpha[0];
    o[i][1] *= alpha[0];
    o[i][2] *= alpha[1];
    o[i][3] *= alpha[1];
  }
}

// The probabilities of 16 keys as an A operand: the accumulators' layout is already that operand's, so P never leaves registers.
__device__ __forceinline__ void pack_probabilities(u32 (&p)[4], const float (&low)[4], const float (&high)[4]) {
  p[0] = pack_f16(low[0], low[1]);
  p[1] = pack_f16(low[2], low[3]);
  p[2] = pack_f16(high[0], high[1]);
  p[3] = pack_f16(high[2], high[3]);
}

// Completes the row sums over a row's four lanes, divides by them and writes 16 rows × 8N columns as f16 to rows `row` … of the Q tile.
template <int N>
__device__ __forceinline__ void stage_output(u32 q_tile, int row, const float (&o)[N][4], const float (&sum)[2], int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = sum[r];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float inverse = reciprocal_fast(total);  // the largest score alone adds 1 to it
#pragma unroll
    for (int i = 0; i < N; ++i)
      store_shared_32(q_tile + tile_offset<Q_ROWS>(row + 8 * r + lane / 4, i) + lane % 4 * 4,
                      pack_f16(o[i][2 * r] * inverse, o[i][2 * r + 1] * inverse));
  }
}

// A warp copies ROWS rows of the Q tile from `row` on to `out` (the tile's first row, the head's first column), 16 bytes a lane.
template <int D, int ROWS>
__device__ __forceinline__ void copy_output(u16* out, int out_stride, u32 q_tile, int row, int valid_rows, int lane) {
  constexpr int CHUNKS = D / 8;
#pragma unroll
  for (int i = 0; i < ROWS * CHUNKS / 32; ++i) {
    const int r = row + (i * 32 + lane) / CHUNKS, chunk = lane % CHUNKS;
    if (r < valid_rows) copy_shared_to_global_16(out + (long long)r * out_stride + chunk * 8, q_tile + tile_offset<Q_ROWS>(r, chunk));
  }
}

template <int D>
__global__ void __launch_bounds__(MMA_THREADS, 2)
attention_mma(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ out,
              int rows, int past, int heads_per_kv, int q_stride, int kv_stride, int out_stride, float scale_log2) {
  constexpr int TILE_BYTES = MMA_KEYS * D * 2;
  constexpr int M_TILES = WARP_ROWS / 16;
  const int head = blockIdx.x, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);  // the shuffle tells the compiler that it is uniform
  const int block_row = (gridDim.y - 1 - blockIdx.y) * Q_ROWS;  // the longest rows start first, so the last wave is short
  const int keys = past + rows;

  // Shared memory: Q, then two stages of (K, V).
  const u32 q_tile = shared_base(), kv_tiles = q_tile + Q_ROWS * D * 2;
  const TileLoad<Q_ROWS, D, MMA_THREADS> load_q;
  const TileLoad<MMA_KEYS, D, MMA_THREADS> load_kv;
  long long kv_offset = load_kv.offset(kv_stride) + (head / heads_per_kv) * D;
  load_q(q_tile, q + (long long)block_row * q_stride + head * D + load_q.offset(q_stride), q_stride, rows - block_row);
  load_kv(kv_tiles, k + kv_offset, kv_stride, keys);
  load_kv(kv_tiles + TILE_BYTES, v + kv_offset, kv_stride, keys);
  cp_async_commit();

  const int warp_row = block_row + warp * WARP_ROWS;
  const int last_key = min(past + block_row + Q_ROWS, keys) - 1;         // of the block
  const int warp_last_key = min(past + warp_row + WARP_ROWS, keys) - 1;  // of the warp; < 0 steps for a warp of padding rows
  const int warp_full_key = min(past + warp_row, keys - 1);              // every row of the warp sees keys up to here
  const int steps = last_key / MMA_KEYS + 1;

  // Every ldmatrix reads 16 rows × 16 columns with one map of lanes. A later 16-column step flips chunk bits within a panel:
  // (chunk ^ row) ^ step = (chunk ^ step) ^ row. The map does not depend on how many rows a panel has.
  const u32 lane_offset = tile_offset<Q_ROWS>(lane & 15, lane >> 4);
  const u32 q_warp = q_tile + warp * WARP_ROWS * PANEL_BYTES;

  float o[M_TILES][D / 8][4], maximum[M_TILES][2], sum[M_TILES][2];
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
    for (int i = 0; i < D / 8; ++i) o[m][i][0] = o[m][i][1] = o[m][i][2] = o[m][i][3] = 0.f;
    maximum[m][0] = maximum[m][1] = NEGATIVE_INFINITY;
    sum[m][0] = sum[m][1] = 0.f;
  }

  for (int step = 0; step < steps; ++step) {
    const int first_key = step * MMA_KEYS;
    const u32 k_tile = kv_tiles + (step & 1) * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are here, and every warp is done with the other stage
    if (step + 1 < steps) {
      const u32 next = kv_tiles + (~step & 1) * 2 * TILE_BYTES;
      kv_offset += MMA_KEYS * kv_stride;
      load_kv(next, k + kv_offset, kv_stride, keys - first_key - MMA_KEYS);
      load_kv(next + TILE_BYTES, v + kv_offset, kv_stride, keys - first_key - MMA_KEYS);
      cp_async_commit();
    }
    if (first_key > warp_last_key || warp_row >= rows) continue;

    float s[M_TILES][MMA_KEYS / 8][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
      for (int i = 0; i < MMA_KEYS / 8; ++i) s[m][i][0] = s[m][i][1] = s[m][i][2] = s[m][i][3] = 0.f;
#pragma unroll
    for (int d = 0; d < D / 16; ++d) {
      u32 a[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) ldmatrix_x4(a[m], q_warp + (lane_offset ^ ((d & 3) << 5)) + (d / 4 * Q_ROWS + m * 16) * PANEL_BYTES);
#pragma unroll
      for (int i = 0; i < MMA_KEYS / 16; ++i) {
        u32 b[4];
        ldmatrix_x4(b, k_tile + (lane_offset ^ ((d & 3) << 5)) + (d / 4 * MMA_KEYS + i * 16) * PANEL_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          mma_16x8x16(s[m][2 * i], a[m], b[0], b[2]);  // keys 0–7 of the 16, columns 0–7 and 8–15
          mma_16x8x16(s[m][2 * i + 1], a[m], b[1], b[3]);
        }
      }
    }

    const bool masked = first_key + MMA_KEYS - 1 > warp_full_key;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
      if (masked) {
        const int row = past + warp_row + m * 16 + lane / 4;  // two bounds: the diagonal and the last key there is
        mask_scores(s[m], first_key + 2 * (lane % 4), min(row, keys - 1), min(row + 8, keys - 1));
      }
      float alpha[2];
      softmax_step(s[m], maximum[m], sum[m], alpha, scale_log2);
      if (maximum_moved(alpha)) rescale(o[m], alpha);
    }

#pragma unroll
    for (int j = 0; j < MMA_KEYS / 16; ++j) {
      u32 p[M_TILES][4];  // the accumulators' layout is the A operand's: P never leaves the registers
#pragma unroll
      for (int m = 0; m < M_TILES; ++m) pack_probabilities(p[m], s[m][2 * j], s[m][2 * j + 1]);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        u32 b[4];
        ldmatrix_x4_trans(b, v_tile + (lane_offset ^ ((i & 3) << 5)) + (i / 4 * MMA_KEYS + j * 16) * PANEL_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          mma_16x8x16(o[m][2 * i], p[m], b[0], b[1]);
          mma_16x8x16(o[m][2 * i + 1], p[m], b[2], b[3]);
        }
      }
    }
  }

  // Through the warp's own rows of the Q tile, which no other warp reads, so that stores to memory are whole lines.
#pragma unroll
  for (int m = 0; m < M_TILES; ++m) stage_output(q_tile, warp * WARP_ROWS + m * 16, o[m], sum[m], lane);
  __syncwarp();
  copy_output<D, WARP_ROWS>(out + (long long)block_row * out_stride + head * D, out_stride, q_tile, warp * WARP_ROWS, rows - block_row, lane);
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A wgmma matrix descriptor for the 128-byte swizzle (PTX ISA, "Asynchronous warpgroup-level matrix shared memory layout").
// `stride` is the bytes between groups of eight rows; `leading` the bytes between panels of a transposed operand, else unused.
__device__ __forceinline__ u64 matrix_descriptor(u32 address, u32 leading, u32 stride) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(leading >> 4) << 16 | (u64)(stride >> 4) << 32 | 1ull << 62;
}

template <int D>
__global__ void __launch_bounds__(WGMMA_THREADS, 1)
attention_wgmma(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, u16* __restrict__ out,
                int rows, int past, int heads_per_kv, int q_stride, int kv_stride, int out_stride, float scale_log2) {
  constexpr int TILE_BYTES = WGMMA_KEYS * D * 2, EIGHT_ROWS = 8 * PANEL_BYTES;
  const int head = blockIdx.x, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), group = warp / 4;
  const int block_row = (gridDim.y - 1 - blockIdx.y) * Q_ROWS;  // the longest rows start first, so the last wave is short
  const int keys = past + rows;
  const int steps = (min(past + block_row + Q_ROWS, keys) - 1) / WGMMA_KEYS + 1;

  // Shared memory: Q, two stages of K, two stages of V; the swizzle is a function of the address, so tiles start at 1024 bytes.
  const u32 q_tile = (shared_base() + 1023) & ~1023u, k_tiles = q_tile + Q_ROWS * D * 2, v_tiles = k_tiles + 2 * TILE_BYTES;
  const TileLoad<Q_ROWS, D, WGMMA_THREADS> load_q;
  const TileLoad<WGMMA_KEYS, D, WGMMA_THREADS> load_kv;
  long long kv_offset = load_kv.offset(kv_stride) + (head / heads_per_kv) * D;  // of the K tile that was loaded last
  load_q(q_tile, q + (long long)block_row * q_stride + head * D + load_q.offset(q_stride), q_stride, rows - block_row);
  load_kv(k_tiles, k + kv_offset, kv_stride, keys);
  cp_async_commit();

  float s[WGMMA_KEYS / 8][4], o[D / 8][4], maximum[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY}, sum[2] = {0.f, 0.f};
  u32 p[WGMMA_KEYS / 16][4];
#pragma unroll
  for (int i = 0; i < D / 8; ++i) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;

  const u64 q_matrix = matrix_descriptor(q_tile + group * GROUP_ROWS * PANEL_BYTES, 0, EIGHT_ROWS);
  const u64 k_matrix = matrix_descriptor(k_tiles, 0, EIGHT_ROWS);
  const u64 v_matrix = matrix_descriptor(v_tiles, WGMMA_KEYS * PANEL_BYTES, EIGHT_ROWS);
  const int row = past + block_row + warp * 16 + lane / 4;  // position of the thread's first row; its second is 8 later
  const int full_key = min(past + block_row + group * GROUP_ROWS, keys - 1);  // every row of the warpgroup sees keys up to here

  const auto multiply_scores = [&](int step) {  // s = Q · K(step)ᵀ
    const u64 k_stage = k_matrix + (step & 1) * (TILE_BYTES >> 4);
#pragma unroll
    for (int d = 0; d < D / 16; ++d)
      wgmma_shared(s, q_matrix + ((d / 4 * Q_ROWS * PANEL_BYTES + d % 4 * 32) >> 4),
                   k_stage + ((d / 4 * WGMMA_KEYS * PANEL_BYTES + d % 4 * 32) >> 4), d > 0);
    wgmma_commit();
  };
  const auto multiply_values = [&](int step) {  // o += P · V(step)
    const u64 v_stage = v_matrix + (step & 1) * (TILE_BYTES >> 4);
#pragma unroll
    for (int j = 0; j < WGMMA_KEYS / 16; ++j) wgmma_registers(o, p[j], v_stage + (j * 16 * PANEL_BYTES >> 4));
    wgmma_commit();
  };
  const auto load_next = [&](int step) {  // V of this step, K of the next
    load_kv(v_tiles + (step & 1) * TILE_BYTES, v + kv_offset, kv_stride, keys - step * WGMMA_KEYS);
    if (step + 1 < steps) {
      kv_offset += WGMMA_KEYS * kv_stride;
      load_kv(k_tiles + ((step + 1) & 1) * TILE_BYTES, k + kv_offset, kv_stride, keys - (step + 1) * WGMMA_KEYS);
    }
    cp_async_commit();
  };
  const auto mask = [&](int step) {
    const int first_key = step * WGMMA_KEYS;
    if (first_key + WGMMA_KEYS - 1 > full_key)  // two bounds: the diagonal and the last key there is
      mask_scores(s, first_key + 2 * (lane % 4), min(row, keys - 1), min(row + 8, keys - 1));
  };
  const auto tiles_arrived = [] {  // and nobody reads the stages that are loaded next
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
  };
  const auto pack = [&] {
#pragma unroll
    for (int j = 0; j < WGMMA_KEYS / 16; ++j) pack_probabilities(p[j], s[2 * j], s[2 * j + 1]);
  };

  float alpha[2];
  tiles_arrived();
  wgmma_fence();
  multiply_scores(0);
  load_next(0);
  wgmma_wait<0>();
  wgmma_fence_operand(s);
  mask(0);
  softmax_step(s, maximum, sum, alpha, scale_log2);
  pack();
  for (int step = 1; step < steps; ++step) {
    tiles_arrived();
    wgmma_fence_operand(s);
    wgmma_fence_operand(o);
    wgmma_fence();
    multiply_scores(step);
    multiply_values(step - 1);
    load_next(step);
    wgmma_wait<1>();
    wgmma_fence_operand(s);
    mask(step);
    softmax_step(s, maximum, sum, alpha, scale_log2);  // runs while P · V does
    wgmma_fence_operand(s);
    if (maximum_moved(alpha)) {  // a wait on each side of the branch: one before it, and the compiler would move the softmax after it
      wgmma_wait<0>();
      wgmma_fence_operand(o);
      rescale(o, alpha);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(o);
    pack();
  }
  tiles_arrived();
  wgmma_fence_operand(o);
  wgmma_fence();
  multiply_values(steps - 1);
  wgmma_wait<0>();
  wgmma_fence_operand(o);

  // Every Q · Kᵀ ended before the last barrier, so the warp's own rows of the Q tile can stage its output.
  stage_output(q_tile, warp * 16, o, sum, lane);
  __syncwarp();
  copy_output<D, 16>(out + (long long)block_row * out_stride + head * D, out_stride, q_tile, warp * 16, rows - block_row, lane);
}
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

// Partial result of SPLIT_KEYS keys of one row and head: accumulators relative to the partial maximum (in base-2 units),
// then {maximum, sum}. Workspace: accumulators [rows, heads, splits, D] f32, then [rows, heads, splits, 2] f32.
template <int D>
__global__ void __launch_bounds__(SPLIT_THREADS)
attention_split(const u16* __restrict__ q, const u16* __restrict__ k, const u16* __restrict__ v, float* __restrict__ partial,
                int past, int heads_per_kv, int q_stride, int kv_stride, float scale_log2) {
  constexpr int LANES = D / 8, GROUPS = SPLIT_THREADS / LANES;  // LANES lanes share a key, 16 bytes each
  constexpr int BATCH = 4;                                      // keys in flight per group
  const int split = blockIdx.x, head = blockIdx.y, row = blockIdx.z, heads = gridDim.y, splits = gridDim.x;
  const int group = threadIdx.x / LANES, column = (threadIdx.x % LANES) * 8;
  const int end = min((split + 1) * SPLIT_KEYS, past + row + 1);
  if (split * SPLIT_KEYS >= end) return;  // a block of keys that this row does not see; attention_combine skips it too

  float query[8], acc[8], maximum = NEGATIVE_INFINITY, sum = 0.f;
  {
    const uint4 x = load_global_16(q + (long long)row * q_stride + head * D + column);
    const u32 pair[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      query[2 * c] = f16_low(pair[c]) * scale_log2;
      query[2 * c + 1] = f16_high(pair[c]) * scale_log2;
      acc[2 * c] = acc[2 * c + 1] = 0.f;
    }
  }
  const u16* k_head = k + (head / heads_per_kv) * D + column;
  const u16* v_head = v + (head / heads_per_kv) * D + column;
  for (int base = split * SPLIT_KEYS; base < end; base += GROUPS * BATCH) {
    uint4 kx[BATCH], vx[BATCH];
    float score[BATCH], m = maximum;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const long long key = min(base + b * GROUPS + group, end - 1);  // in bounds; keys past the end are masked below
      kx[b] = load_global_16(k_head + key * kv_stride);
      vx[b] = load_global_16(v_head + key * kv_stride);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const u32 pair[4] = {kx[b].x, kx[b].y, kx[b].z, kx[b].w};
      float dot = 0.f;
#pragma unroll
      for (int c = 0; c < 4; ++c) dot = fmaf(query[2 * c + 1], f16_high(pair[c]), fmaf(query[2 * c], f16_low(pair[c]), dot));
#pragma unroll
      for (int mask = LANES / 2; mask > 0; mask /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, mask);
      score[b] = base + b * GROUPS + group < end ? dot : NEGATIVE_INFINITY;
      m = fmaxf(m, score[b]);
    }
    if (m == NEGATIVE_INFINITY) continue;  // this group has no key yet, and −∞ − −∞ is NaN
    const float alpha = exp2_fast(maximum - m);
    maximum = m;
    sum *= alpha;
#pragma unroll
    for (int c = 0; c < 8; ++c) acc[c] *= alpha;
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const u32 pair[4] = {vx[b].x, vx[b].y, vx[b].z, vx[b].w};
      const float p = exp2_fast(score[b] - m);
      sum += p;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        acc[2 * c] = fmaf(p, f16_low(pair[c]), acc[2 * c]);
        acc[2 * c + 1] = fmaf(p, f16_high(pair[c]), acc[2 * c + 1]);
      }
    }
  }

  __shared__ float group_acc[GROUPS][D], group_maximum[GROUPS], group_sum[GROUPS];
#pragma unroll
  for (int c = 0; c < 8; ++c) group_acc[group][column + c] = acc[c];
  if (column == 0) {
    group_maximum[group] = maximum;
    group_sum[group] = sum;
  }
  __syncthreads();
  if (threadIdx.x >= D) return;
  float m = NEGATIVE_INFINITY, total = 0.f, value = 0.f;
  for (int g = 0; g < GROUPS; ++g) m = fmaxf(m, group_maximum[g]);
  for (int g = 0; g < GROUPS; ++g) {
    const float weight = exp2_fast(group_maximum[g] - m);  // 0 for a group that had no key
    total = fmaf(weight, group_sum[g], total);
    value = fmaf(weight, group_acc[g][threadIdx.x], value);
  }
  const long long slot = ((long long)row * heads + head) * splits + split;
  partial[slot * D + threadIdx.x] = value;
  if (threadIdx.x == 0) {
    float* statistics = partial + (long long)gridDim.z * heads * splits * D + slot * 2;
    statistics[0] = m;
    statistics[1] = total;
  }
}

// `splits` is attention_split's grid.x.
template <int D>
__global__ void __launch_bounds__(D)
attention_combine(const float* __restrict__ partial, u16* __restrict__ out, int past, int splits, int out_stride) {
  const int head = blockIdx.x, row = blockIdx.y, heads = gridDim.x, column = threadIdx.x;
  const long long slot = ((long long)row * heads + head) * splits;
  const float* statistics = partial + (long long)gridDim.y * heads * splits * D + slot * 2;
  const int used = (past + row) / SPLIT_KEYS + 1;
  float m = NEGATIVE_INFINITY, total = 0.f, value = 0.f;
  for (int s = 0; s < used; ++s) m = fmaxf(m, statistics[2 * s]);
  for (int s = 0; s < used; ++s) {
    const float weight = exp2_fast(statistics[2 * s] - m);
    total = fmaf(weight, statistics[2 * s + 1], total);
    value = fmaf(weight, partial[(slot + s) * D + column], value);
  }
  out[(long long)row * out_stride + head * D + column] = (u16)(pack_f16(value / total, 0.f) & 0xffff);
}
