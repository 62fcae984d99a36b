// Unbounded gates: both triangles of 16 tokens from a warp's sums by dyadic level. The one of
// queries and keys goes to an image in bfloat16, 16-byte rows of 8 columns; the one of keys to
// scratch in float32, SCRATCH_PITCH floats a row.
#pragma once

#include "common/chunk_forward/tiles.cuh"
#include "common/chunk_forward/tokens.cuh"

constexpr int LEVELS = 4;  // halves of 1, 2, 4 and 8 tokens

// Lane bit that holds bit `level - 1` of p.
__device__ __forceinline__ constexpr int lane_bit(int level) { return level == 1 ? 8 : level == 2 ? 4 : 16; }

__device__ __forceinline__ u32 triangle_at(u32 image, int i, int j) {
  return image + (j >> 3) * 256 + i * 16 + (j & 7) * 2;
}

// `level_sums`: products of halves of 1, 2, 4 and 8 tokens. store(i, j, kk, qk) stores the two
// products of a pair.
template <class F>
__device__ __forceinline__ void store_levels(u32 image, u32 scratch, const Lane& l,
                                             const float (&level_sums)[LEVELS][4], const float (&diagonal)[2],
                                             F store) {
#pragma unroll
  for (int i = 0; i < SCRATCH_PITCH * 16 / 4; i += 32) {
    if (i + l.lane < SCRATCH_PITCH * 16 / 4) store_shared(scratch + 16 * (i + l.lane), 0u, 0u, 0u, 0u);
  }
  store_shared(image + 16 * l.lane, 0u, 0u, 0u, 0u);
  sync_warp();
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    const int bit = level ? 1 << (level - 1) : 0;
    const int i = level ? 2 * (l.p | bit) + ((l.p & bit) != 0) : 2 * l.p + 1;
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = token_pair_of(2 * l.t + c);
      const int j = level ? 2 * (n & ~bit) + ((n & bit) != 0) : 2 * n;
      if (l.p >> level == n >> level) store(i, j, level_sums[level][c], level_sums[level][2 + c]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float x = diagonal[i];
    x += shuffle_xor(x, 1);
    x += shuffle_xor(x, 2);
    const int row = 2 * l.p + i;
    if (l.t == 0) store_shared16(triangle_at(image, row, row), pack_bf16(x, 0.0f));
  }
}
