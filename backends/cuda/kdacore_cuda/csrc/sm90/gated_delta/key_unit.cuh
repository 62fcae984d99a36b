// A chunk of a sequence and key head, which all of its value heads share.
#pragma once

#include "common/fast_division.cuh"
#include "sm90/gated_delta/record.cuh"

struct KeyUnit {
  int h, rows;  // rows: 0 where no sequence fills the slot
  long long slot, batch, first;
};
static_assert(sizeof(KeyUnit) == 32, "two pieces of 16 bytes");

// A unit in shared memory.
__device__ __forceinline__ void store_key_unit(u32 to, const KeyUnit& x) {
  store_shared(to, (u32)x.h, (u32)x.rows, (u32)x.slot, (u32)(x.slot >> 32));
  store_shared(to + 16, (u32)x.batch, (u32)(x.batch >> 32), (u32)x.first, (u32)(x.first >> 32));
}
__device__ __forceinline__ KeyUnit load_key_unit(u32 from) {
  const uint4 x = load_shared_u4(from), y = load_shared_u4(from + 16);
  const auto join = [](u32 low, u32 high) { return (long long)((u64)high << 32 | low); };
  return {(int)x.x, (int)x.y, join(x.z, x.w), join(y.x, y.y), join(y.z, y.w)};
}

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
  const int n = p.cu_seqlens ? sequence_of_slot(p, slot, 0, p.N)
                             : divide(slot, p.chunks_factor, p.chunks_shift);
  return make_key_unit(p, find_read_sequence(p, n), slot, index - slot * p.H);
}
