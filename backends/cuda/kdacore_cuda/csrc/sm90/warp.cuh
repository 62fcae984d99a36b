// Functions for warps and pairs of warps. Like ptx.cuh: the emulator has the same functions.
#pragma once

#include "common/ptx.cuh"

// Tells the compiler that all lanes hold the same value.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }
// A barrier of the two warps of a pair.
__device__ __forceinline__ void sync_pair(int barrier) {
  asm volatile("bar.sync %0, 64;" ::"r"(barrier) : "memory");
}
// Elementwise product of two pairs of bfloat16.
__device__ __forceinline__ u32 multiply_bf16(u32 x, u32 y) {
  u32 r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
