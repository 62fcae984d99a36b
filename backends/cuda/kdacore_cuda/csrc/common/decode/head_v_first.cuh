// One token and a state [V, K]. A warp has all channels of its rows of V, so only outputs meet in shared
// memory.
#pragma once

#include "common/decode/head_memory.cuh"

struct HeadUpdate {
  float u;  // of the row whose sums this lane ends with
};

// Before the barrier: the sums over K, and the outputs of this warp's rows.
__device__ __forceinline__ HeadUpdate multiply(const LanePosition& at, const Pieces& pieces, u32 memory,
                                               const HeadFactors& f) {
  const u32 channels = memory + 4 * at.channel;
  float q[VECTOR], k[VECTOR], ks[ROWS], qs[ROWS];
  read_floats(q, channels + OFFSET(HeadMemory, decayed_q));
  read_floats(k, channels + OFFSET(HeadMemory, decayed_k));
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float s[VECTOR];
    read_piece(s, pieces, i);
    ks[i] = k[0] * s[0], qs[i] = q[0] * s[0];
#pragma unroll
    for (int c = 1; c < VECTOR; ++c) {
      ks[i] = multiply_add(k[c], s[c], ks[i]);
      qs[i] = multiply_add(q[c], s[c], qs[i]);
    }
  }
  const float k_sum = fold<ROWS, LANES / 2>(ks, at.lane), q_sum = fold<ROWS, LANES / 2>(qs, at.lane);
  const float v = load_shared1(memory + OFFSET(HeadMemory, v) + 4 * own_column(at));
  const float u = f.update * multiply_add(-f.k, k_sum, v), o = f.q * multiply_add(f.qk, u, q_sum);
  if (at.writes) store_shared(memory + OFFSET(HeadMemory, sums) + 4 * own_column(at), __float_as_uint(o));
  return {u};
}

// The state after the token, to device memory.
__device__ __forceinline__ void store_updated(const LanePosition& at, const Pieces& pieces, u32 memory,
                                              const HeadFactors&, HeadUpdate update, u64 to) {
  const u32 channels = memory + 4 * at.channel;
  float d[VECTOR], k[VECTOR];
  read_floats(d, channels + OFFSET(HeadMemory, decay));
  read_floats(k, channels + OFFSET(HeadMemory, k));
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const float u = shuffle(update.u, lane_of_row(at, i));
    float s[VECTOR];
    read_piece(s, pieces, i);
#pragma unroll
    for (int c = 0; c < VECTOR; ++c) s[c] = multiply_add(k[c], u, d[c] * s[c]);
    store_state_bits(to + STATE_BYTES * piece_offset(i), pack_state(s));
  }
}

// Four columns of the output.
__device__ __forceinline__ float4 output_of(u32 memory, int column, const HeadFactors&) {
  return load_shared4(memory + OFFSET(HeadMemory, sums) + 4 * column);
}
