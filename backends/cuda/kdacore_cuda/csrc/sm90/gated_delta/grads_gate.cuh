// The gradient of a value head's gate in unit_grads, from what both sides have added up. One warp, two tokens a lane.
#pragma once

#include "sm90/gated_delta/gates.cuh"
#include "sm90/gated_delta/grads_rows.cuh"

// Loaded ahead, as it takes long.
struct GateInputs {
  float A_log, bias;
  u32 g[2];
};
__device__ __forceinline__ GateInputs load_gate(const GatedDeltaBackwardParams& p, const KeyUnit& u, int hv,
                                                int lane) {
  GateInputs x = {};
  if (p.A_log) x.A_log = __uint_as_float(load_global4(p.A_log + 4ll * hv));
  if (p.dt_bias) x.bias = load_scalar(p.dt_bias, hv, p.bias_type);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * lane + i < u.rows)
      x.g[i] = load_bits(
          p.g + type_size(p.g_type) * (u.batch * p.g_sb + (u.first + 2 * lane + i) * p.g_st + hv * p.g_sh),
          p.g_type);
  }
  return x;
}

__device__ __forceinline__ float largest_of(int type) {
  return type == TYPE_FLOAT32 ? LARGEST : type == TYPE_BFLOAT16 ? LARGEST_BF16 : 65504.0f;
}

// What a lane's two tokens get: their own, what later ones have, and what all have. `sums`: DecaySums.
__device__ __forceinline__ void sum_decay_gradients(float (&d)[2], u32 sums, float last, int lane) {
  d[0] = d[1] = 0.0f;
#pragma unroll
  for (int role = 0; role < ROLES; ++role) {
    const float2 x = load_shared2(sums + OFFSET(DecaySums, rows) + 4 * C * role + 8 * lane);
    d[0] += x.x, d[1] += x.y;
  }
  const float4 of_states = load_shared4(sums + OFFSET(DecaySums, of_states)),
               of_keys = load_shared4(sums + OFFSET(DecaySums, of_keys));
  float later = d[0] + d[1];  // of this lane and all later ones
#pragma unroll
  for (int n = 1; n < 32; n <<= 1) {
    const float other = shuffle(later, (lane + n) & 31);
    if (lane + n < 32) later += other;
  }
  float after = shuffle(later, (lane + 1) & 31);
  if (lane == 31) after = 0.0f;
  after += last * (of_states.x + of_states.y + of_states.z + of_states.w) +
           (of_keys.x + of_keys.y + of_keys.z + of_keys.w);
  d[1] += after;
  d[0] += d[1];
}

// `d`: the gradient of the natural logarithm of a token's decay.
__device__ __forceinline__ float gate_gradient(const GatedDeltaParams& p, const HeadGate& gate, float x,
                                               float d, float& A_log) {
  if (p.gate == GATE_LOG) return log_gradient(d, 1.0f, x, LOWEST_STEP);
  x = rated_input(gate.rate, x + gate.bias);
  if (p.gate == GATE_SIGMOID)
    return sigmoid_gradient<false>(d, x, gate.rate, slope_of(gate.rate), LOG2E * p.lower_bound,
                                   -p.lower_bound, LOWEST_STEP, A_log);
  float of_rate = 0.0f;
  d = softplus_gradient(d, 1.0f, x, gate.rate, LOWEST_STEP, of_rate);
  A_log += LN2 * of_rate;
  return d;
}

// `d`: gradients of the decays of a lane's two tokens.
__device__ __forceinline__ void store_gate_gradient(const GatedDeltaBackwardParams& p, const KeyUnit& u,
                                                    int hv, const GateInputs& inputs, const float (&d)[2],
                                                    int lane) {
  const HeadGate gate = make_gate(p, inputs.A_log, inputs.bias);
  float of_bias = 0.0f, of_A = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (2 * lane + i >= u.rows) continue;
    const float x =
        limit(gate_gradient(p, gate, from_bits(inputs.g[i], p.g_type), d[i], of_A), largest_of(p.g_type));
    store_scalar(p.dg, (u.batch * p.T + u.first + 2 * lane + i) * p.HV + hv, p.g_type, x);
    of_bias += SUM_SCALE * x;
  }
  of_A = add_over_warp(SUM_SCALE * limit(of_A, LARGEST));
  of_bias = add_over_warp(of_bias);
  if (lane == 0) {
    const long long at = u.slot * p.HV + hv;
    if (p.dA_part) reinterpret_cast<float*>(p.dA_part)[at] = of_A;
    if (p.dbias_part) reinterpret_cast<float*>(p.dbias_part)[at] = of_bias;
  }
}

// The gradient of a token's beta from u . dv; `beta` is what the recurrence used.
__device__ __forceinline__ float beta_gradient(const GatedDeltaParams& p, float product, float beta) {
  const float most = p.flags & FLAG_NEG_EIGVAL ? 2.0f : 1.0f;
  if (p.flags & FLAG_BETA_SIGMOID) return product * (1.0f - beta / most);
  return product / beta * most;
}
