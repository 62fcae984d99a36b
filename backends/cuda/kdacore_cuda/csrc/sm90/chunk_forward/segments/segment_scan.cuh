// Blocks that scan the chunks of a segment: one or two warpgroups with 64 rows of a state each, and
// a producer warp that copies the chunks' operands into a ring of stages ahead of them. A stage's
// barriers count the bytes that arrive (full) and the warps that have read it (empty). Macros from
// the host: WARPGROUPS, SHARED_BYTES.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/chunk_forward/segments/segment_products.cuh"
#include "sm90/evict_first_copies.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

constexpr int STATE_WARPS =
    4 * WARPGROUPS;                    // warps with 16 rows of the state each; the warp after them copies
constexpr int PARTS = 2 / WARPGROUPS;  // blocks of one state
#if WARPGROUPS == 2
// Registers are moved by warpgroups, so the producer's has three idle warps.
constexpr int THREADS = 384, START_REGISTERS = 168, STATE_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");
#else
constexpr int THREADS = 160;
#endif
template <int STATE>
__device__ __forceinline__ void set_role_registers() {
#if WARPGROUPS == 2
  set_registers<STATE ? STATE_REGISTERS : PRODUCER_REGISTERS, START_REGISTERS>();
#endif
}

// A stage holds the first bytes of a chunk's operands. Its lead places their images on 1024 bytes,
// as products want them.
constexpr u32 STAGE_LEAD = 1024 - OFFSET(ChunkOperands, kg);
struct alignas(1024) Stage {
  unsigned char lead[STAGE_LEAD], operands[STAGED_BYTES];
};
constexpr bool LAST_READER = STAGED_BYTES == sizeof(ChunkOperands);  // of the records: output
constexpr int STAGES = LAST_READER ? 3 : 4;
constexpr u32 STAGE_PITCH = sizeof(Stage);
struct SharedMemory {
  Stage stages[STAGES];
  u64 full[STAGES], empty[STAGES];  // barriers
};
static_assert(OFFSET(SharedMemory, empty) + 8 * STAGES <= SHARED_BYTES,
              "the host's shared memory size is too small");

using OperandRing = Ring<STAGES, STAGE_LEAD, STAGE_PITCH, OFFSET(SharedMemory, full), 8 * STAGES>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < 2 * STAGES)
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(),
                 thread_index() < STAGES ? 1 : STATE_WARPS * WARP_ARRIVALS);
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// Asks for the first `bytes` of a record in the next stage; by one thread. For a block that has half the
// rows, of u only its own rows.
__device__ __forceinline__ void load_record(OperandRing& ring, u64 from, u32 bytes, int part) {
  ring.wait_empty();
  const auto copy = [&](u32 at, u32 size) {
    const void* const source = reinterpret_cast<const void*>(from + at);
    if (LAST_READER)
      copy_in_evict_first(ring.stage() + at, source, size, ring.full());
    else
      copy_in(ring.stage() + at, source, size, ring.full());
  };
  if (PARTS == 1) {
    barrier_expect(ring.full(), bytes);
    copy(0, bytes);
  } else {
    barrier_expect(ring.full(), bytes - SQUARE_BYTES);
    copy(0, OFFSET(ChunkOperands, u));
    copy(OFFSET(ChunkOperands, u) + part * SQUARE_BYTES, SQUARE_BYTES);
    if (bytes > OFFSET(ChunkOperands, qg)) copy(OFFSET(ChunkOperands, qg), bytes - OFFSET(ChunkOperands, qg));
  }
  ring.next();
}

// Bytes from a chunk's record to the next chunk's, and the record of a segment's first chunk.
__device__ __forceinline__ u64 record_step(const SegmentParams& p) { return (u64)p.HV * sizeof(ChunkOperands); }
__device__ __forceinline__ u64 first_record(const SegmentParams& p, const Segment& x) {
  return p.chunk_operands + ((u64)(x.s.slot + x.begin) * p.HV + x.hv) * sizeof(ChunkOperands);
}

// One thread loads the first `bytes` of every chunk's operands.
__device__ __forceinline__ void produce(const SegmentParams& p, const Segment& x, OperandRing& ring,
                                        u32 bytes, int part = 0) {
  u64 from = first_record(p, x);
  for (int c = x.begin; c < x.end; ++c, from += record_step(p)) load_record(ring, from, bytes, part);
}

// This warp has finished reading a stage.
__device__ __forceinline__ void release(const Lane& l, const OperandRing& ring) {
  warp_arrive(ring.empty(), l.lane);
}

// A wait for what has come already. It ends a basic block: the assembler would move loads of shared
// memory, and what needs them, between products that are asked for one after another, or operands of
// the next chunk behind products that they do not need.
__device__ __forceinline__ void end_basic_block(const OperandRing& ring) { ring.wait_full(); }
