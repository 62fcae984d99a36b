// A state times a segment's A (segment.cuh), by a warpgroup on 64 rows of the state.
//
// Both are split in two bfloat16 parts each and multiplied in three products, about 16 bits, in the chain's order
// (chain_step.cuh): the same bits, so the host may choose by the number of segments.
#pragma once

#include "sm90/chunk_backward/state.cuh"

// sums = state A. `high`, `low`: A's images. `arrived()` waits for them. `meanwhile()` is called once the state is not
// needed any more. The low parts are taken while the first products run. The products with the low parts of A come last,
// so that the high parts of the state are in use until then: otherwise the compiler would reuse their registers earlier,
// and wait for the first products before it does. `ring`: what end_basic_block takes.
template <class Ring, class Arrived, class Meanwhile>
__device__ __forceinline__ void multiply_map(State& sums, State& state, u32 high, u32 low, const Ring& ring,
                                             Arrived arrived, Meanwhile meanwhile) {
  Operand upper, lower;
  pack_state(upper, state);
  arrived();
  const u64 map = operand_descriptor(high, STATE_BYTES / 2, 8 * IMAGE_ROW),
            map_low = operand_descriptor(low, STATE_BYTES / 2, 8 * IMAGE_ROW);
  fence_registers(sums.s);
  fence_registers(upper.a);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<1>(sums.s, upper.a[kk], over_tokens(map, kk), kk);
  warpgroup_commit();
  end_basic_block(ring);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const Split s = split_tiles(state.s[2 * kk], state.s[2 * kk + 1]);
#pragma unroll
    for (int e = 0; e < 4; ++e) lower.a[kk][e] = s.low[e];
  }
  fence_registers(lower.a);
  meanwhile();
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    warpgroup_mma<1>(sums.s, lower.a[kk], over_tokens(map, kk), 1);
    warpgroup_mma<1>(sums.s, upper.a[kk], over_tokens(map_low, kk), 1);
  }
  warpgroup_commit();
  warpgroup_wait<0>();
  fence_registers(sums.s);
}
__device__ __forceinline__ void add(State& state, const State& more) {
#pragma unroll
  for (int j = 0; j < 2 * K_TILES; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) state.s[j][e] += more.s[j][e];
  }
}
