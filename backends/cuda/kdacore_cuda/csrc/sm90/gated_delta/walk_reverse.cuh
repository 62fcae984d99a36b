// The reverse walk: every sequence and value head from its end; backward_workspace.cuh has the formulas. R, the
// gradient of the state, is carried transposed in float32 accumulators. Its bfloat16 copy is what is stored, and the
// left operand of the product with k. In the order of the matrix unit:
//
//   R k^T,  (output d_o)^T q (added to last R),  du t (added to du),  (state dv)^T k (subtracted from R),  d_o^T a
//
// The last one belongs to the chunk before, whose du is its sum and to_end R k^T: it needs no R, and runs while R is
// rounded.
#pragma once

#include "sm90/gated_delta/walk_arrays.cuh"
#include "sm90/gated_delta/walk_factors.cuh"
#include "sm90/gated_delta/walk_loads.cuh"
#include "sm90/gated_delta/walk_stores.cuh"
#include "sm90/ring.cuh"

// Two would not do: d_o and a of the next chunk are read before a stage is released.
constexpr int REVERSE_STAGES = 3;
struct alignas(1024) ReverseStage {
  WalkRecord record;
  RingBarriers<REVERSE_STAGES> barriers;  // of all stages in the first one, where alignment leaves room
  alignas(1024) TileImage k;
  TileImage q;
  SquareImage d_o[WARPGROUPS];  // rows of tokens
};
struct ReverseMemory {
  ReverseStage stages[REVERSE_STAGES];
  WarpStaging staging[STATE_WARPS];
};
using ReverseRing =
    Ring<REVERSE_STAGES, 0, sizeof(ReverseStage), OFFSET(ReverseStage, barriers), 8 * REVERSE_STAGES>;

__device__ __forceinline__ void make_reverse_barriers(u32 shared) {
  make_record_barriers<ReverseStage, REVERSE_STAGES>(shared);
}

__device__ __forceinline__ void load_reverse(const GatedDeltaBackwardParams& p, const Item& x, u32 shared,
                                             int thread) {
  const int h = divide(x.hv, p.group_factor, p.group_shift), last = x.s.chunks - 1;
  auto k = key_source(p, x, h, thread), q = query_source(p, x, h, thread);
  auto d_o = packed_value_source(p, p.d_o, x, thread);
  k.move(last), q.move(last), d_o.move(last);
  u64 record = record_at(p, x.s.slot + last, x.hv);
  int left = x.s.length - last * C;
  load_chunks(ReverseRing{shared}, x.s.chunks, thread, [&](const ReverseRing& ring) {
    const u32 stage = ring.stage();
    fetch_record(stage + OFFSET(ReverseStage, record), record, ring.full(), thread);
    k.fetch(stage + OFFSET(ReverseStage, k), left, thread);
    q.fetch(stage + OFFSET(ReverseStage, q), left, thread);
    d_o.fetch(stage + OFFSET(ReverseStage, d_o), left, thread);
    k.move(-2), q.move(-2), d_o.move(-2);
    left = C;
    record -= (u64)p.HV * RECORD_BYTES;
  });
}

// The chunk's rows of d_o, transposed.
__device__ __forceinline__ void load_output_grads(TokenOperand& d_o, u32 stage, const Lane& l) {
  load_values(d_o, l, value_rows(stage + OFFSET(ReverseStage, d_o), l.row % BLOCK_VALUES));
  fence_registers(d_o.a);
}
__device__ __forceinline__ u64 image_of_t(u32 stage) {
  return over_rows_operand(stage + OFFSET(ReverseStage, record.t));
}
__device__ __forceinline__ u64 image_of_a(u32 stage) {
  return step(image_of_t(stage), OFFSET(WalkRecord, a) - OFFSET(WalkRecord, t));
}
// Requests d_o^T a.
__device__ __forceinline__ void multiply_output_grads(Products& x, const TokenOperand& d_o, u32 stage) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk)
    warpgroup_mma<1>(x, d_o.a[kk], over_rows(image_of_a(stage), kk), kk > 0);
  warpgroup_commit();
}

__device__ __forceinline__ u64 state_grad_at(const GatedDeltaBackwardParams& p, u64 states,
                                             const Item& item) {
  const int elements = state_elements(p);
  return states ? state_at(p, states, item.n, (long long)p.HV * elements, item.hv, elements) : 0;
}

// Gradients of the caller's states, as they are carried.
__device__ __forceinline__ void read_state_grad(State& state, const GatedDeltaBackwardParams& p,
                                                const Item& item, int row, const Lane& l) {
  read_own_state(state, p, row, l.t, state_grad_at(p, p.d_ht, item));
  if constexpr (HALF_F16) scale_state(state, GRADIENT_SCALE);
}
__device__ __forceinline__ void write_state_grad(State& state, const GatedDeltaBackwardParams& p, u64 to,
                                                 int row, const Lane& l) {
  if constexpr (HALF_F16) scale_state(state, 1.0f / GRADIENT_SCALE);
  write_own_state(state, p, row, l.t, to);
}

// Where a walk begins and ends, of a whole sequence; walk_backward_segment.cuh has the same of a segment.
__device__ __forceinline__ void begin_grad(State& state, const GatedDeltaBackwardParams& p, const Item& item,
                                           int row, const Lane& l) {
  read_state_grad(state, p, item, row, l);
}
__device__ __forceinline__ void end_grad(State& state, const GatedDeltaBackwardParams& p, const Item& item,
                                         int row, const Lane& l) {
  if (const u64 initial = state_grad_at(p, p.d_h0, item)) write_state_grad(state, p, initial, row, l);
}

// STORES: dv, and the gradient at each chunk's end. Else the gradient at the walk's end is all that is wanted.
template <bool STORES = true, class Params, class Walked>
__device__ __forceinline__ void carry_state_grad(const Params& p, const Walked& item, u32 shared, int warp,
                                                 const Lane& l) {
  const int row = l.row + l.g, last_chunk = item.s.chunks - 1;
  State state;  // R
  begin_grad(state, p, item, row, l);
  if (item.s.chunks) {
    Operand r;
    pack_state(r, state);
    ValuePlace to =
        value_place(p, p.dv, item.s.batch * p.T + item.s.first + last_chunk * C, item.hv, l);
    const u32 staging = shared + OFFSET(ReverseMemory, staging) + warp * (u32)sizeof(WarpStaging);
    u64 image = state_image_at(p.state_grads, (long long)(item.s.slot + last_chunk) * p.HV + item.hv);
    int tokens = item.s.length - last_chunk * C;
    ReverseRing ring = {shared};
    TokenOperand d_o;
    Products du = {};  // begins with d_o^T a
    ring.wait_full();
    load_output_grads(d_o, ring.stage(), l);
    fence_registers(du);
    warpgroup_fence();
    multiply_output_grads(du, d_o, ring.stage());
    warpgroup_wait<0>();
    fence_registers(du);
#pragma unroll 1
    for (int c = last_chunk; c >= 0; --c) {
      const u32 stage = ring.stage(), factors = stage + OFFSET(ReverseStage, record.factors);
      const u64 k = operand_descriptor(stage + OFFSET(ReverseStage, k), 16, 1024),
                over_k = operand_descriptor(stage + OFFSET(ReverseStage, k), SQUARE_BYTES, 1024);
      const u64 over_q = step(over_k, OFFSET(ReverseStage, q) - OFFSET(ReverseStage, k)),
                t = image_of_t(stage);
      const ColumnFactors of_output = load_factors(factors + OFFSET(RecordFactors, output), l);
      const float last = load_shared1(factors + OFFSET(RecordFactors, last));
      Products by_keys = {};
      fence_registers(by_keys);
      warpgroup_fence();
      multiply_channels(by_keys, r, k);
      warpgroup_commit();
      end_basic_block(ring);
      scale_rounded(d_o, scaled(of_output, GRADIENT_SCALE));
      fence_registers(d_o.a);
      scale_state(state, last);
      warpgroup_fence();
#pragma unroll
      for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, d_o.a[kk], over_tokens(over_q, kk), 1);
      warpgroup_commit();
      end_basic_block(ring);
      if constexpr (STORES) store_state_rows(r, staging, image, l);
      const ColumnFactors to_end = load_factors(factors + OFFSET(RecordFactors, to_end), l);
      warpgroup_wait<1>();
      fence_registers(by_keys);
      add_multiplied(du, by_keys, scaled(to_end, 1.0f / GRADIENT_SCALE));
      TokenOperand x;
      pack_rows(x, du);
      fence_registers(x.a);
      fence_registers(du);
      warpgroup_fence();
#pragma unroll
      for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(du, x.a[kk], over_rows(t, kk), 1);
      warpgroup_commit();
      end_basic_block(ring);
      const ColumnFactors of_state = load_factors(factors + OFFSET(RecordFactors, state), l);
      warpgroup_wait<0>();
      fence_registers(du);
      fence_registers(state.s);
      TokenOperand dv, predicted;
      pack_scaled(predicted, du, scaled(of_state, GRADIENT_SCALE));
      pack_rows(dv, du);
      fence_registers(predicted.a);
      fence_registers(dv.a);
      warpgroup_fence();
#pragma unroll
      for (int kk = 0; kk < C_TILES; ++kk)
        warpgroup_subtract(state.s, predicted.a[kk], over_tokens(over_k, kk));
      warpgroup_commit();
      // The chunk before; at the start of the sequence this one again, which needs no branch around products.
      ReverseRing before = ring;
      if (c) before.next();
      before.wait_full();
      load_output_grads(d_o, before.stage(), l);
      fence_registers(du);
      warpgroup_fence();
      multiply_output_grads(du, d_o, before.stage());
      end_basic_block(before);
      if constexpr (STORES) store_tokens(dv, staging, to.place, to.tokens(tokens), l);
      warpgroup_wait<1>();
      fence_registers(state.s);
      pack_state(r, state);
      fence_registers(r.a);
      end_basic_block(before);
      warpgroup_wait<0>();
      fence_registers(du);
      warp_arrive(ring.empty(), l.lane);
      ring = before;
      to.place.at -= 4ll * to.place.step;
      image -= (u64)p.HV * STATE_BYTES;
      tokens = C;
    }
  }
  end_grad(state, p, item, row, l);
}
