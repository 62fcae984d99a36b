// Blocks that walk the chunks of a sequence and value head, in one direction: warps, registers, the part of the state.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/gated_delta/record.cuh"
#include "sm90/warp.cuh"

// Macro from the host: WARPGROUPS. A block has a whole state (2; 1 if it has 64 values), or two blocks have half of the
// value rows each (1).
static_assert(WARPGROUPS == 1 || WARPGROUPS == V / 64, "64 value rows a warpgroup");
// Four warps a warpgroup carry 64 value rows of the state; four more load, each a quarter of a chunk's rows.
constexpr int STATE_WARPS = 4 * WARPGROUPS, LOAD_WARPS = 4, THREADS = 32 * (STATE_WARPS + LOAD_WARPS);
constexpr int PARTS = V / 64 / WARPGROUPS, BLOCK_VALUES = 64 * WARPGROUPS;
// Moved between warpgroups if two have the state.
constexpr int START_REGISTERS = 168, STATE_REGISTERS = 232, LOAD_REGISTERS = 40;
static_assert(2 * STATE_REGISTERS + LOAD_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");
template <int REGISTERS>
__device__ __forceinline__ void set_role_registers() {
  if constexpr (WARPGROUPS == 2) set_registers<REGISTERS, START_REGISTERS>();
}

// A block's sequence and value head, and which part of the value rows it has.
struct Item {
  Sequence s;
  int n, hv, part;
};
// The sequence at a place of the order in which blocks begin: a pack's by length, the longest first, so that the last
// blocks have little to do. A warp looks at 32 sequences at most. Longer packs keep their order.
__device__ __forceinline__ int sequence_at(const GatedDeltaParams& p, int place) {
  if (!p.cu_seqlens || p.N > 32) return place;
  const int lane = thread_index() & 31, chunks = lane < p.N ? find_read_sequence(p, lane).chunks : 0;
  int own = 0, found = 0;
#pragma unroll 1
  for (int n = 0; n < p.N; ++n) {
    const int other = shuffle(chunks, n);
    own += other > chunks || (other == chunks && n < lane);
  }
#pragma unroll 1
  for (int n = 0; n < p.N; ++n)
    if (shuffle(own, n) == place) found = n;
  return found;
}
// Of the `block`-th among blocks of one direction.
__device__ __forceinline__ Item find_item(const GatedDeltaParams& p, int block) {
  const int item = block / PARTS, place = item / p.HV, n = sequence_at(p, place);
  return {find_read_sequence(p, n), n, item - place * p.HV, block % PARTS};
}

// The part of a chunk's record that walks read.
struct WalkRecord {
  WholeColumns t, a;
  RecordFactors factors;
};
static_assert(2 * sizeof(LowerColumns) + sizeof(RecordFactors) == WALK_BYTES,
              "what is behind the factors is not copied");

// Of a ring: a stage's barriers count the bytes and the warps whose rows have arrived (full), and the warps that have
// read it (empty).
template <int STAGES>
struct RingBarriers {
  u64 full[STAGES], empty[STAGES];
};
template <int STAGES>
__device__ __forceinline__ void make_ring_barriers(u32 barriers) {
  const int i = thread_index();
  if (i < STAGES) {
    barrier_init(barriers + 8 * i, 1 + LOAD_WARPS * WARP_ARRIVALS);
    barrier_init(barriers + 8 * STAGES + 8 * i, STATE_WARPS * WARP_ARRIVALS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}
// The same, of stages with a WalkRecord, of whose matrices copies fill only what is on and below the diagonal.
template <class Stage, int STAGES>
__device__ __forceinline__ void make_record_barriers(u32 shared) {
  const u32 record = shared + OFFSET(Stage, record);
  clear_above_diagonal(record + OFFSET(WalkRecord, t), sizeof(Stage), STAGES, THREADS);
  clear_above_diagonal(record + OFFSET(WalkRecord, a), sizeof(Stage), STAGES, THREADS);
  make_ring_barriers<STAGES>(shared + OFFSET(Stage, barriers));
}
