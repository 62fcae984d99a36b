// The gradients of beta, from u . dv.
#pragma once

#include "sm90/gated_delta/gates.cuh"
#include "sm90/gated_delta/grads_diagonal.cuh"

// `beta`: as the recurrence used it.
__device__ __forceinline__ float beta_gradient(const GatedDeltaParams& p, float product, float beta) {
  const float most = p.flags & FLAG_NEG_EIGVAL ? 2.0f : 1.0f;
  if (p.flags & FLAG_BETA_SIGMOID) return product * (1.0f - beta / most);
  return product / beta * most;
}
__device__ __forceinline__ float largest_of(int type) {
  return type == TYPE_FLOAT32 ? LARGEST : type == TYPE_BFLOAT16 ? LARGEST_BF16 : 65504.0f;
}
// Of 16 tokens, by one warp.
__device__ __forceinline__ void store_beta_gradients(const GatedDeltaBackwardParams& p, const KeyUnit& u,
                                                     int hv, u32 stage, u32 scalars, const Lane& l) {
  Diagonal d = {};
#pragma unroll
  for (int half = 0; half < V / 64; ++half)
    add_rows_product(d, stage + OFFSET(HeadStage, u) + half * SQUARE_BYTES,
                     stage + OFFSET(HeadStage, own[KEYS]) + half * SQUARE_BYTES, l.block, l.lane);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (!has_row(l) || l.row(i) >= u.rows) continue;
    const float beta = load_shared1(scalars + OFFSET(HeadScalars, beta) + 4 * l.row(i));
    store_scalar(p.dbeta, (u.batch * p.T + u.first + l.row(i)) * p.HV + hv, p.beta_type,
                 limit(beta_gradient(p, row_sum(d, i, l), beta), largest_of(p.beta_type)));
  }
}
