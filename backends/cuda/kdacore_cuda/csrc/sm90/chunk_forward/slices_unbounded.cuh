// Unbounded gates: no product of one decay and one growth is representable over a whole chunk.
// Pairs (i, j) are split by the smallest dyadic block holding both; the end of its left half is the
// anchor, so both factors, 2^(G_i - G_anchor) and 2^(G_anchor - G_j), are at most 1. A level's
// right halves are 8 tokens and its left halves 8: one product of (k right; q right) by (k left)
// serves both triangles. Both exponents are known while decays are summed. Part of slices.cuh.
#pragma once

// The triangles' operands are multiplied in 16 bits: their errors average out over the channels
// summed.
__device__ __forceinline__ u32 scaled(u32 x, float low, float high) {
  return multiply_bf16(x, pack_bf16(low, high));
}

__device__ __forceinline__ void pair_products(const Raw& raw, const float (&s)[2][8], Products& sums) {
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * (w + j);
      b[j] = scaled(word(raw.k[0], w + j), exp2_fast(s[1][c]), exp2_fast(s[1][c + 1]));
    }
    const u32 a[4] = {word(raw.k[1], w), word(raw.q[1], w), word(raw.k[1], w + 1), word(raw.q[1], w + 1)};
    mma_bf16(sums.tile[0], a, b[0], b[1]);
  }
}

// `s` holds sums within the lane's sub-block (half of this level's block), `total` the sub-block's.
__device__ __forceinline__ void level_products(const Raw& raw, const float (&s)[2][8],
                                               const float (&total)[8], const Lane& l, int level,
                                               Products& sums) {
  const int bit = lane_bit(level);
  const bool right = l.lane & bit;
  const float base = right ? 0.0f : -1.0f;
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    u32 a[4], b[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int c = 2 * (w + j);
      u32 k[2], q[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Right tokens decay from the sub-block's start, left ones to its end: s - total is the
        // rest of the decay, negated.
        const float x = total[c] * base + s[i][c], y = total[c + 1] * base + s[i][c + 1];
        const u32 factor = pack_bf16(exp2_fast(-fabsf(x)), exp2_fast(-fabsf(y)));
        k[i] = multiply_bf16(word(raw.k[i], w + j), factor);
        q[i] = multiply_bf16(word(raw.q[i], w + j), factor);
      }
      // Each lane ends with one right token (of the partner's two) and one left token.
      const u32 k_other = shuffle_xor(right ? k[0] : k[1], bit), q_other = shuffle_xor(q[0], bit);
      a[2 * j] = right ? k[1] : k_other;
      a[2 * j + 1] = right ? q[1] : q_other;
      b[j] = right ? k_other : k[0];
    }
    mma_bf16(sums.tile[level], a, b[0], b[1]);
  }
}

// Replaces steps by their inclusive sums from the half's first token; `total` gets the sum of the
// half. Adds all pairs' products.
__device__ __forceinline__ void sum_steps(const Raw& raw, float (&s)[2][8], float (&total)[8], const Lane& l,
                                          Products& sums) {
  pair_products(raw, s, sums);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    s[1][e] += s[0][e];
    total[e] = s[1][e];
  }
#pragma unroll
  for (int level = 1; level < LEVELS; ++level) {
    level_products(raw, s, total, l, level, sums);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float other = shuffle_xor(total[e], lane_bit(level));
      if (l.lane & lane_bit(level)) {  // predicated, which costs no register
        s[0][e] += other;
        s[1][e] += other;
      }
      total[e] += other;
    }
  }
}

__device__ __forceinline__ void prepare_slice(Raw& raw, const float (&sum)[2][8], const float (&total)[8],
                                              const float (&across)[8], const Lane& l, const Place& at,
                                              Products& sums, Operands& operands, const NextLoad& next) {
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
        const float k = element(raw.k[i], c), q = element(raw.q[i], c), down = exp2_fast(sum[i][c]);
        sums.square[0][i] += k * k;
        sums.square[1][i] += q * q;
        sums.diagonal[i] += q * k;
        a[j] = k * down;
        b[j] = q * down;
        e[j] = k * exp2_fast(total[c] - sum[i][c]);
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
