// A softplus's biases in shared memory, as the chunk kernels store them.
//
// Heads whose rate (exp(A_log)) is 0, and softplus gates with large biases, need more instructions a
// step: `rare`. All others are spared them.
#pragma once

#include "common/gate.cuh"

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
