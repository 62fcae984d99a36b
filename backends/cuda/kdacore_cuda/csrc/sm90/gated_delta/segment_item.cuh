// A segment of a sequence and value head as the item of a walk. How sequences are cut, and what `maps`, `addends` and
// `starts` hold: chunk_forward/segments/segment.cuh, with these differences. A sequence's first segment is longer than
// those behind it, so slots are counted by the shortest length, p.segment, of which there are none (p.first_segments
// is 0). It has no map: it is walked from the initial state, and its addend is the state at its end, which is the
// second segment's start, too.
//
// The block of the segment before writes the checkpoint at a border, as the state at its end is that of a call which
// ends there.
#pragma once

#include "generated/gated_delta_segment_params.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/gated_delta/walk_forward.cuh"

__device__ __forceinline__ Sequence find_read_sequence(const GatedDeltaSegmentParams& p, int n) {
  return find_read_sequence(static_cast<const GatedDeltaParams&>(p), n);
}

struct SegmentItem : Item {  // `s`: the segment, but its length reaches to the sequence's end
  int index, begin;          // among the sequence's segments; its first chunk
  bool last;
  long long place;  // in maps, addends and starts
};
__device__ __forceinline__ SegmentItem segment_item(const GatedDeltaSegmentParams& p, int n, int index,
                                                    int hv, int part) {
  const Segment x = find_segment(p, n, index, hv);
  SegmentItem item;
  item.s = x.s;
  item.s.first += (long long)x.begin * C;
  item.s.length -= x.begin * C;
  item.s.slot += x.begin;
  item.s.chunks = x.end > x.begin ? x.end - x.begin : 0;
  item.n = n, item.hv = hv, item.part = part;
  item.index = index, item.begin = x.begin;
  item.last = x.last(), item.place = x.place;
  return item;
}
// Of the `block`-th among the blocks of a grid that has those of later segments. Dense sequences: the last ones come
// first, as they are the longest; `left_out` segments at their ends have no blocks.
__device__ __forceinline__ SegmentItem find_later(const GatedDeltaSegmentParams& p, int block, int left_out) {
  const int m = block / PARTS, slot = m / p.HV, hv = m - slot * p.HV;
  int j = opaque(slot / p.N), n = slot - j * p.N;
  j = p.segments - 1 - left_out - j;
  if (p.cu_seqlens) find_slot_segment(p, slot, [&](int sequence, int segment) { n = sequence, j = segment; });
  return segment_item(p, n, j, hv, block % PARTS);
}

__device__ __forceinline__ u64 full_state_at(u64 states, long long place) {
  return states + place * FULL_STATE_BYTES;
}
__device__ __forceinline__ void begin_state(State& state, const GatedDeltaSegmentParams& p,
                                            const SegmentItem& item, int row, const Lane& l) {
  // Opaque: where the state came from one of these alone, the assembler would make the loop over chunks wait for
  // products before it scales the state.
  if (opaque(item.index))
    read_pairs(state.s, row, 2 * l.t, full_state_at(p.starts, item.place));
  else
    read_state(state, row, l.t, initial_state_at(p, item.n, item.hv, K * V), p.flags);
}
__device__ __forceinline__ CheckpointsBefore checkpoints_before(const SegmentItem& item, int every) {
  if (!item.begin) return {0, 0};
  const int rows = item.begin / every + 1;
  return {rows, rows * every - item.begin};
}
__device__ __forceinline__ void end_state(State& state, const GatedDeltaSegmentParams& p,
                                          const SegmentItem& item, u64 checkpoint, int row, const Lane& l) {
  if (item.last) {
    if (const u64 final = final_state_at(p, item.n, item.hv, K * V))
      write_state(state, row, l.t, final, p.flags);
    return;
  }
  if (checkpoint) write_state(state, row, l.t, checkpoint, p.flags);
  if (item.index) return;
  write_pairs(state.s, row, 2 * l.t, full_state_at(p.addends, item.place));
  write_pairs(state.s, row, 2 * l.t, full_state_at(p.starts, item.place + p.HV));
}
