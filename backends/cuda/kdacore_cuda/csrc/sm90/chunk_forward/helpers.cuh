// Helpers: blocks of further clusters, the first to begin (tickets.cuh), on multiprocessors that would be idle. They
// prepare some of the chunks of the others and write them to device memory, each to its own place, and raise a flag
// for each of the two scanning blocks. Those copy the chunk into their ring. Helpers wait for no other block. Used if
// HELPERS.
//
// In clusters of four the i-th of these blocks prepares every third chunk of the cluster of the i-th sequence and value
// head. It has the warps, the ring and the barriers of a block that only prepares.
//
// In clusters of two (SPACED) their own blocks prepare, in turns, chunks `spacing` apart, and helpers all others:
// helped_steps.cuh, helper_block.cuh.
//
// Only for dense sequences of which none may be padding (state_rows.cuh), or, in clusters of four, for a single sequence;
// each with a cluster of its own.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_forward/helped_steps.cuh"
#include "sm90/chunk_forward/stage_copies.cuh"
#include "sm90/polling.cuh"

constexpr int HELPER = CLUSTER;  // as the rank of a helper, behind those of a cluster's blocks

__device__ __forceinline__ int helper_clusters(const ChunkForwardParams& p) {
  const int items = p.N * p.HV;
  return SPACED ? grid_blocks() / CLUSTER - items : (items + CLUSTER - 1) / CLUSTER;
}

// A chunk that a helper prepares, and its flags, one a scanning block. A flag is raised when it holds the number
// of the launch, which uninitialised memory does not hold by chance. Its only reader clears it: the number is the
// same when a graph is replayed.
struct HelpedChunk {
  u64 image, flags;
};
// Of step c of sequence and value head `item`, in clusters of four.
__device__ __forceinline__ HelpedChunk find_helped_chunk(const ChunkForwardParams& p, int item, int c) {
  const u64 each = (u32)steps_of(p, 0) / PREPARERS, chunk = item * each + (u32)c / PREPARERS;
  const u64 images = p.workspace + TICKETS_BYTES;
  return {images + chunk * IMAGE_BYTES, images + p.N * p.HV * each * IMAGE_BYTES + chunk * 8 * SCANNERS};
}
// In clusters of two. Flags lie behind the chunk, which is whole lines of 128 bytes, in a line of their own.
__device__ __forceinline__ HelpedChunk find_helped_chunk(const ChunkForwardParams& p, int item,
                                                         const HelpedStep& step) {
  static_assert(IMAGE_BYTES % 128 == 0, "chunks would share lines");
  const u64 chunk = (u64)(step.c - step.own) * (u32)(p.N * p.HV) + item;
  const u64 image = p.workspace + TICKETS_BYTES + chunk * (IMAGE_BYTES + 128);
  return {image, image + IMAGE_BYTES};
}

// A helper: writes the prepared chunk of a stage to device memory. `release` says that the stage has been read. All
// lanes of one warp.
template <class F>
__device__ __forceinline__ void store_stage(const ChunkForwardParams& p, u32 shared, u32 own,
                                            const HelpedChunk& to, int lane, F release) {
  if (lane == 0) {
    copy_out(reinterpret_cast<void*>(to.image), shared + OFFSET(SharedMemory, stages) + own * STAGE_PITCH,
             IMAGE_BYTES);
    copy_out_commit();
    copy_out_wait_read<0>();
  }
  release();
  if (lane == 0) {
    copy_out_wait();
#pragma unroll
    for (int rank = 0; rank < SCANNERS; ++rank) set_flag(to.flags + 8 * rank, p.launch);
  }
}
// That of step c, in clusters of four.
__device__ __forceinline__ void store_stage(const ChunkForwardParams& p, u32 shared, int c, int lane) {
  const u32 own = own_stage(own_step(c));
  fence_async_proxy();
  sync_warp();
  store_stage(p, shared, own, find_helped_chunk(p, load_own(shared + OWN_CLUSTER), c), lane, [&] {
#pragma unroll
    for (int i = 0; i < SCANNERS; ++i)  // as the blocks do that other chunks are sent to
      warp_arrive(shared + OFFSET(SharedMemory, empty) + 8 * own, lane);
  });
}

// One thread of a scanning block: copies what a helper has written, and a flag has said so, into a stage.
__device__ __forceinline__ void fetch_stage(u32 shared, u32 slot, u64 image, int rank) {
  fence_async_proxy_global();
  fence_async_proxy();
  const u32 full = shared + OFFSET(SharedMemory, full) + 8 * slot;
  warp_expect_remote(cluster_address(full, rank), IMAGE_BYTES);
  copy_in(shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH, reinterpret_cast<const void*>(image),
          IMAGE_BYTES, full);
}

// In clusters of four: copies what the helper prepared into this scanning block's ring, each chunk once its stage is
// free. All lanes of one warp.
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
      fetch_stage(shared, slot, from.image, rank);
    }
    sync_warp();
  }
}

// In clusters of two: the same, step by step. One warp of each block, which has other work and so waits for nothing.
struct Fetcher {
  int item, steps;
  HelpedStep step;

  // Whether a step was asked for. All lanes.
  __device__ __forceinline__ bool next(const ChunkForwardParams& p, u32 shared, int rank, int lane) {
    if (step.c >= steps) return false;
    const u32 slot = step.c % STAGES, empty = shared + OFFSET(SharedMemory, empty) + 8 * slot;
    if (!shuffle((int)barrier_test(empty, (u32)(step.c / STAGES & 1) ^ 1), 0)) return false;
    const HelpedChunk from = find_helped_chunk(p, item, step);
    int there = 0;
    if (lane == 0) {
      there = take_flag(from.flags + 8 * rank, p.launch);
      if (there) fetch_stage(shared, slot, from.image, rank);
    }
    if (!shuffle(there, 0)) return false;
    to_next_helped(p, step);
    return true;
  }
};
