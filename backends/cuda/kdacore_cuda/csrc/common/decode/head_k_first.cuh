// One token and a state [K, V]. Each warp sums over its channels of K; the sums of all meet in shared
// memory.
#pragma once

#include "common/decode/head_memory.cuh"

struct HeadUpdate {};  // is computed after the barrier

// Before the barrier: k S' and q S', with S' the decayed state, over this warp's channels.
__device__ __forceinline__ HeadUpdate multiply(const LanePosition& at, const Pieces& pieces, u32 memory,
                                               const HeadFactors&) {
  const u32 channels = memory + 4 * at.first;
  float ks[VECTOR] = {}, qs[VECTOR] = {};
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    float q[4], k[4];
    read_floats(q, channels + OFFSET(HeadMemory, decayed_q) + 4 * row_channel(i));
    read_floats(k, channels + OFFSET(HeadMemory, decayed_k) + 4 * row_channel(i));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s[VECTOR];
      read_piece(s, pieces, i + j);
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        ks[c] = multiply_add(k[j], s[c], ks[c]);
        qs[c] = multiply_add(q[j], s[c], qs[c]);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < VECTOR; ++c) {
#pragma unroll
    for (int mask = 16; mask >= LANES; mask >>= 1) {
      ks[c] += shuffle_xor(ks[c], mask);
      qs[c] += shuffle_xor(qs[c], mask);
    }
  }
  const u32 to = memory + 4 * (thread_index() / 32 * COLUMNS + own_column(at));
  if (at.lane < LANES) {
    store_vector(to + OFFSET(HeadMemory, sums), ks);
    store_vector(to + OFFSET(HeadMemory, sums) + OFFSET(HeadSums, q), qs);
  }
  return {};
}

// After it: the sums of N columns over all of K.
template <int N>
__device__ __forceinline__ void add_sums(float (&x)[N], u32 from) {
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    float y[N];
    read_floats(y, from + 4 * COLUMNS * w);
#pragma unroll
    for (int c = 0; c < N; ++c) x[c] = w ? x[c] + y[c] : y[c];
  }
}
template <int N>
__device__ __forceinline__ void update_columns(float (&u)[N], u32 memory, int column, const HeadFactors& f) {
  float ks[N], v[N];
  add_sums(ks, memory + OFFSET(HeadMemory, sums) + 4 * column);
  read_floats(v, memory + OFFSET(HeadMemory, v) + 4 * column);
#pragma unroll
  for (int c = 0; c < N; ++c) u[c] = f.update * multiply_add(-f.k, ks[c], v[c]);
}

// The state after the token, to device memory.
__device__ __forceinline__ void store_updated(const LanePosition& at, const Pieces& pieces, u32 memory,
                                              const HeadFactors& f, HeadUpdate, u64 to) {
  const u32 channels = memory + 4 * at.first;
  float u[VECTOR];
  update_columns(u, memory, own_column(at), f);
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    float d[4], k[4];
    read_floats(d, channels + OFFSET(HeadMemory, decay) + 4 * row_channel(i));
    read_floats(k, channels + OFFSET(HeadMemory, k) + 4 * row_channel(i));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float s[VECTOR];
      read_piece(s, pieces, i + j);
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) s[c] = multiply_add(k[j], u[c], d[j] * s[c]);
      store_state_bits(to + STATE_BYTES * piece_offset(i + j), pack_state(s));
    }
  }
}

// Four columns of the output.
__device__ __forceinline__ float4 output_of(u32 memory, int column, const HeadFactors& f) {
  float u[4], qs[4];
  update_columns(u, memory, column, f);
  add_sums(qs, memory + OFFSET(HeadMemory, sums) + OFFSET(HeadSums, q) + 4 * column);
#pragma unroll
  for (int c = 0; c < 4; ++c) qs[c] = f.q * multiply_add(f.qk, u[c], qs[c]);
  return make_float4(qs[0], qs[1], qs[2], qs[3]);
}
