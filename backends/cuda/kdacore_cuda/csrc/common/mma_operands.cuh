// Float32 sums as operands of a product: rounded, or in two bfloat16 parts, together about 16 bits.
#pragma once

#include "common/half_operands.cuh"

// Two neighbouring tiles (8 columns each) as a left operand.
__device__ __forceinline__ void pack_tiles(const float (&x)[4], const float (&y)[4], u32 (&a)[4]) {
  a[0] = pack_saturated(x[0], x[1]);
  a[1] = pack_saturated(x[2], x[3]);
  a[2] = pack_saturated(y[0], y[1]);
  a[3] = pack_saturated(y[2], y[3]);
}

__device__ __forceinline__ void split(float x, float y, u32& high, u32& low) {
  high = pack_bf16(x, y);
  low = pack_bf16(x - bf16_low(high), y - bf16_high(high));
}

// A 16 x 16 operand in two parts.
struct Split {
  u32 high[4], low[4];
};
__device__ __forceinline__ Split split_tiles(const float (&x)[4], const float (&y)[4]) {
  Split s;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* from = &(i < 2 ? x : y)[2 * (i & 1)];
    split(from[0], from[1], s.high[i], s.low[i]);
  }
  return s;
}

// d += a b, without the product of the two low parts.
__device__ __forceinline__ void mma_split(float (&d)[4], const Split& a, u32 high0, u32 high1, u32 low0,
                                          u32 low1) {
  mma_bf16(d, a.low, high0, high1);
  mma_bf16(d, a.high, low0, low1);
  mma_bf16(d, a.high, high0, high1);
}
