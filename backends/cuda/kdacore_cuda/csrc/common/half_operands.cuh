// The 16-bit type of a kernel's operands and arrays: packing, unpacking, products of a warp.
//
// Macro from the host: HALF_F16, 1 for float16; 0, or none, for bfloat16.
#pragma once

#include "common/ptx.cuh"

#ifndef HALF_F16
#define HALF_F16 0
#endif

__device__ __forceinline__ u32 pack_half(float low, float high) {
  return HALF_F16 ? pack_f16(low, high) : pack_bf16(low, high);
}
// Of numbers that may be too large for float16: the largest one instead, as infinity times zero would be NaN.
__device__ __forceinline__ u32 pack_saturated(float low, float high) {
  return HALF_F16 ? pack_f16_saturated(low, high) : pack_bf16(low, high);
}
__device__ __forceinline__ float half_low(u32 x) {
  return HALF_F16 ? half_to_float((u16)x) : bf16_low(x);
}
__device__ __forceinline__ float half_high(u32 x) {
  return HALF_F16 ? half_to_float((u16)(x >> 16)) : bf16_high(x);
}
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (HALF_F16) {
    mma_f16(d, a, b0, b1);
  } else {
    mma_bf16(d, a, b0, b1);
  }
}
