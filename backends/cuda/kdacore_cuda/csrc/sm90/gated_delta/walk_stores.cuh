// What a warp stores of a chunk for the backward: its 16 value rows of a state's image, its 16 columns of u's.
#pragma once

#include "sm90/chunk_forward/segments/output_rows.cuh"
#include "sm90/gated_delta/backward_workspace.cuh"

// What a warp stores of a chunk goes through memory of its own.
union WarpStaging {
  u16 state[K / 64][16][64];  // rows as they lie in the image
  u16 tokens[C][16];          // PackedRows
};
constexpr u32 HALF_ROWS_BYTES = 16 * IMAGE_ROW;

// Waits until earlier copies from `staging` have read it.
__device__ __forceinline__ void wait_state_stores(const Lane& l) {
  if (l.lane == 0) copy_out_wait_read<0>();
  sync_warp();
}
// To the image `to`, as bulk copies.
__device__ __forceinline__ void store_state_rows(const Operand& s, u32 staging, u64 to, const Lane& l) {
  sync_warp();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    store_matrix4(staging + (kk >> 2) * HALF_ROWS_BYTES + (l.piece ^ (kk & 3) << 5), s.a[kk]);
  fence_async_proxy();
  sync_warp();
  if (l.lane == 0) {
    to += l.row * IMAGE_ROW;
#pragma unroll
    for (int i = 0; i < K / 64; ++i) {
      copy_out(reinterpret_cast<void*>(to + i * V * IMAGE_ROW), staging + i * HALF_ROWS_BYTES,
               HALF_ROWS_BYTES);
    }
    copy_out_commit();
  }
}

// Where a lane's parts of u's image are: what read_output gives.
__device__ __forceinline__ OutputPlace u_place(u64 image, const Lane& l) {
  const u64 at = image + value_rows(0, l.row).place(PackedRows::token_of(l.lane), l.lane & 1);
  return {reinterpret_cast<unsigned char*>(at), 16 * (int)IMAGE_ROW};
}
// Columns of the chunk's tokens.
__device__ __forceinline__ void store_tokens(const TokenOperand& x, u32 staging, const OutputPlace& to,
                                             int tokens, const Lane& l) {
  const PackedRows rows = {staging};
  wait_state_stores(l);
  stage_output(x, rows, l);
  store_output(read_output(rows, l), to, tokens, l);
}
