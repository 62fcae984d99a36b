// How a warp's 16 values of a chunk's o get to device memory: through shared memory that no other warp uses,
// as ValueRows or PackedRows.
#pragma once

#include "sm90/chunk_forward/segments/segment_products.cuh"

// 64 tokens by 16 values, 32 bytes a token. The two pieces of a row are swizzled so that eight rows do not
// share a bank.
struct PackedRows {
  u32 rows;
  __device__ __forceinline__ u32 place(int token, int piece) const {
    return rows + token * 32 + ((piece ^ (token >> 2 & 1)) << 4);
  }
  static __device__ __forceinline__ int token_of(int lane) { return lane >> 1; }
};

template <class Rows>
__device__ __forceinline__ void stage_output(const TokenOperand& o, const Rows& rows, const Lane& l) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) store_matrix4_transposed(matrix_row(rows, kk, l), o.a[kk]);
  sync_warp();
}

// What a lane stores of it: of every 16 tokens half of one.
template <class Rows>
struct OutputRows {
  uint4 x[4];
};
template <class Rows>
__device__ __forceinline__ OutputRows<Rows> read_output(const Rows& rows, const Lane& l) {
  OutputRows<Rows> o;
#pragma unroll
  for (int n = 0; n < 4; ++n)
    o.x[n] = load_shared_u4(rows.place(16 * n + Rows::token_of(l.lane), l.lane & 1));
  return o;
}
// Where a lane's first 16 bytes go in device memory, and how far the next ones are, 16 tokens on. A chunk has
// four. Kept in registers: found again for every chunk, addresses take longer than the products meanwhile.
struct OutputPlace {
  unsigned char* at;
  int step;
};
// `first`: of the warp's values in the chunk's first token.
template <class Rows>
__device__ __forceinline__ OutputPlace output_place(unsigned char* first, int token_bytes, const Lane& l) {
  return {first + (long long)Rows::token_of(l.lane) * token_bytes + 16 * (l.lane & 1),
          opaque(16 * token_bytes)};
}
__device__ __forceinline__ void next_chunk(OutputPlace& to) { to.at += 4ll * to.step; }
template <class Rows>
__device__ __forceinline__ void store_output(const OutputRows<Rows>& o, const OutputPlace& to, int tokens,
                                             const Lane& l) {
  const int left = tokens - Rows::token_of(l.lane);
  unsigned char* at = to.at;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    store_global_if(16 * n < left, at, o.x[n]);
    at += to.step;
  }
}
