// Unbounded gates: no product of one decay and one growth is representable over a whole chunk.
// Pairs (i, j) are split by the smallest dyadic block holding both; the end of its left half is the
// anchor, so both factors, 2^(G_i - G_anchor) and 2^(G_anchor - G_j), are at most 1. A level's
// right halves are 8 tokens and its left halves 8: one product of (k right; q right) by (k left)
// serves both triangles. Used by slices.cuh.
#pragma once

#include "sm90/chunk_forward/slice_parts.cuh"

// Of a lane's tokens and channels: decays from the start of its sub-block (half of a level's block) through the
// token, and from behind the token to the sub-block's end. From level to level they are multiplied by the decay
// of the sub-block next to them; in the end the sub-block is the half. So each step needs one exponential. A product
// too small to be represented is zero.
template <>
struct Decays<false> {
  float from_start[2][8], to_end[2][8];
};

// Products of token pairs. The operands are rounded to 16 bits: the rounding errors average out in the sum over
// channels. Each lane stores its sums in shared memory (16 bytes for each part) as soon as they are complete, which
// frees their registers; the same lane of the solver warp reads them.
__device__ __forceinline__ void pair_products(const Raw& raw, const Decays<false>& d, u32 part) {
  float sums[4] = {};
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * (w + j);
      b[j] = multiply_bf16(word(raw.k[0], w + j), pack_bf16(d.to_end[0][c], d.to_end[0][c + 1]));
    }
    const u32 a[4] = {word(raw.k[1], w), word(raw.q[1], w), word(raw.k[1], w + 1), word(raw.q[1], w + 1)};
    mma_bf16(sums, a, b[0], b[1]);
  }
  store_tile(part, sums);
}

__device__ __forceinline__ void level_products(const Raw& raw, const Decays<false>& d, bool right, int bit,
                                               u32 part) {
  float sums[4] = {};
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 a[4], b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * (w + j);
      u32 k[2], q[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Right tokens decay from the sub-block's start, left ones to its end.
        const u32 factor = right ? pack_bf16(d.from_start[i][c], d.from_start[i][c + 1])
                                 : pack_bf16(d.to_end[i][c], d.to_end[i][c + 1]);
        k[i] = multiply_bf16(word(raw.k[i], w + j), factor);
        q[i] = multiply_bf16(word(raw.q[i], w + j), factor);
      }
      // Each lane ends with one right token (of the partner's two) and one left token.
      const u32 k_other = shuffle_xor(right ? k[0] : k[1], bit), q_other = shuffle_xor(q[0], bit);
      a[2 * j] = right ? k[1] : k_other;
      a[2 * j + 1] = right ? q[1] : q_other;
      b[j] = right ? k_other : k[0];
    }
    mma_bf16(sums, a, b[0], b[1]);
  }
  store_tile(part, sums);
}

// The half's decay of channel 8t + g in log2: a sum, as a product of decays that round to 1 would be 1. Lanes of
// the same t exchange the channels that others keep.
__device__ __forceinline__ float sum_half(const float (&s)[2][8], const Lane& l) {
  float x[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) x[e] = s[0][e] + s[1][e];
#pragma unroll
  for (int n = 4; n; n >>= 1) {
    const bool high = l.lane & 4 * n;
#pragma unroll
    for (int e = 0; e < n; ++e) {
      const float other = shuffle_xor(high ? x[e] : x[e + n], 4 * n);
      x[e] = (high ? x[e + n] : x[e]) + other;
    }
  }
  return x[0];
}

// The decays of the half from its steps, whose total goes to `own_totals`; all pairs' products to `parts`.
__device__ __forceinline__ void make_decays(const Raw& raw, const float (&s)[2][8], Decays<false>& d, const Lane& l,
                                            u32 own_totals, u32 parts) {
  store_shared(own_totals + 4 * l.g, __float_as_uint(sum_half(s, l)));
  float total[8];  // of the sub-block
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    d.from_start[0][e] = exp2_fast(s[0][e]);
    d.to_end[0][e] = exp2_fast(s[1][e]);
    d.to_end[1][e] = 1.0f;
    total[e] = d.from_start[1][e] = d.from_start[0][e] * d.to_end[0][e];
  }
  pair_products(raw, d, parts);
#pragma unroll
  for (int level = 1; level < LEVELS; ++level) {
    const int bit = lane_bit(level);
    const bool right = l.lane & bit;
    level_products(raw, d, right, bit, parts + level * PART_BYTES);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float other = shuffle_xor(total[e], bit);
      if (right) {  // predicated, which costs no register
        d.from_start[0][e] *= other;
        d.from_start[1][e] *= other;
      } else {
        d.to_end[0][e] *= other;
        d.to_end[1][e] *= other;
      }
      total[e] *= other;
    }
  }
}

// Decay of the whole chunk.
__device__ __forceinline__ void store_decay(const Decays<false>&, const float (&)[8], const Lane& l, const Place& at,
                                            u32 own_totals) {
  if (at.half) return;
  const u32 own = own_totals + 4 * l.g;
  store_shared(decay_place(at, l.t) + 16 * (l.g >> 1) + 4 * (l.g & 1),
               __float_as_uint(exp2_fast(load_shared1(own) + load_shared1(own + 128))));
}

__device__ __forceinline__ void prepare_slice(Raw& raw, const Decays<false>& d, const float (&across)[8],
                                              const Lane& l, const Place& at, Products& sums,
                                              Operands& operands, const NextLoad& next) {
  u32(&kp)[2][4] = operands.k, (&qp)[2][4] = operands.q;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 kf[4], qf[4], kg[4];  // k 2^G and q 2^G from the chunk's start, k 2^(G_last - G) to its end
    u32 own[4];               // the latter to its half's end
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a[2], b[2], e[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = 2 * w + j;
        const float k = element(raw.k[i], c), q = element(raw.q[i], c), down = d.from_start[i][c];
        sums.square[0][i] += k * k;
        sums.square[1][i] += q * q;
        sums.diagonal[i] += q * k;
        a[j] = k * down;
        b[j] = q * down;
        e[j] = k * d.to_end[i][c];
      }
      kp[i][w] = pack_bf16(a[0], a[1]);
      qp[i][w] = pack_bf16(b[0], b[1]);
      own[w] = pack_bf16(e[0], e[1]);
      const float x = across[2 * w], y = across[2 * w + 1];
      if (at.half) {
        kf[w] = pack_bf16(a[0] * x, a[1] * y);
        qf[w] = pack_bf16(b[0] * x, b[1] * y);
        kg[w] = own[w];
      } else {
        kf[w] = kp[i][w];
        qf[w] = qp[i][w];
        kg[w] = pack_bf16(e[0] * x, e[1] * y);
      }
    }
    store_rows(at, l, i, kf, qf, kg);
    if (!at.half) send_keys(at, i, own);
  }
  load_rows(raw, next);
  sync_pair(at.pair);
}
