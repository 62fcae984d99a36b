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

// A warp's 16 values of the 64 tokens of a chunk: two pieces of each row of an image.
struct ValueRows {
  u32 image;
  int first;  // piece
  __device__ __forceinline__ u32 place(int token, int piece) const {
    return image + swizzled(token, first + piece);
  }
  // Tokens that eight neighbouring lanes have, so that no two of their places share a bank.
  static __device__ __forceinline__ int token_of(int lane) {
    return 8 * (lane >> 4) + (lane & 6) + (lane >> 3 & 1);
  }
};
// Row `row` of the state and 15 more; `images`: those of the values that the block has.
__device__ __forceinline__ ValueRows value_rows(u32 images, int row) {
  return {images + (row >> 6) * SQUARE_BYTES, row >> 3 & 7};
}

// Of rows as ValueRows, the place of what lane 8m + r names, row r of matrix m of four that are 16 values of
// tokens 16 kk and on.
template <class Rows>
__device__ __forceinline__ u32 matrix_row(const Rows& rows, int kk, const Lane& l) {
  return rows.place(16 * kk + 8 * (l.lane >> 4) + (l.lane & 7), l.lane >> 3 & 1);
}
__device__ __forceinline__ void load_values(TokenOperand& v, const Lane& l, const ValueRows& rows) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4_transposed(v.a[kk], matrix_row(rows, kk, l));
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
