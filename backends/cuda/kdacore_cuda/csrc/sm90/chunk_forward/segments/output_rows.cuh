// How a warp's 16 values of a chunk's o get to device memory.
#pragma once

#include "sm90/chunk_forward/segments/segment_products.cuh"

// Staging of a chunk's o: 64 tokens by this warp's 16 values, PITCH bytes from a token to the next, which
// have 32. If there is nothing between them, the two pieces of a row are swizzled so that eight rows do not
// share a bank.
template <u32 PITCH>
__device__ __forceinline__ u32 staged(int token, int piece) {
  return token * PITCH + ((PITCH == 32 ? piece ^ (token >> 2 & 1) : piece) << 4);
}

template <u32 PITCH>
__device__ __forceinline__ void stage_output(const TokenOperand& o, u32 rows, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) {
    store_matrix4_transposed(
        rows + staged<PITCH>(16 * kk + 8 * (l.lane >> 4) + (l.lane & 7), l.lane >> 3 & 1), o.a[kk]);
  }
  sync_warp();
}

// What a lane stores of it: of every 16 tokens half of one. Eight lanes have four tokens, whose places use
// different banks.
template <u32 PITCH>
__device__ __forceinline__ int own_token(const Lane& l) {
  return PITCH == 32 ? l.lane >> 1 : 8 * (l.lane >> 4) + (l.lane & 6) + (l.lane >> 3 & 1);
}
struct OutputRows {
  uint4 x[4];
};
template <u32 PITCH>
__device__ __forceinline__ OutputRows read_output(u32 rows, const Lane& l) {
  OutputRows o;
#pragma unroll
  for (int n = 0; n < 4; ++n)
    o.x[n] = load_shared_u4(rows + staged<PITCH>(16 * n + own_token<PITCH>(l), l.lane & 1));
  return o;
}
template <u32 PITCH>
__device__ __forceinline__ void store_output(const OutputRows& o, unsigned char* to, long long token_bytes,
                                             int tokens, const Lane& l) {
  const int token = own_token<PITCH>(l);
  to += token * token_bytes + 16 * (l.lane & 1);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (16 * n + token < tokens) store_global(to + 16 * n * token_bytes, o.x[n]);
  }
}
