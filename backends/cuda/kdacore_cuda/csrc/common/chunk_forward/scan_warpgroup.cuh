// Products of the scan by warpgroup instructions: 64 columns of V for four warps, right operands
// read once for all four. Used by scan.cuh. The dependent chain from one state to the next limits
// the time, so everything else is loaded while the matrix unit works, and the state's 16-bit copy
// is made before waiting for the chunk.
#pragma once

#include "common/chunk_forward/scan_parts.cuh"
#include "sm90/wgmma.cuh"

static_assert(!WARPGROUP || ROW_TILES == 1, "a warpgroup carries one tile of 64 columns");

// Descriptors of a stage's operands differ from stage 0's only in their addresses. These never
// overflow their field, so a descriptor can be advanced by an addition.
constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }

// On return the update of the state may still be running; finish_chunk waits for it.
__device__ __forceinline__ void scan_chunk(ProductsBy<true>, ScanState& state, Tokens& tok, const ScanLane& l,
                                           const StageRef& at) {
  u32 a[K_TILES][4];
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) state_operand(state, 0, kk, a[kk]);
  const u64 step = descriptor_step(at.slot * STAGE_PITCH);
  barrier_wait(at.full, at.parity);
  fence_registers(tok.xo[0]);
  warpgroup_fence();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) {
    const u64 b = l.kq + step + descriptor_step((kk >> 2) * 2 * ROWS_BYTES + (kk & 3) * 32);
    warpgroup_mma<0>(tok.xo[0], a[kk], b, kk > 0);
  }
  warpgroup_commit();
  SolveOperands solver;
  load_solve_operands(solver, l, at.base, at.values);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    decay_state(state, 0, kk, load_decay(at.base + OFFSET(ChunkImage, decay), kk, l.t));
  warpgroup_wait<0>();
  fence_registers(tok.xo[0]);
  u32 w[4];
  solve(tok, 0, solver, w);
  fence_registers(state.s[0]);
  warpgroup_fence();
  warpgroup_mma<1>(state.s[0], w, l.kg + step, 1);
  warpgroup_commit();
}

__device__ __forceinline__ void finish_chunk(ProductsBy<true>, ScanState& state) {
  warpgroup_wait<0>();
  fence_registers(state.s[0]);
}
