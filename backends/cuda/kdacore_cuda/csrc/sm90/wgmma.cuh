// Warpgroup products (wgmma, sm_90a): four warps, the left operand in their registers, the right
// one in shared memory, asynchronous until waited for. Like ptx.cuh: the emulator has the same
// functions.
#pragma once

#include "common/half_operands.cuh"
#include "sm90/operand_descriptor.cuh"

// The types of both operands.
#if HALF_F16
#define KDA_HALF "f16.f16"
#else
#define KDA_HALF "bf16.bf16"
#endif

// Accumulators as operands of an instruction: tiles from the i-th on, and the names of the first 8,
// 16, 32 and 64 numbers.
#define KDA_TILE(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define KDA_TILES2(d, i) KDA_TILE(d, i), KDA_TILE(d, i + 1)
#define KDA_TILES4(d, i) KDA_TILES2(d, i), KDA_TILES2(d, i + 2)
#define KDA_TILES8(d, i) KDA_TILES4(d, i), KDA_TILES4(d, i + 4)
#define KDA_TILES12(d, i) KDA_TILES8(d, i), KDA_TILES4(d, i + 8)
#define KDA_TILES16(d, i) KDA_TILES8(d, i), KDA_TILES8(d, i + 8)
#define KDA_NAMES8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KDA_NAMES16 KDA_NAMES8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KDA_NAMES32 \
  KDA_NAMES16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KDA_NAMES48                                                                                      \
  KDA_NAMES32                                                                                            \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KDA_NAMES64                                                                                        \
  KDA_NAMES32                                                                                              \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KDA_LEFT(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accumulators while a product may be writing them.
template <int N>
__device__ __forceinline__ void fence_registers(float (&d)[N][4]) {
#pragma unroll
  for (int i = 0; i < N; ++i)
    asm volatile("" : "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])::"memory");
}

// d[64 x N] (+)= a[64 x 16] b[16 x N]; `add` 0 starts from zero.
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (&d)[2][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k16.f32." KDA_HALF " "
      "{" KDA_NAMES8 "}, {%8, %9, %10, %11}, %12, p, 1, 1, %14; }"
      : KDA_TILES2(d, 0)
      : KDA_LEFT(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (&d)[4][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32." KDA_HALF " "
      "{" KDA_NAMES16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, %22; }"
      : KDA_TILES4(d, 0)
      : KDA_LEFT(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (&d)[8][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." KDA_HALF " "
      "{" KDA_NAMES32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38; }"
      : KDA_TILES8(d, 0)
      : KDA_LEFT(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma(float (&d)[16][4], const u32 (&a)[4], u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %69, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." KDA_HALF " "
      "{" KDA_NAMES64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70; }"
      : KDA_TILES16(d, 0)
      : KDA_LEFT(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
// d[64 x 128] -= a[64 x 16] b[16 x 128], the sum over rows of b.
__device__ __forceinline__ void warpgroup_subtract(float (&d)[16][4], const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." KDA_HALF " {" KDA_NAMES64
               "}, {%64, %65, %66, %67}, %68, 1, -1, 1, 1;"
               : KDA_TILES16(d, 0)
               : KDA_LEFT(a), "l"(b));
}

// The same with the left operand in shared memory, 64 rows of it along the sum (not transposed).
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma_shared(float (&d)[12][4], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %50, 0; wgmma.mma_async.sync.aligned.m64n96k16.f32." KDA_HALF " "
      "{" KDA_NAMES48 "}, %48, %49, p, 1, 1, 0, %51; }"
      : KDA_TILES12(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma_shared(float (&d)[8][4], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." KDA_HALF " "
      "{" KDA_NAMES32 "}, %32, %33, p, 1, 1, 0, %35; }"
      : KDA_TILES8(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
template <int TRANSPOSED>
__device__ __forceinline__ void warpgroup_mma_shared(float (&d)[16][4], u64 a, u64 b, int add) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." KDA_HALF " "
      "{" KDA_NAMES64 "}, %64, %65, p, 1, 1, 0, %67; }"
      : KDA_TILES16(d, 0)
      : "l"(a), "l"(b), "r"(add), "n"(TRANSPOSED));
}
