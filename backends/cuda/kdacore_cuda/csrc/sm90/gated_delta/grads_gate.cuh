// The gradient of a value head's gate in unit_grads, from what both sides have added up. One warp, two tokens a lane.
#pragma once

#include "sm90/gated_delta/grads_beta.cuh"

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

// What a lane's two tokens get: their own, what later ones have, and what all have. `sums`: DecaySums; `of_states`: the
// other half of the states' product.
__device__ __forceinline__ void sum_decay_gradients(float (&d)[2], u32 sums, float of_states, float last,
                                                    int lane) {
  const float2 q = load_shared2(sums + OFFSET(DecaySums, rows[QUERIES]) + 8 * lane),
               k = load_shared2(sums + OFFSET(DecaySums, rows[KEYS]) + 8 * lane);
  d[0] = q.x + k.x, d[1] = q.y + k.y;
  of_states += load_shared1(sums + OFFSET(DecaySums, of_states));
  const float4 of_keys = load_shared4(sums + OFFSET(DecaySums, of_keys));
  float later = d[0] + d[1];  // of this lane and all later ones
#pragma unroll
  for (int n = 1; n < 32; n <<= 1) {
    const float other = shuffle(later, (lane + n) & 31);
    if (lane + n < 32) later += other;
  }
  float after = shuffle(later, (lane + 1) & 31);
  if (lane == 31) after = 0.0f;
  after += last * of_states + (of_keys.x + of_keys.y + of_keys.z + of_keys.w);
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

// The two warps that finish the gates, half of the states' product each; the second one ends it.
__device__ __forceinline__ void finish_gates(const GatedDeltaBackwardParams& p, u32 shared, int warp,
                                             int lane) {
  const Lane l = {lane};
  Position at = make_position(shared);
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool, bool is_last) {
        GateInputs inputs;
        if (warp) inputs = load_gate(p, u, hv, lane);
        const float last =
            exp2_fast(load_shared1(at.head_scalars() + OFFSET(HeadScalars, sum) + 4 * (C - 1)));
        if (!is_last) release(at.heads, l);
        at.states.wait_full();
        at.state_grads.wait_full();
        const float of_states = add_over_warp(
            dot_states(at.states.stage(), at.state_grads.stage(), 32 * warp + lane, 32 * GATE_WARPS));
        release(at.states, l);
        release(at.state_grads, l);
        if (warp == 0) {
          at.sums.wait_empty();
          if (lane == 0)
            store_shared(shared + OFFSET(SharedMemory, sums.of_states), __float_as_uint(of_states));
          warp_arrive(at.sums.full(), lane);
        } else {
          float d[2];
          at.sums.wait_full();
          sum_decay_gradients(d, shared + OFFSET(SharedMemory, sums), of_states, last, lane);
          warp_arrive(at.sums.empty(), lane);
          store_gate_gradient(p, u, hv, inputs, d, lane);
        }
        at.sums.next();
      },
      [&](const KeyUnit&) {
        release(at.heads, l);
        release(at.keys, l);
      });
}
