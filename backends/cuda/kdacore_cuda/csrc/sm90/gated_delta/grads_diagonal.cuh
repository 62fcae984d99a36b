// Sums of products of equal rows of two images: the diagonals of products of matrices, which take a fifth of the
// instructions of as many multiplications.
#pragma once

#include "sm90/gated_delta/grads_shared_memory.cuh"
#include "sm90/gated_delta/tile_places.cuh"

// Of 16 rows.
struct Diagonal {
  float x[2][4];
};
// Adds products over 64 columns of rows 16 row_block and on.
__device__ __forceinline__ void add_rows_product(Diagonal& d, u32 left, u32 right, int row_block, int lane) {
#pragma unroll
  for (int kk = 0; kk < 4; ++kk) {
    u32 a[4], b[4];
    load_matrix4(a, tiles_by_column(left, row_block, kk, lane));
    load_matrix4(b, tiles_by_row(right, row_block, kk, lane));
    mma_half(d.x[0], a, b[0], b[1]);
    mma_half(d.x[1], a, b[2], b[3]);
  }
}
// A row's sum is in one lane.
__device__ __forceinline__ bool has_row(const Lane& l) { return l.t == l.g >> 1; }
__device__ __forceinline__ float row_sum(const Diagonal& d, int i, const Lane& l) {
  return l.g & 1 ? d.x[i][2 * i + 1] : d.x[i][2 * i];
}
