// The gradient of a value head's gate in unit_grads, from what both sides have added up. One warp, two tokens a lane.
#pragma once

#include "sm90/gated_delta/grads_beta.cuh"
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

// What a lane's two tokens get. `of_states`: what all do.
__device__ __forceinline__ void sum_decay_gradients(float (&d)[2], u32 sums, float of_states, int lane) {
  const float2 q = load_shared2(sums + OFFSET(DecaySums, tokens[QUERIES]) + 8 * lane),
               k = load_shared2(sums + OFFSET(DecaySums, tokens[KEYS]) + 8 * lane);
  d[0] = q.x + k.x + of_states, d[1] = q.y + k.y + of_states;
}

// The gradient of a gate's input from `d`, that of the natural logarithm of a token's decay, cut off at the largest
// number of g's type; what it adds to A_log's, times SUM_SCALE.
__device__ __forceinline__ float gate_gradient(const GatedDeltaParams& p, const HeadGate& gate, float x,
                                               float d, float& A_log) {
  const float largest = largest_of(p.g_type);
  if (p.gate == GATE_LOG) return limit(log_gradient(d, 1.0f, x, LOWEST_STEP), largest);
  x = rated_input(gate.rate, x + gate.bias);
  float of_rate = 0.0f;
  if (p.gate == GATE_SIGMOID) {
    d = limit(sigmoid_gradient<false>(d, x, gate.rate, slope_of(gate.rate), LOG2E * p.lower_bound,
                                      -p.lower_bound, LOWEST_STEP, of_rate),
              largest);
    A_log += SUM_SCALE * (d == 0.0f ? 0.0f : limit(d * x, LARGEST));  // 0 whatever the input
    return d;
  }
  d = limit(softplus_gradient(d, 1.0f, x, gate.rate, LOWEST_STEP, of_rate), largest);
  A_log += SUM_SCALE * limit(LN2 * of_rate, LARGEST);
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
    const float x = gate_gradient(p, gate, from_bits(inputs.g[i], p.g_type), d[i], of_A);
    store_scalar(p.dg, (u.batch * p.T + u.first + 2 * lane + i) * p.HV + hv, p.g_type, x);
    of_bias += SUM_SCALE * x;
  }
  of_A = add_over_warp(of_A);
  of_bias = add_over_warp(of_bias);
  if (lane == 0) {
    const long long at = u.slot * p.HV + hv;
    if (p.dA_part) reinterpret_cast<float*>(p.dA_part)[at] = of_A;
    if (p.dbias_part) reinterpret_cast<float*>(p.dbias_part)[at] = of_bias;
  }
}

// Half of the product of two images of states.
__device__ __forceinline__ float multiply_states(u32 left, u32 right, int part, const Lane& l) {
  Diagonal d = {};
#pragma unroll 2
  for (int n = 0; n < 8; ++n) {
    const u32 half = (n & 1) * (STATE_BYTES / 2);
    add_rows_product(d, left + half, right + half, 4 * part + (n >> 1), l.lane);
  }
  return add_over_warp(has_row(l) ? row_sum(d, 0, l) + row_sum(d, 1, l) : 0.0f);
}

// The two warps that finish gates and betas; the second one ends a gate.
__device__ __forceinline__ void finish_gates(const GatedDeltaBackwardParams& p, u32 shared, int warp) {
  const Lane l = make_lane(warp);
  Position at = {shared};
  each_unit(
      p, at,
      [&](const KeyUnit& u, int hv, bool, bool is_last) {
        GateInputs inputs;
        if (warp) inputs = load_gate(p, u, hv, l.lane);
        const float last =
            exp2_fast(load_shared1(at.head_scalars() + OFFSET(HeadScalars, sum) + 4 * (C - 1)));
        Lane rows = l;
#pragma unroll 1
        for (; rows.block < SIDE_WARPS; rows.block += GATE_WARPS)
          store_beta_gradients(p, u, hv, at.heads().stage(), at.head_scalars(), rows);
        if (is_last) {
          // Not before all have arrived for the unit before.
          barrier_wait(at.pairs().empty(), at.pairs().parity ^ 1);
          warp_arrive(at.pairs().empty(), l.lane);
        } else {
          warp_arrive(at.heads().empty(), l.lane);
        }
        at.states().wait_full();
        at.state_grads().wait_full();
        const float of_states = multiply_states(at.states().stage(), at.state_grads().stage(), warp, l);
        warp_arrive(at.states().empty(), l.lane);
        warp_arrive(at.state_grads().empty(), l.lane);
        if (warp == 0) {
          at.sums().wait_empty();
          if (l.lane == 0)
            store_shared(shared + OFFSET(SharedMemory, sums.of_states), __float_as_uint(of_states));
          warp_arrive(at.sums().full(), l.lane);
        } else {
          float d[2];
          at.sums().wait_full();
          const float other = load_shared1(shared + OFFSET(SharedMemory, sums.of_states));
          sum_decay_gradients(d, shared + OFFSET(SharedMemory, sums), last * (1.0f / GRADIENT_SCALE) * (other + of_states), l.lane);
          warp_arrive(at.sums().empty(), l.lane);
          store_gate_gradient(p, u, hv, inputs, d, l.lane);
        }
      },
      [&](const KeyUnit&) {
        warp_arrive(at.heads().empty(), l.lane);
        warp_arrive(at.keys().empty(), l.lane);
      });
}
