// The 16-bit type of a training stage, HALF_F16 = 0 for bfloat16 and 1 for float16: packing,
// unpacking, products.
#pragma once

#include "common/ptx.cuh"

__device__ __forceinline__ u32 pack_half(float low, float high) {
  return HALF_F16 ? pack_f16(low, high) : pack_bf16(low, high);
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

__device__ __forceinline__ u32 word_of(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}
// Both halves of a word scaled.
__device__ __forceinline__ u32 scaled(u32 x, float a, float b) {
  return pack_half(half_low(x) * a, half_high(x) * b);
}
// Element e (0..7) of eight 16-bit values.
__device__ __forceinline__ float half_of(const uint4& x, int e) {
  const u32 w = word_of(x, e >> 1);
  return e & 1 ? half_high(w) : half_low(w);
}
// Element e (0..7) of eight floats.
__device__ __forceinline__ float float_of(const uint4 (&x)[2], int e) {
  return __uint_as_float(word_of(x[e >> 2], e & 3));
}
