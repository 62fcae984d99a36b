// Stores a segment's map, S' = S A + B, from rows of A^T and B^T: a warp has 16 channels of S', a block 64.
#pragma once

#include "sm90/chunk_backward/segment_map.cuh"
#include "sm90/chunk_forward/segments/segment.cuh"
#include "sm90/chunk_forward/segments/segment_products.cuh"

// A's upper and lower bfloat16 parts, to the two images at `images`, of which block `part` has half of the
// columns: 16 KB of each. They are staged at `staging`, which no thread uses any more once all warps that
// hold rows have come here; the first thread's copies may still read them when this returns.
__device__ __forceinline__ void store_transposed_map(const State& a, u64 images, int part, u32 staging,
                                                     const Lane& l) {
  constexpr u32 HALF_STATE = STATE_BYTES / 2;
  sync_threads(1, 128);
  // Matrices 0 and 1 of four are 8 rows of A and columns 0 to 7, and 8 to 15, of this warp's.
  const int row = 8 * (l.lane >> 4) + (l.lane & 7), piece = (l.row % 64 >> 3) + (l.lane >> 3 & 1);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const Split s = split_tiles(a.s[2 * kk], a.s[2 * kk + 1]);
    const u32 to = staging + swizzled(16 * kk + row, piece);
    store_matrix4_transposed(to, s.high);
    store_matrix4_transposed(to + HALF_STATE, s.low);
  }
  fence_async_proxy();
  sync_threads(1, 128);
  if (thread_index()) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    copy_out(reinterpret_cast<void*>(images + i * STATE_BYTES + part * HALF_STATE), staging + i * HALF_STATE,
             HALF_STATE);
  }
  copy_out_commit();
}

// What write_pairs does for rows of B, from rows of B^T. Neighbouring lanes' rows are two channels, and each
// lane stores one value row and the one eight rows further, so that a warp stores 512 bytes in a row.
__device__ __forceinline__ void write_transposed_pairs(const float (&x)[2 * K_TILES][4], const Lane& l,
                                                       u64 base) {
  const bool odd = l.g & 1;
#pragma unroll
  for (int m = 0; m < V / 16; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float (&low)[4] = x[2 * m], (&high)[4] = x[2 * m + 1];
      const float other_low = shuffle_xor(odd ? low[2 * h] : low[2 * h + 1], 4),
                  other_high = shuffle_xor(odd ? high[2 * h] : high[2 * h + 1], 4);
      *tile_at(base, 16 * m + 2 * l.t + odd, l.row + 8 * h + (l.g & 6)) =
          odd ? make_float4(other_low, low[2 * h + 1], other_high, high[2 * h + 1])
              : make_float4(low[2 * h], other_low, high[2 * h], other_high);
    }
  }
}
