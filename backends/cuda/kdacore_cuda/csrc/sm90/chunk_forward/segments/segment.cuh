// A sequence is cut into segments from its start, whatever its length, so that later tokens do not
// move a border: p.first_segments of p.segment chunks, p.later_segments of p.later_segment, p.middle_segments
// of p.middle_segment, then segments of p.long_segment.
//
// Over a segment the state (V by K) changes by an affine map, S' = S A + B. `maps` holds A and `addends` B
// of every segment but a sequence's last, `starts` the state at the start of every segment but a
// sequence's first, all by place: slot * HV + hv. Those of sequence n begin at first_segment(n); a
// slot that no segment fills is never read or written.
//
//   maps    A [K, K] as two state images (chunk_backward/workspace.cuh), the two bfloat16 parts of it,
//           together about 16 bits
//   addends as starts
//   starts  float states in the order of read_pairs. That of a sequence's first segment is read only
//           where the initial state is in the row that the final state goes to, which then is written
//           too early for some; where it begins with zeros it is there only then. Where blocks of output find
//           them (compose_start.cuh) they are stored for the backward alone
#pragma once

#include "common/state_rows.cuh"
#include "generated/segment_params.cuh"
#include "sm90/chunk_backward/state.cuh"
#include "sm90/chunk_forward/segments/chunk_operands.cuh"

constexpr u32 FULL_STATE_BYTES = 4 * V * K;
struct MapImages {
  StateImage high, low;
};
constexpr u32 MAP_BYTES = sizeof(MapImages);

// The chunk that segment `index` of a sequence begins with.
template <class Params>
__device__ __forceinline__ int segment_begin(const Params& p, int index) {
  const auto longer = [](int segments, int by) { return segments > 0 ? segments * by : 0; };
  const int later = index - p.first_segments, middle = later - p.later_segments,
            behind = middle - p.middle_segments;
  return index * p.segment + longer(later, p.later_segment - p.segment) +
         longer(middle, p.middle_segment - p.later_segment) +
         longer(behind, p.long_segment - p.middle_segment);
}

// Segments of a sequence of `chunks` chunks.
template <class Params>
__device__ __forceinline__ int segments_in(const Params& p, int chunks) {
  int segments = 0;  // before those that are as long as the last one
  const auto end_among = [&](int length, int count) {
    if (chunks <= count * length) return true;
    chunks -= count * length;
    segments += count;
    return false;
  };
  const int length = end_among(p.segment, p.first_segments)           ? p.segment
                     : end_among(p.later_segment, p.later_segments)   ? p.later_segment
                     : end_among(p.middle_segment, p.middle_segments) ? p.middle_segment
                                                                      : p.long_segment;
  return segments + (chunks + length - 1) / length;
}

// Slot of the first segment of sequence n. A pack has slots for first segments alone, which suffice, as no
// segment of a pack is shorter.
template <class Params>
__device__ __forceinline__ int first_segment(const Params& p, int n) {
  return p.cu_seqlens ? (int)(load_index(p.cu_seqlens, n, p.flags & FLAG_CU64) / (C * p.segment)) + n
                      : n * p.segments;
}

// Which sequence has slot `slot`: the last whose slots begin at or before it.
template <class Params>
__device__ __forceinline__ int sequence_of(const Params& p, int slot) {
  int n = 0, beyond = p.N;
  while (beyond - n > 1) {
    const int middle = (n + beyond) >> 1;
    if (first_segment(p, middle) <= slot)
      n = middle;
    else
      beyond = middle;
  }
  return n;
}

// Chunks begin .. end - 1 of sequence n and value head hv, or none.
struct Segment {
  int n, hv, index;  // index: among the sequence's
  int begin, end;
  Sequence s;
  long long place;  // in maps and starts
  __device__ __forceinline__ bool last() const { return end >= s.chunks; }
};

// Sequence n; without chunks if it is padding, which only calls without gradients have.
template <class Params>
__device__ __forceinline__ Sequence find_read_sequence(const Params& p, int n) {
  return find_sequence(p, n);
}
__device__ __forceinline__ Sequence find_read_sequence(const SegmentParams& p, int n) {
  const int read = !is_padding(p, n);
  Sequence s = find_sequence(p, n);
  s.length *= read;
  s.chunks *= read;
  return s;
}

// Whether the first segment's initial state is kept in `starts`.
__device__ __forceinline__ bool keeps_initial_state(const SegmentParams& p) { return p.h0 && p.h0 == p.ht; }

template <class Params>
__device__ __forceinline__ Segment find_segment(const Params& p, int n, int index, int hv) {
  Segment x;
  x.n = n;
  x.hv = hv;
  x.index = index;
  x.s = find_read_sequence(p, n);
  x.begin = segment_begin(p, index);
  const int next = segment_begin(p, index + 1);
  x.end = next < x.s.chunks ? next : x.s.chunks;
  x.place = (long long)(first_segment(p, n) + index) * p.HV + hv;
  return x;
}

// Where the matrices of a sequence and value head lie, by segment.
struct SegmentPlaces {
  u64 first;  // place of segment 0
  int heads;
  __device__ __forceinline__ u64 map(u64 maps, int j) const {
    return maps + (first + (u64)j * heads) * MAP_BYTES;
  }
  __device__ __forceinline__ u64 state(u64 states, int j) const {
    return states + (first + (u64)j * heads) * FULL_STATE_BYTES;
  }
};
template <class Params>
__device__ __forceinline__ SegmentPlaces segment_places(const Params& p, int n, int hv) {
  return {(u64)first_segment(p, n) * p.HV + hv, p.HV};
}

// Calls f(n, index) for the segment of a slot. In a pack those are the slots of maps and starts;
// for dense sequences the first segments of all come first, then the second ones.
template <class Params, class F>
__device__ __forceinline__ auto find_slot_segment(const Params& p, int slot, F f) {
  if (!p.cu_seqlens) {
    const int index = slot / p.N;
    return f(slot - index * p.N, index);
  }
  const int n = sequence_of(p, slot);
  return f(n, slot - first_segment(p, n));
}

// Bytes of a state as the caller has it, and where one of an array is; 0 without an array.
__device__ __forceinline__ u32 matrix_bytes(int flags) { return K * V * (flags & FLAG_STATE_BF16 ? 2 : 4); }
__device__ __forceinline__ u64 matrix_at(u64 states, long long place, int flags) {
  return states ? states + place * matrix_bytes(flags) : 0;
}

// A state between launches, float [V / 16][K / 8][32 lanes][4]: what a lane holds of 16 rows and 8
// channels lies together, so that a warp reads and writes 512 bytes in a row. TILES of 8 channels of
// rows `row` and row + 8; `channel`: the lane's first.
__device__ __forceinline__ float4* tile_at(u64 base, int row, int channel) {
  const int lane = 4 * (row & 7) + (channel >> 1 & 3);
  return reinterpret_cast<float4*>(base) + 32 * (K / 8 * (row >> 4) + (channel >> 3)) + lane;
}
template <int TILES>
__device__ __forceinline__ void read_pairs(float (&x)[TILES][4], int row, int channel, u64 base) {
  const float4* from = tile_at(base, row, channel);
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
    const float4 y = from[32 * j];
    x[j][0] = y.x, x[j][1] = y.y, x[j][2] = y.z, x[j][3] = y.w;
  }
}
template <int TILES>
__device__ __forceinline__ void write_pairs(float (&x)[TILES][4], int row, int channel, u64 base) {
  float4* to = tile_at(base, row, channel);
#pragma unroll
  for (int j = 0; j < TILES; ++j) to[32 * j] = make_float4(x[j][0], x[j][1], x[j][2], x[j][3]);
}
