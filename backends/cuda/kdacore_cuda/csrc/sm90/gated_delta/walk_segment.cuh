// Where the forward walk of a segment begins and ends: what walk_forward.cuh has of a whole sequence.
//
// The block of the segment before writes the checkpoint at a border, as the state at its end is that of a call which
// ends there. Of a slice of a row that ranks share (OF_SLICE) another launch finds all states at borders.
#pragma once

#include "sm90/gated_delta/segment_item.cuh"
#include "sm90/gated_delta/walk_forward.cuh"

__device__ __forceinline__ void begin_state(State& state, const GatedDeltaSegmentParams& p,
                                            const SegmentItem& item, int row, const Lane& l) {
  read_segment_start(state, p, item, row, l);
}
__device__ __forceinline__ CheckpointsBefore checkpoints_before(const SegmentItem& item, int every) {
  if (!item.begin) return {0, 0};
  const int rows = item.begin / every + 1;
  return {rows, rows * every - item.begin};
}
__device__ __forceinline__ void end_state(State& state, const GatedDeltaSegmentParams& p,
                                          const SegmentItem& item, u64 checkpoint, int row, const Lane& l) {
  if (item.last) {
    if (const u64 final = final_state_at(p, item.n, item.hv, state_elements(p)))
      write_own_state(state, p, row, l.t, final);
    return;
  }
  if (checkpoint) write_own_state(state, p, row, l.t, checkpoint);
  if (OF_SLICE || item.index) return;
  write_pairs(state.s, row, 2 * l.t, full_state_at(p.addends, item.place));
  if (!COMPOSES) write_pairs(state.s, row, 2 * l.t, full_state_at(p.starts, item.place + p.HV));
}
