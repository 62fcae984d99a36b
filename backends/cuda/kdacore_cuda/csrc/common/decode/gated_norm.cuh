// The gated norm of outputs in shared memory, o / sqrt(mean(o o) + eps) weight act(z), and their stores. A thread
// takes four columns of a token. A head's columns may lie in several blocks of a cluster: the sums of squares go
// from each to all.
#pragma once

#include "common/decode/memory.cuh"

constexpr int UNITS = COLUMNS / 4;                  // threads of a token
constexpr int PASS_TOKENS = WARPS * 32 / UNITS;  // tokens of all threads
static_assert(32 % UNITS == 0, "a token's threads are of one warp");

// Four columns of a token of a value head.
struct Unit {
  int token;   // may lie beyond the last one
  int column;  // of the head
  u32 outputs, factors, squares;  // in shared memory
};
__device__ __forceinline__ Unit unit_of(int pass, int slice, u32 memory) {
  const int thread = thread_index(), token = pass * PASS_TOKENS + thread / UNITS, column = thread % UNITS * 4;
  const u32 row = token < MOST_TOKENS ? token : MOST_TOKENS - 1;
  const u32 own = memory + 4 * (COLUMNS * row + column);
  return {token, slice * COLUMNS + column, own + OFFSET(DecodeMemory, outputs), own + OFFSET(DecodeMemory, factors),
          memory + OFFSET(DecodeMemory, squares) + 4 * SLICES * row};
}

__device__ __forceinline__ int z_type(const DecodeParams& p) { return PLAIN ? TYPE_BFLOAT16 : p.z_type; }
__device__ __forceinline__ Bits<4> load_z(const DecodeParams& p, Offset z_at, int column) {
  if (PLAIN || p.z_whole) return load_elements<4>(p.z, z_at + column, z_type(p));
  return load_apart<4>(p.z, (long long)z_at + column * p.z_sv, p.z_sv, z_type(p));
}
__device__ __forceinline__ Bits<4> load_norm_weight(const DecodeParams& p, int hv, int column) {
  const Offset at = hv * (Offset)p.norm_sh + column;
  if (PLAIN || (p.norm_weight & 15) == 0) return load_elements<4>(p.norm_weight, at, p.norm_type);
  return load_apart<4>(p.norm_weight, at, 1, p.norm_type);
}

// The sum of squares of the block's columns of a unit's token, in all of its threads. Neighbours first, so that the
// order of the additions does not depend on the number of blocks.
__device__ __forceinline__ float sum_of_squares(const float4& o) {
  float x = o.x * o.x;
  x = multiply_add(o.y, o.y, x);
  x = multiply_add(o.z, o.z, x);
  x = multiply_add(o.w, o.w, x);
#pragma unroll
  for (int mask = 1; mask < UNITS; mask *= 2) x += shuffle_xor(x, mask);
  return x;
}

// To the blocks of the cluster that have columns of the head, this one included. `first`: the rank of the first of them;
// `bar`: the barrier of each that counts.
__device__ __forceinline__ void send_squares(const Unit& unit, int slice, int first, float sum, u32 bar) {
  const u32 to = unit.squares + 4 * slice;
#pragma unroll
  for (int i = 0; i < SLICES; ++i)
    store_async(cluster_address(to, first + i), __float_as_uint(sum), cluster_address(bar, first + i));
}
__device__ __forceinline__ float received_squares(const Unit& unit) {
  float x[SLICES];
#pragma unroll
  for (int i = 0; i < SLICES; ++i) x[i] = load_shared1(unit.squares + 4 * i);
#pragma unroll
  for (int step = 1; step < SLICES; step *= 2) {
#pragma unroll
    for (int i = 0; i < SLICES; i += 2 * step) x[i] += x[i + step];
  }
  return x[0];
}

// What the norm multiplies with besides, from the weight and z as they were loaded.
__device__ __forceinline__ void store_factors(const DecodeParams& p, const Unit& unit, const Bits<4>& raw_weight,
                                              const Bits<4>& raw_z) {
  float y[4];
  to_floats(y, raw_weight, p.norm_type);
  if (p.z) {
    float z[4];
    to_floats(z, raw_z, z_type(p));
#pragma unroll
    for (int i = 0; i < 4; ++i) y[i] *= p.silu ? z[i] * sigmoid(z[i]) : sigmoid(z[i]);
  }
  store_shared(unit.factors, __float_as_uint(y[0]), __float_as_uint(y[1]), __float_as_uint(y[2]),
               __float_as_uint(y[3]));
}
__device__ __forceinline__ float4 normed(const DecodeParams& p, const float4& o, float squares, const Unit& unit) {
  const float norm = inverse_sqrt(multiply_add(squares, 1.0f / V, p.norm_eps));
  const float4 y = load_shared4(unit.factors);
  return make_float4(o.x * norm * y.x, o.y * norm * y.y, o.z * norm * y.z, o.w * norm * y.w);
}
