// Checkpoints at chosen tokens (common/chunk_forward/marks.cuh) of a forward walk: the state at the start of each chunk in
// which some lie goes to the place of the first of them in `mark_states`, float32 as write_pairs has it. From there
// walk_to_checkpoints.cu takes it to each of them.
//
// Macro from the host: MARKS, 1: there may be some; 0, or none: there are none, and no instruction asks.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/gated_delta/walk_block.cuh"

#ifndef MARKS
#define MARKS 0
#endif

__device__ __forceinline__ u64 full_state_at(u64 states, long long place) {
  return states + place * FULL_STATE_BYTES;
}

// The first of the checkpoints in a chunk of these tokens. All lanes of a warp together.
__device__ __forceinline__ int first_in_chunk(const GatedDeltaParams& p, long long first, int length,
                                              int chunk) {
  int found = 1 << 30;
#pragma unroll 1
  for (int i = thread_index() & 31; i < p.marks; i += 32) {
    const int token = mark_token(p, i, first);
    if (token >= 0 && token < length && token / C == chunk && i < found) found = i;
  }
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) {
    const int other = shuffle_xor(found, mask);
    found = other < found ? other : found;
  }
  return found;
}
__device__ __forceinline__ u64 marked_state_at(const GatedDeltaParams& p, const Sequence& s, int chunk, int hv) {
  return full_state_at(p.mark_states, (long long)first_in_chunk(p, s.first, s.length, chunk) * p.HV + hv);
}
