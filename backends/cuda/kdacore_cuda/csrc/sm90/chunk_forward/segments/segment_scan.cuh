// Blocks that scan the chunks of a segment: one or two warpgroups with 64 rows of a state each, and
// a producer warp that copies the chunks' operands and values into a ring of stages ahead of them. A stage's
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

// A stage holds the first bytes of a chunk's operands, and its values, for the block's rows of the state.
// Its lead places the images among them on 1024 bytes, as products want them.
constexpr u32 STAGE_LEAD = 1024 - OFFSET(ChunkOperands, kt);
constexpr u32 VALUE_BYTES = 2 * V / PARTS, VALUE_PITCH = VALUE_BYTES + 16;  // of a token
struct alignas(1024) Stage {
  unsigned char lead[STAGE_LEAD], operands[STAGED_BYTES];
  unsigned char values[C][VALUE_PITCH];
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

// This warp's 16 values of a chunk in a stage.
__device__ __forceinline__ u32 values_of(u32 stage, const Lane& l) {
  return stage + STAGED_BYTES + 2 * (l.row % (V / PARTS));
}

// Where a chunk's values are in device memory: those of its first token, and how many tokens it has.
struct ValueRows {
  u64 at;
  int tokens;
};
// Of the chunk that begins at `token` of the call's batch row.
__device__ __forceinline__ ValueRows value_rows(const SegmentParams& p, long long batch, long long token, int hv,
                                                int tokens, int part) {
  return {p.v + 2 * (batch * p.v_sb + token * p.v_st + hv * p.v_sh) + part * VALUE_BYTES, tokens};
}

// Asks for the first `bytes` of a record, and for its values if there are any to ask for, in the next stage;
// by a warp. Values past the end are zero: their products with the operands' zeros are to be zero.
__device__ __forceinline__ void load_chunk(OperandRing& ring, u64 record, u32 bytes, const ValueRows& v,
                                           u32 token_bytes) {
  const int lane = thread_index() & 31;
  const auto copy = [&](u32 to, u64 from, u32 size) {
    const void* const source = reinterpret_cast<const void*>(from);
    if (LAST_READER)
      copy_in_evict_first(to, source, size, ring.full());
    else
      copy_in(to, source, size, ring.full());
  };
  ring.wait_empty();
  const u32 values = ring.stage() + STAGED_BYTES;
  if (v.tokens & C - 1) {
    for (int row = v.tokens + (lane >> 4); row < C; row += 2) {
      if ((lane & 15) < VALUE_BYTES / 16) store_shared(values + row * VALUE_PITCH + 16 * (lane & 15), 0, 0, 0, 0);
    }
    fence_async_proxy();  // a bulk copy will overwrite them
    sync_warp();
  }
  if (lane == 0) {
    barrier_expect(ring.full(), bytes + (u32)v.tokens * VALUE_BYTES);
    copy(ring.stage(), record, bytes);
  }
  sync_warp();
  for (int row = lane; row < v.tokens; row += 32)
    copy(values + row * VALUE_PITCH, v.at + (u64)((u32)row * (u64)token_bytes), VALUE_BYTES);
  ring.next();
}

// Bytes from a chunk's record to the next chunk's, and the record of a segment's first chunk.
__device__ __forceinline__ u64 record_step(const SegmentParams& p) { return (u64)p.HV * sizeof(ChunkOperands); }
__device__ __forceinline__ u64 first_record(const SegmentParams& p, const Segment& x) {
  return p.chunk_operands + ((u64)(x.s.slot + x.begin) * p.HV + x.hv) * sizeof(ChunkOperands);
}

// One warp loads the first `bytes` of every chunk's operands and, if asked to, the values.
__device__ __forceinline__ void produce(const SegmentParams& p, const Segment& x, OperandRing& ring,
                                        u32 bytes, bool with_values, int part = 0) {
  u64 from = first_record(p, x);
  const u32 token_bytes = 2 * (u32)p.v_st;
  int left = x.s.length - x.begin * C;
  ValueRows v = value_rows(p, x.s.batch, x.s.first + (long long)x.begin * C, x.hv, 0, part);
  for (int c = x.begin; c < x.end; ++c, from += record_step(p)) {
    if (with_values) v.tokens = left < C ? left : C;
    load_chunk(ring, from, bytes, v, token_bytes);
    v.at += (u64)C * token_bytes;
    left -= C;
  }
}

// This warp has finished reading a stage.
__device__ __forceinline__ void release(const Lane& l, const OperandRing& ring) {
  warp_arrive(ring.empty(), l.lane);
}

// A wait for what has come already. It ends a basic block: the assembler would move loads of shared
// memory, and what needs them, between products that are asked for one after another, or operands of
// the next chunk behind products that they do not need.
__device__ __forceinline__ void end_basic_block(const OperandRing& ring) { ring.wait_full(); }
