// Several tokens and a state [V, K] in registers: the sums of decode_head.cu in the same order. A warp has all channels
// of its rows of V, so only outputs meet in shared memory.
#pragma once

#include "common/decode/tokens_memory.cuh"

// The sums over K of so many rows of a lane are completed together. All rows at once would take as many registers again
// as half of the state.
constexpr int SUMMED_ROWS = 4, GROUP_LANES = LANES / SUMMED_ROWS;
static_assert(ROWS % SUMMED_ROWS == 0 && ROWS / SUMMED_ROWS <= GROUP_LANES, "a lane ends with the sums of one row");

// The row whose sums this lane ends with: its group, and its number among the lane's rows.
__device__ __forceinline__ int own_group(const LanePosition& at) {
  return at.lane % GROUP_LANES % (ROWS / SUMMED_ROWS);
}
__device__ __forceinline__ int own_row(const LanePosition& at) {
  return SUMMED_ROWS * own_group(at) + at.lane % LANES / GROUP_LANES;
}
// A lane that ends with the sums of row i of this lane.
__device__ __forceinline__ int lane_with_row(const LanePosition& at, int i) {
  return (at.lane & ~(LANES - 1)) + i % SUMMED_ROWS * GROUP_LANES + i / SUMMED_ROWS;
}
// That row as the one whose update the lane has.
__device__ __forceinline__ LanePosition update_position(const LanePosition& at) {
  LanePosition own = at;
  own.v = at.first + GROUPS * own_row(at);
  own.writes = at.lane % GROUP_LANES < ROWS / SUMMED_ROWS;
  return own;
}
// Where a column of the block is in the memory of the warp that has it.
__device__ __forceinline__ u32 output_place(u32 memory, int slot, int column) {
  constexpr int part = COLUMNS / WARPS;
  return sums_of(memory, column / part) + 4 * (part * slot + column % part);
}

// A record that precedes the call.
__device__ __forceinline__ void apply_record(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int record) {
  Record x;
  read_floats(x.key, record_place(memory, record, at.channel, OFFSET(WarpRecord, key)));
  read_floats(x.decay, record_place(memory, record, at.channel, OFFSET(WarpRecord, decay)));
  x.update[0] = load_shared1(record_place(memory, record, at.v % COLUMNS, OFFSET(WarpRecord, update)));
  apply(s, at, x);
}

// k S' and q S', with S' the decayed state, of the row whose sums this lane ends with.
struct TokenSums {
  float k, q;
};
__device__ __forceinline__ TokenSums multiply(const float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory,
                                              int slot) {
  const u32 channels = staged_token(memory, slot) + 4 * at.channel;
  float q[VECTOR], k[VECTOR];
  TokenSums sums = {};
  read_floats(q, channels + OFFSET(StagedToken, decayed_q));
  read_floats(k, channels + OFFSET(StagedToken, decayed_k));
#pragma unroll
  for (int first = 0; first < ROWS; first += SUMMED_ROWS) {
    float ks[ROWS], qs[ROWS];  // the first ones
#pragma unroll
    for (int i = 0; i < SUMMED_ROWS; ++i) {
      ks[i] = k[0] * s[first + i][0], qs[i] = q[0] * s[first + i][0];
#pragma unroll
      for (int c = 1; c < VECTOR; ++c) {
        ks[i] = multiply_add(k[c], s[first + i][c], ks[i]);
        qs[i] = multiply_add(q[c], s[first + i][c], qs[i]);
      }
    }
    const float group_k = fold<SUMMED_ROWS, LANES / 2>(ks, at.lane);
    const float group_q = fold<SUMMED_ROWS, LANES / 2>(qs, at.lane);
    if (own_group(at) == first / SUMMED_ROWS) sums = {group_k, group_q};
  }
  return sums;
}
// The state behind a token.
__device__ __forceinline__ void move_state(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                           const float (&update)[OUT]) {
  const u32 channels = staged_token(memory, slot) + 4 * at.channel;
  float d[VECTOR], k[VECTOR];
  read_floats(d, channels + OFFSET(StagedToken, decay));
  read_floats(k, channels + OFFSET(StagedToken, k));
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float u = shuffle(update[0], lane_with_row(at, i));
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[i][c] = multiply_add(k[c], u, d[c] * s[i][c]);
  }
}
// What comes before the first token of a pass: nothing is shared.
constexpr bool BEGINS_WITH_ROWS = false;
template <class Visit>
__device__ __forceinline__ void begin_tokens(const float (&)[ROWS][VECTOR], const LanePosition&, u32, Visit) {}
__device__ __forceinline__ void begin_tokens(const float (&)[ROWS][VECTOR], const LanePosition&, u32) {}
// A token's update, of the row whose sums this lane has; its output goes to shared memory.
__device__ __forceinline__ void update_of(float (&update)[OUT], const float (&s)[ROWS][VECTOR], const LanePosition& at,
                                          u32 memory, int slot) {
  const TokenSums sums = multiply(s, at, memory, slot);
  const TokenFactors f = kept_factors(memory, slot);
  const int column = update_position(at).v % COLUMNS;
  const float v = load_shared1(staged_token(memory, slot) + OFFSET(StagedToken, v) + 4 * column);
  update[0] = f.update * multiply_add(-f.k, sums.k, v);
  if (update_position(at).writes)
    store_shared(output_place(memory, slot, column), __float_as_uint(f.q * multiply_add(f.qk, update[0], sums.q)));
}
// The state moves on, if it `moves`. To multiply the next token in the same pass would need the factors of both.
__device__ __forceinline__ void end_token(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                          const float (&update)[OUT], bool, bool moves) {
  if (moves) move_state(s, at, memory, slot, update);
}
// Before outputs and records: every warp has replayed its records, and its outputs are there.
__device__ __forceinline__ void finish_tokens() { sync_block(); }

// Four columns of a token's output.
__device__ __forceinline__ float4 output_of(u32 memory, int slot, int column, const TokenFactors&) {
  return load_shared4(output_place(memory, slot, column));
}
