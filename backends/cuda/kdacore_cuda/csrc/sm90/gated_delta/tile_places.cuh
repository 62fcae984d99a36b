// Where the lanes of a warp find 16 by 16 blocks of an image, for instructions that load or store four tiles of 8 by 8.
#pragma once

#include "common/swizzle.cuh"
#include "sm90/chunk_backward/workspace.cuh"

// Where lane 8m + r names row r of tile m of a block, tiles row by row: a right operand, or transposed a left one.
__device__ __forceinline__ u32 tiles_by_row(u32 image, int row_block, int column_block, int lane) {
  const u32 first = swizzled((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
  return image + ((first ^ column_block << 5) + 16 * IMAGE_ROW * row_block);
}
// The same with tiles column by column: a left operand.
__device__ __forceinline__ u32 tiles_by_column(u32 image, int row_block, int column_block, int lane) {
  return image + swizzled(16 * row_block + (lane & 15), 2 * column_block + (lane >> 4));
}
