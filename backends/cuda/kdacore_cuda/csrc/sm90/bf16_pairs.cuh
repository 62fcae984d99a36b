// Pairs of bfloat16. Like common/ptx.cuh: the emulator has the same function.
#pragma once

#include "common/ptx.cuh"

// The larger ones of two pairs; a number rather than NaN.
__device__ __forceinline__ u32 max_bf16(u32 x, u32 y) {
  u32 r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
