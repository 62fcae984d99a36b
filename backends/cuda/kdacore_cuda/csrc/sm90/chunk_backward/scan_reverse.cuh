// Gradients of the states at the chunks' ends (dh), and dr, the gradient of what each chunk's
// inverse is multiplied with.
#pragma once

#include "sm90/chunk_backward/scan_state.cuh"

__device__ __forceinline__ void scan_reverse(const ChunkBackwardParams& p, const Task& task,
                                             const ScanLane& l) {
  State state;
  read_state(state, l, task, p.d_ht, p.flags);
  float dr[2 * C_TILES][4] = {};
  ValueGradRing value_grad = {l.shared};
  StateGradRing state_grad = {l.shared};
  InverseRing inverse = {l.shared};
  OutputGradRing output_grads = {l.shared};
  StateOutRing states_out = {l.shared};
  RowsOutRing rows_out = {l.shared};
  TokenOperand o, v = {};
  const auto load_output_gradients = [&] {
    output_grads.wait_full();
    load_output_gradient(o, l.lane, l.row, output_grads.stage());
    release(l, output_grads.empty());
    output_grads.next();
  };
  // dr of the chunk whose dv is v.
  const auto multiply_inverse = [&] {
    const u64 inv = operand_descriptor(inverse.stage(), SQUARE_BYTES, 1024);
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dr, v.a[kk], over_tokens(inv, kk), kk > 0);
  };
  const int chunks = task.end - task.begin;
  if (chunks > 0) load_output_gradients();
#pragma unroll 1
  for (int left = chunks; left > 0; --left) {
    const u32 stage = value_grad.stage(), rest = state_grad.stage();
    const u64 kg = operand_descriptor(stage + OFFSET(ValueGradStage, kg), 16, 1024),
              w = operand_descriptor(rest + OFFSET(StateGradStage, w), SQUARE_BYTES, 1024);
    const u64 aqk = operand_descriptor(stage + OFFSET(ValueGradStage, aqk), 16, 1024),
              qg = step(w, OFFSET(StateGradStage, qg));
    value_grad.wait_full();
    inverse.wait_full();

    // Products that do not need dh keep the matrix unit busy while it is rounded: dr of the chunk
    // before (of the first, zeros that nobody stores), and the first part of dv.
    float dv[2 * C_TILES][4] = {};
    fence_registers(dv);
    fence_registers(dr);
    warpgroup_fence();
    multiply_inverse();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dv, o.a[kk], over_tokens(aqk, kk), kk > 0);
    warpgroup_commit();
    Operand dh;
    pack_state(dh, state);
    fence_registers(dh.a);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(dv, dh.a[kk], along_channels(kg, kk), 1);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) {
      warpgroup_mma<0>(
          dv, dh.a[kk],
          along_channels(step(kg, OFFSET(ValueGradStage, kg_low) - OFFSET(ValueGradStage, kg)), kk), 1);
    }
    warpgroup_commit();

    // Meanwhile: the state decays; dr and dh are handed over.
    decay_state(state, l, decays_of(value_grad));
    warpgroup_wait<1>();
    fence_registers(dr);
    if (left < chunks) {
      release(l, inverse.empty());
      inverse.next();
    }
    TokenOperand before;
    pack_rows(before, dr);
    rows_out.wait_empty();
    states_out.wait_empty();
    stage_rows(l, rows_out, before);
    stage_state(l, states_out, dh);
    fence_async_proxy();
    hand_over(l, rows_out);
    hand_over(l, states_out);

    // Products that do not need dv, while it is rounded.
    state_grad.wait_full();
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, o.a[kk], over_tokens(qg, kk), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    fence_registers(dv);
    release(l, value_grad.empty());
    value_grad.next();
    pack_rows(v, dv);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(state.s, v.a[kk], over_tokens(w, kk));
    warpgroup_commit();
    warpgroup_wait<1>();  // o has been read
    if (left > 1) load_output_gradients();
    // No product may be open at the loop's end: the compiler would serialise all of them.
    warpgroup_wait<0>();
    fence_registers(state.s);
    release(l, state_grad.empty());
    state_grad.next();
  }
  if (chunks > 0) {
    inverse.wait_full();
    fence_registers(dr);
    warpgroup_fence();
    multiply_inverse();
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(dr);
    TokenOperand before;
    pack_rows(before, dr);
    rows_out.wait_empty();
    stage_rows(l, rows_out, before);
    fence_async_proxy();
    hand_over(l, rows_out);
  }
  if (p.d_h0 && task.begin == 0) write_state(state, l, task, p.d_h0, p.flags);
}
