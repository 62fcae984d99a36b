// Bulk copies between device and shared memory, and barriers for some of a block's threads (sm_90a). Part of ptx.cuh's
// contract: the emulator has the same functions.
#ifndef KDACORE_BACKWARD_BULK_CUH
#define KDACORE_BACKWARD_BULK_CUH

#include "sm90/wgmma.cuh"

#ifndef KDACORE_EMULATE

__device__ __forceinline__ int grid_blocks() { return (int)gridDim.x; }
// The largest of a warp's numbers, in all lanes.
__device__ __forceinline__ u32 largest_of_warp(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
// This thread arrives, and the barrier's phase also waits for so many bytes.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" ::"r"(bar), "r"(bytes) : "memory");
}
// Bytes (a multiple of 16, as both addresses) from device memory to this block's shared memory; `bar` counts them.
__device__ __forceinline__ void copy_in(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst), "l"(src),
               "r"(bytes), "r"(bar)
               : "memory");
}
// copy_async16, and the 128 bytes around `src` to L2: for rows of which other warps take the rest.
__device__ __forceinline__ void copy_async16_of_line(u32 dst, const void* src, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(real ? 16 : 0) : "memory");
}
// This thread arrives once all its copy_async16 so far have landed; barrier_init counts that arrival.
__device__ __forceinline__ void copy_async_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
// Bytes from shared to device memory, in the calling thread's open group. What wrote them comes before fence_async_proxy()
// and a barrier.
__device__ __forceinline__ void copy_out(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but the last N groups of this thread have read their shared memory.
template <int N>
__device__ __forceinline__ void copy_out_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// `count` threads, whole warps, meet at named barrier `id` (1 to 15).
__device__ __forceinline__ void sync_threads(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// Has left operands made here, not after a later wait.
template <int N>
__device__ __forceinline__ void hold(u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
// d[64 x 16] (+)= a[64 x 16] b[16 x 16], as those of wgmma.cuh.
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (&d)[2][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7 }, {%8, %9, %10, %11}, %12, p, 1, 1, %14; }"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANSPOSED));
}
// Four 8x8 tiles held one row pair a lane, stored as they are; lane 8i + r gives the address of row r of tile i.
__device__ __forceinline__ void store_matrix4(u32 a, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// d[64 x 128] -= a[64 x 16] b[16 x 128], the sum over rows of b.
__device__ __forceinline__ void warpgroup_subtract(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "
      "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
      "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
      "%62, %63 "
      "}, {%64, %65, %66, %67}, %68, 1, -1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3]), "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]), "+f"(d[5][0]),
        "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]), "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),
        "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]), "+f"(d[8][0]), "+f"(d[8][1]), "+f"(d[8][2]),
        "+f"(d[8][3]), "+f"(d[9][0]), "+f"(d[9][1]), "+f"(d[9][2]), "+f"(d[9][3]), "+f"(d[10][0]), "+f"(d[10][1]),
        "+f"(d[10][2]), "+f"(d[10][3]), "+f"(d[11][0]), "+f"(d[11][1]), "+f"(d[11][2]), "+f"(d[11][3]), "+f"(d[12][0]),
        "+f"(d[12][1]), "+f"(d[12][2]), "+f"(d[12][3]), "+f"(d[13][0]), "+f"(d[13][1]), "+f"(d[13][2]), "+f"(d[13][3]),
        "+f"(d[14][0]), "+f"(d[14][1]), "+f"(d[14][2]), "+f"(d[14][3]), "+f"(d[15][0]), "+f"(d[15][1]), "+f"(d[15][2]),
        "+f"(d[15][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

#endif
#endif
