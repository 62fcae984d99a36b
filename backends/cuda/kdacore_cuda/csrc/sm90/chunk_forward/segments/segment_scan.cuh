// Blocks that scan the chunks of a segment: two warpgroups with 64 rows of a state each, and a
// producer warp that copies the chunks' operands into a ring of stages ahead of them. A stage's
// barriers count the bytes that arrive (full) and the warps that have read it (empty). Who includes
// this defines STAGED_BYTES of a chunk and STAGING_BYTES of its own; macro from the host: SHARED_BYTES.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/segment_products.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// Warps with 16 rows of the state each; the warp after them copies. Registers are moved by warpgroups,
// so its warpgroup has three idle ones.
constexpr int STATE_WARPS = 8;
constexpr int THREADS = 384, START_REGISTERS = 168, STATE_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");
template <int STATE>
__device__ __forceinline__ void set_role_registers() {
  set_registers<STATE ? STATE_REGISTERS : PRODUCER_REGISTERS, START_REGISTERS>();
}

// A stage holds the first bytes of a chunk's operands. Its lead places their images on 1024 bytes,
// as products want them.
constexpr u32 STAGE_LEAD = 1024 - OFFSET(ChunkOperands, kg);
struct alignas(1024) Stage {
  unsigned char lead[STAGE_LEAD], operands[STAGED_BYTES];
};
constexpr int STAGES = STAGED_BYTES == sizeof(ChunkOperands) ? 3 : 4;
constexpr u32 STAGE_PITCH = sizeof(Stage);
// The stages' barriers (full, empty) are in the first one's lead.
struct SharedMemory {
  Stage stages[STAGES];
  unsigned char staging[STAGING_BYTES];
};
static_assert(OFFSET(SharedMemory, staging) + STAGING_BYTES <= SHARED_BYTES,
              "the host's shared memory size is too small");

using OperandRing = Ring<STAGES, STAGE_LEAD, STAGE_PITCH, 0, 8 * STAGES>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < 2 * STAGES)
    barrier_init(shared + 8 * thread_index(),
                 thread_index() < STAGES ? 1 : STATE_WARPS * WARP_ARRIVALS);
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// One thread loads the first `bytes` of every chunk's operands, once they have been written.
// `reader`: offset in UnitFlags.
__device__ __forceinline__ void produce(const SegmentParams& p, const Segment& x, u32 shared, u32 bytes,
                                        u32 reader) {
  OperandRing ring = {shared};
  u32 unit = (u32)(x.s.slot + x.begin) * p.HV + x.hv;
  for (int c = x.begin; c < x.end; ++c, unit += p.HV) {
    const u64 from = p.chunk_operands + (u64)unit * sizeof(ChunkOperands);
    wait_and_clear_flag(p.ready + (u64)unit * UNIT_FLAGS_BYTES + reader, p.launch);
    fence_async_proxy_global();
    ring.wait_empty();
    barrier_expect(ring.full(), bytes);
    copy_in(ring.stage(), reinterpret_cast<const void*>(from), bytes, ring.full());
    ring.next();
  }
}

// This warp has finished reading a stage.
__device__ __forceinline__ void release(const Lane& l, const OperandRing& ring) {
  warp_arrive(ring.empty(), l.lane);
}
