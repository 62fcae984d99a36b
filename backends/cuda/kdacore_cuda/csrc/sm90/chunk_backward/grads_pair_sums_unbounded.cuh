// Pairs where an anchor serves a quarter of a chunk.
//
// Pairs of different quarters decay over the quarters between: these decays (D), one a channel, are
// applied to float32 sums, so that the operands are those of each quarter, with sk up to its end:
//
//   a of a quarter  = (... (the state's part D_0 + pairs with 0) D_1 + pairs with 1 ...)
//   cs of a quarter = pairs with the next + D_next (pairs with the one after + ... D_3 (the state's part))
//
// Sums over the other half come first, as where an anchor serves a half.
#pragma once

#include "sm90/chunk_backward/grads_pair_sums.cuh"

typedef float Columns[2][4];  // a quarter's part of a half's accumulators
__device__ __forceinline__ Columns& quarter_of(float (&d)[4][4], int quarter) {
  return *reinterpret_cast<Columns*>(&d[2 * quarter]);
}

// The decay of a quarter; `unit` is 2^-centre.
__device__ __forceinline__ float quarter_decay(u32 shared, int quarter, int r, float unit, const Lane& l) {
  return load_shared1(anchor_end_address(shared, quarter, l.channel + 8 * r)) * unit;
}
// Columns of the half's quarters from `first` to `last` times the decay of quarter `of`.
__device__ __forceinline__ void decay(float (&d)[4][4], int first, int last, int of, u32 shared, float unit,
                                      const Lane& l) {
  const float by[2] = {quarter_decay(shared, of, 0, unit, l), quarter_decay(shared, of, 1, unit, l)};
  each([&](int j, int e) {
    if (j >> 1 >= first && j >> 1 <= last) d[j][e] *= by[e >> 1];
  });
}
__device__ __forceinline__ u64 rows_block(u32 image, int i, int j) {
  return rows_operand(image + IMAGE_ROW * i + 2 * j);
}
__device__ __forceinline__ u64 columns_block(u32 image, int i, int j) {
  return columns_operand(image + IMAGE_ROW * i + 2 * j);
}

// Pairs across the halves, and the sums over tokens that earlier steps need of the terms so far,
// before the half's own pairs.
template <int TOKEN_HALF>
__device__ __forceinline__ void add_across(Accumulators& d, const Operands&, float centre, u32 shared,
                                           const Lane& l) {
  const float unit = power_of_two(-(int)centre);
  const u32 dA = shared + OFFSET(SharedMemory, dA), dL = shared + OFFSET(SharedMemory, dL);
  {
    float left[2][2];  // from the end of each quarter of the half to the chunk's
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      left[1][r] =
          TOKEN_HALF ? 1.0f : quarter_decay(shared, 2, r, unit, l) * quarter_decay(shared, 3, r, unit, l);
      left[0][r] = left[1][r] * quarter_decay(shared, 2 * TOKEN_HALF + 1, r, unit, l);
    }
    Operand sk;
    load_operand(sk, shared + operand_at(OFFSET(SharedMemory, sk), 2 * TOKEN_HALF + l.channel_half), l);
    sum_tokens(shared + OFFSET(SharedMemory, suffix_sums) + 4 * K * TOKEN_HALF, l,
               [&](int j, int e) { return element(sk, j, e) * (d.cs[j][e] * left[j >> 1][e >> 1]); });
  }
  if constexpr (TOKEN_HALF) {
#pragma unroll
    for (int quarter = 0; quarter < 2; ++quarter) {
      u32 sk[4];
      load_operand_part(sk, shared + operand_at(OFFSET(SharedMemory, sk), l.channel_half), quarter, l);
      decay(d.aq, 0, 1, quarter, shared, unit, l);
      decay(d.ax, 0, 1, quarter, shared, unit, l);
      fence_registers(d.aq);
      fence_registers(d.ax);
      warpgroup_fence();
      warpgroup_mma<0>(d.aq, sk, rows_block(dA, HALF, 16 * quarter), 1);
      warpgroup_mma<0>(d.ax, sk, rows_block(dL, HALF, 16 * quarter), 1);
      warpgroup_commit();
      warpgroup_wait<0>();
      fence_registers(d.aq);
      fence_registers(d.ax);
    }
    decay(d.aq, 1, 1, 2, shared, unit, l);
    decay(d.ax, 1, 1, 2, shared, unit, l);
    decay(d.cs, 0, 0, 3, shared, unit, l);
  } else {
#pragma unroll
    for (int quarter = 1; quarter >= 0; --quarter) {
      u32 zq[4], zb[4];
      load_operand_part(zq, shared + operand_at(OFFSET(SharedMemory, zq), l.channel_half), quarter, l);
      load_operand_part(zb, shared + operand_at(OFFSET(SharedMemory, zb), l.channel_half), quarter, l);
      decay(d.cs, 0, 1, 2 + quarter, shared, unit, l);
      fence_registers(d.cs);
      warpgroup_fence();
      warpgroup_mma<1>(d.cs, zq, columns_block(dA, HALF + 16 * quarter, 0), 1);
      warpgroup_mma<1>(d.cs, zb, columns_block(dL, HALF + 16 * quarter, 0), 1);
      warpgroup_commit();
      warpgroup_wait<0>();
      fence_registers(d.cs);
    }
    decay(d.cs, 0, 0, 1, shared, unit, l);
    decay(d.aq, 1, 1, 0, shared, unit, l);
    decay(d.ax, 1, 1, 0, shared, unit, l);
  }
}

// Starts the products of the half's own pairs, those across its two quarters included. `sk` must
// not change until they are complete.
template <int TOKEN_HALF>
__device__ __forceinline__ void start_own(Accumulators& d, float (&cy)[4][4], const Operands& o, u32 (&sk)[4],
                                          u32 shared, const Lane& l) {
  const u32 dA = shared + OFFSET(SharedMemory, dA), dL = shared + OFFSET(SharedMemory, dL);
  constexpr int first = HALF * TOKEN_HALF, second = first + 16;
  load_operand_part(sk, shared + operand_at(OFFSET(SharedMemory, sk), 2 * TOKEN_HALF + l.channel_half), 0, l);
  fence_registers(cy);
  fence_registers(d.cs);
  fence_registers(d.aq);
  fence_registers(d.ax);
  warpgroup_fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = first + 16 * i;
    warpgroup_mma<1>(quarter_of(cy, i), o.zq[i], columns_block(dA, at, at), 0);
    warpgroup_mma<1>(quarter_of(cy, i), o.zb[i], columns_block(dL, at, at), 1);
  }
  warpgroup_mma<1>(quarter_of(d.cs, 0), o.zq[1], columns_block(dA, second, first), 1);
  warpgroup_mma<1>(quarter_of(d.cs, 0), o.zb[1], columns_block(dL, second, first), 1);
  warpgroup_commit();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = first + 16 * i;
    warpgroup_mma<0>(quarter_of(d.aq, i), o.yk[i], rows_block(dA, at, at), 1);
    warpgroup_mma<0>(quarter_of(d.ax, i), o.yk[i], rows_block(dL, at, at), 1);
  }
  warpgroup_mma<0>(quarter_of(d.aq, 1), sk, rows_block(dA, second, first), 1);
  warpgroup_mma<0>(quarter_of(d.ax, 1), sk, rows_block(dL, second, first), 1);
  warpgroup_commit();
}
