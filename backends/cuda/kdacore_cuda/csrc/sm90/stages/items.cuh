// Which 64 tokens of which sequence and value head an item is, for blocks that take several.
#ifndef KDACORE_STAGES_ITEMS_CUH
#define KDACORE_STAGES_ITEMS_CUH

#include "sm90/stages/ring.cuh"

// 32 sequences of a pack, one a lane. Slots are asked for in ascending order, so a window only moves on.
struct Window {
  int n0 = 0, slots = 0;            // its first sequence, chunks before it
  int start, length, before, mine;  // of the lane's sequence: tokens, chunks of the window before it, its own
  int total;
  __device__ __forceinline__ void load(const RecomputeParams& p, int lane) {
    const bool wide = p.flags & FLAG_CU64;
    const int n = n0 + lane;
    start = length = 0;
    if (n < p.N) {
      start = (int)load_index(p.cu_seqlens, n, wide);
      length = (int)load_index(p.cu_seqlens, n + 1, wide) - start;
    }
    mine = (length + C - 1) / C;
    int sum = mine;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int other = shuffle(sum, lane >= d ? lane - d : lane);
      if (lane >= d) sum += other;
    }
    total = shuffle(sum, 31);
    before = sum - mine;
  }
};

// All lanes of a warp together; no tokens where no chunk fills the slot, and then none fills a later one.
__device__ __forceinline__ Chunk find_chunk(const RecomputeParams& p, int item, Window& w, int lane) {
  Chunk c;
  const int slot = item / p.HV;
  c.hv = item - slot * p.HV;
  c.h = c.hv / (p.HV / p.H);
  if (!p.cu_seqlens) {
    const int batch = slot / p.NT;
    c.batch = batch;
    c.first = (long long)(slot - batch * p.NT) * C;
    const long long left = p.T - c.first;
    c.rows = left < C ? (int)left : C;
    return c;
  }
  c.batch = 0;
  c.first = 0;
  c.rows = 0;
  while (slot - w.slots >= w.total) {
    w.slots += w.total;
    w.n0 += 32;
    if (w.n0 >= p.N) return c;
    w.load(p, lane);
  }
  const int inside = slot - w.slots - w.before;
  const bool here = inside >= 0 && inside < w.mine;
  const int left = w.length - inside * C;
  c.first = (int)largest_of_warp(here ? w.start + inside * C : 0);
  c.rows = (int)largest_of_warp(here ? (left < C ? left : C) : 0);
  return c;
}

#endif
