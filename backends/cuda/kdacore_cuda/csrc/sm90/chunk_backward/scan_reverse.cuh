// Gradients of the states at the chunks' ends (dh), and dr, the gradient of what each chunk's
// inverse is multiplied with.
#pragma once

#include "sm90/chunk_backward/scan_state.cuh"

__device__ __forceinline__ void scan_reverse(const ChunkBackwardParams& p, const Task& task,
                                             const ScanLane& l) {
  State state;
  read_state(state, l, task, p.d_ht, p.flags, p);
  Operand dh;
  pack_state(dh, state);
  float dr[2 * C_TILES][4] = {};  // of the chunk before
  ValueGradRing value_grad = {l.shared};
  StateGradRing state_grad = {l.shared};
  OutputGradRing output_grads = {l.shared};
  TokenOperand o;
  const auto load_output_gradients = [&] {
    output_grads.wait_full();
    load_output_gradient(o, l.lane, l.row, output_grads.stage());
    release(l, output_grads.empty());
    output_grads.next();
  };
  const int first = task.end - 1;
  if (first >= task.begin) load_output_gradients();
  long long at = task.at + (long long)first * p.HV;
  if constexpr (NARROW) at = value_place(p, task, at);
#pragma unroll 1
  for (int c = first; c >= task.begin; --c, at -= p.HV * value_blocks(p)) {
    const u32 stage = value_grad.stage(), rest = state_grad.stage();
    const u64 kg = operand_descriptor(stage + OFFSET(ValueGradStage, kg), 16, 1024),
              w = operand_descriptor(rest + OFFSET(StateGradStage, w), SQUARE_BYTES, 1024);
    const u64 aqk = operand_descriptor(stage + OFFSET(ValueGradStage, aqk), 16, 1024),
              qg = step(w, OFFSET(StateGradStage, qg)), inv = step(w, OFFSET(StateGradStage, inverse));
    value_grad.wait_full();

    float dv[2 * C_TILES][4] = {};
    fence_registers(dv);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dv, o.a[kk], over_tokens(aqk, kk), kk > 0);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(dv, dh.a[kk], along_channels(kg, kk), 1);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) {
      warpgroup_mma<0>(
          dv, dh.a[kk],
          along_channels(step(kg, OFFSET(ValueGradStage, kg_low) - OFFSET(ValueGradStage, kg)), kk), 1);
    }
    warpgroup_commit();

    // Meanwhile: dh and the previous chunk's dr are stored; the state decays.
    TokenOperand before;
    pack_rows(before, dr);
    wait_stores<0>(l);
    stage_rows(l, before);
    stage_state(l, dh);
    fence_staged();
    if (l.lane == 0) {
      if (c < first) store_rows_image(l, task, p.dr, at + p.HV * value_blocks(p));
      store_state_image(l, task, p.dh, at);
      copy_out_commit();
    }
    decay_state(state, l, decays_of(value_grad));

    // Products that do not need dv keep the matrix unit busy while dv is rounded.
    state_grad.wait_full();
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, o.a[kk], over_tokens(qg, kk), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    fence_registers(dv);
    TokenOperand v;
    pack_rows(v, dv);
    fence_registers(dr);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(state.s, v.a[kk], over_tokens(w, kk));
    warpgroup_commit();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dr, v.a[kk], over_tokens(inv, kk), kk > 0);
    warpgroup_commit();
    release(l, value_grad.empty());
    value_grad.next();
    warpgroup_wait<1>();
    fence_registers(state.s);
    pack_state(dh, state);
    if (c > task.begin) load_output_gradients();
    // No product may be open at the loop's end: the compiler would serialise all of them.
    warpgroup_wait<0>();
    fence_registers(dr);
    release(l, state_grad.empty());
    state_grad.next();
  }
  if (first >= task.begin) {
    TokenOperand before;
    pack_rows(before, dr);
    wait_stores<0>(l);
    stage_rows(l, before);
    fence_staged();
    if (l.lane == 0) {
      store_rows_image(l, task, p.dr, at + p.HV * value_blocks(p));
      copy_out_commit();
    }
  }
  if (p.d_h0 && task.begin == 0) write_state(state, l, task, p.d_h0, p.flags, p);
  wait_stores<0>(l);
}
