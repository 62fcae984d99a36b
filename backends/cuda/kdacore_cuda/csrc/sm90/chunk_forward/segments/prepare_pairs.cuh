// Products of pairs of rows: of queries and keys (aqk), of keys (the system). A warpgroup has one of
// the two, a warp of it 16 rows i, against the keys of every half: column tiles 0 to 7 are tokens
// under their own anchor, 8 to 11 those of the first half, decayed to the start of the second. Of the
// tokens of the first half, rows of the first half use tiles 0 to 3, rows of the second 8 to 11; the
// others are not used and may overflow.
#pragma once

#include "common/mma_operands.cuh"
#include "sm90/chunk_forward/segments/prepare_shared_memory.cuh"

constexpr int PAIR_TILES = 12;

// Descriptor of 16 channels from the kk-th on, of images `distance` bytes apart.
__device__ __forceinline__ u64 over_channels(u64 first, int kk, u32 distance) {
  return first + (((kk >> 2) * distance + (kk & 3) * 32) >> 4);
}

__device__ __forceinline__ void multiply_pairs(float (&sums)[PAIR_TILES][4], u32 shared, bool system) {
  const u64 rows = operand_descriptor(shared + (system ? OFFSET(SharedMemory, k) : OFFSET(SharedMemory, q)),
                                      16, 8 * IMAGE_ROW),
            keys = operand_descriptor(shared + keys_offset(0), 16, 8 * IMAGE_ROW);
  fence_registers(sums);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K / 16; ++kk) {
    const u64 a = over_channels(rows, kk, SQUARE_BYTES), b = over_channels(keys, kk, KEYS_BYTES);
    warpgroup_mma_shared<0>(sums, a, b, kk > 0);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(sums);
}

// Where lane 8m + r puts row r of tile m of block (row_block, j) of a square image; tiles in the
// order of a left operand.
__device__ __forceinline__ u32 block_at(u32 image, int row_block, int j, int lane) {
  return image + swizzled(16 * row_block + (lane & 15), 2 * j + (lane >> 4));
}

// Blocks of 16 columns up to the diagonal, of a warp's 16 rows: tiles 2j and 2j + 1 are block j. Applies
// the anchor's factor to those across halves, and zeros on (`diagonal` 0) or above the diagonal.
template <int ROW_BLOCK>
__device__ __forceinline__ void finish_pairs(float (&x)[PAIR_TILES][4], int lane, float unit, int diagonal) {
  if (ROW_BLOCK >= 2) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] = x[8 + n][e] * unit;
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float& y = x[2 * ROW_BLOCK + n][e];
      const int row = (lane >> 2) + 8 * (e >> 1), column = 8 * n + 2 * (lane & 3) + (e & 1);
      y = column < row + diagonal ? y : 0.0f;
    }
  }
}

// aqk, rounded to its image, with zeros right of the diagonal; and zeros left of it in T^T.
template <int ROW_BLOCK>
__device__ __forceinline__ void store_aqk(float (&x)[PAIR_TILES][4], u32 shared, int lane, float unit) {
  finish_pairs<ROW_BLOCK>(x, lane, unit, 1);
  constexpr u32 NONE[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 r[4] = {};
    if (j <= ROW_BLOCK) pack_tiles(x[2 * j], x[2 * j + 1], r);
    if (j < ROW_BLOCK) store_matrix4(block_at(shared + TRANSFORM, ROW_BLOCK, j, lane), NONE);
    store_matrix4(block_at(shared + AQK, ROW_BLOCK, j, lane), r);
  }
}

// The system's rows, in two steps: the block on the diagonal in float32, then those before it in two
// parts.
__device__ __forceinline__ float2 row_betas(u32 shared, int row_block, int lane) {
  const u32 beta = shared + OFFSET(SharedMemory, beta) + 4 * (16 * row_block + (lane >> 2));
  return make_float2(load_shared1(beta), load_shared1(beta + 32));
}
template <int ROW_BLOCK>
__device__ __forceinline__ void store_diagonal(float (&x)[PAIR_TILES][4], u32 shared, int lane, float unit) {
  finish_pairs<ROW_BLOCK>(x, lane, unit, 0);
  const float2 beta = row_betas(shared, ROW_BLOCK, lane);
  const u32 at = shared + diagonal_offset(ROW_BLOCK) + 4 * (DIAGONAL_PITCH * (lane >> 2) + 2 * (lane & 3));
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float (&y)[4] = x[2 * ROW_BLOCK + n];
    store_shared(at + 32 * n, y[0] * beta.x, y[1] * beta.x);
    store_shared(at + 32 * n + 4 * 8 * DIAGONAL_PITCH, y[2] * beta.y, y[3] * beta.y);
  }
}
template <int ROW_BLOCK>
__device__ __forceinline__ void store_earlier(float (&x)[PAIR_TILES][4], u32 shared, int lane) {
  const float2 beta = row_betas(shared, ROW_BLOCK, lane);
#pragma unroll
  for (int j = 0; j < ROW_BLOCK; ++j) {
#pragma unroll
    for (int n = 2 * j; n < 2 * j + 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= e < 2 ? beta.x : beta.y;
    }
    const Split s = split_tiles(x[2 * j], x[2 * j + 1]);
    store_matrix4(block_at(shared + OFFSET(SharedMemory, system_high), ROW_BLOCK, j, lane), s.high);
    store_matrix4(block_at(shared + OFFSET(SharedMemory, system_low), ROW_BLOCK, j, lane), s.low);
  }
}

// Row blocks are compile-time numbers, so that a warp's products stay in registers.
__device__ __forceinline__ void store_aqk(int row_block, float (&x)[PAIR_TILES][4], u32 shared, int lane,
                                          float unit) {
  if (row_block == 0) store_aqk<0>(x, shared, lane, unit);
  if (row_block == 1) store_aqk<1>(x, shared, lane, unit);
  if (row_block == 2) store_aqk<2>(x, shared, lane, unit);
  if (row_block == 3) store_aqk<3>(x, shared, lane, unit);
}
__device__ __forceinline__ void store_diagonal(int row_block, float (&x)[PAIR_TILES][4], u32 shared, int lane,
                                               float unit) {
  if (row_block == 0) store_diagonal<0>(x, shared, lane, unit);
  if (row_block == 1) store_diagonal<1>(x, shared, lane, unit);
  if (row_block == 2) store_diagonal<2>(x, shared, lane, unit);
  if (row_block == 3) store_diagonal<3>(x, shared, lane, unit);
}
__device__ __forceinline__ void store_earlier(int row_block, float (&x)[PAIR_TILES][4], u32 shared,
                                              int lane) {
  if (row_block == 1) store_earlier<1>(x, shared, lane);
  if (row_block == 2) store_earlier<2>(x, shared, lane);
  if (row_block == 3) store_earlier<3>(x, shared, lane);
}
