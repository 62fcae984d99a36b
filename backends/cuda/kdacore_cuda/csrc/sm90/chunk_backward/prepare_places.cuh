// Which unit a thread works on, and where that lies in shared memory. Needs SharedMemory, UNIT_PITCH,
// THREADS and BLOCKS of the file that includes it.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/prepare_unit_inputs.cuh"

// A unit has THREADS threads and a part of shared memory: those of a block, or (SIDE_BY_SIDE) of one
// of several units that a block computes at once.
#if SIDE_BY_SIDE
// Computed anew wherever they are asked for: there are no registers to keep them.
__device__ __forceinline__ int unit_in_block() { return opaque(thread_index()) / THREADS; }
__device__ __forceinline__ int unit_thread() { return opaque(thread_index()) % THREADS; }
__device__ __forceinline__ u32 place_memory(int place) {
  KDA_SHARED(memory);
  return shared_address(memory) + place * UNIT_PITCH;
}
__device__ __forceinline__ u32 unit_memory() { return place_memory(unit_in_block()); }
__device__ __forceinline__ u32 unit_index() {
  return __float_as_uint(load_shared1(unit_memory() + OFFSET(SharedMemory, place)));
}
__device__ __forceinline__ void sync_unit() { sync_threads(1 + unit_in_block(), THREADS); }
// Half of a unit's threads: the first half (0) or the second (1) of them, or one of any.
__device__ __forceinline__ void sync_half_unit(int half = 0) {
  sync_threads(1 + BLOCKS + 2 * unit_in_block() + half, THREADS / 2);
}
#else
__device__ __forceinline__ int unit_thread() { return thread_index(); }
__device__ __forceinline__ u32 unit_index() { return block_index(); }
__device__ __forceinline__ void sync_unit() { sync_block(); }
__device__ __forceinline__ void sync_half_unit(int half = 0) { sync_threads(1 + half, THREADS / 2); }
#endif
