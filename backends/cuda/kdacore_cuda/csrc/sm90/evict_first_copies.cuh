// Copies to shared memory of what no later launch reads. Their lines leave L2 before others, so
// that more of what is read again stays there. Like ptx.cuh: the emulator has the same functions.
#pragma once

#include "sm90/bulk_copies.cuh"

__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_in_evict_first(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "l"(evict_first_policy())
      : "memory");
}
__device__ __forceinline__ void copy_in_to_both_evict_first(u32 dst, const void* src, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4, %5;" ::"r"(dst),
      "l"(src), "r"(bytes), "r"(bar), "h"((u16)3), "l"(evict_first_policy())
      : "memory");
}
__device__ __forceinline__ void copy_async16_evict_first(u32 dst, const void* src, bool real) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(dst), "l"(src),
               "r"(real ? 16 : 0), "l"(evict_first_policy())
               : "memory");
}
