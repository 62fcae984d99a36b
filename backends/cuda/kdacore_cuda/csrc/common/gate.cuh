// From the raw gate input to the decay of one token and channel, in log2, in float32 throughout.
#pragma once

#include "common/ptx.cuh"
#include "generated/constants.cuh"

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
// Lowest log2 decay of one step. 2^-126 is the smallest normal float32, so anything smaller is zero
// anyway; the limit keeps sums over a chunk accurate.
constexpr float LOWEST_STEP = -126.0f;

constexpr float LARGEST = 3.4028234663852886e38f;  // float32

constexpr float LARGEST_BF16 = 3.3895313892515355e38f;

__device__ __forceinline__ float limit(float x, float largest) {
  return min_or_nan(max_or_nan(x, -largest), largest);
}

// A head's rate, exp(A_log): 0 for -inf, the largest float32 for what is larger.
__device__ __forceinline__ float rate_of(float A_log) {
  return min_or_nan(exp2_fast(LOG2E * A_log), LARGEST);
}
// -rate in units of log2. It stays finite, as zero times infinity would be NaN.
__device__ __forceinline__ float slope_of(float rate) { return max_or_nan(-LOG2E * rate, -LARGEST); }
// What a rate of 0 leaves of an input, infinite ones included: 0, or NaN.
__device__ __forceinline__ float nothing_of(float x) { return min_or_nan(fabsf(x), 0.0f); }
template <int M, int N>
__device__ __forceinline__ void scale_by_zero(float (&x)[M][N]) {
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) x[i][j] = nothing_of(x[i][j]);
  }
}
// dt_bias, held finite: an infinite gate input decides.
__device__ __forceinline__ float held_bias(float bias) { return limit(bias, LARGEST); }

// log2(1 + e) / e for e in [0, 1], relative error 1.4e-6. lg2(1 + e) would lose the small e of slow gates.
__device__ __forceinline__ float log2p_ratio(float e) {
  float p = 0.020401183f;
  p = p * e + -0.095797556f;
  p = p * e + 0.21528457f;
  p = p * e + -0.33908906f;
  p = p * e + 0.47766839f;
  p = p * e + -0.72115948f;
  return p * e + 1.4426932f;
}
// softplus in units of log(2): log2(1 + 2^y), relative error 1.4e-6 of its distance from max(y, 0).
__device__ __forceinline__ float softplus2(float y) {
  const float e = exp2_fast(-fabsf(y));
  return log2p_ratio(e) * e + fmaxf(y, 0.0f);
}

// A large rate makes much of a softplus that is no normal float32. But where anything is left of the state, that
// softplus is exp(x), so its rate is held to 2^24, and what that takes away is added to the input: within 1e-5 of the
// same step.
constexpr float LARGEST_SOFTPLUS_A_LOG = 16.635532f;  // log(2^24)
constexpr float LARGEST_A_LOG = 88.722839f;           // log(LARGEST)
__device__ __forceinline__ float softplus_rate_of(float A_log) {
  return rate_of(min_or_nan(A_log, LARGEST_SOFTPLUS_A_LOG));
}
__device__ __forceinline__ float softplus_shift_of(float A_log) {
  return fmaxf(fminf(A_log, LARGEST_A_LOG) - LARGEST_SOFTPLUS_A_LOG, 0.0f);
}

// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }
