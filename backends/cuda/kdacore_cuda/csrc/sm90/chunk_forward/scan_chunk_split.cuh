// scan_chunk for blocks that only scan, which have the registers for it. Used by scan.cuh. The same bits.
//
// What the next state depends on comes first: (k 2^G) S, then w of both halves, then the state's update.
// (q 2^G) S is multiplied while the first half is solved, and o gets its other terms while the state is updated.
#pragma once

#include "sm90/chunk_forward/scan_chunk.cuh"

// A wait for what has come already. It ends a basic block, so that the assembler does not move instructions
// between products that are requested one after another.
__device__ __forceinline__ void end_basic_block(const StageRef& at) { barrier_wait(at.full, at.parity); }

// As scan_chunk, for a chunk of a long sequence.
template <class WhileReading, class WhileUpdating>
__device__ __forceinline__ void scan_chunk_split(ScanState& state, Output& out, const ScanLane& l,
                                                 const StageRef& at, u32 values, WhileReading while_reading,
                                                 WhileUpdating while_updating) {
  const u64 step = descriptor_step(at.slot * STAGE_PITCH), kq = l.kq + step;
  // Where the rows of k (0) or q (1) have the channels of k-tile kk.
  const auto rows_of = [&](int which, int kk) {
    return kq + descriptor_step(((kk >> 2) * 2 + which) * ROWS_BYTES + (kk & 3) * 32);
  };
  write_output(out, l);
  barrier_wait(at.full, at.parity);
  // Loaded now: while the products run, they take shared memory's whole bandwidth.
  float4 decay[K_TILES];
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) decay[kk] = load_decay(at.base + OFFSET(ChunkImage, decay), kk, l.t);
  float x[4][4] = {}, o[4][4] = {};  // tokens 8i to 8i + 7
  u32 s[K_TILES][4];
  fence_registers(x);
  fence_registers(o);
#pragma unroll
  for (int kk = 0; kk < K_TILES; kk += 2) {
    state_operand(state, kk, s[kk]);
    state_operand(state, kk + 1, s[kk + 1]);
    warpgroup_fence();
    warpgroup_mma<0>(x, s[kk], rows_of(0, kk), kk > 0);
    warpgroup_mma<0>(x, s[kk + 1], rows_of(0, kk + 1), 1);
  }
  warpgroup_commit();
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(o, s[kk], rows_of(1, kk), kk > 0);
  warpgroup_commit();
  end_basic_block(at);
  uint4 rows[2];
  read_output(rows, l);
  SolveOperands first, second;
  u32 a21[4], q1[4], q21[4], q2[4], w[2][4];
  Columns factor[2];
  load_solve_operands(first, l, at.base, 0);
  load_matrix4(a21, at.base + OFFSET(ChunkImage, kk_across) + l.triangle);
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk) decay_state(state, kk, decay[kk]);
  while_reading(rows);
  load_values(first, l, 0, values);
  load_values(second, l, 1, values);
  load_solve_operands(second, l, at.base, 1);
  load_matrix4(q1, at.base + OFFSET(ChunkImage, qk) + l.triangle);
  load_matrix4(q21, at.base + OFFSET(ChunkImage, qk_across) + l.triangle);
  load_matrix4(q2, at.base + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES + l.triangle);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    factor[half] = columns(at.base, OFFSET(TokenScalars, q_factor), half, l.t);
  warpgroup_wait<1>();
  fence_registers(x);
  solve(x[0], x[1], first, w[0]);
  add_triangle(x[2], x[3], w[0], a21);
  solve(x[2], x[3], second, w[1]);
  fence_registers(state.s);
  warpgroup_fence();
  warpgroup_mma<1>(state.s, w[0], l.kg + step, 1);
  warpgroup_mma<1>(state.s, w[1], l.kg + step + descriptor_step(HALF * 128), 1);
  warpgroup_commit();
  end_basic_block(at);
  warpgroup_wait<1>();
  fence_registers(o);
  add_triangle(o[0], o[1], w[0], q1);
  add_triangle(o[2], o[3], w[0], q21);
  add_triangle(o[2], o[3], w[1], q2);
  while_updating();
  pack_output(out, o, factor);
  warpgroup_wait<0>();
  fence_registers(state.s);
}
