// Matrix products of a warp, sums over eight. Like common/ptx.cuh: the emulator has the same functions.
#pragma once

#include "common/ptx.cuh"

// d[16x8] = c[16x8] + a[16x8] b[8x8]. Operands are float32 numbers of which sign, exponent and the first ten bits
// behind the point count. Lane (g, t) has rows g and g + 8 of columns t and t + 4 of a (0: row g, column t; 1: row
// g + 8; 2 and 3: column t + 4), rows t and t + 4 of column g of b, and of c and d what mma_bf16() gives it.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// d[16x8] += a[16x8] b[8x8] of bfloat16: of the registers that mma_bf16() takes the first two of a, the first of b.
__device__ __forceinline__ void mma_bf16_half(float (&d)[4], u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b));
}
