// Bounded gates: every step decays by at most 2^-7.3, so within 16 tokens k 2^G and k 2^-G are both
// representable and one product gives all pairs. Used by prepare.cuh.
#pragma once

#include "common/chunk_forward/bounded_triangles.cuh"
#include "common/chunk_forward/prepare_parts.cuh"

// log2 of a factor of k 2^-G that keeps it from overflowing for G down to -116, and its inverse.
constexpr float SHIFT = -64.0f, INVERSE_SHIFT = 18446744073709551616.0f;

__device__ __forceinline__ void prepare_slice(Form<true>, Raw& raw, const float (&sum)[2][8], const float (&total)[8],
                                              const Lane& l, int slice, u32 stage, Products& sums,
                                              const NextLoad& next) {
  float to_end[8], decay[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    decay[e] = exp2_fast(total[e]);  // of total - SHIFT it would lose the decays of slow gates
    to_end[e] = decay[e] * INVERSE_SHIFT;
  }
  store_decay(stage, l, slice, decay);
  u32 kp[2][4], qp[2][4], km[2][4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    u32 kg[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float a[2], b[2], m[2], e[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int c = 2 * w + j;
        const float k = element(raw.k[i], c), q = element(raw.q[i], c);
        const float down = exp2_fast(sum[i][c]), up = exp2_fast(SHIFT - sum[i][c]);
        sums.k_square[i] += k * k;
        sums.q_square[i] += q * q;
        a[j] = k * down;
        b[j] = q * down;
        m[j] = k * up;
        e[j] = m[j] * to_end[c];
      }
      kp[i][w] = pack_bf16(a[0], a[1]);
      qp[i][w] = pack_bf16(b[0], b[1]);
      km[i][w] = pack_bf16(m[0], m[1]);
      kg[w] = pack_bf16(e[0], e[1]);
    }
    const u32 at = piece_offset(l, i, slice), half = slice >> 1;
    const u32 kq = stage + OFFSET(ChunkImage, kq) + half * 2 * ROWS_BYTES + at;
    store_shared(kq, kp[i][0], kp[i][1], kp[i][2], kp[i][3]);
    store_shared(kq + ROWS_BYTES, qp[i][0], qp[i][1], qp[i][2], qp[i][3]);
    store_shared(stage + OFFSET(ChunkImage, kg) + half * ROWS_BYTES + at, kg[0], kg[1], kg[2], kg[3]);
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
}

__device__ __forceinline__ void store_triangles(Form<true>, u32 stage, u32 scratch, const Lane& l, const Scalars& s,
                                                const Products& sums) {
  store_bounded_triangles(stage + OFFSET(ChunkImage, qk), scratch, l, s, sums.tile, INVERSE_SHIFT,
                          INVERSE_SHIFT);
}
