// What gates and betas make of a unit's inputs.
#pragma once

#include "common/gate.cuh"
#include "sm90/chunk_backward/workspace.cuh"

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

// A step is 1 / (2^(slope x + bias) unit + unit), x the input; or unit softplus2(log2(e) x + bias);
// or x in log2. Those that may be less than the floor are cut off there.
struct Gate {
  int kind;
  float unit, slope, floor;
};
// A head's A_log; 0 without one.
__device__ __forceinline__ float load_A_log(const ChunkBackwardParams& p, int hv) {
  return p.A_log ? __uint_as_float(load_global4(p.A_log + 4ll * hv)) : 0.0f;
}
__device__ __forceinline__ Gate gate_from(const ChunkBackwardParams& p, float A_log) {
  const float a = exp2_fast(LOG2E * A_log);
  return {p.gate, p.gate == GATE_SOFTPLUS ? -a : LN2 * reciprocal(p.lower_bound), -LOG2E * a, p.floor};
}
__device__ __forceinline__ Gate make_gate(const ChunkBackwardParams& p, int hv) {
  return gate_from(p, load_A_log(p, hv));
}
// dt_bias of a channel in the units of what it is added to.
__device__ __forceinline__ float gate_bias(const Gate& gate, float bias) {
  return (gate.kind == GATE_SOFTPLUS ? LOG2E : gate.slope) * bias;
}
__device__ __forceinline__ float gate_bias(const ChunkBackwardParams& p, const Gate& gate, int hv,
                                           int channel) {
  return p.dt_bias ? gate_bias(gate, load_scalar(p.dt_bias, (long long)hv * K + channel, p.bias_type)) : 0.0f;
}
__device__ __forceinline__ float log_step(const Gate& gate, float x) { return fmaxf(x * LOG2E, gate.floor); }
__device__ __forceinline__ float sigmoid_step(const Gate& gate, float x, float bias) {
  return reciprocal(exp2_fast(x * gate.slope + bias) * gate.unit + gate.unit);
}
__device__ __forceinline__ float softplus_step(const Gate& gate, float x, float bias) {
  return fmaxf(softplus2(x * LOG2E + bias) * gate.unit, gate.floor);
}

__device__ __forceinline__ float activate_beta(const ChunkBackwardParams& p, float beta) {
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  return beta;
}
