// Tokens that are staged together, and the rows of the pool that their states go to.
#pragma once

#include "common/decode/tokens_staging.cuh"
#if V_FIRST
#include "common/decode/tokens_v_first.cuh"
#else
#include "common/decode/tokens_k_first.cuh"
#endif

__device__ __forceinline__ bool has_records(u32 memory) { return KEPT(memory, flags) & KEPT_RECORDS; }
// This lane's part of the state in a row of the pool, from the value head's part of the first row.
__device__ __forceinline__ u64 state_place(const DecodeRecordsParams& p, const LanePosition& lane, u32 memory,
                                           int row) {
  return KEPT_ADDRESS(memory, target) + STATE_BYTES * (row * p.ht_row + first_element(lane));
}
// To the row that is named for token t; negative: none.
__device__ __forceinline__ void store_named(const DecodeRecordsParams& p, const float (&s)[ROWS][VECTOR],
                                            const LanePosition& lane, u32 memory, int t) {
  const int row = load_kept(memory, OFFSET(KeptSequence, rows) + 4 * t);
  if (row >= 0) store_state(s, state_place(p, lane, memory, row), true);
}

// The column of the head whose part of a record a thread loads.
__device__ __forceinline__ int own_update(const Part& part) {
  return part.column() + (owns_column() ? thread_index() : 0);
}
// Its parts are computed where they are used, as warp_index().
__device__ __forceinline__ LanePosition position_now(const Part& part) {
  LanePosition at = make_position(part.column(), 0);
  at.lane = opaque(at.lane), at.v = opaque(at.v), at.channel = opaque(at.channel), at.first = opaque(at.first);
  return at;
}
// Tokens that are staged together.
struct Pass {
  int first, count;
};
__device__ __forceinline__ int tokens_from(const Item& it, int first) {
  return it.length - first < PASS_TOKENS ? it.length - first : PASS_TOKENS;
}
// The block's sequence and value head.
__device__ __forceinline__ Item item_of(const DecodeRecordsParams& p, u32 block) {
  const u32 task = block / CLUSTER;
  Item it;
  it.n = (int)((u64)task * p.task_factor >> p.task_shift);  // task / tasks of a sequence
  it.zero = (int)((u64)thread_index() >> p.task_shift);      // the shift is 31 or more
  it.hv = (task - it.n * (int)p.tasks) * HEADS + block % CLUSTER / SLICES;
  return it;
}
