// Unbounded gates: no product of one decay and one growth is representable over a whole chunk.
// Pairs (i, j) are split by the smallest dyadic block holding both; its right half's first token is
// the anchor, so both factors, 2^(G_i - G_anchor) and 2^(G_anchor - G_j), are at most 1. A level's
// right halves are 8 tokens and its left halves 8: one product of (k right; q right) by (k left)
// serves both triangles. Used by prepare.cuh.
#pragma once

#include "common/chunk_forward/dyadic_triangles.cuh"
#include "common/chunk_forward/prepare_parts.cuh"

// The lane whose even token is the first one of the right half.
__device__ __forceinline__ int anchor_lane(int lane, int level) {
  return level == 1 ? lane | 8 : level == 2 ? (lane & ~8) | 4 : (lane & ~12) | 16;
}

__device__ __forceinline__ void pair_products(const Raw& raw, const float (&sum)[2][8], Products& sums) {
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * (w + j);
      b[j] = pack_bf16(element(raw.k[0], c) * exp2_fast(sum[1][c] - sum[0][c]),
                       element(raw.k[0], c + 1) * exp2_fast(sum[1][c + 1] - sum[0][c + 1]));
    }
    const u32 a[4] = {word(raw.k[1], w), word(raw.q[1], w), word(raw.k[1], w + 1), word(raw.q[1], w + 1)};
    mma_bf16(sums.tile[0], a, b[0], b[1]);
  }
}

__device__ __forceinline__ void level_products(const Raw& raw, const float (&sum)[2][8], const Lane& l,
                                               int level, Products& sums) {
  const int bit = lane_bit(level), anchor = anchor_lane(l.lane, level);
  const bool right = l.lane & bit;
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 a[4], b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float k[2][2], q[2][2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int c = 2 * (w + j) + x;
        const float from = shuffle(sum[0][c], anchor);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float factor = exp2_fast(-fabsf(sum[i][c] - from));
          k[i][x] = element(raw.k[i], c) * factor;
          q[i][x] = element(raw.q[i], c) * factor;
        }
      }
      const u32 k0 = pack_bf16(k[0][0], k[0][1]), k1 = pack_bf16(k[1][0], k[1][1]);
      const u32 q0 = pack_bf16(q[0][0], q[0][1]), q1 = pack_bf16(q[1][0], q[1][1]);
      // Each lane ends with one right token (of the partner's two) and one left token.
      const u32 k_other = shuffle_xor(right ? k0 : k1, bit), q_other = shuffle_xor(q0, bit);
      a[2 * j] = right ? k1 : k_other;
      a[2 * j + 1] = right ? q1 : q_other;
      b[j] = right ? k_other : k0;
    }
    mma_bf16(sums.tile[level], a, b[0], b[1]);
  }
}

__device__ __forceinline__ void prepare_slice(Form<false>, Raw& raw, const float (&sum)[2][8], float (&total)[8],
                                              const Lane& l, int slice, u32 stage, Products& sums,
                                              const NextLoad& next) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 kp[4], qp[4], kg[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a[2], b[2], e[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = 2 * w + j;
        const float k = element(raw.k[i], c), q = element(raw.q[i], c), down = exp2_fast(sum[i][c]);
        sums.k_square[i] += k * k;
        sums.q_square[i] += q * q;
        sums.diagonal[i] += q * k;
        a[j] = k * down;
        b[j] = q * down;
        e[j] = k * exp2_fast(total[c] - sum[i][c]);
      }
      kp[w] = pack_bf16(a[0], a[1]);
      qp[w] = pack_bf16(b[0], b[1]);
      kg[w] = pack_bf16(e[0], e[1]);
    }
    const u32 at = piece_offset(l, i, slice), half = slice >> 1;
    const u32 kq = stage + OFFSET(ChunkImage, kq) + half * 2 * ROWS_BYTES + at;
    store_shared(kq, kp[0], kp[1], kp[2], kp[3]);
    store_shared(kq + ROWS_BYTES, qp[0], qp[1], qp[2], qp[3]);
    store_shared(stage + OFFSET(ChunkImage, kg) + half * ROWS_BYTES + at, kg[0], kg[1], kg[2], kg[3]);
  }
  pair_products(raw, sum, sums);
#pragma unroll
  for (int level = 1; level < LEVELS; ++level) level_products(raw, sum, l, level, sums);
  load_rows(raw, next);
#pragma unroll
  for (int e = 0; e < 8; ++e) total[e] = exp2_fast(total[e]);
  store_decay(stage, l, slice, total);
}

__device__ __forceinline__ void store_pair(u32 stage, u32 scratch, int i, int j, float kk, float qk) {
  const float factor =
      load_shared1(stage + OFFSET(ChunkImage, scalars) + OFFSET(TokenScalars, beta_k_norm) + 4 * i) *
      load_shared1(stage + OFFSET(ChunkImage, scalars) + OFFSET(TokenScalars, k_norm) + 4 * j);
  store_shared(scratch + 4 * (SCRATCH_PITCH * i + j), __float_as_uint(kk * factor));
  store_shared16(triangle_at(stage + OFFSET(ChunkImage, qk), i, j), pack_bf16(qk, 0.0f));
}

__device__ __forceinline__ void store_triangles(Form<false>, u32 stage, u32 scratch, const Lane& l, const Scalars& s,
                                                Products& sums) {
  store_levels(stage + OFFSET(ChunkImage, qk), scratch, l, sums.tile, sums.diagonal,
               [&](int i, int j, float kk, float qk) { store_pair(stage, scratch, i, j, kk, qk); });
}
