// Rounded numbers times factors of float32.
#pragma once

#include "common/ptx.cuh"

// Two bfloat16 numbers.
__device__ __forceinline__ u32 scaled_pair(u32 x, float low, float high) {
  return pack_bf16(bf16_low(x) * low, bf16_high(x) * high);
}
// A piece of eight.
__device__ __forceinline__ uint4 scaled_piece(uint4 x, const float (&factor)[8]) {
  x.x = scaled_pair(x.x, factor[0], factor[1]);
  x.y = scaled_pair(x.y, factor[2], factor[3]);
  x.z = scaled_pair(x.z, factor[4], factor[5]);
  x.w = scaled_pair(x.w, factor[6], factor[7]);
  return x;
}
