// Products of the scan by warpgroup instructions: 64 columns of V for four warps, right operands
// read once for all four. Used by scan.cuh. The dependent chain from one state to the next limits
// the time, so everything else is loaded while the matrix unit works.
#pragma once

#include "sm90/chunk_forward/scan_parts.cuh"

// Descriptors of a stage's operands differ from stage 0's only in their addresses. These never
// overflow their field, so a descriptor can be advanced by an addition.
constexpr u64 descriptor_step(u32 bytes) { return bytes >> 4; }

// x and o without the terms of the chunk itself: (k 2^G) S and (q 2^G) S. The state's 16-bit copy
// is made while earlier products run.
__device__ __forceinline__ void read_products(const ScanState& state, Tokens& tok, u64 kq) {
  fence_registers(tok.xo);
#pragma unroll
  for (int kk = 0; kk < K_TILES; kk += 2) {
    u32 a[2][4];
    state_operand(state, kk, a[0]);
    state_operand(state, kk + 1, a[1]);
    warpgroup_fence();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int at = kk + i;
      warpgroup_mma<0>(tok.xo, a[i], kq + descriptor_step((at >> 2) * 2 * ROWS_BYTES + (at & 3) * 32),
                       at > 0);
    }
  }
  warpgroup_commit();
}

// Advances the state by one chunk; its output goes to `out`. while_reading gets the last chunk's output rows
// and waits for V; while_updating runs once V has been read. Both run while the matrix unit works.
//
// `zero`: the state is, so that nothing of it has to be multiplied; `whole`: the chunk has tokens in its second
// half. Only SHORT sequences gain by either test; in a long loop they delay what depends on the state.
template <bool SHORT, class WhileReading, class WhileUpdating>
__device__ __forceinline__ void scan_chunk(ScanState& state, Output& out, const ScanLane& l,
                                           const StageRef& at, u32 values, bool zero, bool whole,
                                           WhileReading while_reading, WhileUpdating while_updating) {
  Tokens tok = {};
  const u64 step = descriptor_step(at.slot * STAGE_PITCH);
  write_output(out, l);
  barrier_wait(at.full, at.parity);
  SolveOperands first, second;
  u32 a21[4], q1[4], q21[4], q2[4], w[2][4] = {};
  Columns factor[2];
  uint4 rows[2];
  const auto load_first = [&] {
    load_solve_operands(first, l, at.base, 0);
    load_matrix4(a21, at.base + OFFSET(ChunkImage, kk_across) + l.triangle);
  };
  const auto load_factors = [&] {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factor[half] = columns(at.base, OFFSET(TokenScalars, q_factor), half, l.t);
  };
  const auto load_rest = [&] {
    load_solve_operands(second, l, at.base, 1);
    load_matrix4(q1, at.base + OFFSET(ChunkImage, qk) + l.triangle);
    load_matrix4(q21, at.base + OFFSET(ChunkImage, qk_across) + l.triangle);
    load_matrix4(q2, at.base + OFFSET(ChunkImage, qk) + TRIANGLE_BYTES + l.triangle);
    load_factors();
  };
  if (SHORT && zero) {
    read_output(rows, l);
    while_reading(rows);
    load_first();
    load_values(first, l, 0, values);
  } else {
    read_products(state, tok, l.kq + step);
    float4 decay[K_TILES];
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) decay[kk] = load_decay(at.base + OFFSET(ChunkImage, decay), kk, l.t);
    read_output(rows, l);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) decay_state(state, kk, decay[kk]);
    while_reading(rows);
    load_first();
    load_values(first, l, 0, values);
    warpgroup_wait<0>();
    fence_registers(tok.xo);
  }
  if (SHORT && !whole) {
    load_matrix4(q1, at.base + OFFSET(ChunkImage, qk) + l.triangle);
    load_factors();
    solve(tok.xo[0], tok.xo[1], first, w[0]);
    add_triangle(tok.xo[4], tok.xo[5], w[0], q1);
  } else {
    load_values(second, l, 1, values);
    load_rest();
    solve(tok.xo[0], tok.xo[1], first, w[0]);
    add_triangle(tok.xo[2], tok.xo[3], w[0], a21);
    add_triangle(tok.xo[4], tok.xo[5], w[0], q1);
    add_triangle(tok.xo[6], tok.xo[7], w[0], q21);
    solve(tok.xo[2], tok.xo[3], second, w[1]);
    add_triangle(tok.xo[6], tok.xo[7], w[1], q2);
  }
  fence_registers(state.s);
  warpgroup_fence();
  warpgroup_mma<1>(state.s, w[0], l.kg + step, 1);
  warpgroup_mma<1>(state.s, w[1], l.kg + step + descriptor_step(HALF * 128), 1);
  warpgroup_commit();
  while_updating();
  pack_output(out, tok.xo + 4, factor);
  warpgroup_wait<0>();
  fence_registers(state.s);
}
