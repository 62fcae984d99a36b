// The product with a triangle's inverse that both scans of chunk forward have.
#pragma once

#include "common/ptx.cuh"

// Of four tokens 2t, 2t + 1 and 8 later, one float each.
struct Columns {
  float c[2][2];
};

// w = r T residual as a left operand (16 columns of V by 16 tokens). `inverse` is r T below the
// diagonal, r the inverse norms of k; the diagonal of T is 1. `residual` is overwritten.
__device__ __forceinline__ void multiply_inverse(float (&residual)[2][4], const Columns& r,
                                                 const u32 (&inverse)[4], u32 (&w)[4]) {
  const u32 a[4] = {pack_bf16(residual[0][0], residual[0][1]), pack_bf16(residual[0][2], residual[0][3]),
                    pack_bf16(residual[1][0], residual[1][1]), pack_bf16(residual[1][2], residual[1][3])};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) residual[i][e] *= r.c[i][e & 1];
  }
  mma_bf16(residual[0], a, inverse[0], inverse[1]);
  mma_bf16(residual[1], a, inverse[2], inverse[3]);
  w[0] = pack_bf16(residual[0][0], residual[0][1]);
  w[1] = pack_bf16(residual[0][2], residual[0][3]);
  w[2] = pack_bf16(residual[1][0], residual[1][1]);
  w[3] = pack_bf16(residual[1][2], residual[1][3]);
}
