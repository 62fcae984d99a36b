// Rows of unit_grads: products with the states at both ends of a chunk, what goes through the norms, and stores.
#pragma once

#include "common/l2norm.cuh"
#include "sm90/gated_delta/grads_shared_memory.cuh"
#include "sm90/gated_delta/tile_places.cuh"

using RowSums = float[2 * K_TILES][4];  // 16 tokens a warp by 128 channels

template <int TILES>
__device__ __forceinline__ void clear(float (&x)[TILES][4]) {
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] = 0.0f;
  }
}

template <int TILES>
__device__ __forceinline__ void scale(float (&x)[TILES][4], float by) {
  if (by == 1.0f) return;
#pragma unroll
  for (int j = 0; j < TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[j][e] *= by;
  }
}

// x = tile m: 64 tokens with 128 values by an image of 128 values by 128 channels.
__device__ __forceinline__ void multiply_state(RowSums& x, u32 tile, u32 image) {
  const u64 a = operand_descriptor(tile, 16, 1024), b = operand_descriptor(image, STATE_BYTES / 2, 1024);
  fence_registers(x);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    warpgroup_mma_shared<1>(x, along_channels(a, kk), over_tokens(b, kk), kk > 0);
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(x);
}
// d += pairs (64 by 64 tokens) times a tile's rows.
__device__ __forceinline__ void add_pairs(RowSums& d, const TokenOperand& pairs, u32 tile) {
  const u64 b = operand_descriptor(tile, SQUARE_BYTES, 1024);
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(d, pairs.a[kk], over_tokens(b, kk), 1);
}

// A warp's 16 rows of channels 16 kk and on of a tile, where accumulators have them.
__device__ __forceinline__ void load_rows(u32 (&r)[4], u32 tile, int kk, const Lane& l) {
  load_matrix4(r, tiles_by_column(tile + (kk >> 2) * SQUARE_BYTES, l.block, kk & 3, l.lane));
}
// Element e of accumulators' tile 2 kk + half.
__device__ __forceinline__ float row_element(const u32 (&r)[4], int half, int e) {
  const u32 pair = r[2 * half + (e >> 1)];
  return e & 1 ? half_high(pair) : half_low(pair);
}
// Calls f(row of the two, accumulator, the tile's element) for all of x.
template <class F>
__device__ __forceinline__ void each_row_element(RowSums& x, u32 tile, const Lane& l, F f) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 r[4];
    load_rows(r, tile, kk, l);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(e >> 1, x[2 * kk + half][e], row_element(r, half, e));
    }
  }
}

// d += by x; dot: the products of what is added with the rows of `tile`, this lane's share.
__device__ __forceinline__ void add_scaled(RowSums& d, float (&dot)[2], const RowSums& x,
                                           const float (&by)[2], u32 tile, const Lane& l) {
  dot[0] = dot[1] = 0.0f;
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 r[4];
    load_rows(r, tile, kk, l);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float y = x[2 * kk + n][e];
        dot[e >> 1] += y * row_element(r, n, e);
        d[2 * kk + n][e] += by[e >> 1] * y;
      }
    }
  }
  dot[0] *= by[0], dot[1] *= by[1];
}
// Sums over the four lanes that share a row.
__device__ __forceinline__ void add_over_row(float (&x)[2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] += shuffle_xor(x[i], 1);
    x[i] += shuffle_xor(x[i], 2);
  }
}
__device__ __forceinline__ float add_over_warp(float x) {
#pragma unroll
  for (int mask = 16; mask; mask >>= 1) x += shuffle_xor(x, mask);
  return x;
}

// From the gradient of normalised rows times their norms to that of the rows as given, which `tile` has.
__device__ __forceinline__ void pass_norm(RowSums& d, const float (&norm)[2], u32 tile, const Lane& l) {
  float less[2] = {};
  each_row_element(d, tile, l, [&](int i, float x, float y) { less[i] += x * y; });
  add_over_row(less);
#pragma unroll
  for (int i = 0; i < 2; ++i) less[i] = norm[i] * (norm[i] * less[i]);
  each_row_element(d, tile, l, [&](int i, float& x, float y) { x -= less[i] * y; });
}

// A warp's rows through its part of an image, of which it is the only user, to device memory, which has `size` elements
// of each.
__device__ __forceinline__ void store_rows(const RowSums& d, u32 image, u64 to, long long row_bytes, int rows,
                                           int size, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 r[4];
    pack_tiles(d[2 * kk], d[2 * kk + 1], r);
    store_matrix4(tiles_by_column(image + (kk >> 2) * SQUARE_BYTES, l.block, kk & 3, l.lane), r);
  }
  sync_warp();
  const int piece = l.lane & 15;
  if (!has_piece(PIECE * piece, size)) rows = 0;
#pragma unroll
  for (int n = 0; n < 16; n += 2) {
    const int row = 16 * l.block + n + (l.lane >> 4);
    const uint4 x = load_shared_u4(image + (piece >> 3) * SQUARE_BYTES + swizzled(row, piece & 7));
    store_global_if(row < rows, reinterpret_cast<void*>(to + row * row_bytes + 16 * piece), x);
  }
}
