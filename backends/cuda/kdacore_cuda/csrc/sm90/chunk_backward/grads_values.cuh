// dv = beta dr of a block of values, and what v gives to dbeta: dr . v, with what earlier blocks gave.
#pragma once

#include "sm90/chunk_backward/grads_loads.cuh"

// Of dbeta the warp's 16 values' part, for token token_of(l) of its side, stays in the thread's
// place.
__device__ __forceinline__ void value_gradients(const ChunkBackwardParams& p, u32 shared, u32 unit,
                                                u32 scalars, int block, const Lane& l) {
  Operand dr, v;
  const int row = 64 * l.channel_half + 16 * l.warp + (l.lane & 15);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    load_matrix4(dr[i],
                 shared + OFFSET(SharedMemory, dr) + swizzled(row, 4 * l.token_half + 2 * i + (l.lane >> 4)));
  load_own(v, shared + OFFSET(SharedMemory, v), l);
  const OfTokens beta = load_tokens(scalars, l);
  OfTokens sum = {};
  each([&](int j, int e) { sum.x[j][e & 1] += element(dr, j, e) * element(v, j, e); });
  make_operand(v, [&](int j, int e) { return beta.x[j][e & 1] * element(dr, j, e); });
  const OutputRows to = output_rows(p, unit, values_of(p), V * block, values_of_block(p, block), l);
  store_own(shared + OFFSET(SharedMemory, v), v, p, p.dv, values_of(p), to, l);
  const u32 own = shared + OFFSET(SharedMemory, values) + 4 * l.thread;
  const float before = NARROW && block ? load_shared1(own) : 0.0f;
  store_shared(own, __float_as_uint(NARROW ? before + sum_channels(sum, l) : sum_channels(sum, l)));
}
