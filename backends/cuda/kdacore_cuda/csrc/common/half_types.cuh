// The 16-bit type of a training stage, HALF_F16 = 0 for bfloat16 and 1 for float16: packing,
// unpacking, products.
#pragma once

#include "common/ptx.cuh"

#ifdef KDACORE_EMULATE
#include <emulate_half.h>
#else

__device__ __forceinline__ u32 pack_f16(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
// d[16x8] += a[16x16] b[16x8], float16 operands, float32 sums.
__device__ __forceinline__ void mma_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void load_eight(u32 (&r)[2], const void* p, bool real) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %3, 0; @p ld.global.nc.v2.b32 {%0, %1}, [%2]; }"
               : "+r"(r[0]), "+r"(r[1])
               : "l"(p), "r"((int)real));
}
__device__ __forceinline__ void store_eight(u64 address, u32 x, u32 y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ int shuffle_int(int x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }

#endif  // KDACORE_EMULATE

__device__ __forceinline__ u32 pack_half(float low, float high) {
#if HALF_F16
  return pack_f16(low, high);
#else
  return pack_bf16(low, high);
#endif
}
__device__ __forceinline__ float half_low(u32 x) {
#if HALF_F16
  return half_to_float((u16)x);
#else
  return bf16_low(x);
#endif
}
__device__ __forceinline__ float half_high(u32 x) {
#if HALF_F16
  return half_to_float((u16)(x >> 16));
#else
  return bf16_high(x);
#endif
}
__device__ __forceinline__ void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if HALF_F16
  mma_f16(d, a, b0, b1);
#else
  mma_bf16(d, a, b0, b1);
#endif
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
