// Tiles of shared memory that both chunk forward kernels have.
#pragma once

#include "common/ptx.cuh"

// A 16 x 16 bfloat16 matrix as a right operand of mma: two halves of columns, 16 bytes a row.
struct Triangle {
  u16 half[2][16][8];
};
constexpr u32 TRIANGLE_BYTES = sizeof(Triangle);

// 16 tokens x 16 columns of V: 32-byte rows.
struct ValueTile {
  u16 x[16][16];
};
constexpr u32 TILE_BYTES = sizeof(ValueTile);

// Offset of half `half` of row `row` of a ValueTile; its order keeps matrix loads free of bank
// conflicts.
__device__ __forceinline__ u32 tile_offset(int row, int half) {
  return row * 32 + ((half ^ (row >> 2 & 1)) << 4);
}

constexpr u32 SCRATCH_PITCH = 20;  // floats a row of a float32 triangle of 16 tokens
