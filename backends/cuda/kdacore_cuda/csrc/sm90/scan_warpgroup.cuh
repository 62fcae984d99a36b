// Products of the scan by warpgroup instructions: tiles of 64 columns of V, right operands read once for four warps.
// Part of scan.cuh.

// x and o of tile m start; its bf16 state operand is in registers until they are waited for.
__device__ __forceinline__ void start_products(const ScanState& state, Tokens& tok, int m, u32 stage) {
  u32 a[K_TILES][4];
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) state_operand(state, m, kk, a[kk]);
  hold(tok.xo[m]);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const u64 b = operand_descriptor(stage + KQ_AT + (kk >> 2) * 2 * ROWS_BYTES + (kk & 3) * 32, 16, 1024);
    warpgroup_mma<0>(tok.xo[m], a[kk], b, kk > 0);
  }
  warpgroup_commit();
}

// S += (k 2^(G_last - G))^T w of tile m starts.
__device__ __forceinline__ void start_update(ScanState& state, int m, const u32 (&w)[4], u32 stage) {
  hold(state.s[m]);
  warpgroup_fence();
  warpgroup_mma<1>(state.s[m], w, operand_descriptor(stage + KG_AT, ROWS_BYTES, 1024), 1);
  warpgroup_commit();
}

// On return the last updates of the state may still be running; finish_chunk waits for them.
__device__ __forceinline__ void scan_chunk(ScanState& state, Tokens& tok, const ScanLane& l, u32 stage, u32 values) {
  u32 inverse[4], qk[4], w[ROW_TILES][4];
  start_products(state, tok, 0, stage);
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) {
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) decay_state(state, m, kk, stage, l.t);
    if (m == 0) {
      load_matrix4(inverse, stage + T_AT + triangle_row(l));
      load_matrix4(qk, stage + QK_AT + triangle_row(l));
    }
    if (m == 0) {
      warpgroup_wait<0>();
    } else {
      warpgroup_wait<1>();  // the products of this tile; the update of the one before may still run
    }
    hold(tok.xo[m]);
    if (m + 1 < ROW_TILES) start_products(state, tok, m + 1, stage);
    solve(tok, m, l, stage, values + m * TILE_BYTES, inverse, w[m]);
    start_update(state, m, w[m], stage);
    mma_bf16(tok.xo[m][2], w[m], qk[0], qk[1]);
    mma_bf16(tok.xo[m][3], w[m], qk[2], qk[3]);
  }
}

__device__ __forceinline__ void finish_chunk(ScanState& state) {
  warpgroup_wait<0>();
#pragma unroll
  for (int m = 0; m < ROW_TILES; ++m) hold(state.s[m]);
}
