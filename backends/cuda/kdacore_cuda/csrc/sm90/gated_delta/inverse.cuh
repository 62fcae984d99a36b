// The inverse of a chunk's unit lower triangle: float32 substitution inside blocks of 16, block columns merged on the
// matrix unit with operands in two bfloat16 parts (about 16 bits). Four warps; warp r stores rows 16r to 16r + 15 of
// the system, inverts their diagonal block and, after a barrier of the four, merges block column r.
//
// With L the system and D the inverses of its diagonal blocks, block column c of the inverse is X_c = D_c,
// X_b = -D_b (sum over c <= m < b of L_bm X_m). X is kept transposed, so that each sum is the next product's left
// operand. D replaces the system's diagonal blocks; until then these are in float32, in the same places. X replaces the
// high parts of the system, once all warps have read them.
#pragma once

#include "common/mma_operands.cuh"
#include "common/unit_triangle_inverse.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/gated_delta/tile_places.cuh"

// The 16 x 16 blocks on and below the diagonal, by rows of blocks.
struct LowerBlocks {
  u16 x[10][16][16];  // pieces of 16 bytes in the order of block_piece
};
// Where a system is in shared memory. High parts: an image whose blocks above the diagonal stay as they are.
struct TriangularSystem {
  u32 high, low;
};
// Byte offset of half `half` of row `row`, from the start of a block of LowerBlocks: the same half of eight neighbouring
// rows lies in different banks.
__device__ __forceinline__ u32 block_piece(int row, int half) { return 32 * row + ((half ^ row >> 2 & 1) << 4); }
__device__ __forceinline__ u32 lower_block(u32 blocks, int row_block, int column_block) {
  return blocks + 512 * (row_block * (row_block + 1) / 2 + column_block);
}
// As in tile_places.cuh, of a block of LowerBlocks.
__device__ __forceinline__ u32 low_by_row(const TriangularSystem& s, int row_block, int column_block, int lane) {
  return lower_block(s.low, row_block, column_block) + block_piece((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
}
__device__ __forceinline__ u32 low_by_column(const TriangularSystem& s, int row_block, int column_block,
                                             int lane) {
  return lower_block(s.low, row_block, column_block) + block_piece(lane & 15, lane >> 4);
}
// Four columns from `column` on of a row of a diagonal block in float32: half of the columns are where its high parts
// will be, the others where the low ones will.
__device__ __forceinline__ u32 diagonal_at(const TriangularSystem& s, int block, int row, int column) {
  const int half = column >> 2 & 1;
  return column < 8 ? s.high + 16 * block * IMAGE_ROW + swizzled(row, 2 * block + half)
                    : lower_block(s.low, block, block) + block_piece(row, half);
}

// 16 rows of a 64 x 64 matrix, blocks of 16 columns: elements 8n + 2t, + 1 of rows g and g + 8.
struct BlockRow {
  float block[4][2][4];
};

// A block of the system's rows below the diagonal, and one on it.
__device__ __forceinline__ void store_below(const TriangularSystem& system, int row_block, int j,
                                            const float (&x)[2][4], int lane) {
  const Split s = split_tiles(x[0], x[1]);
  store_matrix4(tiles_by_column(system.high, row_block, j, lane), s.high);
  store_matrix4(low_by_column(system, row_block, j, lane), s.low);
}
__device__ __forceinline__ void store_diagonal(const TriangularSystem& system, int row_block,
                                               const float (&x)[2][4], int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_shared(diagonal_at(system, row_block, g + 8 * i, 8 * n + 2 * t) + 8 * (t & 1), x[n][2 * i],
                   x[n][2 * i + 1]);
  }
}

// What a lane has of a block of D: half of a column, as the image of the inverse gets it, zero on and above the
// diagonal. Pairs of rows.
struct DiagonalColumn {
  u32 x[4];
};
__device__ __forceinline__ u32 diagonal_place(u32 image, int block, int row, int column) {
  return image + swizzled(16 * block + row, 2 * block + (column >> 3)) + 2 * (column & 7);
}
// D of a block. One column a lane, both halves of the warp compute the same; each stores half of the rows.
__device__ __forceinline__ DiagonalColumn invert_diagonal(const TriangularSystem& system, int block, int lane) {
  const int j = lane & 15, half = lane >> 4;
  float x[16];
  invert_column(x, j, [&](int i, int m) { return diagonal_at(system, block, i, m); });
  sync_warp();  // D comes to the same places
  DiagonalColumn found;
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    float y[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = i + e + 8 * half;
      y[e] = half ? x[i + e + 8] : x[i + e];
      u32 high, low;
      split(y[e], 0.0f, high, low);
      store_shared16(diagonal_place(system.high, block, row, j), high);
      store_shared16(lower_block(system.low, block, block) + block_piece(row, j >> 3) + 2 * (j & 7), low);
      if (row <= j) y[e] = 0.0f;
    }
    found.x[i / 2] = pack_saturated(y[0], y[1]);
  }
  return found;
}
__device__ __forceinline__ void store_diagonal_column(const DiagonalColumn& d, u32 to, int block, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    store_shared16(diagonal_place(to, block, i + 8 * (lane >> 4), lane & 15), d.x[i / 2] >> 16 * (i & 1));
}

// d += x y^T.
__device__ __forceinline__ void add_product(float (&d)[2][4], const Split& x, u32 y_high, u32 y_low) {
  u32 high[4], low[4];
  load_matrix4(high, y_high);
  load_matrix4(low, y_low);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma_split(d[n], x, high[2 * n], high[2 * n + 1], low[2 * n], low[2 * n + 1]);
}

// Blocks of the inverse below block `c` of the diagonal, transposed.
struct BlockColumn {
  u32 x[3][4];
};
__device__ __forceinline__ BlockColumn merge_column(const TriangularSystem& system, int c, int lane) {
  BlockColumn out;
  Split x[3];
  load_matrix4_transposed(x[0].high, tiles_by_row(system.high, c, c, lane));
  load_matrix4_transposed(x[0].low, low_by_row(system, c, c, lane));
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    float sum[2][4] = {}, found[2][4] = {};
#pragma unroll
    for (int m = 0; m < b; ++m)
      add_product(sum, x[m], tiles_by_row(system.high, c + b, c + m, lane),
                  low_by_row(system, c + b, c + m, lane));
    add_product(found, split_tiles(sum[0], sum[1]), tiles_by_row(system.high, c + b, c + b, lane),
                low_by_row(system, c + b, c + b, lane));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) found[n][e] = -found[n][e];
    }
    if (b < 3) x[b] = split_tiles(found[0], found[1]);
    pack_tiles(found[0], found[1], out.x[b - 1]);
  }
  return out;
}
__device__ __forceinline__ void store_block_column(const BlockColumn& x, u32 to, int c, int lane) {
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    store_matrix4_transposed(tiles_by_row(to, c + b, c, lane), x.x[b - 1]);
  }
}
