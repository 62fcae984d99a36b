// dv = beta dr of a block of values, and what v gives to dbeta: dr . v, with what earlier blocks gave.
#pragma once

#include "sm90/chunk_backward/grads_channel_sums.cuh"

__device__ __forceinline__ u32 values_address(u32 shared, int warp) {
  return shared + OFFSET(SharedMemory, values) + 4 * HALF * warp;
}
// Of dbeta the part of the warp's 16 values stays in the warp's place.
__device__ __forceinline__ void value_gradients(const ChunkBackwardParams& p, u32 shared, u32 unit,
                                                u32 scalars, int block, const Lane& l) {
  const u32 rows = shared + OFFSET(SharedMemory, v) + l.channel_half * SQUARE_BYTES + HALF * IMAGE_ROW * l.token_half +
                   swizzled(l.lane & 15, 2 * l.warp + (l.lane >> 4));
  const int row = 64 * l.channel_half + 16 * l.warp + (l.lane & 15);
  const OfTokens beta = load_tokens(scalars, l);
  TokenSums sums;
  Operand dr;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const u32 columns =
        shared + OFFSET(SharedMemory, dr) + swizzled(row, 4 * l.token_half + 2 * i + (l.lane >> 4));
    u32 v[4], dr_rows[4];
    load_matrix4(v, rows + 16 * IMAGE_ROW * i);
    load_matrix4_transposed(dr_rows, columns);
    multiply_tokens(sums, i, v, dr_rows, l);
    load_matrix4(dr[i], columns);
  }
  const u32 own = values_address(shared, l.thread >> 5);
  if (NARROW && block && has_token_sums(l)) {
    const float4 before = load_shared4(own + 16 * l.g);
    sums[0] += before.x, sums[1] += before.y, sums[2] += before.z, sums[3] += before.w;
  }
  store_token_sums(own, sums, l);
  Operand dv;
  make_operand(dv, [&](int j, int e) { return beta.x[j][e & 1] * element(dr, j, e); });
  const OutputRows to = output_rows(p, unit, values_of(p), V * block, values_of_block(p, block), l);
  store_own(shared + OFFSET(SharedMemory, v), dv, p, p.dv, values_of(p), to, l);
}
// One warp of each half of tokens, once all warps' parts are there: their sum.
__device__ __forceinline__ void add_values(u32 shared, const Lane& l) {
  if (l.channel_half || l.warp != VALUES_WARP) return;
  const float sum = add_warps(values_address(shared, 8 * l.token_half) + 4 * l.lane, 4 * HALF);
  store_shared(shared + OFFSET(SharedMemory, of_values) + 4 * (HALF * l.token_half + l.lane), __float_as_uint(sum));
}
