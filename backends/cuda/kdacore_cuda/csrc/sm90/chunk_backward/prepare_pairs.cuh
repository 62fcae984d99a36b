// Products of pairs of rows: of queries and keys (aqk), of keys (the system). A warp has one of the
// two and 16 rows i, in blocks of 16 columns j up to the diagonal. Within a part both lie under its
// anchor; across, keys have been decayed to the start of the later part.
#pragma once

#include "common/mma_operands.cuh"
#include "sm90/chunk_backward/prepare_shared_memory.cuh"

// Blocks 0 .. row_block (of the warp's rows) of a row of blocks: 16 x 16, columns 8n + 2t, + 1,
// rows g and g + 8. All warps run the same instructions (prepare_operands_bounded.cuh says why) and skip the
// blocks after row_block.
struct Pairs {
  float block[4][2][4];
};

// Whether block (row_block, j) lies across parts.
__device__ __forceinline__ bool across(int row_block, int j) {
  return BOUNDED ? row_block >= 2 && j < 2 : j < row_block;
}

__device__ __forceinline__ void multiply_pairs(Pairs& out, u32 shared, u32 left, int row_block, int lane) {
  // Left: rows lane % 8, then + 8, of channels 0-7, then 8-15. Right: channels 0-7, then 8-15, of
  // rows lane % 8, then + 8.
  const u32 earlier = BOUNDED || row_block < 2 ? OFFSET(SharedMemory, sk)
                      : row_block == 2         ? third_keys()
                                               : fourth_keys();
  const u32 wide = !BOUNDED && row_block == 3 ? SQUARE_BYTES : HALF_SQUARE;
  const u32 a_at = shared + left + tile_offset(16 * row_block + (lane & 15), lane >> 4);
  const u32 b_at = tile_offset((lane & 7) + (lane >> 1 & 8), lane >> 3 & 1);
#pragma unroll
  for (int i = 0; i < K / 16; ++i) {
    u32 a[4];
    load_matrix4(a, (a_at ^ ((i & 3) << 5)) + (i >> 2) * SQUARE_BYTES);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j > row_block) break;
      // Rows 16 further: their pieces are swapped with those two further.
      const u32 place = shared + ((b_at ^ ((i & 3) << 5) ^ (j & 1) << 6) + 16 * j * IMAGE_ROW);
      u32 b[4];
      load_matrix4(b, place + (across(row_block, j) ? earlier + (i >> 2) * wide
                                                    : OFFSET(SharedMemory, yk) + (i >> 2) * SQUARE_BYTES));
      mma_bf16(out.block[j][0], a, b[0], b[1]);
      mma_bf16(out.block[j][1], a, b[2], b[3]);
    }
  }
}

// Applies the anchor's factor to blocks across parts, and zeros above the diagonal.
__device__ __forceinline__ void finish_pairs(Pairs& out, int row_block, int lane, float unit, int diagonal) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float factor = across(row_block, j) ? unit : 1.0f;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = (lane >> 2) + 8 * (e >> 1), column = 8 * n + 2 * (lane & 3) + (e & 1);
        float& x = out.block[j][n][e];
        if (j < 3) x *= factor;
        if (j == row_block) x = column < row + diagonal ? x : 0.0f;
      }
    }
  }
}

// Where lane 8m + r puts row r of tile m of block (row_block, j) of a square image; tiles in the
// order of a left operand.
__device__ __forceinline__ u32 block_at(u32 image, int row_block, int j, int lane) {
  return image + swizzled(16 * row_block + (lane & 15), 2 * j + (lane >> 4));
}

// Rounded to an image; zeros right of the diagonal, there and in `other`.
__device__ __forceinline__ void store_image(int row_block, const Pairs& pairs, u32 image, u32 other,
                                            int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 r[4] = {};
    if (j <= row_block)
      pack_tiles(pairs.block[j][0], pairs.block[j][1], r);
    else
      store_matrix4(block_at(other, row_block, j, lane), r);
    store_matrix4(block_at(image, row_block, j, lane), r);
  }
}

// The system's rows: the block on the diagonal in float32, those before it in two parts.
__device__ __forceinline__ void store_system(int row_block, const Pairs& pairs, u32 shared, int lane) {
  const u32 at = shared + OFFSET(SharedMemory, diagonal) +
                 4 * (DIAGONAL_PITCH * (16 * row_block + (lane >> 2)) + 2 * (lane & 3));
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < row_block) {
      const Split s = split_tiles(pairs.block[j][0], pairs.block[j][1]);
      store_matrix4(block_at(shared + OFFSET(SharedMemory, system_high), row_block, j, lane), s.high);
      store_matrix4(block_at(shared + OFFSET(SharedMemory, system_low), row_block, j, lane), s.low);
    } else if (j == row_block) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float (&x)[4] = pairs.block[j][n];
        store_shared(at + 32 * n, x[0], x[1]);
        store_shared(at + 32 * n + 4 * 8 * DIAGONAL_PITCH, x[2], x[3]);
      }
    }
  }
}

// Rows of pairs times beta, which zb has already unless FOR_SEGMENTS.
__device__ __forceinline__ void multiply_rows(Pairs& out, int row_block, u32 shared, int lane) {
  const u32 at = shared + OFFSET(SharedMemory, beta) + 4 * (16 * row_block + (lane >> 2));
  const float beta[2] = {load_shared1(at), load_shared1(at + 32)};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out.block[j][n][e] *= beta[e >> 1];
    }
  }
}

__device__ __forceinline__ void make_pairs(int row_block, Pairs& pairs, u32 shared, bool system, int lane,
                                           float unit) {
  pairs = {};
  multiply_pairs(pairs, shared, system ? OFFSET(SharedMemory, k) : OFFSET(SharedMemory, q), row_block, lane);
  finish_pairs(pairs, row_block, lane, unit, system ? 0 : 1);
  if (FOR_SEGMENTS) {
    if (system) multiply_rows(pairs, row_block, shared, lane);
  } else if (!system)
    store_image(row_block, pairs, shared + OFFSET(SharedMemory, aqk), shared + OFFSET(SharedMemory, inverse),
                lane);
}
