// Helpers: where a GPU has multiprocessors that no cluster of four uses, a further block prepares every third
// chunk of a cluster. Used if HELPERS.
//
// Helpers are blocks of clusters of their own, the first to begin (tickets.cuh): the i-th of these blocks prepares for the
// cluster of the i-th sequence and value head. It has the warps, the ring and the barriers of a block that only
// prepares, but writes its chunks to device memory, each to its own place, and raises a flag for each of the two
// scanning blocks. Those copy the chunk into their ring. Helpers wait for no other block.
//
// Only for dense sequences of which none may be padding (state_rows.cuh), each with a cluster of its own.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_forward/stage_copies.cuh"

constexpr int HELPER = CLUSTER;  // as the rank of a helper, behind those of a cluster's blocks

__device__ __forceinline__ int helper_clusters(const ChunkForwardParams& p) {
  return (p.N * p.HV + CLUSTER - 1) / CLUSTER;
}

// A chunk that a helper prepares, and its flags, one a scanning block. A flag is raised when it holds the number
// of the launch, which uninitialised memory does not hold by chance. Its only reader clears it: the number is the
// same when a graph is replayed.
struct HelpedChunk {
  u64 image, flags;
};
// Of step c of sequence and value head `item`.
__device__ __forceinline__ HelpedChunk find_helped_chunk(const ChunkForwardParams& p, int item, int c) {
  const u64 each = (u32)steps_of(p, 0) / PREPARERS, chunk = item * each + (u32)c / PREPARERS;
  const u64 images = p.workspace + TICKETS_BYTES;
  return {images + chunk * IMAGE_BYTES, images + p.N * p.HV * each * IMAGE_BYTES + chunk * 8 * SCANNERS};
}

// A helper: writes the prepared chunk of step c to device memory. All lanes of one warp.
__device__ __forceinline__ void store_stage(const ChunkForwardParams& p, u32 shared, int c, int lane) {
  const u32 own = own_stage(c);
  fence_async_proxy();
  sync_warp();
  const HelpedChunk to = find_helped_chunk(p, load_own(shared + OWN_CLUSTER), c);
  if (lane == 0) {
    copy_out(reinterpret_cast<void*>(to.image), shared + OFFSET(SharedMemory, stages) + own * STAGE_PITCH,
             IMAGE_BYTES);
    copy_out_commit();
    copy_out_wait_read<0>();
  }
#pragma unroll
  for (int i = 0; i < SCANNERS; ++i)  // as the blocks do that other chunks are sent to
    warp_arrive(shared + OFFSET(SharedMemory, empty) + 8 * own, lane);
  if (lane == 0) {
    copy_out_wait();
#pragma unroll
    for (int rank = 0; rank < SCANNERS; ++rank) set_flag(to.flags + 8 * rank, p.launch);
  }
}

// Copies what the helper prepared into this scanning block's ring, each chunk once its stage is free. All lanes of one
// warp.
__device__ __forceinline__ void fetch_stages(const ChunkForwardParams& p, u32 shared, int rank) {
  const int lane = thread_index() & 31, item = load_own(shared + OWN_CLUSTER),
            steps = steps_of(p, 0);
#pragma unroll 1
  for (int c = PREPARERS - 1; c < steps; c += PREPARERS) {
    const u32 slot = c % STAGES;
    barrier_wait(room_at(shared, slot), (u32)(c / STAGES & 1) ^ 1);
    if (lane == 0) {
      const HelpedChunk from = find_helped_chunk(p, item, c);
      wait_and_clear_flag(from.flags + 8 * rank, p.launch);
      fence_async_proxy_global();
      fence_async_proxy();
      const u32 full = shared + OFFSET(SharedMemory, full) + 8 * slot;
      warp_expect_remote(cluster_address(full, rank), IMAGE_BYTES);
      copy_in(shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH,
              reinterpret_cast<const void*>(from.image), IMAGE_BYTES, full);
    }
    sync_warp();
  }
}
