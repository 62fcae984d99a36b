// Bounded gates: an anchor serves a half. Used by prepare_operands.cuh.
#pragma once

#include "sm90/chunk_backward/prepare_strips.cuh"

// The strip's part of zq, zb, yk and sk to shared memory, of kg, kg_low and qg to device memory
// (FOR_SEGMENTS: kg to shared memory). `x`: from sum_strip.
//
// Both halves run the same instructions, to keep the code small: the blocks that share a multiprocessor are at
// different places in it, and together they need more than the instruction cache holds.
__device__ __forceinline__ void make_bounded_operands(const ChunkBackwardParams& p, u32 shared, const Strip& s,
                                                      const float (&x)[4][8]) {
  const u32 tokens = shared + 4 * (HALF * s.half + 8 * s.t);
  const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (32 * s.slice + s.g);
  const auto total = [&](int half, int i) { return load_shared1(totals + 4 * K * half + 32 * i); };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float first = total(0, i), second = total(1, i),
                end = exp2_fast((s.half ? second : first) + p.centre);
    const float more = s.half ? 1.0f : exp2_fast(second);  // the first half's k decays over the second
    const u32 at = (shared + s.at) ^ (i << 4);
    u32 k[4], y[4], sk[4], kg[4], low[4];
    load_matrix4_transposed(k, at + OFFSET(SharedMemory, k));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 rk = load_shared2(tokens + OFFSET(SharedMemory, k_norm) + 8 * m),
                   kb = load_shared2(tokens + ZB_FACTOR + 8 * m);
      const float x0 = x[i][2 * m], x1 = x[i][2 * m + 1];
      const float k0 = bf16_low(k[m]), k1 = bf16_high(k[m]);
      const float y0 = k0 * rk.x * exp2_fast(-x0), y1 = k1 * rk.y * exp2_fast(-x1);
      const float s0 = y0 * end, s1 = y1 * end;
      y[m] = pack_bf16(y0, y1);
      k[m] = pack_bf16(k0 * kb.x * exp2_fast(x0), k1 * kb.y * exp2_fast(x1));
      sk[m] = pack_bf16(s0, s1);
      split_kg(s0 * more, s1 * more, kg[m], low[m]);
    }
    store_matrix4_transposed(at + OFFSET(SharedMemory, k), k);
    store_matrix4_transposed(at + OFFSET(SharedMemory, yk), y);
    // Its images have 32 rows.
    if (!s.half)
      store_matrix4_transposed(at + OFFSET(SharedMemory, sk) - (s.slice >> 1) * (SQUARE_BYTES - HALF_SQUARE),
                               sk);
    store_kg(p, shared, s, i, kg, low);
  }
  const float unit = exp2_fast(-p.centre);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float more = s.half ? exp2_fast(total(0, i)) : 1.0f;  // the second half's q decays over the first
    const u32 at = ((shared + s.at) ^ (i << 4)) + OFFSET(SharedMemory, q);
    u32 q[4], qg[4];
    load_matrix4_transposed(q, at);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 factor = load_shared2(tokens + OFFSET(SharedMemory, q_factor) + 8 * m);
      // Exponentials once more: kept from above, they would take 32 registers.
      const float z0 = bf16_low(q[m]) * factor.x * exp2_fast(opaque_float(x[i][2 * m]));
      const float z1 = bf16_high(q[m]) * factor.y * exp2_fast(opaque_float(x[i][2 * m + 1]));
      q[m] = pack_bf16(z0, z1);
      qg[m] = pack_bf16(z0 * unit * more, z1 * unit * more);
    }
    store_matrix4_transposed(at, q);
    if constexpr (!FOR_SEGMENTS)
      store_matrix4_transposed(staging_address(strip_of(shared, s), i, s.lane >> 3, s.lane & 7), qg);
  }
  if constexpr (!FOR_SEGMENTS) flush_strip(strip_of(shared, s), s, place_of(p.qg, TILE_BYTES));
}
