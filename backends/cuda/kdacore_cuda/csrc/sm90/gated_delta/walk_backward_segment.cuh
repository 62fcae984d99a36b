// Where the backward's walks of a segment begin and end: what walk_reverse.cuh and walk_states.cuh have of a whole
// sequence. `maps`, `starts` and `ends`: chunk_backward/segments.cuh, with the segments of segment_item.cuh; a sequence's
// first and last segment have no map.
//
// Of a slice of a row that several ranks share (OF_SLICE) the gradient at a sequence's end is not known before the ranks'
// exchange. So last segments have maps, and first ones where the state at the slice's start is another rank's, which is
// so for the sequence that the slice's first token belongs to. The gradient's part lies at its own segment's place, as
// chunk_backward/slice_chain.cu has it, which begins with gradients that ranks exchange: `ends` are not times
// GRADIENT_SCALE there.
#pragma once

#include "generated/gated_delta_backward_segment_params.cuh"
#include "sm90/gated_delta/segment_item.cuh"
#include "sm90/gated_delta/walk_reverse.cuh"
#include "sm90/gated_delta/walk_states.cuh"

__device__ __forceinline__ Sequence find_read_sequence(const GatedDeltaBackwardSegmentParams& p, int n) {
  return find_read_sequence(static_cast<const GatedDeltaParams&>(p), n);
}

__device__ __forceinline__ void begin_alone(State& state, const GatedDeltaBackwardSegmentParams& p,
                                            const SegmentItem& item, int row, const Lane& l) {
  read_segment_start(state, p, item, row, l);
}
__device__ __forceinline__ void end_alone(State& state, const GatedDeltaBackwardSegmentParams& p,
                                          const SegmentItem& item, int row, const Lane& l) {
  if (!item.index && !item.last && !(p.flags & FLAG_KEPT_MAPS))
    write_pairs(state.s, row, 2 * l.t, full_state_at(p.starts, item.place + p.HV));
}

__device__ __forceinline__ void begin_grad(State& state, const GatedDeltaBackwardSegmentParams& p,
                                           const SegmentItem& item, int row, const Lane& l) {
  if (item.last)
    read_state_grad(state, p, item, row, l);
  else {
    read_pairs(state.s, row, 2 * l.t, full_state_at(p.ends, item.place));
    if constexpr (OF_SLICE && HALF_F16) scale_state(state, GRADIENT_SCALE);
  }
  make_opaque(state);
}
__device__ __forceinline__ void write_grad_before(State& state, const GatedDeltaBackwardSegmentParams& p,
                                                  const SegmentItem& item, int row, const Lane& l) {
  write_pairs(state.s, row, 2 * l.t, full_state_at(p.ends, item.place - p.HV));
}
__device__ __forceinline__ void end_grad(State& state, const GatedDeltaBackwardSegmentParams& p,
                                         const SegmentItem& item, int row, const Lane& l) {
  if (item.index) {
    if (!OF_SLICE && item.last) write_grad_before(state, p, item, row, l);
  } else if (const u64 initial = state_grad_at(p, p.d_h0, item)) {
    write_state_grad(state, p, initial, row, l);
  }
}

// The gradient at a segment's start from zero at its end.
struct GradMap : SegmentItem {};
__device__ __forceinline__ void begin_grad(State& state, const GatedDeltaBackwardSegmentParams&,
                                           const GradMap&, int, const Lane&) {
  state = {};
  make_opaque(state);
}
__device__ __forceinline__ void end_grad(State& state, const GatedDeltaBackwardSegmentParams& p,
                                         const GradMap& item, int row, const Lane& l) {
  if constexpr (OF_SLICE) {
    if constexpr (HALF_F16) scale_state(state, 1.0f / GRADIENT_SCALE);
    write_pairs(state.s, row, 2 * l.t, full_state_at(p.ends, item.place));
  } else {
    write_grad_before(state, p, item, row, l);
  }
}
