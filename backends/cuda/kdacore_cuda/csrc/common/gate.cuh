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

// log(1 + e) for e in [0, 1], relative error 2e-7. lg2(1 + e) would lose the small e of slow gates.
__device__ __forceinline__ float log1p_unit(float e) {
  float p = 0.00525346f;
  p = p * e + -0.02958851f;
  p = p * e + 0.07836167f;
  p = p * e + -0.1367477f;
  p = p * e + 0.19111431f;
  p = p * e + -0.2484437f;
  p = p * e + 0.33319271f;
  p = p * e + -0.49999502f;
  p = p * e + 0.99999997f;
  return p * e;
}

// max(x, 0) + log(1 + exp(-|x|))
__device__ __forceinline__ float softplus(float x) {
  const float e = exp2_fast(-LOG2E * fabsf(x));
  return fmaxf(x, 0.0f) + log1p_unit(e);
}

// softplus in units of log(2): log2(1 + 2^y), relative error 1.4e-6 of its distance from max(y, 0).
__device__ __forceinline__ float softplus2(float y) {
  const float e = exp2_fast(-fabsf(y));
  float p = 0.020401183f;
  p = p * e + -0.095797556f;
  p = p * e + 0.21528457f;
  p = p * e + -0.33908906f;
  p = p * e + 0.47766839f;
  p = p * e + -0.72115948f;
  p = p * e + 1.4426932f;
  return p * e + fmaxf(y, 0.0f);
}

// 1 / (1 + exp(-x))
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2_fast(-LOG2E * x)); }
