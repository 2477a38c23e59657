// PTX that attention.cu uses, one short function per instruction. Nothing else of that file is specific to the hardware,
// so a host emulator that defines ATTENTION_PTX_CUH and these functions itself runs the same kernels on a CPU.
#ifndef ATTENTION_PTX_CUH
#define ATTENTION_PTX_CUH

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

extern __shared__ __align__(1024) unsigned char shared_memory[];

__device__ __forceinline__ u32 shared_base() { return (u32)__cvta_generic_to_shared(shared_memory); }

// Copies 16 bytes to shared memory, asynchronously; writes zeros where `valid` is false and then reads nothing.
__device__ __forceinline__ void cp_async_16(u32 dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

__device__ __forceinline__ void store_shared_32(u32 dst, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(dst), "r"(value) : "memory");
}
__device__ __forceinline__ void copy_shared_to_global_16(void* dst, u32 src) {
  u32 a, b, c, d;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(src) : "memory");
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(dst), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ uint4 load_global_16(const void* src) { return __ldg((const uint4*)src); }

// Four 8 × 8 f16 matrices; lane l gives the address of row l % 8 of matrix l / 8 and gets elements [l / 4][2(l % 4) + {0, 1}] of each.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// The same, each matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// d[16 × 8] += a[16 × 16] · b[16 × 8], f16 inputs, f32 accumulators.
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// {low half: f16(low), high half: f16(high)}
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float f16_low(u32 pair) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ float f16_high(u32 pair) {
  float r;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h; }" : "=f"(r) : "r"(pair));
  return r;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// ---- wgmma: a group of four warps multiplies from shared memory. Registers that an unfinished wgmma reads or writes
// must not be touched before wgmma_wait; wgmma_fence_operand keeps the compiler from moving accesses across it.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int N>
__device__ __forceinline__ void wgmma_fence_operand(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}
// Makes this thread's writes to shared memory visible to wgmma; a barrier must follow.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define D4(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define D16(i) D4(i), D4(i + 1), D4(i + 2), D4(i + 3)
#define R16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p) \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i ",%" #j ",%" #k ",%" #l ",%" #m ",%" #n ",%" #o ",%" #p
#define R32 R16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) "," R16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define R64 R32 "," R16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47) "," R16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)

// d[64 × 128] (+)= a[64 × 16] · b[16 × 128], both from shared memory and K-major.
__device__ __forceinline__ void wgmma_shared(float (&d)[16][4], u64 a, u64 b, bool accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, %64, %65, p, 1, 1, 0, 0; }"
               : D16(0), D16(4), D16(8), D16(12) : "l"(a), "l"(b), "r"((int)accumulate));
}
// d[64 × 128] += a[64 × 16] · b[16 × 128], a in registers, b from shared memory with its columns contiguous (MN-major).
__device__ __forceinline__ void wgmma_registers(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" R64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1; }"
               : D16(0), D16(4), D16(8), D16(12) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// The same for 64 columns (head_dim 64).
__device__ __forceinline__ void wgmma_registers(float (&d)[8][4], const u32 (&a)[4], u64 b) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1; }"
               : D16(0), D16(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef D4
#undef D16
#undef R16
#undef R32
#undef R64
#endif  // __CUDA_ARCH_FEAT_SM90_ALL

#endif  // ATTENTION_PTX_CUH
