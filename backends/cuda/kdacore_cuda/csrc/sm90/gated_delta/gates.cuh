// The gate of a head with one decay a token: log2 of each token's decay.
#pragma once

#include "common/gate.cuh"
#include "common/loads.cuh"
#include "generated/gated_delta_params.cuh"

struct HeadGate {
  float rate, bias;  // bias with the gate's shift
};
__device__ __forceinline__ HeadGate make_gate(const GatedDeltaParams& p, float A_log, float bias) {
  return {gate_rate(p.gate, A_log), held_bias(bias) + gate_shift(p.gate, A_log)};
}
__device__ __forceinline__ float log2_decay(const GatedDeltaParams& p, const HeadGate& gate, float x) {
  if (p.gate == GATE_LOG) return max_or_nan(LOG2E * x, LOWEST_STEP);
  x = rated_input(gate.rate, x + gate.bias);
  const float step = p.gate == GATE_SOFTPLUS ? softplus_step(-gate.rate, LOG2E * x)
                                             : sigmoid_step(LOG2E * p.lower_bound, slope_of(gate.rate), x);
  return max_or_nan(step, LOWEST_STEP);
}

constexpr float LEAST_BETA = 0x1p-64f;  // FLAG_NONZERO_BETA
__device__ __forceinline__ float activate_beta(const GatedDeltaParams& p, float beta) {
  if (p.flags & FLAG_BETA_SIGMOID) beta = sigmoid(beta);
  if (p.flags & FLAG_NEG_EIGVAL) beta *= 2.0f;
  if (p.flags & FLAG_NONZERO_BETA && fabsf(beta) < LEAST_BETA) return beta < 0.0f ? -LEAST_BETA : LEAST_BETA;
  return beta;
}

// This lane's two neighbouring tokens of the chunk, in the order of tokens over the warp: log2 decays summed from the
// chunk's start. What a token has depends on earlier ones alone.
__device__ __forceinline__ void sum_decays(float (&x)[2], int lane) {
  x[1] += x[0];
  float before = x[1];
#pragma unroll
  for (int n = 1; n < 32; n <<= 1) {
    const float other = shuffle(before, (lane - n) & 31);
    if (lane >= n) before += other;
  }
  const float earlier = shuffle(before, (lane - 1) & 31);
  if (lane) x[0] += earlier, x[1] += earlier;
}
