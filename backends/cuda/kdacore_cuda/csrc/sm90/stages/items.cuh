// The chunks and value heads a block takes, one after another: every grid-th, so that blocks at work have neighbours at any time. With
// DYNAMIC the next one nobody has taken: p.counter is 0 before a launch, and after it. With TOGETHER a block takes all value heads of a
// query head's chunk in turn.
#ifndef KDACORE_STAGES_ITEMS_CUH
#define KDACORE_STAGES_ITEMS_CUH

#include "sm90/stages/ring.cuh"

#ifndef KDACORE_EMULATE
__device__ __forceinline__ u32 fetch_add(u64 counter, u32 x) {
  u32 r;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(r) : "l"(counter), "r"(x) : "memory");
  return r;
}
#endif

// Which item a block takes next; all threads of the producers, `i` which of them, ask together.
struct Queue {
  u32 shared;
  u32 turn = 0, taken = 0;
  __device__ __forceinline__ int first(const RecomputeRingParams& p) const {
    return TOGETHER ? block_index() * (p.HV / p.H) : block_index();
  }
  // One thread asks early: the answer is on its way meanwhile.
  __device__ __forceinline__ void ask(const RecomputeRingParams& p, int i) {
    if (DYNAMIC && i == 0) taken = fetch_add(p.counter, 1);
  }
  __device__ __forceinline__ int next(const RecomputeRingParams& p, int item, int i) {
    if (TOGETHER) {
      const int group = p.HV / p.H, later = item + 1;
      return later % group ? later : later + (grid_blocks() - 1) * group;
    }
    if (!DYNAMIC) return item + grid_blocks();
    const u32 at = shared + NEXT_AT + 16 * (turn ^= 1);
    if (i == 0) {
      if (taken == p.items - 1) *reinterpret_cast<u32*>(p.counter) = 0;  // the last block that asks
      store_shared(at, taken + grid_blocks());
    }
    sync_threads(15, 32 * PRODUCERS);
    return __float_as_uint(load_shared1(at));
  }
};

// 32 sequences of a pack, one a lane. Slots are asked for in ascending order, so a window only moves on.
struct Window {
  int n0 = 0, slots = 0;          // its first sequence, chunks before it
  int start, length, before, mine;  // of the lane's sequence: tokens, chunks of the window before it, its own
  int total;
  __device__ __forceinline__ void load(const RecomputeRingParams& p, int lane) {
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
__device__ __forceinline__ Chunk find_chunk(const RecomputeRingParams& p, int item, Window& w, int lane) {
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
