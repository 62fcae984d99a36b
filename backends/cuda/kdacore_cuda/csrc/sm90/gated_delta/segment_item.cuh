// A segment of a sequence and value head as the item of a walk. How sequences are cut, and what `maps`, `addends` and
// `starts` hold: chunk_forward/segments/segment.cuh, with these differences. Slots are counted by the shortest length,
// p.segment; where a sequence's first segment is longer than those behind it, none has that place (p.first_segments is 0).
// The first one has no map: it is walked from the initial state, and its addend is the state at its end, which is the
// second segment's start, too. Slices of a row that several ranks share (OF_SLICE) differ: walk_first_segments.cu.
#pragma once

#include "generated/gated_delta_segment_params.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/gated_delta/walk_arrays.cuh"
#include "sm90/gated_delta/walk_checkpoints.cuh"

__device__ __forceinline__ Sequence find_read_sequence(const GatedDeltaSegmentParams& p, int n) {
  return find_read_sequence(static_cast<const GatedDeltaParams&>(p), n);
}

struct SegmentItem : Item {  // `s`: the segment, but its length reaches to the sequence's end
  int index, begin;          // among the sequence's segments; its first chunk
  bool last;
  long long place;  // in maps, and in float states of segments
};
template <class Params>
__device__ __forceinline__ SegmentItem segment_item(const Params& p, int n, int index, int hv, int part) {
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
// Of the `block`-th among blocks that have segments, two each and value head. Packs: those of all slots. Dense sequences:
// from the last segment on, without the `behind` last ones, towards the first. The last ones are the longest.
template <class Params>
__device__ __forceinline__ SegmentItem find_later(const Params& p, int block, int behind) {
  const int m = block / PARTS, slot = m / p.HV, hv = m - slot * p.HV;
  int j = opaque(slot / p.N), n = slot - j * p.N;
  j = p.segments - 1 - behind - j;
  if (p.cu_seqlens) find_slot_segment(p, slot, [&](int sequence, int segment) { n = sequence, j = segment; });
  return segment_item(p, n, j, hv, block % PARTS);
}

// The state at a segment's start.
template <class Params>
__device__ __forceinline__ void read_segment_start(State& state, const Params& p, const SegmentItem& item,
                                                   int row, const Lane& l) {
  if (item.index)
    read_pairs(state.s, row, 2 * l.t, full_state_at(p.starts, item.place));
  else
    read_initial_state(state, p, item, row, l);
  make_opaque(state);
}
