// What the launches of the gated delta rule leave for one another, for each chunk and value head, beside the records:
//
//   u            [64 tokens, 128 values]     TileImage: record.cuh's u, zeros past the end
//   states       [128 values, 128 channels]  StateImage: the state at the chunk's start
//   state_grads  [128 values, 128 channels]  StateImage: the gradient of the state at its end, times GRADIENT_SCALE
//
// dv is read where the caller will find it. In the reverse direction, with R the gradient of S (V by K) and the
// factors of record.cuh, to_end including r beta:
//
//   du_j = to_end_j R k_j + sum over i >= j of a_ij d_o_i
//   dv_j = du_j + sum over i > j of t_ij du_i
//   R'   = 2^G_last R + sum over i of (output_i d_o_i q_i^T - state_i dv_i k_i^T)
#pragma once

#include "common/half_operands.cuh"
#include "generated/gated_delta_backward_params.cuh"
#include "sm90/gated_delta/record.cuh"

// Gradients of states as they are carried and kept, and pairs of tokens as an operand, are times this. Factors of queries
// and keys make both small against the gradients that the caller gives, and float16 has few bits below 2^-14.
constexpr float GRADIENT_SCALE = HALF_F16 ? 128.0f : 1.0f;

// `unit`: slot * HV + value head.
__device__ __forceinline__ u64 u_at(const GatedDeltaBackwardParams& p, long long unit) {
  return p.u + unit * TILE_BYTES;
}
__device__ __forceinline__ u64 state_image_at(u64 images, long long unit) {
  return images + unit * STATE_BYTES;
}
