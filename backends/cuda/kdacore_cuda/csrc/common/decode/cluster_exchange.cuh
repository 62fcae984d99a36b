// Numbers from one block of a cluster to another without a barrier of the cluster: the release of such a barrier, and of
// an arrival at cluster scope, waits for all of a thread's stores to device memory, a state's among them. Like ptx.cuh:
// the emulator has the same functions.
#pragma once

#include "common/ptx.cuh"

// Stores to shared memory of a block of the cluster, and counts the bytes at a barrier of that block: who waits there
// reads what was stored.
__device__ __forceinline__ void store_async(u32 a, u32 x, u32 bar) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(a), "r"(x),
               "r"(bar)
               : "memory");
}
// Arrives at the barrier of all threads of a cluster, which then says only that all blocks have begun and that their
// barriers are made: fence_barrier_init() comes before it. wait_cluster() is its other half.
__device__ __forceinline__ void arrive_cluster_begun() {
  sync_warp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
