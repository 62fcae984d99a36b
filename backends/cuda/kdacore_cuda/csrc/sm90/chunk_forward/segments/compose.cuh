// Segments' maps applied one after another to the rows of a state, or of its gradient, that a block
// has. Rows, warps and products: chain_step.cuh.
#pragma once

#include "sm90/chunk_forward/segments/chain_step.cuh"

__device__ __forceinline__ Lane make_lane(int part) {
  const int warp = uniform(thread_index() >> 5), lane = thread_index() & 31;
  const int strip = warp / GROUPS, group = warp % GROUPS;
  return {lane, strip, group, ROWS * part + 16 * strip + (lane >> 2), CHANNELS * group + 2 * (lane & 3)};
}

// To be called once, by all threads, before `compose`.
__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < STAGES) barrier_init(shared + OFFSET(SharedMemory, barriers) + 8 * thread_index(), 1);
  fence_async_proxy();
  sync_block();
}

// The lane's numbers of a float [K][V], as states are exchanged between ranks: f(number, its place).
template <class F>
__device__ __forceinline__ void each_key_first(Sums& sums, const Lane& l, u64 base, F f) {
  float* at = reinterpret_cast<float*>(base) + l.channel * V + l.row;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(sums.x[j][e], at[(8 * j + (e & 1)) * V + 8 * (e >> 1)]);
  }
}
__device__ __forceinline__ void read_key_first(Sums& sums, const Lane& l, u64 base) {
  each_key_first(sums, l, base, [](float& x, const float& from) { x = from; });
}
__device__ __forceinline__ void write_key_first(Sums& sums, const Lane& l, u64 base) {
  each_key_first(sums, l, base, [](float& x, float& to) { to = x; });
}
__device__ __forceinline__ void set_unit(Sums& sums, const Lane& l) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e)
      sums.x[j][e] = l.row + 8 * (e >> 1) == l.channel + 8 * j + (e & 1) ? 1.0f : 0.0f;
  }
}

// sums = sums A(i) + B(i), or with A(i)^T, for i from 0 to steps - 1. `map_at(i)`: where the two images
// of A(i) are; `addend_at(i)`: where B(i) is, a float [V][K], or 0 for none. `keep(i)` is called in
// step i, while sums are what that step begins with; it may overwrite B(i). `begin()` is called before the
// first step, while its A is on its way, and may load what that step begins with.
//
// The A of the next two steps are loaded ahead, by bulk copies whose bytes the barrier of their stage
// counts. A barrier of the block separates writing S from reading it, and one step from the next.
struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};
template <bool TRANSPOSED, bool ONE_SUM = false, class MapAt, class AddendAt, class Keep, class Begin = Nothing>
__device__ __forceinline__ void compose(Sums& sums, int steps, u32 shared, const Lane& l, MapAt map_at,
                                        AddendAt addend_at, Keep keep, Begin begin = {}) {
  const auto barrier_at = [&](int i) { return shared + OFFSET(SharedMemory, barriers) + 8 * (i % STAGES); };
  const auto right_at = [&](int i) {
    return shared + OFFSET(SharedMemory, right) + i % STAGES * RIGHT_BYTES;
  };
  const auto fetch = [&](int i) {
    if (thread_index() || i >= steps) return;
    barrier_expect(barrier_at(i), RIGHT_BYTES);
    copy_in(right_at(i), reinterpret_cast<const void*>(map_at(i)), RIGHT_BYTES, barrier_at(i));
  };
  const auto read_addend = [&](Sums& to, int i) {
    to = {};
    if (i >= steps) return;
    if (const u64 from = addend_at(i)) read_pairs(to.x, l.row, l.channel, from);
  };
  fetch(0);
  fetch(1);
  Sums next;  // B, which is loaded a step ahead
  read_addend(next, 0);
  begin();
#pragma unroll 1
  for (int i = 0; i < steps; ++i) {
    keep(i);
    Sums after_next;  // requested at the step's head: where the step ends, moving it to `next` would wait for it
    read_addend(after_next, i + 1);
    const u32 left = shared + OFFSET(SharedMemory, left) + (i & 1) * 2 * PART_BYTES;
    store_left(sums, left, l);
    sync_block();  // and all have used A of the previous step
    fetch(i + 2);
    barrier_wait(barrier_at(i), i / STAGES & 1);
    sums = multiply<TRANSPOSED, ONE_SUM>(left, right_at(i), l);
    add(sums, next);
    next = after_next;
  }
}

// Sequence whose tokens begin at or before token `token` and end behind it; -1 where there is none.
template <class Params>
__device__ __forceinline__ int sequence_with(const Params& p, long long token) {
  const bool wide = p.flags & FLAG_CU64;
  int n = -1, beyond = p.N;  // offsets up to n are at most `token`
  while (beyond - n > 1) {
    const int middle = (n + beyond) >> 1;
    if (load_index(p.cu_seqlens, middle, wide) <= token)
      n = middle;
    else
      beyond = middle;
  }
  return n >= 0 && load_index(p.cu_seqlens, n + 1, wide) > token ? n : -1;
}
