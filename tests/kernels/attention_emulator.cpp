// Runs engine/cuda/kernels/attention.cu on a CPU, thread by thread, with the PTX of attention_ptx.cuh in software.
//
// Every CUDA thread is a fibre. Warp instructions (ldmatrix, mma, shuffles), wgmma and barriers are meetings: the last fibre to
// arrive does the work. Two switches make races visible that one order would hide:
//   late      asynchronous copies and wgmma happen when they are waited for (0: when they are issued)
//   backward  the fibre that runs is the last that can (0: the first), so a warp runs ahead of the others as far as barriers let it
// Shared memory starts as NaN. Layouts come from the PTX ISA's fragment and descriptor tables, not from the kernel.
#define ATTENTION_PTX_CUH
#define __CUDA_ARCH_FEAT_SM90_ALL
#define __global__ static
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct Index { u32 x, y, z; };
using std::min;

static Index threadIdx, blockIdx, gridDim;
static bool late, backward;
alignas(1024) static unsigned char shared[228 * 1024];

static float to_float(u16 bits) { _Float16 h; memcpy(&h, &bits, 2); return (float)h; }
static u16 to_half(float x) { _Float16 h = (_Float16)x; u16 bits; memcpy(&bits, &h, 2); return bits; }
static void check(bool ok, const char* what) { if (!ok) { fprintf(stderr, "attention emulator: %s\n", what); abort(); } }

// ---- fibres and meetings
struct Meeting { int arrived = 0; u64 generation = 0; void* slots[256]; };
struct Copy { u32 dst; const void* src; bool valid; };
struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(1 << 16);
  Meeting* meeting = nullptr;  // what it waits for, and that meeting's generation when it began to
  u64 generation = 0;
  bool done = false;
  std::deque<std::vector<Copy>> copies;  // committed groups; `open` is the one being filled
  std::vector<Copy> open;
};
static std::vector<std::unique_ptr<Fibre>> fibres;
static ucontext_t scheduler;
static int current;
static Meeting block_meeting, group_meetings[2], warp_meetings[8];
static std::function<void()> body;

// `last(slots)` runs once everybody came; slots[i] is the argument of the i-th thread of the set.
template <class F>
static void meet(Meeting& m, int size, int index, void* argument, F last) {
  m.slots[index] = argument;
  if (++m.arrived == size) {
    last(m.slots);
    m.arrived = 0;
    ++m.generation;
    return;
  }
  Fibre& self = *fibres[current];
  self.meeting = &m;
  self.generation = m.generation;
  swapcontext(&self.context, &scheduler);
}
template <class F> static void meet_warp(void* a, F last) { meet(warp_meetings[threadIdx.x / 32], 32, threadIdx.x % 32, a, last); }
template <class F> static void meet_group(void* a, F last) { meet(group_meetings[threadIdx.x / 128], 128, threadIdx.x % 128, a, last); }
static void __syncthreads() { meet(block_meeting, (int)fibres.size(), threadIdx.x, nullptr, [](void**) {}); }
static void __syncwarp() { meet_warp(nullptr, [](void**) {}); }

static void run_block(int threads) {
  memset(shared, 0xff, sizeof shared);
  while ((int)fibres.size() < threads) fibres.push_back(std::make_unique<Fibre>());
  fibres.resize(threads);
  for (auto& f : fibres) {
    f->done = false;
    f->meeting = nullptr;
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = f->stack.data();
    f->context.uc_stack.ss_size = f->stack.size();
    f->context.uc_link = nullptr;
    makecontext(&f->context, (void (*)())(+[] {
      body();
      fibres[current]->done = true;
      swapcontext(&fibres[current]->context, &scheduler);
    }), 0);
  }
  for (int left = threads; left > 0;) {
    bool progress = false;
    for (int i = 0; i < threads; ++i) {
      current = backward ? threads - 1 - i : i;
      Fibre& f = *fibres[current];
      if (f.done || (f.meeting && f.meeting->generation == f.generation)) continue;
      f.meeting = nullptr;
      threadIdx = {(u32)current, 0, 0};
      swapcontext(&scheduler, &f.context);
      left -= f.done;
      progress = true;
      if (current % 32 == (backward ? 0 : 31)) break;  // a warp's lanes stay together; then the most favoured warp again
    }
    check(progress, "threads wait for each other for ever");
  }
  for (auto& f : fibres) check(f->open.empty() && f->copies.empty(), "a kernel ended with copies in flight");
}

// ---- warp instructions
template <class T>
static T __shfl_sync(u32, T value, int lane) {
  meet_warp(&value, [&](void** s) {
    T v = *(T*)s[lane];
    for (int i = 0; i < 32; ++i) *(T*)s[i] = v;
  });
  return value;
}
static float __shfl_xor_sync(u32, float value, int mask) {
  meet_warp(&value, [&](void** s) {
    float v[32];
    for (int i = 0; i < 32; ++i) v[i] = *(float*)s[i];
    for (int i = 0; i < 32; ++i) *(float*)s[i] = v[i ^ mask];
  });
  return value;
}
static bool __any_sync(u32, bool value) {
  meet_warp(&value, [](void** s) {
    bool any = false;
    for (int i = 0; i < 32; ++i) any |= *(bool*)s[i];
    for (int i = 0; i < 32; ++i) *(bool*)s[i] = any;
  });
  return value;
}
static float __int_as_float(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }

static u32 shared_base() { return 512; }  // what the kernel must align by itself
static unsigned char* at(u32 address, u32 bytes) {
  check(address >= 512 && address + bytes <= sizeof shared && address % bytes == 0, "shared memory out of bounds or misaligned");
  return shared + address;
}
static void do_copy(const Copy& c) {
  if (c.valid) memcpy(at(c.dst, 16), c.src, 16); else memset(at(c.dst, 16), 0, 16);
}
static void cp_async_16(u32 dst, const void* src, bool valid) {
  check(!valid || (u64)src % 16 == 0, "misaligned copy");
  if (late) fibres[current]->open.push_back({dst, src, valid}); else do_copy({dst, src, valid});
}
static void cp_async_commit() { Fibre& f = *fibres[current]; f.copies.push_back(std::move(f.open)); f.open.clear(); }
template <int PENDING>
static void cp_async_wait() {
  auto& groups = fibres[current]->copies;
  for (; groups.size() > PENDING; groups.pop_front()) for (auto& c : groups.front()) do_copy(c);
}
static void store_shared_32(u32 dst, u32 value) { memcpy(at(dst, 4), &value, 4); }
static void copy_shared_to_global_16(void* dst, u32 src) { check((u64)dst % 16 == 0, "misaligned store"); memcpy(dst, at(src, 16), 16); }
static uint4 load_global_16(const void* src) { check((u64)src % 16 == 0, "misaligned load"); uint4 x; memcpy(&x, src, 16); return x; }
static u32 pack_f16(float low, float high) { return to_half(low) | (u32)to_half(high) << 16; }
static float f16_low(u32 pair) { return to_float(pair & 0xffff); }
static float f16_high(u32 pair) { return to_float(pair >> 16); }
static float exp2_fast(float x) { return exp2f(x); }
static float reciprocal_fast(float x) { return 1 / x; }

struct LdMatrix { u32* r; u32 address; };
template <bool TRANS>
static void ldmatrix(u32 (&r)[4], u32 address) {
  LdMatrix mine{r, address};
  meet_warp(&mine, [](void** s) {
    for (int m = 0; m < 4; ++m) {
      u16 matrix[8][8];
      for (int row = 0; row < 8; ++row) memcpy(matrix[row], at(((LdMatrix*)s[8 * m + row])->address, 16), 16);
      for (int lane = 0; lane < 32; ++lane) {
        u16 e[2];
        for (int c = 0; c < 2; ++c) e[c] = TRANS ? matrix[2 * (lane % 4) + c][lane / 4] : matrix[lane / 4][2 * (lane % 4) + c];
        ((LdMatrix*)s[lane])->r[m] = e[0] | (u32)e[1] << 16;
      }
    }
  });
}
static void ldmatrix_x4(u32 (&r)[4], u32 address) { ldmatrix<false>(r, address); }
static void ldmatrix_x4_trans(u32 (&r)[4], u32 address) { ldmatrix<true>(r, address); }

// Element (i, k) of a 16 × 16 A fragment lies in lane 4(i % 8) + k % 8 / 2, register (i ≥ 8) + 2(k ≥ 8), half k % 2;
// element (k, j) of a 16 × 8 B fragment in lane 4j + k % 8 / 2, register k ≥ 8, half k % 2.
static float half_of(u32 pair, int which) { return to_float(pair >> (16 * which) & 0xffff); }
struct Mma { float* d; const u32* a; u32 b[2]; };
static void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  Mma mine{d, a, {b0, b1}};
  meet_warp(&mine, [](void** s) {
    float A[16][16], B[16][8];
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 16; ++i) A[i][k] = half_of(((Mma*)s[4 * (i % 8) + k % 8 / 2])->a[(i >= 8) + 2 * (k >= 8)], k % 2);
      for (int j = 0; j < 8; ++j) B[k][j] = half_of(((Mma*)s[4 * j + k % 8 / 2])->b[k >= 8], k % 2);
    }
    for (int i = 0; i < 16; ++i)
      for (int j = 0; j < 8; ++j) {
        float sum = 0;
        for (int k = 0; k < 16; ++k) sum += A[i][k] * B[k][j];
        ((Mma*)s[4 * (i % 8) + j / 2])->d[2 * (i >= 8) + j % 2] += sum;
      }
  });
}

// ---- wgmma
struct Wgmma { float* d[128]; const u32* a[128]; u64 a_matrix, b_matrix; bool accumulate; int n; };
struct WgmmaQueue { std::deque<std::vector<Wgmma>> groups; std::vector<Wgmma> open; };
static WgmmaQueue wgmma_queues[2];

// Bytes of a descriptor's matrix with the 128-byte swizzle: address bits 4–6 are XORed with bits 7–9.
struct Matrix {
  u32 start, leading, stride;
  explicit Matrix(u64 d) : start((d & 0x3fff) << 4), leading((d >> 16 & 0x3fff) << 4), stride((d >> 32 & 0x3fff) << 4) {
    check(d >> 62 == 1 && (d >> 49 & 7) == 0, "descriptor of another swizzle");
  }
  static float read(u32 linear) { u16 h; memcpy(&h, at(linear ^ (linear >> 7 & 7) << 4, 2), 2); return to_float(h); }
  float k_major(int row, int k) const { return read(start + row / 8 * stride + row % 8 * 128 + 2 * k); }
  float mn_major(int n, int k) const { return read(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + 2 * (n % 64)); }
};
static void execute(const Wgmma& w) {
  Matrix b(w.b_matrix);
  static float B[16][128];
  for (int k = 0; k < 16; ++k) for (int j = 0; j < w.n; ++j) B[k][j] = w.a[0] ? b.mn_major(j, k) : b.k_major(j, k);
  for (int i = 0; i < 64; ++i) {
    float A[16];
    const int lane0 = i / 16 * 32 + 4 * (i % 8);
    for (int k = 0; k < 16; ++k)
      A[k] = w.a[0] ? half_of(w.a[lane0 + k % 8 / 2][(i % 16 >= 8) + 2 * (k >= 8)], k % 2) : Matrix(w.a_matrix).k_major(i, k);
    for (int j = 0; j < w.n; ++j) {
      float sum = 0;
      for (int k = 0; k < 16; ++k) sum += A[k] * B[k][j];
      float& d = w.d[lane0 + j % 8 / 2][j / 8 * 4 + 2 * (i % 16 >= 8) + j % 2];
      d = w.accumulate ? d + sum : sum;
    }
  }
}
struct WgmmaThread { float* d; const u32* a; u64 a_matrix, b_matrix; bool accumulate; };
static void issue(int n, WgmmaThread mine) {
  WgmmaQueue& queue = wgmma_queues[threadIdx.x / 128];
  meet_group(&mine, [&](void** s) {
    Wgmma w{{}, {}, mine.a_matrix, mine.b_matrix, mine.accumulate, n};
    for (int t = 0; t < 128; ++t) {
      auto* o = (WgmmaThread*)s[t];
      check(o->a_matrix == w.a_matrix && o->b_matrix == w.b_matrix && o->accumulate == w.accumulate, "a warpgroup's threads disagree");
      w.d[t] = o->d;
      w.a[t] = o->a;
    }
    if (!late) { execute(w); return; }
    if (!w.accumulate) for (int t = 0; t < 128; ++t) std::fill_n(w.d[t], n / 2, NAN);  // not there before the wait
    queue.open.push_back(w);
  });
}
static void wgmma_shared(float (&d)[16][4], u64 a, u64 b, bool accumulate) { issue(128, {d[0], nullptr, a, b, accumulate}); }
static void wgmma_registers(float (&d)[16][4], const u32 (&a)[4], u64 b) { issue(128, {d[0], a, 0, b, true}); }
static void wgmma_registers(float (&d)[8][4], const u32 (&a)[4], u64 b) { issue(64, {d[0], a, 0, b, true}); }
static void wgmma_commit() {
  WgmmaQueue& q = wgmma_queues[threadIdx.x / 128];
  meet_group(nullptr, [&](void**) { q.groups.push_back(std::move(q.open)); q.open.clear(); });
}
template <int PENDING>
static void wgmma_wait() {  // each warp waits by itself; the first one to do so makes it happen
  auto& groups = wgmma_queues[threadIdx.x / 128].groups;
  meet_warp(nullptr, [&](void**) { for (; groups.size() > PENDING; groups.pop_front()) for (auto& w : groups.front()) execute(w); });
}
static void wgmma_fence() {}
template <int N> static void wgmma_fence_operand(float (&)[N][4]) {}
static void fence_async_proxy() {}

#include "../../engine/cuda/kernels/attention.cu"

static void launch(Index grid, int threads, std::function<void()> kernel, bool late_, bool backward_) {
  late = late_;
  backward = backward_;
  gridDim = grid;
  body = std::move(kernel);
  for (u32 z = 0; z < grid.z; ++z)
    for (u32 y = 0; y < grid.y; ++y)
      for (u32 x = 0; x < grid.x; ++x) { blockIdx = {x, y, z}; run_block(threads); }
}

// variant: 0 mma, 1 wgmma, 2 split + combine. Grids as the kernel's header says; `partial` is attention_split's workspace.
template <int D>
static void attention(int variant, const u16* q, const u16* k, const u16* v, u16* out, float* partial, int rows, int past, int heads,
                      int heads_per_kv, int qs, int kvs, int os, float scale_log2, bool late_, bool backward_) {
  const u32 tiles = (rows + Q_ROWS - 1) / Q_ROWS, splits = (past + rows + SPLIT_KEYS - 1) / SPLIT_KEYS;
  const auto run = [&](Index grid, int threads, std::function<void()> kernel) { launch(grid, threads, kernel, late_, backward_); };
  if (variant == 0)
    run({(u32)heads, tiles, 1}, MMA_THREADS, [=] { attention_mma<D>(q, k, v, out, rows, past, heads_per_kv, qs, kvs, os, scale_log2); });
  else if (variant == 1)
    run({(u32)heads, tiles, 1}, WGMMA_THREADS, [=] { attention_wgmma<D>(q, k, v, out, rows, past, heads_per_kv, qs, kvs, os, scale_log2); });
  else {
    run({splits, (u32)heads, (u32)rows}, SPLIT_THREADS, [=] { attention_split<D>(q, k, v, partial, past, heads_per_kv, qs, kvs, scale_log2); });
    run({(u32)heads, (u32)rows, 1}, D, [=] { attention_combine<D>(partial, out, past, splits, os); });
  }
}

extern "C" void emulate(int variant, int head_dim, const u16* q, const u16* k, const u16* v, u16* out, float* partial, int rows, int past,
                        int heads, int heads_per_kv, int qs, int kvs, int os, float scale_log2, int late_, int backward_) {
  (head_dim == 64 ? attention<64> : attention<128>)(variant, q, k, v, out, partial, rows, past, heads, heads_per_kv, qs, kvs, os, scale_log2,
                                                    late_, backward_);
}
