// The gated norm of outputs in shared memory, and their stores. A head's columns may lie in several blocks of a
// cluster: the sums of squares go from each to all.
#pragma once

#include "common/decode/memory.cuh"
#include "common/decode/norm_inputs.cuh"

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
