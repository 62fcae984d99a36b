// A helper of clusters of two: a block that only prepares (preparing_block.cuh), each chunk of another sequence and
// value head, and writes them to device memory.
#pragma once

#include "sm90/chunk_forward/preparing_block.cuh"
#include "sm90/chunk_forward/triangles.cuh"

// Which of the helpers a block is, and from one of its units to the next.
struct HelperTurns {
  int number, count;
};
__device__ __forceinline__ HelperTurns find_turns(const ChunkForwardParams& p, u32 shared) {
  return {load_own(shared + OWN_CLUSTER), CLUSTER * helper_clusters(p)};
}

__device__ __forceinline__ void helper_slice_warp(const ChunkForwardParams& p, u32 shared, int warp) {
  const HelperTurns turns = find_turns(p, shared);
  const int steps = steps_of_length((int)p.T), pair = warp % PAIRS;
  const u32 memory = shared + OFFSET(SharedMemory, values) + pair * PAIR_BYTES;
  u32 i = pair / SLICES;  // of the block's steps
  HelperUnit unit = first_helper_unit(p);
  unit.advance(p, turns.number + i * turns.count);
  if (unit.step.c >= steps) return;
  SliceWarp w;
  w.l = make_lane();
  w.group = 0;
  w.pair = pair;
  w.at.half = warp / PAIRS;
  w.at.odd = pair & 1;
  w.at.pair = 1 + pair;
  w.at.exchange = memory + OFFSET(PairMemory, keys) + 16 * w.l.lane;
  w.own_totals = memory + OFFSET(PairMemory, totals) + w.at.half * 128 + 32 * w.l.t;
  w.gate = shared + GATES + warp * GATE_BYTES + 16 * w.l.lane;
  set_slice(w, shared, memory, pair % SLICES);
  Source from;
  int left;           // this lane's tokens from the next load on
  float A_log;        // of the next unit's head
  u32 bias_bits;      // of a channel of its slice, not converted yet: that would wait for the load
  const auto find_inputs = [&](int slice) {
    const SequenceHead sequence = unit.sequence(p);
    // What comes from the caches is requested before what comes from memory, as answers come in order.
    A_log = p.A_log ? reinterpret_cast<const float*>(p.A_log)[sequence.hv] : 0.0f;
    bias_bits = 0;
    if (p.dt_bias && !w.at.half)
      bias_bits = load_bits(p.dt_bias + type_size(p.bias_type) * (sequence.hv * K + 32 * slice + w.l.lane),
                            p.bias_type);
    const int token = unit.step.c * C + w.at.half * HALF + 2 * w.l.p;
    left = (int)p.T - token;
    from = make_source(p, sequence, w.l, slice, token);
  };
  const float inverse_of_bound = 1.0f / p.lower_bound;
  Gate gate;
  const auto store_gate = [&] {
    const u32 to = memory + OFFSET(PairMemory, bias) + 128 * (w.at.slice >> 1);
    gate = make_gate<BOUNDED>(p.gate, A_log, inverse_of_bound);
    float bias = held_bias(from_bits(bias_bits, p.bias_type));
    const bool softplus = !BOUNDED && gate.kind == GATE_SOFTPLUS;
    if (softplus) {
      bias += gate.shift;
      bias = softplus_bias(gate.rare || warp_any(is_large_bias(bias)), bias);
    }
    // Read before only in the pair's step before the last, whose warps have met since.
    if (!w.at.half) store_shared(to + 4 * w.l.lane, __float_as_uint(bias));
    sync_pair(w.at.pair);
    if (softplus) gate.rare = is_rare_bias(to);
  };
  find_inputs(w.at.slice);
  Raw raw = {};
  load_gate<true>(raw, {from, left}, w.gate);
  load_rows(raw, {from, left});
  store_gate();
#pragma unroll 1
  while (true) {
    const SliceStep next = next_slice(w.at.slice, 1);
    const int slice = w.at.slice ^ 2;
    slice_step<true>(w, shared, gate, raw, {unit.step.c, i}, from, left, [&] {
      unit.advance(p, next.chunks * turns.count);
      i += next.chunks;
      find_inputs(slice);
    });
    if (unit.step.c >= steps) return;
    set_slice(w, shared, memory, slice);
    store_gate();
  }
}

__device__ __forceinline__ void helper_solver_warp(const ChunkForwardParams& p, u32 shared, int warp) {
  const SolverWarp w = make_solver_warp(shared, warp);
  const HelperTurns turns = find_turns(p, shared);
  const int steps = steps_of_length((int)p.T);
  const long long size = type_size(p.beta_type);
  u32 i = w.pair;  // of the block's steps
  HelperUnit unit = first_helper_unit(p);
  unit.advance(p, turns.number + i * turns.count);
  int left;
  u32 beta[2];
  const auto load = [&] {
    const SequenceHead x = unit.sequence(p);
    const int token = unit.step.c * C + HALF * w.half + 2 * w.l.p;
    left = (int)p.T - token;
    load_beta(p, p.beta + size * (x.batch * p.beta_sb + x.hv * p.beta_sh + token * p.beta_st),
              size * p.beta_st, left, beta);
  };
  const auto wait = [](u32 barrier, u32 parity) { barrier_wait(barrier, parity); };
  load();
#pragma unroll 1
  while (unit.step.c < steps) {
    const OwnStep step = {unit.step.c, i};
    const HelpedChunk to = find_helped_chunk(p, unit.item, unit.step);
    solve_step<true>(p, w, shared, step, HELPER, beta, left, wait,
                     [&] {
                       i += SOLVERS;
                       unit.advance(p, SOLVERS * turns.count);
                       load();
                     },
                     [&] {
                       if (!w.half) return;
                       const u32 own = own_stage<true>(step);
                       fence_async_proxy();
                       sync_warp();
                       store_stage(p, shared, own, to, w.l.lane,
                                   [&] { warp_arrive(room_at(shared, own), w.l.lane); });
                     });
  }
}
