// The inverse of a 16 x 16 unit lower triangle by float32 substitution, a column a lane.
#pragma once

#include "common/ptx.cuh"

// Column j. at(i, m): address in shared memory of columns m to m + 3 of row i; values on and right
// of the diagonal are not used.
template <class At>
__device__ __forceinline__ void invert_column(float (&x)[16], int j, At at) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float even = i == j ? 1.0f : 0.0f, odd = 0.0f;
#pragma unroll
    for (int m = 0; m < i; m += 4) {
      const float4 a = load_shared4(at(i, m));
      even -= a.x * x[m];
      if (m + 1 < i) odd -= a.y * x[m + 1];
      if (m + 2 < i) even -= a.z * x[m + 2];
      if (m + 3 < i) odd -= a.w * x[m + 3];
    }
    x[i] = even + odd;
  }
}
