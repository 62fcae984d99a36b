// Bounded gates: an anchor serves a half. Part of prepare_operands.cuh.
#pragma once

#if !FOR_SEGMENTS
// qg of the first half: zq without its anchor, a power of two and so exact.
__device__ __forceinline__ void flush_queries(u32 shared, const Strip& s, unsigned char* tile, float unit) {
  const int lane = opaque(s.lane);
  const u32 units = pack_bf16(unit, unit), image = (s.slice >> 1) * SQUARE_BYTES;
  const int piece = 4 * (s.slice & 1) + (lane & 3);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int row = n + (lane & 4) + 8 * (lane >> 3);  // in this order they use different banks
    uint4 x = load_shared_u4(shared + OFFSET(SharedMemory, q) + image + tile_offset(row, piece));
    x.x = multiply_bf16(x.x, units), x.y = multiply_bf16(x.y, units);
    x.z = multiply_bf16(x.z, units), x.w = multiply_bf16(x.w, units);
    store_global(tile + image + swizzled(row, piece), x);
  }
}
#endif

// The strip's part of zq, zb, yk and sk to shared memory, of kg, kg_low and qg to device memory
// (FOR_SEGMENTS: kg to shared memory). `x`: from sum_strip.
template <int TOKEN_HALF>
__device__ __forceinline__ void make_operands(const ChunkBackwardParams& p, u32 shared, const Strip& s,
                                              const float (&x)[4][8]) {
  const u32 tokens = shared + 4 * (HALF * TOKEN_HALF + 8 * s.t);
  const float unit = exp2_fast(-p.centre);
  u32 qg[4][4];  // of the second half
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (32 * s.slice + 8 * i + s.g);
    const float first = load_shared1(totals), second = load_shared1(totals + 4 * K);
    // The second half's q decays over the first half, the first half's k over the second.
    const float other = exp2_fast(TOKEN_HALF ? first : second),
                end = exp2_fast((TOKEN_HALF ? second : first) + p.centre);
    const u32 at = (shared + s.at) ^ (i << 4);
    {
      u32 q[4];
      load_matrix4_transposed(q, at + OFFSET(SharedMemory, q));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float2 factor = load_shared2(tokens + OFFSET(SharedMemory, q_factor) + 8 * m);
        const float z0 = bf16_low(q[m]) * factor.x * exp2_fast(x[i][2 * m]);
        const float z1 = bf16_high(q[m]) * factor.y * exp2_fast(x[i][2 * m + 1]);
        q[m] = pack_bf16(z0, z1);
        if (TOKEN_HALF && !FOR_SEGMENTS) qg[i][m] = pack_bf16(z0 * unit * other, z1 * unit * other);
      }
      store_matrix4_transposed(at + OFFSET(SharedMemory, q), q);
    }
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
      if (TOKEN_HALF) {
        split_kg(s0, s1, kg[m], low[m]);
      } else {
        sk[m] = pack_bf16(s0, s1);
        split_kg(s0 * other, s1 * other, kg[m], low[m]);
      }
    }
    store_matrix4_transposed(at + OFFSET(SharedMemory, k), k);
    store_matrix4_transposed(at + OFFSET(SharedMemory, yk), y);
    // Its images have 32 rows.
    if (!TOKEN_HALF)
      store_matrix4_transposed(at + OFFSET(SharedMemory, sk) - (s.slice >> 1) * (SQUARE_BYTES - HALF_SQUARE),
                               sk);
    store_kg(p, shared, s, i, kg, low);
  }
#if !FOR_SEGMENTS
  if (TOKEN_HALF) {
    const u32 strip = strip_of(shared, s);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_matrix4_transposed(staging_address(strip, i, s.lane >> 3, s.lane & 7), qg[i]);
    flush_strip(strip, s, place_of(p.qg, TILE_BYTES));
  } else {
    flush_queries(shared, s, place_of(p.qg, TILE_BYTES), unit);
  }
#endif
}
