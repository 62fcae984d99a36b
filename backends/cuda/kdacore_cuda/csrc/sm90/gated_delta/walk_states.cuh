// The forward walk without outputs: u and the states at the chunks' starts, as walk_forward.cuh has them, bit for bit.
// In the order of the matrix unit:
//
//   S k^T,  y t^T (added to y),  (to_end u) k (added to last S)
#pragma once

#include "sm90/gated_delta/walk_arrays.cuh"
#include "sm90/gated_delta/walk_factors.cuh"
#include "sm90/gated_delta/walk_loads.cuh"
#include "sm90/gated_delta/walk_stores.cuh"
#include "sm90/ring.cuh"

constexpr int STATES_STAGES = 4;
struct alignas(1024) StatesStage {
  WholeColumns t;
  RecordFactors factors;
  RingBarriers<STATES_STAGES> barriers;  // of all stages in the first one
  alignas(1024) TileImage k;
  SquareImage values[WARPGROUPS];  // rows of tokens
};
struct StatesMemory {
  StatesStage stages[STATES_STAGES];
  WarpStaging staging[STATE_WARPS];
};
using StatesRing =
    Ring<STATES_STAGES, 0, sizeof(StatesStage), OFFSET(StatesStage, barriers), 8 * STATES_STAGES>;

// `stages`: those that are used.
__device__ __forceinline__ void make_states_barriers(u32 shared, int stages = STATES_STAGES) {
  clear_above_diagonal(shared + OFFSET(StatesStage, t), sizeof(StatesStage), stages, THREADS);
  make_ring_barriers<STATES_STAGES>(shared + OFFSET(StatesStage, barriers));
}

__device__ __forceinline__ void load_states(const GatedDeltaParams& p, const Item& x, u32 shared,
                                            int thread) {
  auto k = key_source(p, x, divide(x.hv, p.group_factor, p.group_shift), thread);
  auto v = value_source(p, x, thread);
  u64 record = record_at(p, x.s.slot, x.hv);
  int left = x.s.length;
  load_chunks(StatesRing{shared}, x.s.chunks, thread, [&](const StatesRing& ring) {
    const u32 stage = ring.stage();
    fetch_system(stage + OFFSET(StatesStage, t), stage + OFFSET(StatesStage, factors), record, ring.full(),
                 thread);
    k.fetch(stage + OFFSET(StatesStage, k), left, thread);
    v.fetch(stage + OFFSET(StatesStage, values), left, thread);
    left -= C;
    record += (u64)p.HV * RECORD_BYTES;
  });
}

// Where a walk begins and ends, of a whole sequence; walk_backward_segment.cuh has the same of a segment.
__device__ __forceinline__ void begin_alone(State& state, const GatedDeltaBackwardParams& p, const Item& item,
                                            int row, const Lane& l) {
  read_initial_state(state, p, item, row, l);
}
__device__ __forceinline__ void end_alone(State&, const GatedDeltaBackwardParams&, const Item&, int,
                                          const Lane&) {}

// Factors of a chunk's tokens for the state at its end, and the chunk's decay. Others: walk_to_checkpoints.cu.
__device__ __forceinline__ float decay_to_end(const GatedDeltaParams&, const Item&, u32 factors) {
  return load_shared1(factors + OFFSET(RecordFactors, last));
}
__device__ __forceinline__ ColumnFactors factors_to_end(const GatedDeltaParams&, const Item&, u32 factors,
                                                        const Lane& l) {
  return load_factors(factors + OFFSET(RecordFactors, to_end), l);
}

// STORES: u and the state at each chunk's start. Else the state at the walk's end is all that is wanted.
template <bool STORES = true, class Params, class Walked>
__device__ __forceinline__ void carry_state_alone(const Params& p, const Walked& item, u32 shared, int warp,
                                                  const Lane& l) {
  State state;
  begin_alone(state, p, item, l.row + l.g, l);
  const u32 staging = shared + OFFSET(StatesMemory, staging) + warp * (u32)sizeof(WarpStaging);
  OutputPlace to;
  u64 image;
  if constexpr (STORES) {
    const long long unit = (long long)item.s.slot * p.HV + item.hv;
    to = u_place(u_at(p, unit), l);
    image = state_image_at(p.states, unit);
  }
  Operand s;
  pack_state(s, state);
  StatesRing ring = {shared};
#pragma unroll 1
  for (int c = 0; c < item.s.chunks; ++c) {
    const u32 stage = ring.stage(), factors = stage + OFFSET(StatesStage, factors);
    const u64 k = operand_descriptor(stage + OFFSET(StatesStage, k), 16, 1024),
              over_k = operand_descriptor(stage + OFFSET(StatesStage, k), SQUARE_BYTES, 1024),
              t = columns_operand(stage + OFFSET(StatesStage, t));
    ring.wait_full();
    TokenOperand v, y;
    load_values(v, l, value_rows(stage + OFFSET(StatesStage, values), l.row % BLOCK_VALUES));
    const ColumnFactors of_state = load_factors(factors + OFFSET(RecordFactors, state), l);
    const float last = decay_to_end(p, item, factors);
    Products u = {};
    fence_registers(u);
    warpgroup_fence();
    multiply_channels(u, s, k);
    warpgroup_commit();
    end_basic_block(ring);
    if constexpr (STORES) store_state_rows(s, staging, image, l);
    warpgroup_wait<0>();
    fence_registers(u);
    begin_inverse(u, y, v, of_state, t);
    end_basic_block(ring);
    const ColumnFactors to_end = factors_to_end(p, item, factors, l);
    scale_state(state, last);
    warpgroup_wait<0>();
    fence_registers(u);
    TokenOperand ends;
    pack_scaled(ends, u, to_end);
    pack_rows(y, u);
    fence_registers(ends.a);
    fence_registers(y.a);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, ends.a[kk], over_tokens(over_k, kk), 1);
    warpgroup_commit();
    end_basic_block(ring);
    if constexpr (STORES) store_tokens(y, staging, to, C, l);
    warpgroup_wait<0>();
    fence_registers(state.s);
    pack_state(s, state);
    warp_arrive(ring.empty(), l.lane);
    ring.next();
    if constexpr (STORES) {
      to.at += (long long)p.HV * TILE_BYTES;
      image += (u64)p.HV * STATE_BYTES;
    }
  }
  end_alone(state, p, item, l.row + l.g, l);
}
