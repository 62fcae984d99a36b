// The PTX instructions the kernels use, one small function each; those of Hopper alone are in sm90.
// The CPU emulator of the tests has functions of the same names instead of this header, so the kernels
// themselves run unchanged without a GPU.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// Byte offset of a field of a structure that describes shared memory. An address in shared memory
// is a 32-bit number here, as ldmatrix, mbarrier, wgmma and bulk copies take it; the structures
// give the layout, the sizes and the types.
#define OFFSET(structure, field) ((u32)__INTADDR__(&((structure*)0)->field))  // NVRTC has no offsetof

#define KDA_KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
// Blocks of a cluster; 1: no clusters, which not every architecture has.
#define KDA_CLUSTER(size) KDA_CLUSTER_OF(size)
#define KDA_CLUSTER_OF(size) KDA_CLUSTER_##size
#define KDA_CLUSTER_1
#define KDA_CLUSTER_2 __cluster_dims__(2, 1, 1)
#define KDA_CLUSTER_4 __cluster_dims__(4, 1, 1)
#define KDA_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
// Bytes of dynamic shared memory that a launch of the kernel must have, once in every source file. The host
// reads this constant from the compiled kernel; several numbers are those of several kinds of blocks.
#define KDA_SHARED_BYTES(...) extern "C" __constant__ const u32 shared_bytes[] = {__VA_ARGS__}
#define KDA_PARAM const __grid_constant__

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ int thread_index() { return (int)threadIdx.x; }
__device__ __forceinline__ int block_index() { return (int)blockIdx.x; }
__device__ __forceinline__ int grid_blocks() { return (int)gridDim.x; }

// Hopper and later: clusters, order of launches, stmatrix.
#define SINCE_HOPPER (__CUDA_ARCH__ >= 900)

// --- order of launches ---------------------------------------------------------------------------

// A launch may begin while the previous one in the stream still runs, so every thread of every
// kernel waits here before it reads or writes device memory (but see segments/output.cu and maps.cu, which
// read before that what is older than the previous launch). Blocks without work wait too, as the next launch
// waits for this one alone.
__device__ __forceinline__ void wait_for_inputs() {
  if constexpr (SINCE_HOPPER) asm volatile("griddepcontrol.wait;" ::: "memory");
}
// Lets the next launch of the stream use free multiprocessors; it still waits for this one in
// wait_for_inputs.
__device__ __forceinline__ void launch_dependents() {
  if constexpr (SINCE_HOPPER) asm volatile("griddepcontrol.launch_dependents;");
}

// Waits for this many cycles of the multiprocessor's clock.
__device__ __forceinline__ void pause(u32 cycles) {
  u32 begin, now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(begin)::"memory");
  do {
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
  } while (now - begin < cycles);
}

// --- arithmetic ----------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_sqrt(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The smaller and the larger of two numbers; NaN if one of them is. (fminf and fmaxf return the other one.)
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
// Two floats to packed bf16, `low` in the low half, rounded to nearest even.
__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float bf16_low(u32 x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float bf16_high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
__device__ __forceinline__ float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ u16 float_to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
// Two floats to packed float16.
__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// The same; numbers that are too large become the largest one.
__device__ __forceinline__ u32 pack_f16_saturated(float low, float high) {
  u32 r;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// Explicit, so that kernels that compute the same round alike whatever code surrounds it.
__device__ __forceinline__ float multiply_add(float x, float y, float z) { return __fmaf_rn(x, y, z); }
// Zeros that are written only on the path that needs them.
__device__ __forceinline__ uint4 zero_bits() {
  uint4 r;
  asm volatile("mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w));
  return r;
}

// The same value with its origin hidden from the compiler, so that what depends on it is not
// hoisted out of a loop into registers.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The same for a float: the compiler no longer sees that two expressions are equal, and computes both.
__device__ __forceinline__ float opaque_float(float x) {
  asm volatile("" : "+f"(x));
  return x;
}

// --- lanes ---------------------------------------------------------------------------------------

__device__ __forceinline__ float shuffle_xor(float x, int mask) {
  return __shfl_xor_sync(0xffffffffu, x, mask);
}
__device__ __forceinline__ u32 shuffle_xor(u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ __forceinline__ int shuffle_xor(int x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
__device__ __forceinline__ float shuffle(float x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
__device__ __forceinline__ int shuffle(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Whether x holds in any lane of the warp.
__device__ __forceinline__ bool warp_any(bool x) { return __any_sync(0xffffffffu, x); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
__device__ __forceinline__ void sync_block() { __syncthreads(); }

// --- shared memory -------------------------------------------------------------------------------

__device__ __forceinline__ void store_shared(u32 a, u32 x, u32 y, u32 z, u32 w) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
__device__ __forceinline__ void store_shared(u32 a, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(a), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_shared(u32 a, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared16(u32 a, u32 x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(a), "h"((u16)x) : "memory");
}
__device__ __forceinline__ float4 load_shared4(u32 a) {
  float4 r;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r.x), "=f"(r.y), "=f"(r.z), "=f"(r.w)
               : "r"(a)
               : "memory");
  return r;
}
__device__ __forceinline__ float load_shared1(u32 a) {
  float r;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(r) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ float2 load_shared2(u32 a) {
  float2 r;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "r"(a) : "memory");
  return r;
}
__device__ __forceinline__ uint4 load_shared_u4(u32 a) {
  uint4 r;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "r"(a)
               : "memory");
  return r;
}

// --- global memory -------------------------------------------------------------------------------

// Loads 16 bytes; `r` keeps its value when `real` is false. Without L1::no_allocate, though few are
// read again: with it chunk forward was 0.4 to 5 % slower.
__device__ __forceinline__ void load_sixteen(uint4& r, const void* p, bool real) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
               : "l"(p), "r"((int)real));
}
__device__ __forceinline__ void store_global(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
// Without a branch.
__device__ __forceinline__ void store_global_if(bool real, void* p, uint4 v) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p st.global.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(p),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"((int)real)
               : "memory");
}
// Loads 8 bytes if `real`; else leaves r as it is.
__device__ __forceinline__ void load_eight(u32 (&r)[2], const void* p, bool real) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
               : "+r"(r[0]), "+r"(r[1])
               : "l"(p), "r"((int)real));
}
// Prefetches the 128 bytes around `p` to L2.
__device__ __forceinline__ void prefetch_l2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// Loads and stores by width; volatile, so that they are issued in program order.
__device__ __forceinline__ u32 load_global1(u64 a) {
  u32 r;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(r) : "l"(a));
  return r;
}
__device__ __forceinline__ u32 load_global2(u64 a) {
  u16 r;
  asm volatile("ld.global.b16 %0, [%1];" : "=h"(r) : "l"(a));
  return r;
}
__device__ __forceinline__ u32 load_global4(u64 a) {
  u32 r;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(r) : "l"(a));
  return r;
}
__device__ __forceinline__ uint2 load_global8(u64 a) {
  uint2 r;
  asm volatile("ld.global.v2.b32 {%0, %1}, [%2];" : "=r"(r.x), "=r"(r.y) : "l"(a));
  return r;
}
__device__ __forceinline__ uint4 load_global16(u64 a) {
  uint4 r;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(a));
  return r;
}
__device__ __forceinline__ void store_global2(u64 a, u32 x) {
  asm volatile("st.global.b16 [%0], %1;" ::"l"(a), "h"((u16)x) : "memory");
}
__device__ __forceinline__ void store_global4(u64 a, u32 x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(a), "r"(x) : "memory");
}
__device__ __forceinline__ void store_global8(u64 a, u32 x, u32 y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(a), "r"(x), "r"(y) : "memory");
}
// 16 bytes of a state row.
__device__ __forceinline__ void store_state_bits(u64 address, const uint4& x) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
// Cache policy of a store: its line stays in L2 longer than others (`kept`) or not.
__device__ __forceinline__ u64 write_policy(bool kept) {
  u64 policy;
  if (kept) {
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}
__device__ __forceinline__ void store_global(void* p, uint4 v, u64 policy) {
  asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(p), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w), "l"(policy)
               : "memory");
}

// Loads 16 bytes that another block may have written.
__device__ __forceinline__ uint4 load_written(u64 p) {
  uint4 r;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(p)
               : "memory");
  return r;
}
// Sets a flag to `value`, after all earlier writes of this thread; waits for that value and clears
// the flag.
__device__ __forceinline__ void set_flag(u64 flag, u64 value) {
  asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ void wait_and_clear_flag(u64 flag, u64 value) {
  u64 found;
  do {
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
  } while (found != value);
  asm volatile("st.global.b64 [%0], 0;" ::"l"(flag) : "memory");
}

// Atomic operations on 64 bits, of which other blocks see no order with other memory.
__device__ __forceinline__ u64 atomic_add(u64 at, u64 x) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(x) : "memory");
  return before;
}
__device__ __forceinline__ void atomic_maximum(u64 at, long long x) {
  asm volatile("red.relaxed.gpu.global.max.s64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}
// Stores x if `expected` is there; returns what was.
__device__ __forceinline__ u64 atomic_replace(u64 at, u64 expected, u64 x) {
  u64 before;
  asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
               : "=l"(before)
               : "l"(at), "l"(expected), "l"(x)
               : "memory");
  return before;
}
__device__ __forceinline__ void atomic_store(u64 at, u64 x) {
  asm volatile("st.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(x) : "memory");
}

// Copies 16 bytes from device to shared memory, asynchronously; zeros when `real` is false (then
// `src` is not read).
__device__ __forceinline__ void copy_async16(u32 dst, const void* src, bool real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(real ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// --- matrix unit ---------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrix4(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
__device__ __forceinline__ void load_matrix4_transposed(u32 (&r)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
// Stores four 8x8 tiles transposed, of which each lane holds a row pair; lane 8i + r gives the
// address of stored row r of tile i.
__device__ __forceinline__ void store_matrix4_transposed(u32 a, const u32 (&r)[4]) {
  if constexpr (SINCE_HOPPER) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
    return;
  }
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(r[i]));
    store_shared(__shfl_sync(0xffffffffu, a, 8 * i + (lane >> 2)) + 4 * (lane & 3), y);
  }
}
// d[16x8] += a[16x16] b[16x8], bf16 operands, float32 sums.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d[16x8] += a[16x16] b[16x8], float16 operands, float32 sums.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- barriers in shared memory -------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 bar) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(bar) : "memory");
}
__device__ __forceinline__ bool barrier_try(u32 bar, u32 parity) {
  u32 done;
  if constexpr (SINCE_HOPPER) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } else {
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
  }
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(u32 bar, u32 parity) {
  while (!barrier_try(bar, parity)) {
  }
}

// --- clusters ------------------------------------------------------------------------------------
// Arrivals name no scope: a cluster-scope release costs a device-wide memory barrier and a
// cluster-scope wait flushes L1. Blocks of a cluster exchange nothing through device memory: data goes from
// block to block as bulk copies that the barrier counts, and a remote arrival says only that shared memory has
// been read.
//
// An assumption, which the memory model does not give: the loads of shared memory that a warp issued before its remote
// arrival have read their values before the block that is told so overwrites the memory, by a bulk copy that it issues
// after its wait. By architecture:
//   sm_90a   holds: loads of shared memory are issued in order and read when they are issued to the block's own memory;
//            the arrival, its notice and the copy cross the cluster's network after that, hundreds of cycles later.
//            Products of the matrix unit have been waited for before the arrival. Checked by
//            tests/cuda/test_remote_arrivals_gpu.py.
//   sm_100f  the same instructions, in chunk_forward.cu of common/. Not run yet on such a device: run that test first.
//   others   have no clusters here.
// Where it does not hold, barrier_arrive_remote and barrier_expect_remote need .release.cluster, barrier_wait of such a
// barrier .acquire.cluster.

__device__ __forceinline__ u32 cluster_address(u32 a, u32 rank) {
  u32 r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(rank));
  return r;
}
__device__ __forceinline__ void barrier_arrive_remote(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void barrier_expect_remote(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
// Copies bytes from this block's shared memory to another's; the destination's barrier counts them.
__device__ __forceinline__ void copy_to_block(u32 dst, u32 src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          dst),
      "r"(src), "r"(bytes), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Stores to shared memory of any block of the cluster that has begun.
__device__ __forceinline__ void store_cluster_shared(u32 a, u32 x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(a), "r"(x) : "memory");
}
// The barrier of all threads of a cluster, in two halves. A warp takes part in each as a whole, but its lanes may leave
// loops, or branches of one lane, at different times: so they meet first.
__device__ __forceinline__ void arrive_cluster() {
  sync_warp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void wait_cluster() {
  sync_warp();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void sync_cluster() {
  sync_warp();
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// --- registers -----------------------------------------------------------------------------------

// Changes the registers of a warpgroup's threads from the block's START to N (sm_90a and later
// architecture-specific targets).
template <int N, int START>
__device__ __forceinline__ void set_registers() {
  if constexpr (N > START) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
  if constexpr (N < START) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
