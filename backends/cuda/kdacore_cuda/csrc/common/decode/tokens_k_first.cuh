// Several tokens and a state [K, V] in registers: the sums of decode_head.cu in the same order. Each warp sums over its
// channels of K; the sums of all meet in shared memory.
#pragma once

#include "common/decode/tokens_memory.cuh"

// Where apply() of state_k_first.cuh has the record of this warp's channels.
__device__ __forceinline__ LanePosition position_of(int column, u32 memory) {
  return make_position(column, area_of(memory, warp_index()) + OFFSET(WarpMemory, record) - HALF_BYTES);
}
// The lane's columns whose update it has.
__device__ __forceinline__ const LanePosition& update_position(const LanePosition& at) { return at; }
// This lane's first column among the block's.
__device__ __forceinline__ int own_column(const LanePosition& at) { return at.v % COLUMNS; }

// k S' and q S', with S' the decayed state, over this warp's channels.
__device__ __forceinline__ void multiply(const float (&s)[ROWS][VECTOR], const LanePosition& at, u32 staged, u32 sums) {
  const u32 channels = staged + 4 * at.first;
  float ks[VECTOR] = {}, qs[VECTOR] = {};
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    float q[4], k[4];
    read_floats(q, channels + OFFSET(StagedToken, decayed_q) + 4 * row_channel(i));
    read_floats(k, channels + OFFSET(StagedToken, decayed_k) + 4 * row_channel(i));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) {
        ks[c] = multiply_add(k[j], s[i + j][c], ks[c]);
        qs[c] = multiply_add(q[j], s[i + j][c], qs[c]);
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
  if (at.lane < LANES) {
    store_vector(sums, ks);
    store_vector(sums + OFFSET(WarpSums, q), qs);
  }
}

// The sums of N columns over all of K, and the update there.
template <int N>
__device__ __forceinline__ void add_sums(float (&x)[N], u32 from) {
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    float y[N];
    read_floats(y, from + AREA_BYTES * w);
#pragma unroll
    for (int c = 0; c < N; ++c) x[c] = w ? x[c] + y[c] : y[c];
  }
}
template <int N>
__device__ __forceinline__ void update_columns(float (&u)[N], u32 memory, int slot, int column, const TokenFactors& f) {
  float ks[N], v[N];
  add_sums(ks, sums_of(memory, 0) + 4 * (COLUMNS * slot + column));
  read_floats(v, staged_token(memory, slot) + OFFSET(StagedToken, v) + 4 * column);
#pragma unroll
  for (int c = 0; c < N; ++c) u[c] = f.update * multiply_add(-f.k, ks[c], v[c]);
}

// One token: its update, and, if `moves`, the state after it.
__device__ __forceinline__ void take_token(float (&s)[ROWS][VECTOR], const LanePosition& at, u32 memory, int slot,
                                           const TokenFactors& f, bool moves, float (&u)[OUT]) {
  const u32 staged = staged_token(memory, slot), channels = staged + 4 * at.first;
  multiply(s, at, staged, sums_of(memory, warp_index()) + 4 * (COLUMNS * slot + own_column(at)));
  sync_block();
  update_columns(u, memory, slot, own_column(at), f);
  if (!moves) return;
#pragma unroll
  for (int i = 0; i < ROWS; i += 4) {
    float d[4], k[4];
    read_floats(d, channels + OFFSET(StagedToken, decay) + 4 * row_channel(i));
    read_floats(k, channels + OFFSET(StagedToken, k) + 4 * row_channel(i));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < VECTOR; ++c) s[i + j][c] = multiply_add(k[j], u[c], d[j] * s[i + j][c]);
    }
  }
}
// What comes before outputs and records: the last token's barrier says that every warp has replayed its records and
// multiplied all tokens.
__device__ __forceinline__ void finish_tokens() {}

// Four columns of a token's output.
__device__ __forceinline__ float4 output_of(u32 memory, int slot, int column, const TokenFactors& f) {
  float u[4], qs[4];
  update_columns(u, memory, slot, column, f);
  add_sums(qs, sums_of(memory, 0) + OFFSET(WarpSums, q) + 4 * (COLUMNS * slot + column));
#pragma unroll
  for (int c = 0; c < 4; ++c) qs[c] = f.q * multiply_add(f.qk, u[c], qs[c]);
  return make_float4(qs[0], qs[1], qs[2], qs[3]);
}
