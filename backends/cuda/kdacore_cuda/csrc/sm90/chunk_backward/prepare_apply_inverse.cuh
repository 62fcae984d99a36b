// w = inv beta k 2^gc and u = (inv beta v)^T, with the inverse as it is stored. A warp has 16
// channels of w and 16 values of u, which a block of the inverse multiplies alike; u is transposed
// on its way to shared memory.
//
// beta k 2^gc is zb but for a factor of its channel and part, which the sums take.
//
// KEYS: w too; else u alone, of another block of values.
#pragma once

#include "sm90/chunk_backward/prepare_pairs.cuh"
#include "sm90/scaled_pieces.cuh"

template <bool KEYS>
__device__ __forceinline__ void apply_inverse(u32 shared, int warp, int lane, float unit) {
  const int t = lane & 3, image = warp >> 2, piece = 2 * (warp & 3);
  u32 zb[4][4], vb[4][4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // Tokens 0-7, then 8-15, of channels (values) 0-7, then 8-15.
    const u32 at = shared + image * SQUARE_BYTES + tile_offset(16 * j + (lane & 15), piece + (lane >> 4));
    if constexpr (KEYS) load_matrix4_transposed(zb[j], at + OFFSET(SharedMemory, k));
    load_matrix4_transposed(vb[j], at + OFFSET(Matrices<false>, v));
    const u32 beta = shared + OFFSET(SharedMemory, beta) + 4 * (16 * j + 2 * t);
    const float2 b0 = load_shared2(beta), b1 = load_shared2(beta + 32);
    vb[j][0] = scaled_pair(vb[j][0], b0.x, b0.y);
    vb[j][1] = scaled_pair(vb[j][1], b1.x, b1.y);
    vb[j][2] = scaled_pair(vb[j][2], b0.x, b0.y);
    vb[j][3] = scaled_pair(vb[j][3], b1.x, b1.y);
  }
  constexpr int BLOCKS_A_PART = 4 / PARTS;
  float decay[PARTS - 1][2][2];  // before each later part, by this lane's channels
#pragma unroll
  for (int n = 0; KEYS && n < 2; ++n) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int part = 0; part < PARTS - 1; ++part) {
      const float2 total =
          load_shared2(shared + OFFSET(SharedMemory, totals) + 4 * (K * part + 16 * warp + 8 * n + 2 * t));
      sum.x += total.x, sum.y += total.y;
      decay[part][n][0] = exp2_fast(sum.x);
      decay[part][n][1] = exp2_fast(sum.y);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float w[PARTS][2][4] = {}, u[2][4] = {};  // w: of keys of each part
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      u32 x[4];
      load_matrix4(x, block_at(shared + OFFSET(SharedMemory, inverse), i, j, lane));
      if constexpr (KEYS) {
        mma_bf16(w[j / BLOCKS_A_PART][0], x, zb[j][0], zb[j][1]);
        mma_bf16(w[j / BLOCKS_A_PART][1], x, zb[j][2], zb[j][3]);
      }
      mma_bf16(u[0], x, vb[j][0], vb[j][1]);
      mma_bf16(u[1], x, vb[j][2], vb[j][3]);
    }
    u32 out[4];
#pragma unroll
    for (int n = 0; KEYS && n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int part = 1; part <= i / BLOCKS_A_PART; ++part)
          w[0][n][e] += w[part][n][e] * decay[part - 1][n][e & 1];
        w[0][n][e] *= unit;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) out[2 * n + h] = pack_bf16(w[0][n][2 * h], w[0][n][2 * h + 1]);
    }
    if constexpr (KEYS)
      store_matrix4(shared + OFFSET(Matrices<false>, w) + image * SQUARE_BYTES +
                        swizzled(16 * i + (lane & 15), piece + (lane >> 4)),
                    out);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) out[2 * n + h] = pack_bf16(u[n][2 * h], u[n][2 * h + 1]);
    }
    store_matrix4_transposed(shared + OFFSET(Matrices<false>, u) +
                                 swizzled(16 * warp + (lane & 7) + (lane >> 1 & 8), 2 * i + (lane >> 3 & 1)),
                             out);
  }
}

// One thread: u of a block of values to the workspace.
__device__ __forceinline__ void store_values(const ChunkBackwardParams& p, u32 shared, int block) {
  unsigned char* const u = place_of(p.u, TILE_BYTES * value_blocks(p)) + block * TILE_BYTES;
  // In halves, as the scan may load them: initcheck takes what a copy of 16 KB wrote for half
  // written.
  copy_out(u, shared + OFFSET(Matrices<false>, u), SQUARE_BYTES);
  copy_out(u + SQUARE_BYTES, shared + OFFSET(Matrices<false>, u) + SQUARE_BYTES, SQUARE_BYTES);
}
// One thread: w and u to the workspace.
__device__ __forceinline__ void store_w_and_u(const ChunkBackwardParams& p, u32 shared) {
  copy_out(place_of(p.w, TILE_BYTES), shared + OFFSET(Matrices<false>, w), TILE_BYTES);
  store_values(p, shared, 0);
  copy_out_commit();
}
