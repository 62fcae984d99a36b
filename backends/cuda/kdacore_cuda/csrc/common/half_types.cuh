// Words and pieces of numbers of the 16-bit type of a training stage.
#pragma once

#include "common/half_operands.cuh"

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
