// Unbounded gates: an anchor serves a quarter. Each later quarter also needs the keys decayed to
// its start: the second in sk (of its 32 rows the last 16 are not read), the third in third, the
// fourth in fourth (of its 64 rows the last 16 are not read). Used by prepare_operands.cuh.
#pragma once

#include "sm90/chunk_backward/prepare_strips.cuh"

// The strip's part of zq, zb, yk and the decayed keys to shared memory, of kg, kg_low and qg to
// device memory (FOR_SEGMENTS: kg to shared memory). `x`: from sum_strip.
// Both halves run the same instructions (prepare_operands_bounded.cuh says why).
__device__ __forceinline__ void make_unbounded_operands(const ChunkBackwardParams& p, u32 shared, const Strip& s,
                                                        const float (&x)[4][8]) {
  const u32 tokens = shared + 4 * (HALF * s.half + 8 * s.t);
  const float unit = exp2_fast(-p.centre);
  const bool later = s.t & 2;  // this lane's quarter of the half
  const u32 totals = shared + OFFSET(SharedMemory, totals) + 4 * (32 * s.slice + s.g);
  u32 qg[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Of the quarters of this half and of the other.
    const u32 own = totals + 4 * (2 * K * s.half + 8 * i),
              other = totals + 4 * (2 * K * (1 - s.half) + 8 * i);
    const float own_first = load_shared1(own), own_second = load_shared1(own + 4 * K),
                other_first = load_shared1(other), other_half = other_first + load_shared1(other + 4 * K);
    const float end = exp2_fast((later ? own_second : own_first) + p.centre);
    // Decays from this quarter to the third, the fourth and the chunk's end, and from the chunk's
    // start to it.
    const float rest = later ? 0.0f : own_second;
    const float third = exp2_fast(rest), fourth = s.half ? 1.0f : exp2_fast(rest + other_first);
    const float after = exp2_fast(s.half ? rest : rest + other_half);
    const float before = exp2_fast((s.half ? other_half : 0.0f) + (later ? own_first : 0.0f));
    const u32 at = (shared + s.at) ^ (i << 4), narrow = at - (s.slice >> 1) * (SQUARE_BYTES - HALF_SQUARE);
    u32 q[4], k[4], y[4], s1[4], s2[4], s3[4], kg[4], low[4];
    load_matrix4_transposed(k, at + OFFSET(SharedMemory, k));
    load_matrix4_transposed(q, at + OFFSET(SharedMemory, q));
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float2 rq = load_shared2(tokens + OFFSET(SharedMemory, q_factor) + 8 * m),
                   rk = load_shared2(tokens + OFFSET(SharedMemory, k_norm) + 8 * m);
      const float2 kb = load_shared2(tokens + ZB_FACTOR + 8 * m);
      const float x0 = x[i][2 * m], x1 = x[i][2 * m + 1], up0 = exp2_fast(x0), up1 = exp2_fast(x1);
      const float k0 = bf16_low(k[m]), k1 = bf16_high(k[m]);
      const float y0 = k0 * rk.x * exp2_fast(-x0), y1 = k1 * rk.y * exp2_fast(-x1);
      const float d0 = y0 * end, d1 = y1 * end;
      const float z0 = bf16_low(q[m]) * rq.x * up0, z1 = bf16_high(q[m]) * rq.y * up1;
      y[m] = pack_bf16(y0, y1);
      k[m] = pack_bf16(k0 * kb.x * up0, k1 * kb.y * up1);
      q[m] = pack_bf16(z0, z1);
      s1[m] = pack_bf16(d0, d1);
      s2[m] = pack_bf16(d0 * third, d1 * third);
      s3[m] = pack_bf16(d0 * fourth, d1 * fourth);
      split_kg(d0 * after, d1 * after, kg[m], low[m]);
      if (!FOR_SEGMENTS) qg[i][m] = pack_bf16(z0 * unit * before, z1 * unit * before);
    }
    store_matrix4_transposed(at + OFFSET(SharedMemory, k), k);
    store_matrix4_transposed(at + OFFSET(SharedMemory, q), q);
    store_matrix4_transposed(at + OFFSET(SharedMemory, yk), y);
    store_matrix4_transposed(at + fourth_keys(), s3);
    if (!s.half) {
      store_matrix4_transposed(narrow + OFFSET(SharedMemory, sk), s1);
      store_matrix4_transposed(narrow + third_keys(), s2);
    }
    store_kg(p, shared, s, i, kg, low);
  }
  if constexpr (!FOR_SEGMENTS) {
    const u32 strip = strip_of(shared, s);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_matrix4_transposed(staging_address(strip, i, s.lane >> 3, s.lane & 7), qg[i]);
    flush_strip(strip, s, place_of(p.qg, TILE_BYTES));
  }
}
