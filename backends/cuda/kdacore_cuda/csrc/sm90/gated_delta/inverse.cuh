// The inverse of a chunk's unit lower triangle: float32 substitution inside blocks of 16, block columns merged on the
// matrix unit with operands in two bfloat16 parts (about 16 bits). Four warps; warp r stores rows 16r to 16r + 15 of
// the system, inverts their diagonal block and, after a barrier of the four, merges block column r.
//
// With L the system and D the inverses of its diagonal blocks, block column c of the inverse is X_c = D_c,
// X_b = -D_b (sum over c <= m < b of L_bm X_m). X is kept transposed, so that each sum is the next product's left
// operand. D replaces the system's diagonal blocks; until then these are in float32, in the same places.
#pragma once

#include "common/mma_operands.cuh"
#include "common/unit_triangle_inverse.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/gated_delta/tile_places.cuh"

struct TriangularSystem {
  SquareImage high, low;
};
// Four columns from `column` on of a row of a diagonal block in float32: half of the columns are in either image.
__device__ __forceinline__ u32 diagonal_at(u32 system, int block, int row, int column) {
  const u32 image = system + (column < 8 ? OFFSET(TriangularSystem, high) : OFFSET(TriangularSystem, low));
  return image + 16 * block * IMAGE_ROW + swizzled(row, 2 * block + (column >> 2 & 1));
}

// 16 rows of a 64 x 64 matrix, blocks of 16 columns: elements 8n + 2t, + 1 of rows g and g + 8.
struct BlockRow {
  float block[4][2][4];
};

// A block of the system's rows below the diagonal, and one on it.
__device__ __forceinline__ void store_below(u32 system, int row_block, int j, const float (&x)[2][4],
                                            int lane) {
  const Split s = split_tiles(x[0], x[1]);
  store_matrix4(tiles_by_column(system + OFFSET(TriangularSystem, high), row_block, j, lane), s.high);
  store_matrix4(tiles_by_column(system + OFFSET(TriangularSystem, low), row_block, j, lane), s.low);
}
__device__ __forceinline__ void store_diagonal(u32 system, int row_block, const float (&x)[2][4], int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const u32 at = diagonal_at(system, row_block, g, 8 * n + 2 * t) + 8 * (t & 1);
    store_shared(at, x[n][0], x[n][1]);
    store_shared(at + 8 * IMAGE_ROW, x[n][2], x[n][3]);
  }
}

// D of a block, and below its diagonal what goes to the image `to`. One column a lane, both halves of the warp compute
// the same; each stores half of the rows.
__device__ __forceinline__ void invert_diagonal(u32 system, u32 to, int block, int lane) {
  const int j = lane & 15, half = lane >> 4;
  float x[16];
  invert_column(x, j, [&](int i, int m) { return diagonal_at(system, block, i, m); });
  sync_warp();  // D comes to the same places
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = i + 8 * half;
    const float y = half ? x[i + 8] : x[i];
    const u32 at = swizzled(16 * block + row, 2 * block + (j >> 3)) + 2 * (j & 7);
    u32 high, low;
    split(y, 0.0f, high, low);
    store_shared16(system + OFFSET(TriangularSystem, high) + at, high);
    store_shared16(system + OFFSET(TriangularSystem, low) + at, low);
    store_shared16(to + at, pack_saturated(row > j ? y : 0.0f, 0.0f));
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

// Block column `c` below the diagonal to the image `to`.
__device__ __forceinline__ void merge_column(u32 system, u32 to, int c, int lane) {
  const u32 high = system + OFFSET(TriangularSystem, high), low = system + OFFSET(TriangularSystem, low);
  Split x[3];
  load_matrix4_transposed(x[0].high, tiles_by_row(high, c, c, lane));
  load_matrix4_transposed(x[0].low, tiles_by_row(low, c, c, lane));
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    float sum[2][4] = {}, found[2][4] = {};
#pragma unroll
    for (int m = 0; m < b; ++m)
      add_product(sum, x[m], tiles_by_row(high, c + b, c + m, lane), tiles_by_row(low, c + b, c + m, lane));
    add_product(found, split_tiles(sum[0], sum[1]), tiles_by_row(high, c + b, c + b, lane),
                tiles_by_row(low, c + b, c + b, lane));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) found[n][e] = -found[n][e];
    }
    if (b < 3) x[b] = split_tiles(found[0], found[1]);
    u32 rounded[4];
    pack_tiles(found[0], found[1], rounded);
    store_matrix4_transposed(tiles_by_row(to, c + b, c, lane), rounded);
  }
}
