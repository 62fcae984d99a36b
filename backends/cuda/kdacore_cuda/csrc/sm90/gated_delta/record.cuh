// What prepare leaves of a chunk (64 tokens) and value head for walk, one contiguous record each.
//
// One decay a token serves all channels, so q and k are multiplied as the caller has them, and decays, norms and beta
// are factors of rows of float32 sums. With G the log2 decay summed from the chunk's start, r = 1 / |k| (1 without
// l2norm), c = scale / |q| and S (V by K) the state at the chunk's start:
//
//   u_i = beta_i (v_i - 2^G_i r_i S k_i) - sum over j < i of L_ij u_j,  L_ij = beta_i r_i r_j 2^(G_i - G_j) k_i . k_j
//   o_i = c_i 2^G_i S q_i + sum over j <= i of A_ij r_j u_j,            A_ij = c_i 2^(G_i - G_j) q_i . k_j
//   S'  = 2^G_last S + sum over i of 2^(G_last - G_i) r_i u_i k_i^T
//
// With T the inverse of I + L, of which the diagonal is 1, and t_ij = r_i T_ij beta_j:
//
//   y_i = v_i - state_i S k_i,   state_i = 2^G_i r_i
//   o_i = output_i S q_i + sum over j <= i of to_output_ij y_j,   output_i = c_i 2^G_i,   to_output = A t
//   S'  = last S + sum over j of y_j to_state_j,   to_state_j = sum over i >= j of 2^(G_last - G_i) t_ij k_i
//
// so walk needs nothing but products of S, y and these. Terms with a diagonal element of t, usually the largest, are
// made in float32, and rounded only with the sums.
#pragma once

#include "common/state_rows.cuh"
#include "generated/gated_delta_params.cuh"
#include "sm90/chunk_backward/workspace.cuh"

// A number of each token, in the order in which lanes of walk read them: a lane with columns 8j + 2t and 8j + 2t + 1 of
// products over 64 tokens has sixteen in a row. Rows are padded so that four of them do not share a bank.
struct TokenFactors {
  float x[4][20];
};
// Where those of tokens 2i and 2i + 1 are.
__device__ __forceinline__ u32 factor_offset(int i) { return 4 * (20 * (i & 3) + 2 * (i >> 2)); }

struct ChunkRecord {
  TileImage to_state;
  SquareImage to_output;
  TokenFactors state, output;
  float last[4];  // 2^G_last, four times
};
constexpr u32 RECORD_BYTES = sizeof(ChunkRecord);

__device__ __forceinline__ u64 record_at(const GatedDeltaParams& p, long long slot, int hv) {
  return p.records + (u64)(slot * p.HV + hv) * RECORD_BYTES;
}

// Sequence n; one without a slot in the pool has no tokens to read.
__device__ __forceinline__ Sequence find_read_sequence(const GatedDeltaParams& p, int n) {
  Sequence s = find_sequence(p, n);
  if (is_padding(p, n)) s.length = s.chunks = 0;
  return s;
}
