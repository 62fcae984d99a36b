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

// A chunk's rows of v in shared memory, PITCH bytes apart: 16 bytes more than they have, so that eight rows
// do not share a bank. A warp uses the 16 values of its rows of the state alone; `values`: of the first of
// them. Lane 8m + r names row r of matrix m in the four that are 16 values by tokens 16 kk and on.
template <u32 PITCH>
__device__ __forceinline__ u32 value_piece(u32 values, int kk, const Lane& l) {
  return values + (16 * kk + 8 * (l.lane >> 4) + (l.lane & 7)) * PITCH + 16 * (l.lane >> 3 & 1);
}
template <u32 PITCH>
__device__ __forceinline__ void load_values(TokenOperand& v, const Lane& l, u32 values) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4_transposed(v.a[kk], value_piece<PITCH>(values, kk, l));
}

// r = v - S kd^T, rounded.
__device__ __forceinline__ void subtract(TokenOperand& r, const TokenOperand& v,
                                         const float (&prediction)[2 * C_TILES][4]) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* x = &prediction[2 * kk + (i >> 1)][2 * (i & 1)];
      r.a[kk][i] = pack_bf16(bf16_low(v.a[kk][i]) - x[0], bf16_high(v.a[kk][i]) - x[1]);
    }
  }
}

// x (+)= S m^T, 64 tokens by the channels of m.
__device__ __forceinline__ void multiply_channels(float (&x)[2 * C_TILES][4], const Operand& s, u64 m) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(x, s.a[kk], along_channels(m, kk), kk > 0);
}
