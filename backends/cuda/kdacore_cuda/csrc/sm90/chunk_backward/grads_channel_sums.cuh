// Sums over channels, one a token, as the diagonals of products [tokens, tokens].
//
// One factor is rounded to bfloat16; the other one is an input, and exact. A warp's sums are those over its 16
// channels. Of 16 tokens the lanes with t = g / 2 have the sums of tokens g and g + 8, so of a half four: g, g + 8,
// g + 16, g + 24. They store them side by side: the place of a token is 4 (token % 8) + token / 8.
#pragma once

#include "sm90/bf16_pairs.cuh"
#include "sm90/chunk_backward/grads_loads.cuh"

typedef float TokenSums[4];
__device__ __forceinline__ bool has_token_sums(const Lane& l) { return l.t == l.g >> 1; }
__device__ __forceinline__ int token_at(int place) { return (place >> 2) + 8 * (place & 3); }

// Sums of the 16 tokens of `part`: a is a left operand [tokens, channels], and of b the first two registers are a right
// operand [channels, tokens] of the first eight tokens, the other two that of the others.
__device__ __forceinline__ void multiply_tokens(TokenSums& r, int part, const u32 (&a)[4], const u32 (&b)[4],
                                                const Lane& l) {
  float first[4] = {}, second[4] = {};
  mma_bf16(first, a, b[0], b[1]);
  mma_bf16(second, a, b[2], b[3]);
  r[2 * part] = l.g & 1 ? first[1] : first[0];
  r[2 * part + 1] = l.g & 1 ? second[3] : second[2];
}

// Sums of d x, x from the warp's own rows.
__device__ __forceinline__ void dot_with_rows(TokenSums& r, const float (&d)[4][4], u32 image, const Lane& l) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 a[4], b[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float* x = &d[2 * i + (w & 1)][2 * (w >> 1)];
      a[w] = transpose(pack_bf16(x[0], x[1]));
    }
    load_matrix4(b, image + l.own + 16 * IMAGE_ROW * i);
    multiply_tokens(r, i, a, b, l);
  }
}

// Of a warp's four tokens a lane, to `to`, where the warp's 32 places are.
__device__ __forceinline__ void store_token_sums(u32 to, const TokenSums& x, const Lane& l) {
  if (has_token_sums(l))
    store_shared(to + 16 * l.g, __float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]),
                 __float_as_uint(x[3]));
}
// The sum over eight warps, of each of which places are `pitch` further.
__device__ __forceinline__ float add_warps(u32 from, u32 pitch) {
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = load_shared1(from + pitch * i);
  return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}
