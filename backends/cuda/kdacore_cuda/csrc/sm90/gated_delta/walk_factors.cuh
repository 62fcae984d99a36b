// Factors of tokens, applied to products over a chunk: float32 sums of 16 value rows by 64 tokens.
#pragma once

#include "sm90/chunk_forward/segments/segment_products.cuh"
#include "sm90/gated_delta/record.cuh"

// A factor of each token, for this lane's columns of products over 64 tokens.
struct ColumnFactors {
  float2 x[2 * C_TILES];
};
__device__ __forceinline__ ColumnFactors load_factors(u32 from, const Lane& l) {
  ColumnFactors f;
#pragma unroll
  for (int j = 0; j < C_TILES; ++j) {
    const float4 x = load_shared4(from + factor_offset(l.t) + 16 * j);
    f.x[2 * j] = {x.x, x.y}, f.x[2 * j + 1] = {x.z, x.w};
  }
  return f;
}
// Other factors, `by` times these.
__device__ __forceinline__ ColumnFactors scaled(ColumnFactors f, float by) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) f.x[j].x *= by, f.x[j].y *= by;
  return f;
}
using Products = float[2 * C_TILES][4];
__device__ __forceinline__ void multiply_columns(Products& x, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j)
    x[j][0] *= f.x[j].x, x[j][1] *= f.x[j].y, x[j][2] *= f.x[j].x, x[j][3] *= f.x[j].y;
}
// x += y, its columns multiplied.
__device__ __forceinline__ void add_multiplied(Products& x, const Products& y, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
    x[j][0] += f.x[j].x * y[j][0], x[j][1] += f.x[j].y * y[j][1];
    x[j][2] += f.x[j].x * y[j][2], x[j][3] += f.x[j].y * y[j][3];
  }
}
// y = v - state S k.
__device__ __forceinline__ void subtract_from(Products& x, const TokenOperand& v, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 pair = v.a[j >> 1][2 * (j & 1) + i];
      x[j][2 * i] = half_low(pair) - f.x[j].x * x[j][2 * i];
      x[j][2 * i + 1] = half_high(pair) - f.x[j].y * x[j][2 * i + 1];
    }
  }
}
// Requests u = y + y t^T. The sums begin with y, of which `y` has the operand. `t`: right operand.
__device__ __forceinline__ void request_inverse(Products& u, TokenOperand& y, u64 t) {
  fence_registers(y.a);
  fence_registers(u);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<0>(u, y.a[kk], along_columns(t, kk), 1);
  warpgroup_commit();
}
// The same from products of the state with the keys, and y.
__device__ __forceinline__ void begin_inverse(Products& u, TokenOperand& y, const TokenOperand& v,
                                              const ColumnFactors& of_state, u64 t) {
  subtract_from(u, v, of_state);
  pack_rows(y, u);
  request_inverse(u, y, t);
}
__device__ __forceinline__ void pack_scaled(TokenOperand& to, const Products& x, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      to.a[j >> 1][2 * (j & 1) + i] = pack_saturated(x[j][2 * i] * f.x[j].x, x[j][2 * i + 1] * f.x[j].y);
  }
}
__device__ __forceinline__ void scale_rounded(TokenOperand& x, const ColumnFactors& f) {
#pragma unroll
  for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32& pair = x.a[j >> 1][2 * (j & 1) + i];
      pair = pack_saturated(half_low(pair) * f.x[j].x, half_high(pair) * f.x[j].y);
    }
  }
}
__device__ __forceinline__ void scale_state(State& state, float by) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) state.s[j][e] *= by;
  }
  fence_registers(state.s);
}

// Ends a basic block: the assembler would move loads of shared memory, and what needs them, between products that are
// requested one after another. No instruction of the memory pipe is here, as it would wait for those products.
template <class Ring>
__device__ __forceinline__ void end_basic_block(const Ring& ring) {
  if (ring.shared == ~0u) sleep_briefly();  // never
}
