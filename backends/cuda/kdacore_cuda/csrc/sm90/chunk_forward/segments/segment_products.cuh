// What a warp with 16 rows of a state does with a chunk's operands.
#pragma once

#include "sm90/chunk_backward/state.cuh"

struct Lane {
  int lane, g, t;
  int row;  // this warp's first row of the state
  // In a 16-row tile: where lane 8i + r finds row r of matrix i of four that make the first 16
  // columns.
  u32 piece;
};
__device__ __forceinline__ Lane make_lane(int warp, int part = 0) {
  const int lane = thread_index() & 31;
  return {lane, lane >> 2, lane & 3, 64 * part + 16 * warp, swizzled(lane & 15, lane >> 4)};
}

// This warp's rows of u, the block's first one at `rows`.
__device__ __forceinline__ void load_u(TokenOperand& u, const Lane& l, u32 rows) {
  const u32 from = rows + l.row * IMAGE_ROW + l.piece;
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4(u.a[kk], from ^ kk << 5);
}

// v = u - S w^T, rounded.
__device__ __forceinline__ void subtract(TokenOperand& v, const TokenOperand& u,
                                         const float (&prediction)[2 * C_TILES][4]) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &prediction[2 * kk + (i >> 1)][2 * (i & 1)];
      v.a[kk][i] = pack_bf16(bf16_low(u.a[kk][i]) - x[0], bf16_high(u.a[kk][i]) - x[1]);
    }
  }
}

// x (+)= S m^T, 64 tokens by the channels of m.
__device__ __forceinline__ void multiply_channels(float (&x)[2 * C_TILES][4], const Operand& s, u64 m) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(x, s.a[kk], along_channels(m, kk), kk > 0);
}
