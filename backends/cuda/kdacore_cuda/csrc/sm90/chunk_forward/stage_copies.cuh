// Clusters in which blocks either prepare or scan: how a prepared chunk gets from one to the others.
//
// A block that prepares every other chunk has a ring of its own for them. A stage of it is taken only
// until its copies have arrived, and a stage of the scanning blocks only from then on until it has been
// read. In other clusters a chunk takes the same stage of all blocks for both.
//
// Barriers: full (in scanning blocks: arrived), empty (in the block that prepares: copied), room (there
// too: this stage of the scanning blocks has been read and its arrival noticed).
#pragma once

#include "common/ptx.cuh"
#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/schedule.cuh"

__device__ __forceinline__ void init_copy_barriers(u32 shared, u32 stage, int rank) {
  barrier_init(shared + OFFSET(SharedMemory, empty) + 8 * stage, WARP_ARRIVALS * SCANNERS);
  barrier_init(room_at(shared, stage),
               WARP_ARRIVALS * (HELPERS && rank < SCANNERS ? 1 : SCANNERS) * (SCAN_WARPS + 1));
}

// The block of the cluster that is told when a scanning block has read stage `slot`: the one that prepares chunks for
// it, or where a helper does, the scanning block itself.
__device__ __forceinline__ u32 sender_of(u32 slot) {
  if constexpr (HELPERS && SEPARATE) {
    static_assert(!(HELPERS && SEPARATE) || (SCANNERS == 2 && PREPARERS == 3 && STAGES == 6),
                  "ranks by stage, four bits each");
    const u32 own = block_index() & 1;
    return (0x032032u | own << 20 | own << 8) >> (4 * slot) & 15;
  }
  return SCANNERS + slot % PREPARERS;
}

// Copies the prepared chunk of step c to the scanning blocks, as soon as they have room. All lanes of
// one warp.
__device__ __forceinline__ void send_stage(u32 shared, int c, int lane) {
  const u32 slot = c % STAGES;
  barrier_wait(room_at(shared, slot), (u32)(c / STAGES & 1) ^ 1);
  fence_async_proxy();
  sync_warp();
  if (lane == 0) {
    const u32 from = shared + OFFSET(SharedMemory, stages) + own_stage(own_step(c)) * STAGE_PITCH,
              at = shared + OFFSET(SharedMemory, stages) + slot * STAGE_PITCH,
              full = shared + OFFSET(SharedMemory, full) + 8 * slot;
#pragma unroll
    for (int to = 0; to < SCANNERS; ++to) {
      warp_expect_remote(cluster_address(full, to), IMAGE_BYTES);
      copy_to_block(cluster_address(at, to), from, IMAGE_BYTES, cluster_address(full, to));
    }
  }
}

// One warp of a scanning block: tells the blocks that prepare when copies have arrived. It also counts
// among those that have to be done with a stage, so that it never misses a phase of `full`.
__device__ __forceinline__ void acknowledge_stages(const ChunkForwardParams& p, u32 shared) {
  const int lane = thread_index() & 31;
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
#pragma unroll 1
  for (int c = 0; advance_to_step(p, shared, task, c); ++c) {
    const u32 slot = c % STAGES, from = sender_of(slot);
    barrier_wait(shared + OFFSET(SharedMemory, full) + 8 * slot, (u32)(c / STAGES & 1));
    if (from >= SCANNERS)
      warp_arrive_remote(cluster_address(shared + OFFSET(SharedMemory, empty) + 8 * own_stage(own_step(c)), from),
                         lane);
    warp_arrive_remote(cluster_address(room_at(shared, slot), from), lane);
  }
}
