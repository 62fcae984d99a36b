// Chunks into the ring, as soon as a stage is free. Rows past a chunk's end are its last one again: their beta is 0, so they add nothing,
// and their results are not stored.
#ifndef KDACORE_STAGES_FETCH_CUH
#define KDACORE_STAGES_FETCH_CUH

#include "sm90/stages/items.cuh"

__device__ __forceinline__ const unsigned char* clamped(const Rows& r, int row, int rows) { return row_at(r, row < rows ? row : rows - 1); }

template <int PIECES, u32 PITCH>
__device__ __forceinline__ void fetch_array(u32 to, const Rows& from, int rows, int i) {
  constexpr int AT_ONCE = FETCHERS / PIECES, TIMES = C / AT_ONCE;
  const int piece = i % PIECES, first = i / PIECES;
  to += first * PITCH + 16 * piece;
  if (rows == C) {
    const unsigned char* at = row_at(from, first) + 16 * piece;
    const long long step = (long long)AT_ONCE * from.step;
#pragma unroll
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

__device__ __forceinline__ void fetch_chunk(const RecomputeParams& p, const Chunk& c, const Chunks& ring, int i) {
  const Rows k = make_rows(p.k, p.k_sb, p.k_st, p.k_sh, 2, c, c.h), v = make_rows(p.v, p.v_sb, p.v_st, p.v_sh, 2, c, c.hv);
  const Rows g = make_rows(p.g, p.g_sb, p.g_st, p.g_sh, 4, c, c.hv);
  const Rows inverse = make_rows(p.Akk, p.Akk_sb, p.Akk_st, p.Akk_sh, 2, c, c.hv);
  const long long beta_at = c.batch * p.beta_sb + (c.first + i) * p.beta_st + c.hv * p.beta_sh;
  const float beta = i < c.rows ? load_scalar(p.beta, beta_at, p.beta_type) : 0.0f;  // on its way while the stage is waited for
  ring.wait_empty();
  const u32 stage = ring.stage();
  fetch_array<2 * K / 16, HALF_PITCH>(stage + K_AT, k, c.rows, i);
  fetch_array<4 * K / 16, FLOAT_PITCH>(stage + G_AT, g, c.rows, i);
  fetch_array<2 * K / 16, HALF_PITCH>(stage + V_AT, v, c.rows, i);
  fetch_inverse(stage, inverse, c.rows, i);
  if (i < C) store_shared(stage + BETA_AT + 4 * i, __float_as_uint(beta));
  if (i == 0) {
    const u64 at = 2 * output_at(p, c, 0, K);
    store_shared(stage + INFO_AT, (u32)c.rows, 0, (u32)at, (u32)(at >> 32));
  }
  arrive_full(ring, i & 31);
}

// All of a block's chunks: every grid-th, so that blocks at work have neighbours at any time. i: which of the fetching threads.
__device__ __forceinline__ void feed(const RecomputeParams& p, u32 shared, int i) {
  const int lane = i & 31;
  Chunks ring = {shared};
  Window window;
  if (p.cu_seqlens) window.load(p, lane);
#pragma unroll 1
  for (int item = block_index(); item < p.items; item += grid_blocks()) {
    const Chunk c = find_chunk(p, item, window, lane);
    if (!c.rows) break;
    fetch_chunk(p, c, ring, i);
    if (ONCE) return;
    ring.next();
  }
#pragma unroll 1
  for (int team = 0; team < TEAMS; ++team) {
    ring.wait_empty();
    if (i == 0) store_shared(ring.stage() + INFO_AT, 0, 0, 0, 0);
    arrive_full(ring, lane);
    ring.next();
  }
}

#endif
