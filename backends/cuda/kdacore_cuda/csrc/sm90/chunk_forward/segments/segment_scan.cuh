// Blocks that scan the chunks of a segment: one or two warpgroups with 64 rows of a matrix each, and
// producers that copy the chunks' operands and values into a ring of stages ahead of them. A stage's barriers
// count the bytes of operands and the producers whose values have arrived (full), and the warps that have
// read it (empty). Values come by small copies of all producers: as bulk copies of 256 bytes they would take
// twice as long as everything else.
//
// Blocks that read the same records may be a cluster of two (CLUSTER 2): each asks for half of a record, for
// both. A stage then is empty when both blocks have read it.
//
// Macros from the host: WARPGROUPS, CLUSTER; LAST_READER, of the launch that reads records
// last: output, which needs all of a record; maps needs the part before qg.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_forward/segments/chunk_operands.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/chunk_forward/segments/segment_products.cuh"
#include "sm90/evict_first_copies.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// How much of a record a block loads, and how many of a chunk's values.
constexpr u32 STAGED_BYTES = LAST_READER ? sizeof(ChunkOperands) : OFFSET(ChunkOperands, qg);
constexpr int BLOCK_VALUES = LAST_READER ? 64 * WARPGROUPS : 128;
constexpr int PRODUCER_WARPS = LAST_READER && WARPGROUPS == 1 ? 1 : 4;
constexpr int STATE_WARPS = 4 * WARPGROUPS;  // warps with 16 rows each; those after them are producers
constexpr int PARTS = 2 / WARPGROUPS;        // blocks of one matrix
constexpr int THREADS = 32 * (STATE_WARPS + PRODUCER_WARPS);
// Moved between warpgroups if two have the state.
constexpr int START_REGISTERS = 168, STATE_REGISTERS = 232, PRODUCER_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + PRODUCER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");
__device__ __forceinline__ int producer_thread() { return thread_index() - 32 * STATE_WARPS; }
template <int STATE>
__device__ __forceinline__ void set_role_registers() {
  if constexpr (WARPGROUPS == 2)
    set_registers<STATE ? STATE_REGISTERS : PRODUCER_REGISTERS, START_REGISTERS>();
}

// A stage holds the first bytes of a chunk's operands, and BLOCK_VALUES of its values.
// Its lead places images on 1024 bytes, as products want them.
constexpr u32 STAGE_LEAD = 1024 - OFFSET(ChunkOperands, kt);
struct alignas(1024) Stage {
  unsigned char lead[STAGE_LEAD], operands[STAGED_BYTES];
  SquareImage values[BLOCK_VALUES / 64];  // rows of tokens
};
constexpr int STAGES = LAST_READER ? 3 : 4;
constexpr u32 STAGE_PITCH = sizeof(Stage);
struct SharedMemory {
  Stage stages[STAGES];
  u64 full[STAGES], empty[STAGES];  // barriers
};
// Without the padding that the alignment of stages adds.
KDA_SHARED_BYTES(OFFSET(SharedMemory, empty) + sizeof(u64[STAGES]));

using OperandRing = Ring<STAGES, STAGE_LEAD, STAGE_PITCH, OFFSET(SharedMemory, full), 8 * STAGES>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < 2 * STAGES)
    barrier_init(shared + OFFSET(SharedMemory, full) + 8 * thread_index(),
                 thread_index() < STAGES ? 1 + 32 * PRODUCER_WARPS : CLUSTER * STATE_WARPS * WARP_ARRIVALS);
  if constexpr (CLUSTER == 1) {
    fence_async_proxy();  // bulk copies use them
    sync_block();
  } else {
    fence_barrier_init();
    sync_cluster();
  }
}

// This warp's values in a stage.
__device__ __forceinline__ ValueRows values_of(u32 stage, const Lane& l) {
  return value_rows(stage + STAGED_BYTES, l.row % BLOCK_VALUES);
}

// A chunk's values in device memory: 16 bytes of the first row that this thread copies, and how many rows
// there are. The producers share them.
constexpr int PIECES = BLOCK_VALUES / 8, ROWS_AT_ONCE = 32 * PRODUCER_WARPS / PIECES;
struct Values {
  const unsigned char* at;
  long long step;  // bytes from a row to the next
  int rows;
};
// Of a chunk that begins at `token` of the batch row.
__device__ __forceinline__ Values find_values(const SegmentParams& p, const Sequence& s, long long token,
                                              int hv, int part) {
  const int own = producer_thread();
  const long long row = s.batch * p.v_sb + (s.first + token + own / PIECES) * p.v_st + hv * p.v_sh;
  return {
      reinterpret_cast<const unsigned char*>(p.v + 2 * row) + part * (2 * BLOCK_VALUES) + 16 * (own % PIECES),
      2 * p.v_st, 0};
}

// Copies `bytes` that all blocks of the cluster need, this block's share of them to all. FOR_LAST: nothing reads them
// later, so they may leave L2 first.
template <bool FOR_LAST>
__device__ __forceinline__ void copy_shared_part(u32 to, u64 from, u32 bytes, u32 full) {
  if constexpr (CLUSTER == 2) {
    const u32 half = bytes / 2, at = block_index() % 2 * half;
    if (FOR_LAST)
      copy_in_to_both_evict_first(to + at, reinterpret_cast<const void*>(from + at), half, full);
    else
      copy_in_to_both(to + at, reinterpret_cast<const void*>(from + at), half, full);
  } else {
    const void* const source = reinterpret_cast<const void*>(from);
    if (FOR_LAST)
      copy_in_evict_first(to, source, bytes, full);
    else
      copy_in(to, source, bytes, full);
  }
}

// Asks for the first `bytes` of a record in the ring's stage, which is empty.
__device__ __forceinline__ void ask_for_record(const OperandRing& ring, u64 record, u32 bytes) {
  if (producer_thread()) return;
  barrier_expect(ring.full(), bytes);
  copy_shared_part<LAST_READER>(ring.stage(), record, bytes, ring.full());
}

// Asks for values in the same stage. Rows past the end are zero: products of them with the operands' zeros are
// to be zero.
__device__ __forceinline__ void ask_for_values(const OperandRing& ring, const Values& v) {
  const int own = producer_thread();
  const unsigned char* from = v.at;
  const u32 image = ring.stage() + STAGED_BYTES + own % PIECES / 8 * SQUARE_BYTES;
  int left = v.rows - own / PIECES;
#pragma unroll
  for (int n = 0; n < C / ROWS_AT_ONCE; ++n) {
    const u32 to = image + swizzled(own / PIECES + n * ROWS_AT_ONCE, own % 8);
    if (LAST_READER)
      copy_async16_evict_first(to, from, left > 0);
    else
      copy_async16(to, from, left > 0);
    from += ROWS_AT_ONCE * v.step;
    left -= ROWS_AT_ONCE;
  }
}

// Asks for both in the ring's stage, once that is empty; it is full when all has come.
__device__ __forceinline__ void load_chunk(OperandRing& ring, u64 record, u32 bytes, const Values& v) {
  ring.wait_empty();
  ask_for_record(ring, record, bytes);
  ask_for_values(ring, v);
  copy_async_arrive(ring.full());
  ring.next();
}

// Bytes from a chunk's record to the next chunk's, and the record of a segment's first chunk.
__device__ __forceinline__ u64 record_step(const SegmentParams& p) {
  return (u64)p.HV * sizeof(ChunkOperands);
}
__device__ __forceinline__ u64 first_record(const SegmentParams& p, const Segment& x) {
  return p.chunk_operands + ((u64)(x.s.slot + x.begin) * p.HV + x.hv) * sizeof(ChunkOperands);
}

// The producers load every chunk's operands and values.
__device__ __forceinline__ void produce(const SegmentParams& p, const Segment& x, OperandRing& ring,
                                        int part) {
  u64 from = first_record(p, x);
  Values v = find_values(p, x.s, (long long)x.begin * C, x.hv, part);
  int left = x.s.length - x.begin * C;
  for (int c = x.begin; c < x.end; ++c, from += record_step(p)) {
    v.rows = left < C ? left : C;
    load_chunk(ring, from, STAGED_BYTES, v);
    v.at += C * v.step;
    left -= C;
  }
}

// This warp has finished reading a stage.
__device__ __forceinline__ void release(const Lane& l, const OperandRing& ring) {
  if constexpr (CLUSTER == 2) {
    for (u32 rank = 0; rank < 2; ++rank) warp_arrive_remote(cluster_address(ring.empty(), rank), l.lane);
  } else {
    warp_arrive(ring.empty(), l.lane);
  }
}

// At the end: another block of the cluster may still tell this one that it has read a stage.
__device__ __forceinline__ void leave_together() {
  if constexpr (CLUSTER == 2) sync_cluster();
}

// A wait for what has come already. It ends a basic block: the assembler would move loads of shared
// memory, and what needs them, between products that are requested one after another, or operands of
// the next chunk behind products that they do not need.
__device__ __forceinline__ void end_basic_block(const OperandRing& ring) { ring.wait_full(); }
