// The inverse of a chunk's unit lower triangle: float32 substitution inside blocks of 16, block columns merged on the
// matrix unit with operands in two bfloat16 parts (about 16 bits). Four warps; warp r stores rows 16r to 16r + 15 of
// the system, inverts their diagonal block, multiplies the blocks left of it and, after a barrier of the four, merges
// block column r.
//
// With L the system and D the inverses of its diagonal blocks, block column c of the inverse is X_c = D_c,
// X_b = sum over c <= m < b of W_bm X_m, with W_bm = -D_b L_bm. X is kept transposed, so that each sum is the next
// product's left operand. W and D replace the system's blocks; until then those on the diagonal are in float32, in the
// same places.
#pragma once

#include "common/mma_operands.cuh"
#include "sm90/bulk_copies.cuh"
#include "sm90/gated_delta/lower_columns.cuh"

// The 16 x 16 blocks on and below the diagonal, by rows of blocks.
struct LowerBlocks {
  u16 x[10][16][16];  // pieces of 16 bytes in the order of block_piece
};
struct TriangularSystem {
  LowerBlocks high, low;
};
__device__ __forceinline__ u32 lower_block(u32 blocks, int row_block, int column_block) {
  return blocks + 512 * (row_block * (row_block + 1) / 2 + column_block);
}
// As in tile_places.cuh.
__device__ __forceinline__ u32 lower_by_row(u32 blocks, int row_block, int column_block, int lane) {
  return lower_block(blocks, row_block, column_block) +
         block_piece((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
}
__device__ __forceinline__ u32 lower_by_column(u32 blocks, int row_block, int column_block, int lane) {
  return lower_block(blocks, row_block, column_block) + block_piece(lane & 15, lane >> 4);
}
// In what follows `system` is the address of a TriangularSystem.
constexpr u32 TO_LOW = OFFSET(TriangularSystem, low);

// Four columns from `column` on of a row of a diagonal block in float32: half of the columns are where its high parts
// will be, the others where the low ones will.
__device__ __forceinline__ u32 diagonal_at(u32 system, int block, int row, int column) {
  return lower_block(system, block, block) + (column < 8 ? 0 : TO_LOW) + block_piece(row, column >> 2 & 1);
}

// A block of the system's rows below the diagonal, and one on it: elements 8n + 2t, + 1 of rows g and g + 8.
__device__ __forceinline__ void store_below(u32 system, int row_block, int j, const float (&x)[2][4],
                                            int lane) {
  const Split s = split_tiles(x[0], x[1]);
  const u32 to = lower_by_column(system, row_block, j, lane);
  store_matrix4(to, s.high);
  store_matrix4(to + TO_LOW, s.low);
}
__device__ __forceinline__ void store_diagonal(u32 system, int row_block, const float (&x)[2][4], int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_shared(diagonal_at(system, row_block, g + 8 * i, 8 * n + 2 * t) + 8 * (t & 1), x[n][2 * i],
                   x[n][2 * i + 1]);
  }
}

// Row j of the inverse of a 16 x 16 unit lower triangle. at(i, m): address in shared memory of columns m to m + 3 of
// row i; values on and right of the diagonal are not used, nor rows behind j.
template <class At>
__device__ __forceinline__ void invert_row(float (&x)[16], int j, At at) {
#pragma unroll
  for (int m = 0; m < 16; ++m) x[m] = m == j ? 1.0f : 0.0f;
#pragma unroll
  for (int i = 15; i > 0; --i) {
    const bool used = i <= j;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 a = load_shared4(at(i, m));
      const float row[4] = {a.x, a.y, a.z, a.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (m + e < i) x[m + e] = used ? x[m + e] - x[i] * row[e] : x[m + e];
      }
    }
  }
}
// D of a block, and the inverse `t` (LowerColumns) there: zero on and above the diagonal. One row a lane, both halves of
// the warp compute the same; each stores half of the columns.
__device__ __forceinline__ void invert_diagonal(u32 system, u32 t, int block, int lane) {
  const int j = lane & 15, half = lane >> 4;
  float x[16];
  invert_row(x, j, [&](int i, int m) { return diagonal_at(system, block, i, m); });
  sync_warp();  // D comes to the same places
  u32 high[4], low[4], rounded[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) y[e] = half ? x[2 * i + e + 8] : x[2 * i + e];
    split(y[0], y[1], high[i], low[i]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (2 * i + e + 8 * half == j) y[e] = 0.0f;
    }
    rounded[i] = pack_saturated(y[0], y[1]);
  }
  const u32 to = lower_block(system, block, block) + block_piece(j, half);
  store_shared(to, high[0], high[1], high[2], high[3]);
  store_shared(to + TO_LOW, low[0], low[1], low[2], low[3]);
  const u32 image = lower_column_block(t, block, block) + block_piece(j, half);
  store_shared(image, rounded[0], rounded[1], rounded[2], rounded[3]);
}

// W of a block row, from its D.
__device__ __forceinline__ void multiply_row(u32 system, int b, int lane) {
  if (!b) return;
  sync_warp();  // D has been stored
  Split d;
  load_matrix4(d.high, lower_by_column(system, b, b, lane));
  load_matrix4(d.low, lower_by_column(system, b, b, lane) + TO_LOW);
#pragma unroll
  for (int i = 0; i < 4; ++i) d.high[i] ^= 0x80008000, d.low[i] ^= 0x80008000;
#pragma unroll
  for (int m = 0; m < 3; ++m) {
    if (m >= b) break;
    const u32 at = lower_by_column(system, b, m, lane);
    u32 high[4], low[4];
    load_matrix4_transposed(high, at);
    load_matrix4_transposed(low, at + TO_LOW);
    float w[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_split(w[n], d, high[2 * n], high[2 * n + 1], low[2 * n], low[2 * n + 1]);
    store_below(system, b, m, w, lane);
  }
}

// d += x y^T. `y`: where the lane finds its row of high parts.
__device__ __forceinline__ void add_product(float (&d)[2][4], const Split& x, u32 y) {
  u32 high[4], low[4];
  load_matrix4(high, y);
  load_matrix4(low, y + TO_LOW);
#pragma unroll
  for (int n = 0; n < 2; ++n) mma_split(d[n], x, high[2 * n], high[2 * n + 1], low[2 * n], low[2 * n + 1]);
}

// Blocks of the inverse below block `c` of the diagonal, to `t`.
__device__ __forceinline__ void merge_column(u32 system, u32 t, int c, int lane) {
  Split x[3];
  load_matrix4_transposed(x[0].high, lower_by_row(system, c, c, lane));
  load_matrix4_transposed(x[0].low, lower_by_row(system, c, c, lane) + TO_LOW);
#pragma unroll
  for (int b = 1; b < 4; ++b) {
    if (c + b > 3) break;
    float found[2][4] = {};
#pragma unroll
    for (int m = 0; m < b; ++m) add_product(found, x[m], lower_by_row(system, c + b, c + m, lane));
    if (b < 3) x[b] = split_tiles(found[0], found[1]);
    u32 rounded[4];
    pack_tiles(found[0], found[1], rounded);
    store_matrix4_transposed(lower_tiles_by_row(t, c + b, c, lane), rounded);
  }
}
