// States at the chunks' starts, and v minus the state's prediction.
#pragma once

#include "sm90/chunk_backward/scan_state.cuh"

// A warp's rows of an image of 64 tokens, in the places of a product's sums.
__device__ __forceinline__ void load_rows(float (&x)[2 * C_TILES][4], u32 from) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) {
    u32 pairs[4];
    load_matrix4(pairs, from ^ kk << 5);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* to = &x[2 * kk + (i >> 1)][2 * (i & 1)];
      to[0] = bf16_low(pairs[i]);
      to[1] = bf16_high(pairs[i]);
    }
  }
  fence_registers(x);
}

__device__ __forceinline__ void scan_forward(const ChunkBackwardParams& p, const Task& task,
                                             const ScanLane& l) {
  State state;
  read_state(state, l, task, p.h0, p.flags, p);
  Operand h;
  pack_state(h, state);
  ForwardRing ring = {l.shared};
#pragma unroll 1
  for (int c = task.begin; c < task.end; ++c) {
    long long at = task.at + (long long)c * p.HV;
    if constexpr (NARROW) at = value_place(p, task, at);
    const u32 stage = ring.stage();
    const u64 w = operand_descriptor(stage + OFFSET(ForwardStage, w), 16, 1024),
              kg = operand_descriptor(stage + OFFSET(ForwardStage, kg), SQUARE_BYTES, 1024);
    ring.wait_full();

    float prediction[2 * C_TILES][4] = {};  // S w^T
    fence_registers(prediction);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(prediction, h.a[kk], along_channels(w, kk), kk > 0);
    warpgroup_commit();

    // Meanwhile: u is loaded, the state decays, h is stored. Groups of copies alternate between h
    // and v, so waiting for all but the last one is enough.
    float u[2 * C_TILES][4];
    load_rows(u, stage + OFFSET(ForwardStage, u) + l.row * IMAGE_ROW + l.piece);
    decay_state(state, l, stage + OFFSET(ForwardStage, decay));
    wait_stores<1>(l);
    stage_state(l, h);
    fence_staged();
    if (l.lane == 0) {
      store_state_image(l, task, p.h, at);
      copy_out_commit();
    }
    warpgroup_wait<0>();
    fence_registers(prediction);

    TokenOperand v;
#pragma unroll
    for (int j = 0; j < 2 * C_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) u[j][e] -= prediction[j][e];
    }
    pack_rows(v, u);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, v.a[kk], over_tokens(kg, kk), 1);
    warpgroup_commit();
    wait_stores<1>(l);
    stage_rows(l, v);
    fence_staged();
    if (l.lane == 0) {
      store_rows_image(l, task, p.u, at);
      copy_out_commit();
    }
    warpgroup_wait<0>();
    fence_registers(state.s);
    pack_state(h, state);
    release(l, ring.empty());
    ring.next();
  }
  wait_stores<0>(l);
}
