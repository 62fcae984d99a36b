// Bulk copies between device and shared memory, and barriers for some of a block's threads
// (sm_90a). Like ptx.cuh: the emulator has the same functions.
#pragma once

#include "sm90/wgmma.cuh"

// The maximum over a warp, in all lanes.
__device__ __forceinline__ u32 warp_max(u32 x) { return __reduce_max_sync(0xffffffffu, x); }
// Whether a barrier's phase has completed; does not wait.
__device__ __forceinline__ bool barrier_test(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done != 0;
}
// Leaves the multiprocessor to other warps for a while.
__device__ __forceinline__ void sleep_briefly() { asm volatile("nanosleep.u32 100;" ::: "memory"); }
// This thread arrives; the barrier's phase also waits for `bytes`.
__device__ __forceinline__ void barrier_expect(u32 bar, u32 bytes) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [%0], %1; }" ::"r"(bar),
               "r"(bytes)
               : "memory");
}
// Copies bytes (a multiple of 16, as both addresses) from device memory to this block's shared
// memory; `bar` counts them.
__device__ __forceinline__ void copy_in(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
// The same to the same place of both blocks of a cluster of two; the barrier at the same place of each counts
// what comes to it.
__device__ __forceinline__ void copy_in_to_both(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "h"((u16)3)
      : "memory");
}
// copy_async16 that also loads the 128 bytes around `src` to L2, where other warps need the rest of
// them.
__device__ __forceinline__ void copy_async16_of_line(u32 dst, const void* src, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src),
               "r"(real ? 16 : 0)
               : "memory");
}
// This thread arrives once all its copy_async16 so far have landed; barrier_init counts that
// arrival.
__device__ __forceinline__ void copy_async_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
}
// Copies bytes from shared to device memory, in the calling thread's open group.
// fence_async_proxy() and a barrier come between the writes of these bytes and this call.
__device__ __forceinline__ void copy_out(void* dst, u32 src, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_out_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last N groups of this thread have read their shared memory.
template <int N>
__device__ __forceinline__ void copy_out_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Waits until all groups of this thread have been written to device memory.
__device__ __forceinline__ void copy_out_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
// Orders ordinary accesses of device memory, and what flags have made visible, before bulk copies
// of this thread that follow.
__device__ __forceinline__ void fence_async_proxy_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
// `count` threads, whole warps, meet at named barrier `id` (1 to 15).
__device__ __forceinline__ void sync_threads(int id, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory");
}
// Makes the compiler compute left operands here, not after a later wait.
template <int N>
__device__ __forceinline__ void fence_registers(u32 (&a)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
// Stores four 8x8 tiles, of which each lane holds a row pair; lane 8i + r gives the address of row
// r of tile i.
__device__ __forceinline__ void store_matrix4(u32 a, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}
