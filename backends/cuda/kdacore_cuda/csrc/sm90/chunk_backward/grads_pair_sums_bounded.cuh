// Pairs where one anchor serves half a chunk.
#pragma once

#include "sm90/chunk_backward/grads_pair_sums.cuh"

// d += a times a block of pairs, from row `i` and column `j` of its image: the sum over its
// columns, or over its rows.
template <int OVER_ROWS>
__device__ __forceinline__ void add_pairs(float (&d)[4][4], const Operand& a, u32 image, int i, int j,
                                          int add = 1) {
  const u32 at = image + IMAGE_ROW * i + 2 * j;
  const u64 block = OVER_ROWS ? columns_operand(at) : rows_operand(at);
#pragma unroll
  for (int kk = 0; kk < 2; ++kk) {
    warpgroup_mma<OVER_ROWS>(d, a[kk], block + descriptor_step(kk * (OVER_ROWS ? 16 * IMAGE_ROW : 32)),
                             kk ? 1 : add);
  }
}

// Pairs across the halves, and the sum over tokens of sk cs while cs is the state's part, before the half's own pairs.
template <int TOKEN_HALF>
__device__ __forceinline__ void add_across(Accumulators& d, const Operands&, float, u32 shared,
                                           const Lane& l) {
  {
    Operand sk;
    load_operand(sk, shared + operand_at(OFFSET(SharedMemory, sk), 2 * TOKEN_HALF + l.channel_half), l);
    sum_tokens(shared + OFFSET(SharedMemory, suffix_sums[TOKEN_HALF]), l,
               [&](int j, int e) { return element(sk, j, e) * d.cs[j][e]; });
  }
  if constexpr (TOKEN_HALF) {
    Operand sk;
    load_operand(sk, shared + operand_at(OFFSET(SharedMemory, sk), l.channel_half), l);
    fence_registers(d.aq);
    fence_registers(d.ax);
    warpgroup_fence();
    add_pairs<0>(d.aq, sk, shared + OFFSET(SharedMemory, dA), HALF, 0);
    add_pairs<0>(d.ax, sk, shared + OFFSET(SharedMemory, dL), HALF, 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(d.aq);
    fence_registers(d.ax);
  } else {
    Operand zq, zb;
    load_operand(zq, shared + operand_at(OFFSET(SharedMemory, zq), l.channel_half), l);
    load_operand(zb, shared + operand_at(OFFSET(SharedMemory, zb), l.channel_half), l);
    fence_registers(d.cs);
    warpgroup_fence();
    add_pairs<1>(d.cs, zq, shared + OFFSET(SharedMemory, dA), HALF, 0);
    add_pairs<1>(d.cs, zb, shared + OFFSET(SharedMemory, dL), HALF, 0);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(d.cs);
  }
}

// Starts the products of the half's own pairs.
template <int TOKEN_HALF>
__device__ __forceinline__ void start_own(Accumulators& d, float (&cy)[4][4], const Operands& o, u32 (&)[4],
                                          u32 shared, const Lane& l) {
  constexpr int first = HALF * TOKEN_HALF;
  fence_registers(cy);
  fence_registers(d.aq);
  fence_registers(d.ax);
  warpgroup_fence();
  add_pairs<1>(cy, o.zq, shared + OFFSET(SharedMemory, dA), first, first, 0);
  add_pairs<1>(cy, o.zb, shared + OFFSET(SharedMemory, dL), first, first);
  warpgroup_commit();
  add_pairs<0>(d.aq, o.yk, shared + OFFSET(SharedMemory, dA), first, first);
  add_pairs<0>(d.ax, o.yk, shared + OFFSET(SharedMemory, dL), first, first);
  warpgroup_commit();
}
