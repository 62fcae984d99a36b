// Running sums over tokens, as products with triangles of ones.
//
// A float32 number is two TF32 operands: its first eleven bits, and what is left. So sums are as exact as those of
// float32 numbers of 21 bits. Tokens that do not count are multiplied by zeros: they do not change the last bits.
#pragma once

#include "sm90/chunk_backward/grads_shared_memory.cuh"
#include "sm90/small_products.cuh"

// x of one tile (channels g, g + 8; tokens 2t, 2t + 1) as a left operand: its columns t and t + 4 are these tokens.
struct SplitTile {
  u32 high[4], low[4];
};
__device__ __forceinline__ SplitTile split_tile(const float (&x)[4]) {
  SplitTile s;
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int to = 2 * (e & 1) + (e >> 1);
    s.high[to] = __float_as_uint(x[e]) & 0xffffe000u;
    s.low[to] = __float_as_uint(x[e] - __uint_as_float(s.high[to]));
  }
  return s;
}
__device__ __forceinline__ void add_tile(float (&d)[4], const SplitTile& a, u32 b0, u32 b1, const float (&to)[4]) {
  mma_tf32(d, a.low, b0, b1, to);
  mma_tf32(d, a.high, b0, b1, d);
}

// Replaces the elements of `N` tiles by the sums of those up to each token, with what `sums` holds of the channels
// (0, 1: channel g; 2, 3: channel g + 8), to which all of them are added. AFTER: from each token on.
template <bool AFTER, int N>
__device__ __forceinline__ void sum_tiles(float (*x)[4], float (&sums)[4], const Lane& l) {
  constexpr u32 ONE = 0x3f800000;
  const u32 first = (AFTER ? 2 * l.t >= l.g : 2 * l.t <= l.g) ? ONE : 0,
            second = (AFTER ? 2 * l.t + 1 >= l.g : 2 * l.t + 1 <= l.g) ? ONE : 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float(&tile)[4] = x[AFTER ? N - 1 - i : i];
    const SplitTile a = split_tile(tile);
    add_tile(tile, a, first, second, sums);
    add_tile(sums, a, ONE, ONE, sums);
  }
}
