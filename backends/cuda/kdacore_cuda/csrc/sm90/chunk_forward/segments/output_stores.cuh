// Which segment a block has, where its outputs and checkpoints go, and how outputs get there.
#pragma once

#include "sm90/chunk_forward/segments/segment_products.cuh"

__device__ __forceinline__ Segment find_block(const SegmentParams& p, int block) {
  const int slot = block / p.HV, hv = block - slot * p.HV;
  return find_slot_segment(p, slot, [&](int n, int index) { return find_segment(p, n, index, hv); });
}

// Row of the first checkpoint of sequence n; all lanes.
__device__ __forceinline__ long long first_checkpoint(const SegmentParams& p, int n) {
  if (!p.cu_seqlens) return n * ((p.T + p.ckpt_every - 1) / p.ckpt_every);
  long long rows = 0;
  for (int m = 0; m < n; ++m) rows += (find_sequence(p, m).length + p.ckpt_every - 1) / p.ckpt_every;
  return rows;
}

// o of a chunk: 16 values of the `tokens` first of its 64 tokens. Half of the tokens at a time are
// staged at `rows`, 1 KB of the warp's own: 32 bytes a token, whose two pieces are swizzled so that
// eight rows do not share a bank.
__device__ __forceinline__ u32 staged(int token, int piece) {
  return token * 32 + ((piece ^ (token >> 2 & 1)) << 4);
}
__device__ __forceinline__ void store_output(const TokenOperand& o, u32 rows, unsigned char* to,
                                             long long token_bytes, int tokens, const Lane& l) {
  uint4 x[4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sync_warp();  // all lanes have read what was there
#pragma unroll
    for (int i = 0; i < C_TILES / 2; ++i) {
      store_matrix4_transposed(rows + staged(16 * i + 8 * (l.lane >> 4) + (l.lane & 7), l.lane >> 3 & 1),
                               o.a[C_TILES / 2 * half + i]);
    }
    sync_warp();
#pragma unroll
    for (int n = 0; n < 2; ++n)
      x[2 * half + n] = load_shared_u4(rows + staged(16 * n + (l.lane >> 1), l.lane & 1));
  }
  to += (l.lane >> 1) * token_bytes + 16 * (l.lane & 1);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    if (16 * n + (l.lane >> 1) < tokens) store_global(to + 16 * n * token_bytes, x[n]);
  }
}
