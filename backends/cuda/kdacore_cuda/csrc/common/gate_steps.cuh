// The log2 decay of one token and channel, a step, as the chunk kernels make it of the gate input and
// the channel's dt_bias.
//
// The sigmoid and the softplus take (x + bias) times a factor of the head. Where bias factor is small,
// that is x factor + (bias factor), one instruction for each step. Otherwise the sum comes first
// (sum_first): products that overflow would cancel to NaN, and large ones would lose what is left of
// their sum.
#pragma once

#include "common/gate.cuh"

struct Gate {
  int kind;
  // log2 decay of one unit of the gate (of softplus2 for the softplus); its inverse for the sigmoid.
  float unit;
  float slope;     // -log2(e) exp(A_log)
  bool sum_first;  // the same in a warp
};

__device__ __forceinline__ Gate make_gate(int kind, float A_log, float inverse_of_bound) {
  const float rate = rate_of(A_log);
  const float unit = kind == GATE_SOFTPLUS ? -rate : max_or_nan(LN2 * inverse_of_bound, -LARGEST);
  return {kind, unit, slope_of(rate), false};
}

// With products up to this, rounding moves a step by at most 2e-4 of itself.
constexpr float LARGEST_PRODUCT = 4096.0f;
// Sums that come first are kept in this range, where a rate of 0 takes them to 0, and log2(e) times
// them is finite.
constexpr float LARGEST_SUM = 1.7014118346046923e38f;  // 2^127

__device__ __forceinline__ float bias_factor(const Gate& gate) {
  return gate.kind == GATE_SIGMOID ? gate.slope : LOG2E;
}
// An input that means no decay, where sums do not come first: bits of a float32, or of two bfloat16.
// About -1e30.
__device__ __forceinline__ u32 closed_input(const Gate& gate, bool is_float) {
  return gate.kind == GATE_LOG ? 0u : (is_float ? 0xf149f2cau : 0xf149f149u);
}
constexpr float SMALLEST_SLOPE = 1e-26f;  // closes with that input, with any product of a bias

__device__ __forceinline__ bool needs_sum_first(const Gate& gate, float bias) {
  // A rate of 0 times an infinite input would be NaN.
  return gate.kind != GATE_LOG && (!(fabsf(gate.slope) >= SMALLEST_SLOPE) ||
                                   !(fabsf(bias_factor(gate) * bias) <= LARGEST_PRODUCT));
}
// What a step is given as the channel's bias: the product, or the bias itself if the sum comes first.
__device__ __forceinline__ float given_bias(const Gate& gate, float bias) {
  return gate.sum_first ? bias : bias_factor(gate) * bias;
}
// The same where a warp's lanes have the channels whose steps the warp computes. Decides what comes
// first.
__device__ __forceinline__ float decide_bias(Gate& gate, float bias) {
  gate.sum_first = warp_any(needs_sum_first(gate, bias));
  return given_bias(gate, bias);
}

__device__ __forceinline__ float finite_sum(float x, float bias) { return limit(x + bias, LARGEST_SUM); }

// SUM_FIRST: of a gate whose sum_first is set. A choice of the caller's code: a branch in the steps of
// all other gates cost 2 to 3 % of a call.
template <bool SUM_FIRST>
__device__ __forceinline__ float sigmoid_step(const Gate& gate, float x, float bias) {
  const float product = SUM_FIRST ? finite_sum(x, bias) * gate.slope : x * gate.slope + bias;
  return reciprocal(exp2_fast(product) * gate.unit + gate.unit);
}
template <bool SUM_FIRST>
__device__ __forceinline__ float softplus_step(const Gate& gate, float x, float bias) {
  return softplus2(SUM_FIRST ? finite_sum(x, bias) * LOG2E : x * LOG2E + bias) * gate.unit;
}
