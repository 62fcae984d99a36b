// The gated norm of an output, o / sqrt(mean(o o) + eps) weight act(z): its inputs and arithmetic. A thread takes four
// columns of a token.
#pragma once

#include "common/decode/convolution.cuh"

__device__ __forceinline__ int z_type(const DecodeParams& p) { return PLAIN ? TYPE_BFLOAT16 : p.z_type; }
__device__ __forceinline__ Bits<4> load_z(const DecodeParams& p, Offset z_at, int column) {
  if (PLAIN || p.z_whole) return load_elements<4>(p.z, z_at + column, z_type(p));
  return load_apart<4>(p.z, (long long)z_at + column * p.z_sv, p.z_sv, z_type(p));
}
__device__ __forceinline__ Bits<4> load_norm_weight(const DecodeParams& p, int hv, int column) {
  const Offset at = hv * (Offset)p.norm_sh + column;
  if (PLAIN || (p.norm_weight & 15) == 0) return load_four(p.norm_weight, at, p.norm_type);
  return load_apart<4>(p.norm_weight, at, 1, p.norm_type);
}

// The sum of squares of the columns that LANES neighbouring lanes have, in all of them. Neighbours first, so that the
// order of the additions does not depend on the number of lanes.
template <int LANES_OF_TOKEN>
__device__ __forceinline__ float sum_of_squares(const float4& o) {
  float x = o.x * o.x;
  x = multiply_add(o.y, o.y, x);
  x = multiply_add(o.z, o.z, x);
  x = multiply_add(o.w, o.w, x);
#pragma unroll
  for (int mask = 1; mask < LANES_OF_TOKEN; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// What the norm multiplies with besides, from the weight and z as they were loaded.
__device__ __forceinline__ float4 norm_factors(const DecodeParams& p, const Bits<4>& raw_weight, const Bits<4>& raw_z) {
  float y[4];
  to_floats(y, raw_weight, p.norm_type);
  if (p.z) {
    float z[4];
    to_floats(z, raw_z, z_type(p));
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] *= p.silu ? z[i] * sigmoid(z[i]) : sigmoid(z[i]);
  }
  return make_float4(y[0], y[1], y[2], y[3]);
}
// `squares`: the sum over V.
__device__ __forceinline__ float4 normed(const DecodeParams& p, const float4& o, float squares, const float4& factors) {
  const float norm = inverse_sqrt(multiply_add(squares, 1.0f / V, p.norm_eps));
  return make_float4(o.x * norm * factors.x, o.y * norm * factors.y, o.z * norm * factors.z, o.w * norm * factors.w);
}
