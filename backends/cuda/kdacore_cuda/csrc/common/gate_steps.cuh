// The log2 decay of one token and channel, a step, as the chunk kernels make it of the gate input and
// the channel's dt_bias.
//
// Heads whose rate (exp(A_log)) is 0, and softplus gates with large biases, need more instructions a
// step: `rare`. All others are spared them.
#pragma once

#include "common/gate.cuh"

struct Gate {
  int kind;
  // log2 decay of one unit of the gate (of softplus2 for the softplus); its inverse for the sigmoid.
  float unit;
  float slope;  // -log2(e) exp(A_log)
  float shift;  // of the softplus, to be added to the bias
  bool rare;
};

// BOUNDED_KIND: it is no softplus.
template <bool BOUNDED_KIND>
__device__ __forceinline__ Gate make_gate(int kind, float A_log, float inverse_of_bound) {
  const bool softplus = !BOUNDED_KIND && kind == GATE_SOFTPLUS;
  const float rate = softplus ? softplus_rate_of(A_log) : rate_of(A_log);
  const float unit = softplus ? -rate : max_or_nan(LN2 * inverse_of_bound, -LARGEST);
  return {kind, unit, slope_of(rate), softplus ? softplus_shift_of(A_log) : 0.0f,
          kind != GATE_LOG && rate == 0.0f};
}

// A softplus takes log2(e) (x + bias). Of usual biases that is log2(e) x + (log2(e) bias), an instruction for each step,
// so that product is what is stored in shared memory; of rare gates, the bias. The lowest bit of the first of 32
// channels' numbers says which.
constexpr float LARGEST_USUAL_BIAS = 2048.0f;  // rounding moves a step by at most 2e-4 of itself
__device__ __forceinline__ bool is_large_bias(float bias) { return !(fabsf(bias) <= LARGEST_USUAL_BIAS); }
// `bias`: with the gate's shift. `rare`: the gate, or for a bias of the warp's.
__device__ __forceinline__ float softplus_bias(bool rare, float bias) {
  const u32 bits = __float_as_uint(rare ? bias : LOG2E * bias);
  return __uint_as_float((thread_index() & 31) == 0 ? (bits & ~1u) | rare : bits);
}
__device__ __forceinline__ bool is_rare_bias(u32 first) { return __float_as_uint(load_shared1(first)) & 1; }

// x: the sum of input and bias, of which a rate of 0 has left nothing.
__device__ __forceinline__ float sigmoid_step(const Gate& gate, float x) {
  return reciprocal(exp2_fast(x * gate.slope) * gate.unit + gate.unit);
}
// y: log2(e) times that.
__device__ __forceinline__ float softplus_step(const Gate& gate, float y) { return softplus2(y) * gate.unit; }
// With a rate of 0.
__device__ __forceinline__ float still_step(const Gate& gate) {
  return gate.kind == GATE_SOFTPLUS ? 0.0f : reciprocal(gate.unit + gate.unit);
}
