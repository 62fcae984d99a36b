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
// `all`. Weighed by `keys` they are added up by rows and by columns.
__device__ __forceinline__ void weigh_pairs(PairSums& all, float (&rows)[2], float (&columns)[4 * C_TILES],
                                            const PairSums& x, const KeyPairs& keys, u32 head, int diagonal,
                                            const Lane& l) {
  const u32 sums = head + OFFSET(HeadScalars, sum), betas = head + OFFSET(HeadScalars, beta);
  const float own[2] = {load_shared1(sums + 4 * l.row(0)), load_shared1(sums + 4 * l.row(1))};
  const int from = 2 * l.t - diagonal;
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const float2 sum = load_shared2(sums + 4 * (8 * j + 2 * l.t)),
                 beta = load_shared2(betas + 4 * (8 * j + 2 * l.t));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = e >> 1, odd = e & 1;
      const float decay = exp2_fast(own[i] - (odd ? sum.y : sum.x)) * (odd ? beta.y : beta.x),
                  y = from + (8 * j + odd) < l.row(i) ? x[j][e] * decay : 0.0f,
                  w = y * (odd ? bf16_high(keys.x[j][i]) : bf16_low(keys.x[j][i]));
      all[j][e] += y;
      rows[i] += w;
      columns[2 * j + odd] += w;
    }
  }
}

// Sums over the eight lanes that share columns, of 16 numbers each; of all 64 columns a lane is left with 2 lane and
// 2 lane + 1, in x[0] and x[1].
__device__ __forceinline__ void add_over_columns(float (&x)[4 * C_TILES], const Lane& l) {
#pragma unroll
  for (int n = 8, mask = 16; n > 1; n >>= 1, mask >>= 1) {
    const bool upper = l.lane & mask;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const float given = upper ? x[i] : x[i + n], own = upper ? x[i + n] : x[i];
      x[i] = own + shuffle_xor(given, mask);
    }
  }
}

// Adds sums of a warp's rows, which all four lanes of a row have, to numbers that a lane has of tokens 2 lane and
// 2 lane + 1.
__device__ __forceinline__ void add_rows(float (&x)[2], const float (&rows)[2], const Lane& l) {
  const int i = l.lane & 7, from = 8 * (i & 3);
  const float low[2] = {shuffle(rows[0], from), shuffle(rows[0], from + 4)},
              high[2] = {shuffle(rows[1], from), shuffle(rows[1], from + 4)};
  if (l.lane >> 3 == l.block) x[0] += i < 4 ? low[0] : high[0], x[1] += i < 4 ? low[1] : high[1];
}
// From warp to warp in turn, so that sums have the same order in every run: of all tokens to `to`.
__device__ __forceinline__ void add_over_warps(int side, u32 to, const float (&x)[2], const Lane& l) {
#pragma unroll 1
  for (int w = 0; w < SIDE_WARPS; ++w) {
    if (w == l.block) {
      const float2 before = w ? load_shared2(to + 8 * l.lane) : float2{0.0f, 0.0f};
      store_shared(to + 8 * l.lane, before.x + x[0], before.y + x[1]);
    }
    sync_side(side);
  }
}

// The pairs of all value heads, times factors of their rows and columns, as an image for the last products.
__device__ __forceinline__ void store_pairs(u32 image, PairSums& all, const float (&row)[2], u32 columns,
                                            const Lane& l) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    const float2 by = load_shared2(columns + 4 * (8 * j + 2 * l.t));
    all[j][0] *= row[0] * by.x, all[j][1] *= row[0] * by.y;
    all[j][2] *= row[1] * by.x, all[j][3] *= row[1] * by.y;
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
