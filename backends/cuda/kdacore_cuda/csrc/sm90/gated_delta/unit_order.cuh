// The order in which chunk_records_beside makes units, chunks of a sequence and key head: first the first chunks of all
// sequences and heads, then their second ones, and so on, so that none of the walks waits long.
//
// A pack's sequences are taken by length, the longest first. A table has for each: its chunks, and how many chunks of
// all sequences come before the chunk of that number, which are those of sequences that are no longer. Then, at every
// chunk, the sequences that still have one are the first rows of the table.
#pragma once

#include "generated/gated_delta_beside_params.cuh"
#include "sm90/gated_delta/key_unit.cuh"

struct OrderedSequence {
  int chunks, before, n, unused;
};
struct OrderTable {
  OrderedSequence rows[ORDERED_SEQUENCES];
};

// One warp, for a pack.
__device__ __forceinline__ void make_order(const GatedDeltaParams& p, u32 table, int lane) {
  static_assert(ORDERED_SEQUENCES == 32, "a lane for each sequence");
  const int chunks = lane < p.N ? find_read_sequence(p, lane).chunks : 0;
  int row = 0, before = 0;
#pragma unroll 1
  for (int n = 0; n < p.N; ++n) {
    const int other = shuffle(chunks, n);
    row += other > chunks || (other == chunks && n < lane);
    before += other < chunks ? other : chunks;
  }
  if (lane < p.N)
    store_shared(table + row * (u32)sizeof(OrderedSequence), (u32)chunks, (u32)before, (u32)lane, 0);
}

__device__ __forceinline__ OrderedSequence load_row(u32 table, int row) {
  const uint4 x = load_shared_u4(table + row * (u32)sizeof(OrderedSequence));
  return {(int)x.x, (int)x.y, (int)x.z, 0};
}

// The unit at a position of the order; `past` where there is none.
struct OrderedUnit {
  KeyUnit unit;
  bool past;
};
__device__ __forceinline__ OrderedUnit find_ordered_unit(const GatedDeltaParams& p, u32 table, int position) {
  const int at = divide(position, p.h_factor, p.h_shift), h = position - at * p.H;  // among all chunks
  int chunk, n;
  if (!p.cu_seqlens) {
    chunk = (int)((u32)at / (u32)p.N), n = at - chunk * p.N;
    if (chunk >= p.NT) return {{}, true};
  } else {
    int active = 0, beyond = p.N;  // the sequences that have more chunks than come before this one
    while (active < beyond) {
      const int middle = (active + beyond) >> 1;
      if (load_row(table, middle).before > at)
        active = middle + 1;
      else
        beyond = middle;
    }
    if (!active) return {{}, true};
    int first = 0;  // chunks before `chunk`
    chunk = 0;
    if (active < p.N) {
      const OrderedSequence ended = load_row(table, active);
      chunk = ended.chunks, first = ended.before;
    }
    const int more = (int)((u32)(at - first) / (u32)active);
    chunk += more;
    n = load_row(table, at - first - more * active).n;
  }
  const Sequence s = find_read_sequence(p, n);
  return {make_key_unit(p, s, s.slot + chunk, h), false};
}
