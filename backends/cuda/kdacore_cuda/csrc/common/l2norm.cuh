// The L2 norm of rows of q and k, and its gradient.
#pragma once

#include "common/ptx.cuh"

// 1 / |x| from the sum of squares.
__device__ __forceinline__ float inverse_norm(float squares) { return inverse_sqrt(squares + 1e-6f); }

// The gradient of x from d, that of y = x / |x| divided by `grow`: by d - less x. `norm`: 1 / |x|, 1 of rows that are
// not normalised; `sum`: that of d x over the channels.
struct NormGradient {
  float by, less;
};
__device__ __forceinline__ NormGradient norm_gradient(bool normalised, float norm, float sum, float grow) {
  const float by = norm * grow;
  return {by, normalised ? by * norm * (norm * sum) : 0.0f};
}
