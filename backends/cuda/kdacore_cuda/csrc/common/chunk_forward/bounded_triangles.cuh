// Bounded gates: both triangles of 16 tokens from a warp's sums. The one of queries and keys goes
// to an image in bfloat16, 16-byte rows of 8 columns; the one of keys to scratch in float32,
// SCRATCH_PITCH floats a row.
#pragma once

#include "common/chunk_forward/tiles.cuh"
#include "common/chunk_forward/tokens.cuh"

// `tile`: products of keys with even and odd tokens, then of queries with them; they are multiplied by
// `k_scale` and `q_scale`. Row i = 2p + h against tokens 2n and 2n + 1 of each column pair. What lies on
// and right of the diagonal of the keys' triangle is not meant to be read.
__device__ __forceinline__ void store_bounded_triangles(u32 image, u32 scratch, const Lane& l,
                                                        const Scalars& s, const float (&tile)[4][4],
                                                        float k_scale, float q_scale) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int n = 2 * l.t + c, j = 2 * token_pair_of(n);
    const float r0 = shuffle(s.k_norm[0], 4 * n), r1 = shuffle(s.k_norm[1], 4 * n);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int i = 2 * l.p + h;
      const float factor = k_scale * s.beta[h] * s.k_norm[h];
      store_shared(scratch + 4 * (SCRATCH_PITCH * i + j), tile[0][2 * h + c] * factor * r0,
                   tile[1][2 * h + c] * factor * r1);
      const float b0 = j <= i ? tile[2][2 * h + c] * q_scale : 0.0f;
      const float b1 = j + 1 <= i ? tile[3][2 * h + c] * q_scale : 0.0f;
      store_shared(image + (j >> 3) * 256 + i * 16 + (j & 7) * 2, pack_bf16(b0, b1));
    }
  }
}
