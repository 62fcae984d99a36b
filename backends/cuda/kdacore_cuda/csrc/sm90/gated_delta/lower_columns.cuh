// Matrices of 64 by 64 that are zero above the diagonal, in columns of 16: of each the rows from the diagonal on, rows of
// 32 bytes in the order of block_piece, which is the 32-byte swizzle of wgmma.
//
// In shared memory, where products read them, each column has all of its rows; those above the diagonal are cleared once.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/operand_descriptor.cuh"

// Byte offset of half `half` of row `row`, from the start of a block: the same half of eight neighbouring rows lies in
// different banks.
__device__ __forceinline__ u32 block_piece(int row, int half) { return 32 * row + ((half ^ row >> 2 & 1) << 4); }

constexpr int COLUMNS = C / 16;
constexpr u32 BLOCK_BYTES = 512, COLUMN_BYTES = COLUMNS * BLOCK_BYTES;
struct LowerColumns {
  u16 blocks[COLUMNS * (COLUMNS + 1) / 2][16][16];
};
struct WholeColumns {
  u16 x[COLUMNS][C][16];
};
// Blocks before column `column` of LowerColumns.
__device__ __forceinline__ constexpr int blocks_before(int column) {
  return COLUMNS * column - column * (column - 1) / 2;
}
__device__ __forceinline__ u32 lower_column_block(u32 from, int row_block, int column) {
  return from + BLOCK_BYTES * (blocks_before(column) + row_block - column);
}
// Where the lanes of a warp find such a block; as in tile_places.cuh.
__device__ __forceinline__ u32 lower_tiles_by_row(u32 from, int row_block, int column, int lane) {
  return lower_column_block(from, row_block, column) + block_piece((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
}
__device__ __forceinline__ u32 lower_tiles_by_column(u32 from, int row_block, int column, int lane) {
  return lower_column_block(from, row_block, column) + block_piece(lane & 15, lane >> 4);
}

// A column from device memory; all of them are sizeof(LowerColumns) bytes. One thread.
__device__ __forceinline__ void fetch_column(u32 to, u64 from, int column, u32 full) {
  copy_in(to + (COLUMN_BYTES + BLOCK_BYTES) * column,
          reinterpret_cast<const void*>(from + BLOCK_BYTES * blocks_before(column)),
          COLUMN_BYTES - BLOCK_BYTES * column, full);
}
// What is above the diagonal, of WholeColumns at `first` and `count` - 1 more, `pitch` bytes apart. By `threads` threads.
__device__ __forceinline__ void clear_above_diagonal(u32 first, u32 pitch, int count, int threads) {
  constexpr int PIECES = BLOCK_BYTES / 16, ALL = PIECES * COLUMNS * (COLUMNS - 1) / 2;
#pragma unroll 1
  for (int i = opaque(thread_index()); i < ALL * count; i += threads) {
    const int n = i / ALL, piece = i - n * ALL, column = piece < PIECES ? 1 : piece < 3 * PIECES ? 2 : 3,
              before = column * (column - 1) / 2 * PIECES;
    store_shared(first + n * pitch + COLUMN_BYTES * column + 16 * (piece - before), 0, 0, 0, 0);
  }
}

// WholeColumns m as a right operand x m^T, whose sum runs along columns, and as x m, where it runs over rows.
__device__ __forceinline__ u64 columns_operand(u32 address) { return narrow_operand_descriptor(address, 16, 256); }
__device__ __forceinline__ u64 over_rows_operand(u32 address) {
  return narrow_operand_descriptor(address, COLUMN_BYTES, 256);
}
// The same for the kk-th 16 terms of the sum.
__device__ __forceinline__ u64 along_columns(u64 m, int kk) { return m + (kk * COLUMN_BYTES >> 4); }
__device__ __forceinline__ u64 over_rows(u64 m, int kk) { return m + (kk * BLOCK_BYTES >> 4); }
