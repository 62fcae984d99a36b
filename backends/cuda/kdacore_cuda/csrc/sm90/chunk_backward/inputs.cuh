// What gates and betas make of a unit's inputs.
#pragma once

#include "common/gate_bias.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#include "sm90/head_dims.cuh"

// Row 0 of a unit's input, and from one token to the next, in bytes.
struct Rows {
  const unsigned char* at;
  int step;
};
__device__ __forceinline__ const unsigned char* row_at(const Rows& r, int row) {
  return r.at + (long long)row * r.step;
}
__device__ __forceinline__ Rows make_rows(const Unit& u, u64 base, long long sb, long long st, long long sh,
                                          int head, int size) {
  const long long offset = u.batch * sb + u.first * st + head * sh;
  return {reinterpret_cast<const unsigned char*>(base) + offset * size, (int)(st * size)};
}

// A head's A_log; 0 without one.
__device__ __forceinline__ float load_A_log(const ChunkBackwardParams& p, int hv) {
  return p.A_log ? __uint_as_float(load_global4(p.A_log + 4ll * hv)) : 0.0f;
}
__device__ __forceinline__ Gate gate_from(const ChunkBackwardParams& p, float A_log) {
  return make_gate<BOUNDED>(p.gate, A_log, reciprocal(p.lower_bound));
}
__device__ __forceinline__ Gate make_gate(const ChunkBackwardParams& p, int hv) {
  return gate_from(p, load_A_log(p, hv));
}
// Bits of dt_bias of a channel; 0 without one.
__device__ __forceinline__ u32 load_bias_bits(const ChunkBackwardParams& p, int hv, int channel) {
  if (!p.dt_bias || !has_piece(channel, channels_of(p))) return 0;
  return load_bits(p.dt_bias + (long long)(hv * channels_of(p) + channel) * type_size(p.bias_type), p.bias_type);
}

__device__ __forceinline__ float activate_beta(const ChunkBackwardParams& p, float beta) {
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  return beta;
}
