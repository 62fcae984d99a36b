// Pairs of bfloat16. Like common/ptx.cuh: the emulator has the same functions.
#pragma once

#include "common/ptx.cuh"

// The larger ones of two pairs; a number rather than NaN.
__device__ __forceinline__ u32 max_bf16(u32 x, u32 y) {
  u32 r;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}
// Of a matrix of 8 x 8 numbers of which lane (g, t) has row g's columns 2t and 2t + 1: the same of the transposed one.
__device__ __forceinline__ u32 transpose(u32 x) {
  u32 r;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}
