// Checkpoints at chosen tokens: a mark is the position of a token in a pack, and the state before that
// token goes to a row of the pool that is written. For the parameters of any kernel that has those of
// state_rows.cuh and
//
//   mark_offsets, mark_rows   the positions, and the rows; a row that names no slot: no mark
//   marks                     how many there are
//   mark_states               float32, a state for each mark and value head
//
// A kernel that works in steps of more than 16 tokens has no state between its steps. There it keeps
// the state at the step's start in mark_states, and checkpoint_tail.cu takes it through the rest.
#pragma once

#include "common/state_rows.cuh"

// The token of a mark, counted from position `first`. Negative if there is no mark.
template <class Params>
__device__ __forceinline__ int mark_token(const Params& p, int mark, long long first) {
  const long long token = load_index(p.mark_offsets, mark, p.flags & FLAG_MARK_OFFSETS64) - first;
  return is_null(p, p.mark_rows, mark, p.flags & FLAG_MARK_ROWS64) || token < 0 ? -1 : (int)token;
}

// The first step from `from` on, of STEP tokens each, in which a mark of these tokens lies; none: a large
// number. All lanes of a warp together.
template <int STEP, class Params>
__device__ __forceinline__ int next_mark(const Params& p, long long first, int length, int from) {
  int next = 1 << 30;
#pragma unroll 1
  for (int i = thread_index() & 31; i < p.marks; i += 32) {
    const int token = mark_token(p, i, first);
    if (token >= from * STEP && token < length && token / STEP < next) next = token / STEP;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const int other = shuffle_xor(next, mask);
    next = other < next ? other : next;
  }
  return next;
}

// Where the state at the start of a step goes for a mark in it, and with which dtype and layout.
struct MarkedState {
  u64 at;
  int flags;
};

// Whether mark `i` lies in a step; then `to` is where its state goes.
template <int STEP, class Params>
__device__ __forceinline__ bool marked_state(const Params& p, int i, long long first, int length, int step,
                                             int hv, int matrix, MarkedState& to) {
  const int token = mark_token(p, i, first);
  if (token < 0 || token >= length || token / STEP != step) return false;
  if (token % STEP == 0) {
    to = {state_at(p, p.ht, slot_at(p, p.mark_rows, i, p.flags & FLAG_MARK_ROWS64), p.ht_row, hv, matrix),
          p.flags};
    return true;
  }
  to = {p.mark_states + 4ull * ((u64)i * p.HV + hv) * matrix, p.flags & ~FLAG_STATE_BF16};
  return p.mark_states;  // always there, unless the contract was broken
}

// Calls f(address, flags) for each mark in a step.
template <int STEP, class Params, class F>
__device__ __forceinline__ void each_mark(const Params& p, long long first, int length, int step, int hv,
                                          int matrix, F f) {
#pragma unroll 1
  for (int i = 0; i < p.marks; ++i) {
    MarkedState to;
    if (marked_state<STEP>(p, i, first, length, step, hv, matrix, to)) f(to.at, to.flags);
  }
}
