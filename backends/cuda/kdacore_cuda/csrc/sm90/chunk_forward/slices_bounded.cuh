// Bounded gates: every step decays by at most 2^-7.3, so within 16 tokens k 2^G and k 2^-G are both
// representable and one product gives all pairs. Their factors are 2^32 and 2^-32, so that neither
// overflows: KQ_SCALE. Used by slices.cuh.
#pragma once

#include "sm90/chunk_forward/slice_parts.cuh"

template <>
struct Decays<true> {
  float sum[2][8];  // log2 decays of a lane's tokens from the half's start, plus KQ_SHIFT
  float total[8];   // the half's decay
};

__device__ __forceinline__ void make_decays(const Raw&, float (&steps)[2][8], Decays<true>& d, const Lane& l,
                                            u32 own_totals, u32) {
  float total[8];
  sum_steps(steps, total, l, KQ_SHIFT);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    d.sum[0][e] = steps[0][e];
    d.sum[1][e] = steps[1][e];
    d.total[e] = exp2_fast(total[e]);
  }
  if (l.g) return;
#pragma unroll
  for (int e = 0; e < 8; e += 2) store_shared(own_totals + 4 * e, d.total[e], d.total[e + 1]);
}

// Decay of the whole chunk.
__device__ __forceinline__ void store_decay(const Decays<true>& d, const float (&across)[8], const Lane& l,
                                            const Place& at, u32) {
  if (l.g || at.half) return;
  const u32 to = decay_place(at, l.t);
#pragma unroll
  for (int e = 0; e < 8; e += 2)
    store_shared(to + 8 * e, d.total[e] * across[e], d.total[e + 1] * across[e + 1]);
}

__device__ __forceinline__ void prepare_slice(Raw& raw, const Decays<true>& d, const float (&across)[8],
                                              const Lane& l, const Place& at, Products& sums,
                                              Operands& operands, const NextLoad& next) {
  float to_end[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) to_end[e] = d.total[e] * KQ_SCALE;
  u32(&kp)[2][4] = operands.k, (&qp)[2][4] = operands.q, km[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 kf[4], qf[4], kg[4];  // k 2^G and q 2^G from the chunk's start, k 2^(G_last - G) to its end
    u32 own[4];               // the latter to its half's end
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a[2], b[2], m[2], e[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = 2 * w + j;
        const float k = element(raw.k[i], c), q = element(raw.q[i], c);
        const float down = exp2_fast(d.sum[i][c]);
        sums.square[0][i] += k * k;
        sums.square[1][i] += q * q;
        a[j] = k * down;
        b[j] = q * down;
        m[j] = k * exp2_fast(-d.sum[i][c]);
        e[j] = m[j] * to_end[c];
      }
      kp[i][w] = pack_bf16(a[0], a[1]);
      qp[i][w] = pack_bf16(b[0], b[1]);
      km[i][w] = pack_bf16(m[0], m[1]);
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
#pragma unroll
  for (int w = 0; w < 4; w += 2) {
    const u32 k[4] = {kp[0][w], kp[1][w], kp[0][w + 1], kp[1][w + 1]};
    const u32 q[4] = {qp[0][w], qp[1][w], qp[0][w + 1], qp[1][w + 1]};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      mma_bf16(sums.tile[tile], k, km[tile][w], km[tile][w + 1]);
      mma_bf16(sums.tile[2 + tile], q, km[tile][w], km[tile][w + 1]);
    }
  }
  sync_pair(at.pair);
}
