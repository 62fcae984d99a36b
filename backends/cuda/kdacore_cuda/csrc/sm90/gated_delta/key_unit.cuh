// A chunk of a sequence and key head, which all of its value heads share.
#pragma once

#include "common/fast_division.cuh"
#include "sm90/gated_delta/record.cuh"

struct KeyUnit {
  int h, rows;  // rows: 0 where no sequence fills the slot
  long long slot, batch, first;
};
// In a slot of sequence s. One past its end has no rows.
__device__ __forceinline__ KeyUnit make_key_unit(const GatedDeltaParams& p, const Sequence& s, int slot,
                                                 int h) {
  KeyUnit u;
  u.h = h;
  u.slot = slot;
  const int begin = (slot - s.slot) * C, left = s.length - begin;
  u.batch = s.batch;
  u.first = s.first + begin;
  u.rows = left <= 0 ? 0 : left < C ? left : C;
  return u;
}
__device__ __forceinline__ KeyUnit find_key_unit(const GatedDeltaParams& p, int index) {
  const int slot = divide(index, p.h_factor, p.h_shift);
  int n = 0, beyond = p.N;
  if (!p.cu_seqlens) {
    n = divide(slot, p.chunks_factor, p.chunks_shift);
  } else {
    // The last sequence whose slots begin at or before this one.
    const bool wide = p.flags & FLAG_CU64;
    while (beyond - n > 1) {
      const int middle = (n + beyond) >> 1;
      if (load_index(p.cu_seqlens, middle, wide) / C + middle <= slot)
        n = middle;
      else
        beyond = middle;
    }
  }
  return make_key_unit(p, find_read_sequence(p, n), slot, index - slot * p.H);
}
