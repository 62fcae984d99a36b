// The producer warps: chunks into the ring, as soon as a stage is free. Rows past a chunk's end are its last one again: their beta is 0,
// so they add nothing, and their results are not stored.
#ifndef KDACORE_STAGES_FETCH_CUH
#define KDACORE_STAGES_FETCH_CUH

#include "sm90/stages/items.cuh"

constexpr int FETCHERS = 32 * PRODUCERS;

struct Sources {
  Rows k, v, q, g, inverse;
};
__device__ __forceinline__ Sources find_sources(const RecomputeRingParams& p, const Chunk& c) {
  Sources s;
  s.k = make_rows(p.k, p.k_sb, p.k_st, p.k_sh, 2, c, c.h);
  s.v = make_rows(p.v, p.v_sb, p.v_st, p.v_sh, 2, c, c.hv);
  if (HAS_Q) s.q = make_rows(p.q, p.q_sb, p.q_st, p.q_sh, 2, c, c.h);
  s.g = make_rows(p.g, p.g_sb, p.g_st, p.g_sh, 4, c, c.hv);
  s.inverse = make_rows(p.Akk, p.Akk_sb, p.Akk_st, p.Akk_sh, 2, c, c.hv);
  return s;
}

__device__ __forceinline__ const unsigned char* clamped(const Rows& r, int row, int rows) { return row_at(r, row < rows ? row : rows - 1); }

#if BULK

// A copy a row. A warp's 32 rows are of one array. How many bytes it brings is said on its arrival, without which the phase cannot end.
__device__ __forceinline__ u32 fetch_rows(const Sources& s, u32 stage, u32 full, int rows, int i) {
  const int warp = uniform(i >> 5), lane = i & 31;
  constexpr int ARRAYS = 4 + HAS_Q, HALVES = 2 * ARRAYS;
  const auto each = [&](auto f) {
#pragma unroll
    for (int n = 0; n < (HALVES + PRODUCERS - 1) / PRODUCERS; ++n) {
      const int half = n * PRODUCERS + warp, row0 = half & 1 ? C / 2 : 0;
      if (half >> 1 == 0) f(s.g, G_AT + row0 * FLOAT_PITCH, FLOAT_PITCH, 4 * K, row0);
      if (half >> 1 == 1) f(s.k, K_AT + row0 * HALF_PITCH, HALF_PITCH, 2 * K, row0);
      if (half >> 1 == 2) f(s.v, V_AT + row0 * HALF_PITCH, HALF_PITCH, 2 * K, row0);
      if (half >> 1 == 3) f(s.inverse, inverse_at(row0), row0 ? LONG_PITCH : SHORT_PITCH, row0 ? 128 : 64, row0);
      if (HAS_Q && half >> 1 == 4) f(s.q, Q_AT + row0 * HALF_PITCH, HALF_PITCH, 2 * K, row0);
    }
  };
  u32 coming = 0;
  each([&](const Rows& r, u32 at, u32 pitch, u32 bytes, int row0) {
    copy_in(stage + at + lane * pitch, clamped(r, row0 + lane, rows), bytes, full);
    coming += 32 * bytes;
  });
  return coming;
}
// With what this thread has asked for, and this warp has written.
__device__ __forceinline__ void arrive(u32 full, u32 coming, int lane) {
  sync_warp();
  if (lane == 0) barrier_expect(full, coming);
  else if (EVERY_LANE) barrier_arrive(full);
}

#else

template <int PIECES, u32 PITCH>
__device__ __forceinline__ void fetch_array(u32 to, const Rows& from, int rows, int i) {
  constexpr int AT_ONCE = FETCHERS / PIECES, TIMES = C / AT_ONCE;
  static_assert(AT_ONCE > 0 && C % AT_ONCE == 0, "rows past the chunk");
  const int piece = i % PIECES, first = i / PIECES;
  to += first * PITCH + 16 * piece;
  if (rows == C) {
    const unsigned char* at = row_at(from, first) + 16 * piece;
    const long long step = (long long)AT_ONCE * from.step;
#pragma unroll 16
    for (int n = 0; n < TIMES; ++n) {
      copy_async16(to + n * (AT_ONCE * PITCH), at, true);
      at += step;
    }
    return;
  }
#pragma unroll 1
  for (int n = 0; n < TIMES; ++n) {
    copy_async16(to + n * (AT_ONCE * PITCH), clamped(from, first + n * AT_ONCE, rows) + 16 * piece, true);
  }
}

// Akk by blocks of 16 x 16, those on and below the diagonal.
__device__ __forceinline__ void fetch_inverse(u32 stage, const Rows& from, int rows, int i) {
  constexpr int AT_ONCE = FETCHERS / 8;
  const int piece = i & 7, first = i >> 3;
#pragma unroll
  for (int n = 0; n < C / AT_ONCE; ++n) {
    const int row = first + n * AT_ONCE;
    if (piece >> 1 <= row >> 4) copy_async16(stage + inverse_at(row) + 16 * piece, clamped(from, row, rows) + 16 * piece, true);
  }
}

__device__ __forceinline__ u32 fetch_rows(const Sources& s, u32 stage, u32, int rows, int i) {
  fetch_array<2 * K / 16, HALF_PITCH>(stage + K_AT, s.k, rows, i);
  fetch_array<4 * K / 16, FLOAT_PITCH>(stage + G_AT, s.g, rows, i);
  fetch_array<2 * K / 16, HALF_PITCH>(stage + V_AT, s.v, rows, i);
  if (HAS_Q) fetch_array<2 * K / 16, HALF_PITCH>(stage + Q_AT, s.q, rows, i);
  fetch_inverse(stage, s.inverse, rows, i);
  return 0;
}
__device__ __forceinline__ void arrive(u32 full, u32, int lane) {
  copy_async_arrive(full);
  warp_arrive(full, lane);
}

#endif

// All producer warps; i: which of their threads.
__device__ __forceinline__ void feed(const RecomputeRingParams& p, u32 shared, int i) {
  const int lane = i & 31;
  Ring ring = {shared};
  Window window;
  if (p.cu_seqlens) window.load(p, lane);
  Queue queue = {shared};
#pragma unroll 1
  for (int item = queue.first(p); item < p.items; item = queue.next(p, item, i)) {
    queue.ask(p, i);
    const Chunk c = find_chunk(p, item, window, lane);
    if (!c.rows) {
      if (DYNAMIC) continue;  // all are counted
      break;
    }
    const Sources sources = find_sources(p, c);
    constexpr int BETAS = FETCHERS < C ? C / FETCHERS : 1;
    float beta[BETAS];
#pragma unroll
    for (int n = 0; n < BETAS; ++n) {  // on their way while the stage is waited for
      const int row = i + n * FETCHERS;
      const long long at = c.batch * p.beta_sb + (c.first + row) * p.beta_st + c.hv * p.beta_sh;
      beta[n] = row < c.rows ? load_scalar(p.beta, at, p.beta_type) : 0.0f;
    }
    ring.wait_empty();
    const u32 stage = ring.stage(), coming = fetch_rows(sources, stage, ring.full(), c.rows, i);
#pragma unroll
    for (int n = 0; n < BETAS; ++n) {
      if (i + n * FETCHERS < C) store_shared(stage + BETA_AT + 4 * (i + n * FETCHERS), __float_as_uint(beta[n]));
    }
    if (i == 0) {
      const u64 at = 2 * output_at(p, c, 0, K);
      store_shared(stage + INFO_AT, (u32)c.rows, 0, (u32)at, (u32)(at >> 32));
    }
    arrive(ring.full(), coming, lane);
    ring.next();
    if (ONCE) return;
  }
#pragma unroll 1
  for (int team = 0; team < TEAMS; ++team) {
    ring.wait_empty();
    if (i == 0) store_shared(ring.stage() + INFO_AT, 0, 0, 0, 0);
    arrive(ring.full(), 0, lane);
    ring.next();
  }
}

#endif
