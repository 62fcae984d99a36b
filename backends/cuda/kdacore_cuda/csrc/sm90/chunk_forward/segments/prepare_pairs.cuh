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

// A warp has blocks of 16 columns up to the diagonal of its 16 rows: tiles 2j and 2j + 1 are block j. All warps
// run the same instructions (prepare_strips.cuh says why) and skip the blocks that they do not have.

// Across halves, products with their anchor's factor take the places of those without.
__device__ __forceinline__ void finish_pairs(float (&x)[PAIR_TILES][4], int row_block, float unit) {
  if (row_block < 2) return;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = x[8 + n][e] * unit;
  }
}

// Zeros on (`diagonal` 0) or above the diagonal, in tile n of a block that lies on it.
__device__ __forceinline__ void clear_upper(float (&x)[4], int n, int lane, int diagonal) {
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = (lane >> 2) + 8 * (e >> 1), column = 8 * n + 2 * (lane & 3) + (e & 1);
    x[e] = column < row + diagonal ? x[e] : 0.0f;
  }
}

// aqk, rounded to its image, with zeros right of the diagonal; and zeros left of it in T^T.
__device__ __forceinline__ void store_aqk(int row_block, float (&x)[PAIR_TILES][4], u32 shared, int lane,
                                          float unit) {
  finish_pairs(x, row_block, unit);
  constexpr u32 NONE[4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 r[4] = {};
    if (j == row_block) {
      clear_upper(x[2 * j], 0, lane, 1);
      clear_upper(x[2 * j + 1], 1, lane, 1);
    }
    if (j <= row_block) pack_tiles(x[2 * j], x[2 * j + 1], r);
    if (j < row_block) store_matrix4(block_at(shared + TRANSFORM, row_block, j, lane), NONE);
    store_matrix4(block_at(shared + AQK, row_block, j, lane), r);
  }
}

// The system's rows, in two steps: the block on the diagonal in float32, then those before it in two
// parts.
__device__ __forceinline__ float2 row_betas(u32 shared, int row_block, int lane) {
  const u32 beta = shared + OFFSET(SharedMemory, beta) + 4 * (16 * row_block + (lane >> 2));
  return make_float2(load_shared1(beta), load_shared1(beta + 32));
}
__device__ __forceinline__ void store_diagonal(int row_block, float (&x)[PAIR_TILES][4], u32 shared, int lane,
                                               float unit) {
  finish_pairs(x, row_block, unit);
  const float2 beta = row_betas(shared, row_block, lane);
  const u32 at = shared + diagonal_offset(row_block) + 4 * (DIAGONAL_PITCH * (lane >> 2) + 2 * (lane & 3));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j != row_block) continue;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&y)[4] = x[2 * j + n];
      clear_upper(y, n, lane, 0);
      store_shared(at + 32 * n, y[0] * beta.x, y[1] * beta.x);
      store_shared(at + 32 * n + 4 * 8 * DIAGONAL_PITCH, y[2] * beta.y, y[3] * beta.y);
    }
  }
}
__device__ __forceinline__ void store_earlier(int row_block, float (&x)[PAIR_TILES][4], u32 shared,
                                              int lane) {
  const float2 beta = row_betas(shared, row_block, lane);
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    if (j >= row_block) return;
#pragma unroll
    for (int n = 2 * j; n < 2 * j + 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[n][e] *= e < 2 ? beta.x : beta.y;
    }
    const Split s = split_tiles(x[2 * j], x[2 * j + 1]);
    store_matrix4(block_at(shared + OFFSET(SharedMemory, system_high), row_block, j, lane), s.high);
    store_matrix4(block_at(shared + OFFSET(SharedMemory, system_low), row_block, j, lane), s.low);
  }
}
