// Gradients of the states at the chunks' ends, and of what each chunk's inverse is multiplied with.
#pragma once

#include "sm90/chunk_backward/scan_state.cuh"

// A chunk's rows of d_o, transposed: this warp's 16 values by 64 tokens.
__device__ __forceinline__ void load_output_gradient(TokenOperand& o, const ScanLane& l, u32 rows) {
  const u32 from = rows + output_piece((l.lane >> 4) * 8 + (l.lane & 7), l.row / 8 + (l.lane >> 3 & 1));
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) load_matrix4_transposed(o.a[kk], from + 16 * kk * DO_ROW);
}

__device__ __forceinline__ void scan_reverse(const ChunkBackwardParams& p, const Job& job, const ScanLane& l) {
  State state;
  read_state(state, l, job, p.d_ht, p.flags);
  Operand dh;
  pack_state(dh, state);
  float dr[2 * C_TILES][4] = {};  // of the chunk before
  EarlyRing early = {l.shared};
  LateRing late = {l.shared};
  OutputRing outputs = {l.shared};
  TokenOperand o;
  const auto take_outputs = [&] {
    outputs.wait_full();
    load_output_gradient(o, l, outputs.stage());
    release(l, outputs.empty());
    outputs.next();
  };
  const int first = job.s.chunks - 1;
  if (first >= 0) take_outputs();
  long long at = job.at + (long long)first * p.HV;
#pragma unroll 1
  for (int c = first; c >= 0; --c, at -= p.HV) {
    const u32 stage = early.stage(), rest = late.stage();
    const u64 kg = operand_descriptor(stage + EARLY_KG_AT, 16, 1024), w = operand_descriptor(rest + LATE_W_AT, SQUARE_BYTES, 1024);
    const u64 aqk = operand_descriptor(stage + EARLY_AQK_AT, 16, 1024), qg = step(w, LATE_QG_AT), inv = step(w, LATE_INV_AT);
    early.wait_full();

    float dv[2 * C_TILES][4] = {};
    hold(dv);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dv, o.a[kk], over_tokens(aqk, kk), kk > 0);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) warpgroup_mma<0>(dv, dh.a[kk], along_channels(kg, kk), 1);
#pragma unroll
    for (int kk = 0; kk < K_TILES; ++kk) {
      warpgroup_mma<0>(dv, dh.a[kk], along_channels(step(kg, EARLY_LOW_AT - EARLY_KG_AT), kk), 1);
    }
    warpgroup_commit();

    // Meanwhile: dh leaves, as does what the chunk before left; the state decays.
    TokenOperand before;
    pack_rows(before, dr);
    wait_sent<0>(l);
    put_rows(l, before);
    put_state(l, dh);
    publish();
    if (l.lane == 0) {
      if (c < first) copy_rows(l, job, p.dr, at + p.HV);
      copy_state(l, job, p.dh, at);
      copy_out_commit();
    }
    decay_state(state, l, decays_of(early));

    // What does not need dv keeps the matrix unit at work while dv is rounded.
    late.wait_full();
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, o.a[kk], over_tokens(qg, kk), 1);
    warpgroup_commit();
    warpgroup_wait<1>();
    hold(dv);
    TokenOperand v;
    pack_rows(v, dv);
    hold(dr);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_subtract(state.s, v.a[kk], over_tokens(w, kk));
    warpgroup_commit();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(dr, v.a[kk], over_tokens(inv, kk), kk > 0);
    warpgroup_commit();
    release(l, early.empty());
    early.next();
    warpgroup_wait<1>();
    hold(state.s);
    pack_state(dh, state);
    if (c > 0) take_outputs();
    // No product may be left behind at the loop's end: the compiler would make every one wait for the one before.
    warpgroup_wait<0>();
    hold(dr);
    release(l, late.empty());
    late.next();
  }
  if (first >= 0) {
    TokenOperand before;
    pack_rows(before, dr);
    wait_sent<0>(l);
    put_rows(l, before);
    publish();
    if (l.lane == 0) {
      copy_rows(l, job, p.dr, at + p.HV);
      copy_out_commit();
    }
  }
  if (p.d_h0) write_state(state, l, job, p.d_h0, p.flags);
  wait_sent<0>(l);
}
