// Pairs of a chunk's tokens in unit_grads: what their products weigh, and what a value head's decays get from them.
#pragma once

#include "sm90/gated_delta/grads_shared_memory.cuh"
#include "sm90/gated_delta/tile_places.cuh"

using PairSums = float[2 * C_TILES][4];

// Products of 64 rows with 64, the sum along 128 columns: left and right operand are tiles.
__device__ __forceinline__ void multiply_rows(PairSums& x, u32 left, u32 right) {
  const u64 a = operand_descriptor(left, 16, 1024), b = operand_descriptor(right, 16, 1024);
  fence_registers(x);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    warpgroup_mma_shared<0>(x, along_channels(a, kk), along_channels(b, kk), kk > 0);
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(x);
}

// Products with keys times factors of their rows and columns, below the diagonal: q_i . k_j, or k_i . k_j, as the
// matrices of record.cuh have them but for decays and betas. In bfloat16 pairs.
struct KeyPairs {
  u32 x[2 * C_TILES][2];
};
__device__ __forceinline__ void pack_key_pairs(KeyPairs& to, const PairSums& x, const float (&row)[2],
                                               u32 columns, const Lane& l) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const int column = 8 * j + 2 * l.t;
    const float2 by = load_shared2(columns + 4 * column);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float a = column < l.row(i) ? x[j][2 * i] * row[i] * by.x : 0.0f,
                  b = column + 1 < l.row(i) ? x[j][2 * i + 1] * row[i] * by.y : 0.0f;
      to.x[j][i] = pack_bf16(a, b);
    }
  }
}

// Products d_o_i . u_j (or dv_i . u_j) of a value head times beta_j 2^(G_i - G_j), where j < i + `diagonal`, are added to
// `all`; `weighed`: times `keys`.
__device__ __forceinline__ void weigh_pairs(PairSums& all, TokenOperand& weighed, const PairSums& x,
                                            const KeyPairs& keys, u32 head, int diagonal, const Lane& l) {
  const u32 sums = head + OFFSET(HeadScalars, sum), betas = head + OFFSET(HeadScalars, beta);
  const float own[2] = {load_shared1(sums + 4 * l.row(0)), load_shared1(sums + 4 * l.row(1))};
  const int from = 2 * l.t - diagonal;
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const float2 sum = load_shared2(sums + 4 * (8 * j + 2 * l.t)),
                 beta = load_shared2(betas + 4 * (8 * j + 2 * l.t));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float w[2];
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float decay = exp2_fast(own[i] - (odd ? sum.y : sum.x)) * (odd ? beta.y : beta.x),
                    y = from + (8 * j + odd) < l.row(i) ? x[j][2 * i + odd] * decay : 0.0f;
        all[j][2 * i + odd] += y;
        w[odd] = y * (odd ? bf16_high(keys.x[j][i]) : bf16_low(keys.x[j][i]));
      }
      weighed.a[j >> 1][2 * (j & 1) + i] = pack_bf16(w[0], w[1]);
    }
  }
}

// What the decays of tokens get, over this warp's rows: a decay at token m is a factor of pairs i, j with j < m <= i, of
// what row i gives to `before` (m <= i) and of what it gives to `after` (i < m). Nothing is added that would have to be
// taken off again: where a decay is large, what it gets is small against what its neighbours do. Sums over j < m are
// products with a triangle of ones.
__device__ __forceinline__ void sum_crossings(float (&tokens)[4 * C_TILES], const TokenOperand& weighed,
                                              const float (&before)[2], const float (&after)[2],
                                              const Lane& l) {
  constexpr u32 ONE = 0x3f80, ONES = ONE << 16 | ONE;
  const u32 triangle = (2 * l.t < l.g ? ONE : 0) | (2 * l.t + 1 < l.g ? ONE << 16 : 0);
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    float x[4] = {before[0], before[0], before[1], before[1]};
#pragma unroll
    for (int kk = 0; kk <= j / 2; ++kk) {
      const bool ends = kk == j / 2, odd = j & 1;
      mma_bf16(x, weighed.a[kk], ends && !odd ? triangle : ONES, ends ? (odd ? triangle : 0) : ONES);
    }
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      const int m = 8 * j + 2 * l.t + odd;
      tokens[2 * j + odd] = (m <= l.row(0) ? x[odd] : after[0]) + (m <= l.row(1) ? x[2 + odd] : after[1]);
    }
  }
}

// Sums over the eight lanes that share columns, of 16 numbers each; of all 64 columns a lane is left with 2 lane and
// 2 lane + 1, in x[0] and x[1].
template <int KEPT>
__device__ __forceinline__ void halve_columns(float (&x)[4 * C_TILES], const Lane& l) {
  const bool upper = l.lane & 2 * KEPT;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const float given = upper ? x[i] : x[i + KEPT], own = upper ? x[i + KEPT] : x[i];
    x[i] = own + shuffle_xor(given, 2 * KEPT);
  }
}
__device__ __forceinline__ void add_over_columns(float (&x)[4 * C_TILES], const Lane& l) {
  halve_columns<8>(x, l), halve_columns<4>(x, l), halve_columns<2>(x, l);
}

// From warp to warp of a side in turn, so that sums have the same order in every run: of all tokens to `to`. All of the
// side's warps meet between two of them, as racecheck follows no order that a third warp makes.
__device__ __forceinline__ void add_over_warps(int side, u32 to, float x, float y, const Lane& l) {
#pragma unroll 1
  for (int w = 0; w < SIDE_WARPS; ++w) {
    if (w == l.block) {
      const float2 before = w ? load_shared2(to + 8 * l.lane) : float2{0.0f, 0.0f};
      store_shared(to + 8 * l.lane, before.x + x, before.y + y);
    }
    sync_side(side);
  }
}

// The pairs of all value heads, times factors of their rows and columns and GRADIENT_SCALE, as an image for the last
// products.
__device__ __forceinline__ void store_pairs(u32 image, PairSums& all, const float (&row)[2], u32 columns,
                                            const Lane& l) {
  const float own[2] = {row[0] * GRADIENT_SCALE, row[1] * GRADIENT_SCALE};
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const float2 by = load_shared2(columns + 4 * (8 * j + 2 * l.t));
    all[j][0] *= own[0] * by.x, all[j][1] *= own[0] * by.y;
    all[j][2] *= own[1] * by.x, all[j][3] *= own[1] * by.y;
  }
  TokenOperand x;
  pack_rows(x, all);
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) store_matrix4(tiles_by_column(image, l.block, kk, l.lane), x.a[kk]);
}

// A warp's rows of the image, as a left operand; or of the transposed image; or of minus the image and the transposed
// one, of which each has positive zeros where the other has not.
__device__ __forceinline__ void load_pairs(TokenOperand& to, u32 image, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4(to.a[kk], tiles_by_column(image, l.block, kk, l.lane));
}
__device__ __forceinline__ void load_pairs_transposed(TokenOperand& to, u32 image, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk)
    load_matrix4_transposed(to.a[kk], tiles_by_row(image, kk, l.block, l.lane));
}
__device__ __forceinline__ void load_negative_symmetric_pairs(TokenOperand& to, u32 image, const Lane& l) {
  TokenOperand other;
  load_pairs(to, image, l);
  load_pairs_transposed(other, image, l);
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to.a[kk][e] = (to.a[kk][e] | other.a[kk][e]) ^ 0x80008000u;
  }
}
