// Products of a scan warp on its own, by mma.sync. Used by scan.cuh.
#pragma once

#include "common/chunk_forward/scan_parts.cuh"

// x and o of every tile; the state decays as it is read.
__device__ __forceinline__ void read_products(ScanState& state, Tokens& tok, const ScanLane& l, u32 stage) {
  const int row = (l.lane >> 4) * 8 + (l.lane & 7), piece = l.lane >> 3 & 1;
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const u32 at =
        stage + OFFSET(ChunkImage, kq) + (kk >> 2) * 2 * ROWS_BYTES + swizzled(row, (kk & 3) * 2 + piece);
    u32 kb[4], qb[4];
    const float4 d = load_decay(stage + OFFSET(ChunkImage, decay), kk, l.t);
    load_matrix4(kb, at);
    load_matrix4(qb, at + ROWS_BYTES);
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      u32 a[4];
      state_operand(state, m, kk, a);
      mma_bf16(tok.xo[m][0], a, kb[0], kb[1]);
      mma_bf16(tok.xo[m][1], a, kb[2], kb[3]);
      mma_bf16(tok.xo[m][2], a, qb[0], qb[1]);
      mma_bf16(tok.xo[m][3], a, qb[2], qb[3]);
      decay_state(state, m, kk, d);
    }
  }
}

__device__ __forceinline__ void scan_chunk(ProductsBy<false>, ScanState& state, Tokens& tok, const ScanLane& l,
                                           const StageRef& at) {
  barrier_wait(at.full, at.parity);
  read_products(state, tok, l, at.base);
  SolveOperands solver;
  load_solve_operands(solver, l, at.base, at.values);
  u32 w[ROW_TILES][4];
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) solve(tok, m, solver, w[m]);
  const int row = l.lane & 15, piece = l.lane >> 4;
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    u32 b[4];
    load_matrix4_transposed(
        b, at.base + OFFSET(ChunkImage, kg) + (kk >> 2) * ROWS_BYTES + swizzled(row, (kk & 3) * 2 + piece));
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
      mma_bf16(state.s[m][2 * kk], w[m], b[0], b[1]);
      mma_bf16(state.s[m][2 * kk + 1], w[m], b[2], b[3]);
    }
  }
}

__device__ __forceinline__ void finish_chunk(ProductsBy<false>, ScanState& state) {}
