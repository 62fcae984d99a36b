// What chunk_records leaves of a chunk (64 tokens) and value head for walk_records, one contiguous record each.
//
// One decay a token serves all channels, so q and k are multiplied as the caller has them, and decays, norms and beta
// are factors of rows of float32 sums. With G the log2 decay summed from the chunk's start, r = 1 / |k| (1 without
// l2norm), c = scale / |q| and S (V by K) the state at the chunk's start:
//
//   y_i = v_i - 2^G_i r_i S k_i
//   u_i = y_i - sum over j < i of L_ij u_j,  L_ij = 2^(G_i - G_j) r_i (k_i . k_j) r_j beta_j
//   o_i = c_i 2^G_i S q_i + sum over j <= i of c_i 2^(G_i - G_j) (q_i . k_j) r_j beta_j u_j
//   S'  = 2^G_last S + sum over j of 2^(G_last - G_j) r_j beta_j u_j k_j^T
//
// u is what a token would write with a beta of 1: all betas are factors of columns. With t below the diagonal of the
// inverse of I + L, u_i = y_i + sum over j < i of t_ij y_j, where the first term, usually the largest, is not rounded.
// The gradient of v is that of y, and beta's is the product of u and dv, divided by beta.
#pragma once

#include "common/state_rows.cuh"
#include "sm90/gated_delta/lower_columns.cuh"
#include "sm90/gated_delta/head_dims.cuh"

// A number of each token, in the order in which lanes of walk_records read them: a lane with columns 8j + 2t and 8j + 2t + 1 of
// products over 64 tokens has sixteen in a row. Rows are padded so that four of them do not share a bank.
struct TokenFactors {
  float x[4][20];
};
// Where those of tokens 2i and 2i + 1 are.
__device__ __forceinline__ u32 factor_offset(int i) { return 4 * (20 * (i & 3) + 2 * (i >> 2)); }

struct RecordImages {
  LowerColumns t;  // the inverse below its diagonal, else 0
  LowerColumns a;  // c_i 2^(G_i - G_j) (q_i . k_j) r_j beta_j up to the diagonal, else 0
};
struct RecordFactors {
  TokenFactors state;   // 2^G r
  TokenFactors output;  // c 2^G
  TokenFactors to_end;  // 2^(G_last - G) r beta; 0 past the end
  float last[4];        // 2^G_last, four times
};
// What the backward needs beside them.
struct HeadScalars {
  float sum[C], beta[C];  // G; 0 past the end
};
struct KeyScalars {
  float k_norm[C], q_factor[C];  // r, c
};
struct ChunkRecord {
  RecordImages images;
  RecordFactors factors;
  float unused[12];  // compute-sanitizer follows bulk copies of multiples of 512 bytes only
  HeadScalars head;
  KeyScalars key;
};
constexpr u32 RECORD_BYTES = sizeof(ChunkRecord), WALK_BYTES = OFFSET(ChunkRecord, unused);

__device__ __forceinline__ u64 record_at(const GatedDeltaParams& p, long long slot, int hv) {
  return p.records + (u64)(slot * p.HV + hv) * RECORD_BYTES;
}

// Sequence n; one without a slot in the pool has no tokens to read.
__device__ __forceinline__ Sequence find_read_sequence(const GatedDeltaParams& p, int n) {
  Sequence s = find_sequence(p, n);
  if (is_padding(p, n)) s.length = s.chunks = 0;
  return s;
}
