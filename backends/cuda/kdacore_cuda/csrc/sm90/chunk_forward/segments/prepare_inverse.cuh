// T (chunk_operands.cuh): the inverse of the system with its columns times beta, here as bfloat16 has
// it, so that the diagonal, which most of the products with T come from, is exact in bfloat16. The columns
// of those products are multiplied by `ratio`, which makes beta exact again. The image has T transposed.
//
// Float32 substitution inside blocks of 16; block columns are merged on the matrix unit with operands
// in two bfloat16 parts (about 16 bits). Four warps; warp r inverts the diagonal block r of the system
// and, after a barrier of the four, merges block column r.
//
// With A the system and D the inverses of its diagonal blocks, block column c of the inverse is X_c
// = D_c, X_b = -D_b (sum over c <= m < b of A_bm X_m). X is kept transposed, so that each sum is
// the next product's left operand. D lies in the places of the system's diagonal blocks.
#pragma once

#include "common/unit_triangle_inverse.cuh"
#include "sm90/chunk_forward/segments/prepare_pairs.cuh"

// A diagonal block's inverse. One column a lane, both halves of the warp compute the same; each
// stores half of the rows.
__device__ __forceinline__ void invert_diagonal(u32 shared, int block, int lane) {
  const u32 from = shared + diagonal_offset(block);
  const int j = lane & 15;
  float x[16];
  invert_column(x, j, [&](int i, int m) { return from + 4 * (DIAGONAL_PITCH * i + m); });
  const int half = lane >> 4;
  const float beta = load_shared1(shared + OFFSET(SharedMemory, rounded_beta) + 4 * (16 * block + j));
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    y[i] = half ? x[i + 8] : x[i];
    const u32 to = shared + swizzled(16 * block + i + 8 * half, 2 * block + (j >> 3)) + 2 * (j & 7);
    u32 high, low;
    split(y[i], 0.0f, high, low);
    store_shared16(to + OFFSET(SharedMemory, system_high), high);
    store_shared16(to + OFFSET(SharedMemory, system_low), low);
    y[i] *= beta;
  }
  store_shared(shared + TRANSFORM + swizzled(16 * block + j, 2 * block + half), pack_bf16(y[0], y[1]),
               pack_bf16(y[2], y[3]), pack_bf16(y[4], y[5]), pack_bf16(y[6], y[7]));
}

// Sums of a 16 x 16 product, of its terms high by high, low by high and high by low apart, so that
// none waits for another.
struct SplitSums {
  float term[3][2][4];
};

// d += x y^T.
__device__ __forceinline__ void add_product(SplitSums& d, const Split& x, u32 y_high, u32 y_low) {
  u32 high[4], low[4];
  load_matrix4(high, y_high);
  load_matrix4(low, y_low);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    mma_bf16(d.term[0][n], x.high, high[2 * n], high[2 * n + 1]);
    mma_bf16(d.term[1][n], x.low, high[2 * n], high[2 * n + 1]);
    mma_bf16(d.term[2][n], x.high, low[2 * n], low[2 * n + 1]);
  }
}
__device__ __forceinline__ void join(float (&sum)[2][4], const SplitSums& d) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[n][e] = d.term[0][n][e] + (d.term[1][n][e] + d.term[2][n][e]);
  }
}

// Lane 8m + r names row r of a block's tile m, tiles row by row: a right operand, or transposed a
// left one. `lane_at`: of block (0, 0).
__device__ __forceinline__ u32 merged_block(u32 lane_at, int row_block, int column_block) {
  return (lane_at ^ column_block << 5) + 16 * IMAGE_ROW * row_block;
}

// Block (c + B, c) of T from those above it, of which x has the inverse's.
template <int B>
__device__ __forceinline__ void merge_block(Split (&x)[3], u32 shared, u32 lane_at, int c, int lane,
                                            const float (&column_factor)[2]) {
  constexpr u32 HIGH = OFFSET(SharedMemory, system_high), LOW = OFFSET(SharedMemory, system_low);
  SplitSums sums = {}, products = {};
#pragma unroll
  for (int m = 0; m < B; ++m) {
    const u32 at = merged_block(lane_at, c + B, c + m);
    add_product(sums, x[m], at + HIGH, at + LOW);
  }
  float sum[2][4], found[2][4];
  join(sum, sums);
  const u32 diagonal = merged_block(lane_at, c + B, c + B);
  add_product(products, split_tiles(sum[0], sum[1]), diagonal + HIGH, diagonal + LOW);
  join(found, products);  // the inverse's, negative
  u32 rounded[4];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
      rounded[2 * h + n] =
          pack_bf16(found[n][2 * h] * column_factor[h], found[n][2 * h + 1] * column_factor[h]);
  }
  store_matrix4(merged_block(lane_at, c, c + B) + TRANSFORM, rounded);
  if constexpr (B < 3) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) found[n][e] = -found[n][e];
    }
    x[B] = split_tiles(found[0], found[1]);
  }
}

// T's block column `c` below the diagonal.
__device__ __forceinline__ void merge_column(u32 shared, int c, int lane) {
  const u32 lane_at = shared + swizzled((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
  const u32 beta = shared + OFFSET(SharedMemory, rounded_beta) + 4 * (16 * c + (lane >> 2));
  const float column_factor[2] = {-load_shared1(beta), -load_shared1(beta + 32)};
  Split x[3];
  load_matrix4_transposed(x[0].high, merged_block(lane_at, c, c) + OFFSET(SharedMemory, system_high));
  load_matrix4_transposed(x[0].low, merged_block(lane_at, c, c) + OFFSET(SharedMemory, system_low));
  if (c < 3) merge_block<1>(x, shared, lane_at, c, lane, column_factor);
  if (c < 2) merge_block<2>(x, shared, lane_at, c, lane, column_factor);
  if (c < 1) merge_block<3>(x, shared, lane_at, c, lane, column_factor);
}
