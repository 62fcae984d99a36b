// The triangular inverse: float32 substitution inside blocks of 16, block columns merged on the
// matrix unit with operands in two bfloat16 parts (about 16 bits). Four warps; warp r stores rows
// 16r to 16r + 15 of the system, inverts their diagonal block and, after a barrier of the four,
// merges block column r.
//
// With A the system and D the inverses of its diagonal blocks, block column c of the inverse is X_c
// = D_c, X_b = -D_b (sum over c <= m < b of A_bm X_m). X is kept transposed, so that each sum is
// the next product's left operand. The high part of D is in the image of the inverse, the low part
// in the place of A's low part.
#pragma once

#include "common/unit_triangle_inverse.cuh"
#include "sm90/chunk_backward/prepare_pairs.cuh"

// A diagonal block's inverse. One column a lane, both halves of the warp compute the same; each
// stores half of the rows.
__device__ __forceinline__ void invert_diagonal(u32 shared, int block, int lane) {
  const u32 from = shared + OFFSET(SharedMemory, diagonal) + 4 * 16 * DIAGONAL_PITCH * block;
  const int j = lane & 15;
  float x[16];
  invert_column(x, j, [&](int i, int m) { return from + 4 * (DIAGONAL_PITCH * i + m); });
  const bool first = lane < 16;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 to = shared + swizzled(16 * block + i + (first ? 0 : 8), 2 * block + (j >> 3)) + 2 * (j & 7);
    u32 high, low;
    split(first ? x[i] : x[i + 8], 0.0f, high, low);
    store_shared16(to + OFFSET(SharedMemory, inverse), high);
    store_shared16(to + OFFSET(SharedMemory, system_low), low);
  }
}

// d += x y^T.
__device__ __forceinline__ void add_product(float (&d)[2][4], const Split& x, u32 y_high, u32 y_low) {
  u32 high[4], low[4];
  load_matrix4(high, y_high);
  load_matrix4(low, y_low);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma_split(d[n], x, high[2 * n], high[2 * n + 1], low[2 * n], low[2 * n + 1]);
}

// The inverse's block column `c` below the diagonal, rounded into its image.
__device__ __forceinline__ void merge_column(u32 shared, int c, int lane) {
  // Lane 8m + r names row r of a block's tile m, tiles row by row: a right operand, or transposed a
  // left one.
  const u32 lane_at = shared + swizzled((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
  const auto at = [&](int row_block, int column_block) {
    return (lane_at ^ column_block << 5) + 16 * IMAGE_ROW * row_block;
  };
  Split x[3];
  load_matrix4_transposed(x[0].high, at(c, c) + OFFSET(SharedMemory, inverse));
  load_matrix4_transposed(x[0].low, at(c, c) + OFFSET(SharedMemory, system_low));
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    float sum[2][4] = {};
#pragma unroll
    for (int m = 0; m < b; ++m)
      add_product(sum, x[m], at(c + b, c + m) + OFFSET(SharedMemory, system_high),
                  at(c + b, c + m) + OFFSET(SharedMemory, system_low));
    float negative[2][4] = {};
    add_product(negative, split_tiles(sum[0], sum[1]), at(c + b, c + b) + OFFSET(SharedMemory, inverse),
                at(c + b, c + b) + OFFSET(SharedMemory, system_low));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) negative[n][e] = -negative[n][e];
    }
    const Split found = split_tiles(negative[0], negative[1]);
    if (b < 3) x[b] = found;
    store_matrix4_transposed(at(c + b, c) + OFFSET(SharedMemory, inverse), found.high);
  }
}
