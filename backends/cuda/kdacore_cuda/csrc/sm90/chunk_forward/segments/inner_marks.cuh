// Checkpoints at chosen tokens (common/chunk_forward/marks.cuh) in segments. At a chunk's first token it is
// the state that the walk has there, and where one segment ends and the next begins, the state of the one
// that ends: as in a call that ends there, to the bit. For one inside a chunk the walk keeps the state at the
// chunk's start and, once it has finished its segment, takes one more step from it. For each mark and value
// head, at place mark * HV + hv, `mark_states` has
//
//   float [V][K]    the state at the start of the mark's chunk; those of all marks come first
//   ChunkOperands   the record of that chunk cut off at the mark: prepare_marked.cu
//
// Producer and walkers go through the marks in the same order.
#pragma once

#include "common/chunk_forward/marks.cuh"
#include "sm90/chunk_forward/segments/segment_scan.cuh"

// Calls f(mark, its token, counted from the sequence's start) for each mark in chunks begin .. end - 1.
template <class F>
__device__ __forceinline__ void each_mark_of(const SegmentParams& p, const Sequence& s, int begin, int end,
                                             F f) {
#pragma unroll 1
  for (int i = 0; i < p.marks; ++i) {
    const int token = mark_token(p, i, s.first);
    if (token >= begin * C && token < end * C && token < s.length) f(i, token);
  }
}

__device__ __forceinline__ u64 mark_start_at(const SegmentParams& p, int mark, int hv) {
  return p.mark_states + ((u64)mark * p.HV + hv) * FULL_STATE_BYTES;
}
__device__ __forceinline__ u64 mark_record_at(const SegmentParams& p, int mark, int hv) {
  return mark_start_at(p, p.marks, 0) + ((u64)mark * p.HV + hv) * sizeof(ChunkOperands);
}
// Where the state at a mark goes.
__device__ __forceinline__ u64 marked_state_at(const SegmentParams& p, int mark, int hv) {
  const int row = slot_at(p, p.mark_rows, mark, p.flags & FLAG_MARK_ROWS64);
  return state_at(p, p.ht, row, p.ht_row, hv, K * V);
}

// The state at the start of a chunk of the segment, for each mark in it.
__device__ __forceinline__ void keep_marked_states(const SegmentParams& p, const Segment& x, int chunk,
                                                   State& state, const Lane& l) {
  // Checkpoints at a segment's first token are written by the block of the previous segment.
  const bool by_previous = x.index && chunk == x.begin;
  each_mark_of(p, x.s, chunk, chunk + 1, [&](int mark, int token) {
    if (token % C)
      write_pairs(state.s, l.row + l.g, 2 * l.t, mark_start_at(p, mark, x.hv));
    else if (!by_previous)
      write_state(state, l.row + l.g, l.t, marked_state_at(p, mark, x.hv), p.flags);
  });
}
// The state at the end of a segment, for each mark at the first token behind it. There is none behind a
// sequence's last segment.
__device__ __forceinline__ void keep_states_at_end(const SegmentParams& p, const Segment& x, State& state,
                                                   const Lane& l) {
  each_mark_of(p, x.s, x.end, x.end + 1, [&](int mark, int token) {
    if (token % C == 0) write_state(state, l.row + l.g, l.t, marked_state_at(p, mark, x.hv), p.flags);
  });
}

// What `produce` does for a segment, then the records of its marks, with the values before them.
__device__ __forceinline__ void produce_marks(const SegmentParams& p, const Segment& x, OperandRing& ring,
                                              int part) {
  each_mark_of(p, x.s, x.begin, x.end, [&](int mark, int token) {
    if (token % C == 0) return;
    Values v = find_values(p, x.s, token - token % C, x.hv, part);
    v.rows = token % C;
    load_chunk(ring, mark_record_at(p, mark, x.hv), OFFSET(ChunkOperands, qg), v);
  });
}

// The step that a mark inside a chunk needs: S diag(last) + r kt, as in the walk. `use_rows(stage)` is called
// while the places of this warp's values in a stage are free.
template <class F>
__device__ __forceinline__ void take_marked_steps(const SegmentParams& p, const Segment& x, OperandRing& ring,
                                                  const Lane& l, F use_rows) {
  each_mark_of(p, x.s, x.begin, x.end, [&](int mark, int token) {
    if (token % C == 0) return;
    State state;  // what this lane has written
    read_pairs(state.s, l.row + l.g, 2 * l.t, mark_start_at(p, mark, x.hv));
    Operand s;
    pack_state(s, state);
    const u32 stage = ring.stage();
    ring.wait_full();
    float prediction[2 * C_TILES][4] = {};
    fence_registers(prediction);
    warpgroup_fence();
    multiply_channels(prediction, s, operand_descriptor(stage + OFFSET(ChunkOperands, kd), 16, 1024));
    warpgroup_commit();
    TokenOperand v, r;
    load_values(v, l, values_of(stage, l));
    decay_state(state, l.t, stage + OFFSET(ChunkOperands, last));
    use_rows(stage);
    warpgroup_wait<0>();
    fence_registers(prediction);
    subtract(r, v, prediction);
    const u64 kt = operand_descriptor(stage + OFFSET(ChunkOperands, kt), SQUARE_BYTES, 1024);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, r.a[kk], over_tokens(kt, kk), 1);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(state.s);
    release(l, ring);
    ring.next();
    write_state(state, l.row + l.g, l.t, marked_state_at(p, mark, x.hv), p.flags);
  });
}
