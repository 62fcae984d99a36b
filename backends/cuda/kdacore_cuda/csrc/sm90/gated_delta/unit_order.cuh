// The order in which records are made for walks that take them as they come. Sequences are taken in groups, as many as
// are walked at a time, a pack's by length, the longest first. Of a group the first chunks of all sequences and heads come
// first, then their second ones, and so on, so that none of the walks waits long.
//
// A pack's sequences have a table, by length. A row has: the sequence's chunks; how many chunks of its group come before
// the chunk of that number, which are those of sequences that are no longer; the sequence; and the chunks of all groups
// before. Then, at every chunk, the sequences that still have one are the first rows of the group.
#pragma once

#include "generated/gated_delta_beside_params.cuh"
#include "sm90/gated_delta/key_unit.cuh"

struct OrderedSequence {
  int chunks, before, n, start;
};
struct OrderTable {
  OrderedSequence rows[ORDERED_SEQUENCES];
};

// One warp, for a pack. `together`: sequences of a group.
__device__ __forceinline__ void make_order(const GatedDeltaParams& p, u32 table, int together, int lane) {
  static_assert(ORDERED_SEQUENCES == 32, "a lane for each sequence");
  const int chunks = lane < p.N ? find_read_sequence(p, lane).chunks : 0;
  int row = 0, before = 0, start = 0;
#pragma unroll 1
  for (int n = 0; n < p.N; ++n) {
    const int other = shuffle(chunks, n);
    row += other > chunks || (other == chunks && n < lane);
  }
  const int group = row / together;
#pragma unroll 1
  for (int n = 0; n < p.N; ++n) {
    const int other = shuffle(chunks, n), others = shuffle(group, n);
    if (others == group) before += other < chunks ? other : chunks;
    if (others < group) start += other;
  }
  if (lane < p.N)
    store_shared(table + row * (u32)sizeof(OrderedSequence), (u32)chunks, (u32)before, (u32)lane, (u32)start);
}

__device__ __forceinline__ OrderedSequence load_row(u32 table, int row) {
  const uint4 x = load_shared_u4(table + row * (u32)sizeof(OrderedSequence));
  return {(int)x.x, (int)x.y, (int)x.z, (int)x.w};
}
// Rows from `first` up to `beyond` of which is(row) is true are the first ones. Returns the row behind them.
template <class F>
__device__ __forceinline__ int find_row(u32 table, int first, int beyond, F is) {
  while (first < beyond) {
    const int middle = (first + beyond) >> 1;
    if (is(load_row(table, middle)))
      first = middle + 1;
    else
      beyond = middle;
  }
  return first;
}

// The unit at a position of the order; `past` where there is none.
struct OrderedUnit {
  KeyUnit unit;
  bool past;
};
__device__ __forceinline__ OrderedUnit find_ordered_unit(const GatedDeltaParams& p, u32 table, int together,
                                                         int position) {
  int at = divide(position, p.h_factor, p.h_shift);  // among all chunks
  const int h = position - at * p.H;
  int chunk, n;
  if (!p.cu_seqlens) {
    const int group = (int)((u32)at / (u32)(together * p.NT)), first = group * together;
    if (first >= p.N) return {{}, true};
    at -= first * p.NT;
    const int active = p.N - first < together ? p.N - first : together;
    chunk = (int)((u32)at / (u32)active), n = first + at - chunk * active;
    if (chunk >= p.NT) return {{}, true};
  } else {
    const int last = find_row(table, 1, p.N, [&](const OrderedSequence& x) { return x.start <= at; }) - 1;
    const int first = last / together * together;
    const int beyond = p.N - first < together ? p.N : first + together;
    at -= load_row(table, first).start;
    // Behind the rows that have more chunks than come before this one.
    const int ended = find_row(table, first, beyond, [&](const OrderedSequence& x) { return x.before > at; });
    const int active = ended - first;
    if (!active) return {{}, true};
    int begin = 0;  // chunks before `chunk`
    chunk = 0;
    if (ended < beyond) {
      const OrderedSequence x = load_row(table, ended);
      chunk = x.chunks, begin = x.before;
    }
    const int more = (int)((u32)(at - begin) / (u32)active);
    chunk += more;
    n = load_row(table, first + at - begin - more * active).n;
  }
  const Sequence s = find_read_sequence(p, n);
  return {make_key_unit(p, s, s.slot + chunk, h), false};
}

// Positions of the order in all.
__device__ __forceinline__ int ordered_units(const GatedDeltaParams& p, u32 table, int together) {
  if (!p.cu_seqlens) return p.N * p.NT * p.H;
  const int first = (p.N - 1) / together * together;
  const OrderedSequence x = load_row(table, first);  // it has the group's most chunks
  return (x.start + x.before) * p.H;
}
