// Slice warps turn 32 channels of one half of a chunk's q, k and g into their part of the image,
// and give the sums over those channels to a solver warp (triangles.cuh). The warps of the two
// halves of a slice exchange their decays, and the second gets the first's keys for the products
// across the halves.
#pragma once

#include "sm90/chunk_forward/slices_bounded.cuh"
#include "sm90/chunk_forward/slices_unbounded.cuh"

__device__ __forceinline__ Source make_source(const ChunkForwardParams& p, const SequenceHead& w,
                                              const Lane& l, int slice, int token) {
  const long long g_size = G_FLOAT ? 4 : 2;
  const long long at = w.first + token;
  const int channel = 32 * slice + 8 * l.t;
  Source s;
  s.k_token = (int)(2 * p.k_st);
  s.q_token = (int)(2 * p.q_st);
  s.g_token = (int)(g_size * p.g_st);
  s.k = reinterpret_cast<const unsigned char*>(p.k + 2 * (w.batch * p.k_sb + w.h * p.k_sh) + at * s.k_token +
                                               2 * channel);
  s.q = reinterpret_cast<const unsigned char*>(p.q + 2 * (w.batch * p.q_sb + w.h * p.q_sh) + at * s.q_token +
                                               2 * channel);
  s.g = reinterpret_cast<const unsigned char*>(p.g + g_size * (w.batch * p.g_sb + gate_head(p, w.hv) * p.g_sh) +
                                               at * s.g_token + g_size * channel);
  s.set_channels(channels_of(p) - channel);
  return s;
}

// This lane's sums, 16 bytes a part, where the solver's same lane reads them. If gates are unbounded, products of
// pairs are there already.
__device__ __forceinline__ void store_parts(u32 to, const Products& sums) {
  if constexpr (BOUNDED) store_tiles(to, sums.tile);
  const float (&s)[2][2] = sums.square;
  store_shared(to + 4 * PART_BYTES, __float_as_uint(s[0][0]), __float_as_uint(s[0][1]),
               __float_as_uint(s[1][0]), __float_as_uint(s[1][1]));
  if constexpr (!BOUNDED)
    store_shared(to + 5 * PART_BYTES, __float_as_uint(sums.diagonal[0]), __float_as_uint(sums.diagonal[1]), 0u,
                 0u);
}

// The other half's decay of this lane's channels. `own_totals`: where those of its own half are in shared memory.
__device__ __forceinline__ void exchange_totals(const Place& at, u32 own_totals, float (&across)[8]) {
  sync_pair(at.pair);
  const u32 other = opaque(own_totals) + (at.half ? -128 : 128);  // recomputed to save registers
#pragma unroll
  for (int e = 0; e < 8; e += 4) {
    const float4 x = load_shared4(other + 4 * e);
    across[e] = decay_of(x.x);
    across[e + 1] = decay_of(x.y);
    across[e + 2] = decay_of(x.z);
    across[e + 3] = decay_of(x.w);
  }
}

// What a slice warp keeps for as long as it runs.
struct SliceWarp {
  Lane l;
  Place at;
  int group, pair;
  u32 bias, own_totals, parts, gate;  // in shared memory, of this lane
};
__device__ __forceinline__ SliceWarp make_slice_warp(u32 shared, int warp) {
  SliceWarp w;
  w.l = make_lane();
  w.group = warp / (2 * SLICES);
  w.at.half = warp / SLICES % 2;
  w.at.slice = warp % SLICES;
  w.at.odd = w.at.slice & 1;
  w.pair = w.group * SLICES + w.at.slice;
  w.at.pair = 1 + w.pair;
  w.at.exchange = shared + OFFSET(SharedMemory, keys) + w.pair * EXCHANGE_BYTES + 16 * w.l.lane;
  w.bias = shared + OFFSET(SharedMemory, bias) + 4 * (32 * w.at.slice + 8 * w.l.t);
  w.own_totals = shared + OFFSET(SharedMemory, totals) + w.pair * 256 + w.at.half * 128 + 32 * w.l.t;
  w.parts = shared + OFFSET(SharedMemory, parts) + w.pair * SLICE_PARTS + w.at.half * PARTS * PART_BYTES +
            16 * w.l.lane;
  w.gate = 0;
  return w;
}

// Both warps of a pair process the same task and share a bias.
__device__ __forceinline__ void store_bias(const SliceWarp& w, u32 shared, Gate& gate, float own_bias) {
  const u32 first = shared + OFFSET(SharedMemory, bias) + 4 * (32 * w.at.slice);
  const bool softplus = !BOUNDED && gate.kind == GATE_SOFTPLUS;
  if (softplus) {
    own_bias += gate.shift;
    own_bias = softplus_bias(gate.rare || warp_any(is_large_bias(own_bias)), own_bias);
  }
  sync_pair(w.at.pair);
  if (!w.at.half) store_shared(first + 4 * w.l.lane, __float_as_uint(own_bias));
  sync_pair(w.at.pair);
  if (softplus) gate.rare = is_rare_bias(first);
}

// Waits until a step's stage may be written.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ void wait_for_stage(u32 shared, const OwnStep& step) {
  const u32 stage = own_stage<ALONE>(step);
  barrier_wait(ALONE && SPACED ? room_at(shared, stage) : shared + OFFSET(SharedMemory, empty) + 8 * stage,
               (u32)(own_use<ALONE>(step) & 1) ^ 1);
}

// Waits until a solver has read the sums that those of the block's i-th step replace. `barriers`: parts_read or
// tiles_read.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ void wait_for_solver(const SliceWarp& w, u32 shared, u32 i, u32 barriers) {
  // The block's step that had those sums is GROUPS * SUMS ago; half a round of the barriers, or a whole one.
  i += READS<ALONE> - GROUPS * SUMS<ALONE>;
  barrier_wait(shared + barriers + 8 * read_barrier<ALONE>(w.group, i), (read_use<ALONE>(i) & 1) ^ 1);
}

// Where this lane's sums of the block's i-th step go.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ u32 parts_of(const SliceWarp& w, u32 i) {
  return w.parts + sums_offset<ALONE>(i);
}

// Hands sums to the solver of the block's i-th step. `across_halves` gives the second half's sums against the first.
template <bool ALONE = SEPARATE, class F>
__device__ __forceinline__ void hand_over(const SliceWarp& w, u32 shared, u32 i, const Products& sums,
                                          F across_halves) {
  const u32 parts = parts_of<ALONE>(w, i);
  wait_for_solver<ALONE>(w, shared, i, OFFSET(SharedMemory, parts_read));
  store_parts(parts, sums);
  if (w.at.half) {
    const Across across = across_halves();
    store_tiles(parts + PARTS * PART_BYTES, across.tile);
  }
  warp_arrive(shared + OFFSET(SharedMemory, parts_ready) + 8 * (i % SOLVERS), w.l.lane);
}

// This warp's part of a step, whose inputs are in `raw`. `to_next` moves `from` and `left` to the next load. A second
// half without tokens is computed like any other: both warps of a pair then reach each barrier at the same
// instruction, without which compute-sanitizer's synccheck reports divergent threads.
template <bool ALONE = SEPARATE, class F>
__device__ __forceinline__ void slice_step(SliceWarp& w, u32 shared, const Gate& gate, Raw& raw,
                                           const OwnStep& step, const Source& from, int& left, F to_next) {
  w.at.stage = shared + OFFSET(SharedMemory, stages) + own_stage<ALONE>(step) * STAGE_PITCH;
  receive_gate<ALONE>(raw, w.gate);
  float steps[2][8], across[8];
  gate_steps(raw, gate, w.bias, left, steps);
  to_next();
  Decays<BOUNDED> decays;
  if constexpr (BOUNDED)
    load_gate<ALONE>(raw, {from, left}, w.gate);
  else
    wait_for_solver<ALONE>(w, shared, step.i, tiles_read());
  make_decays(raw, steps, decays, w.l, w.own_totals, parts_of<ALONE>(w, step.i));
  if constexpr (!BOUNDED) load_gate<ALONE>(raw, {from, left}, w.gate);
  exchange_totals(w.at, w.own_totals, across);
  wait_for_stage<ALONE>(shared, step);
  store_decay(decays, across, w.l, w.at, w.own_totals);
  Products sums = {};
  Operands operands;
  prepare_slice(raw, decays, across, w.l, w.at, sums, operands, {from, left});
  hand_over<ALONE>(w, shared, step.i, sums, [&] { return across_products(w.at, operands); });
}

__device__ __forceinline__ void slice_warp(const ChunkForwardParams& p, u32 shared, int warp, int rank) {
  int c = warp / (2 * SLICES) * PREPARERS + rank;  // of the cluster's steps
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  if (!advance_to_step(p, shared, task, c)) return;
  SliceWarp w = make_slice_warp(shared, warp);
  int length, shift,
      left;  // of the sequence; from a step to its chunk; this lane's tokens from the next load on
  Source from;
  const auto first_token = [&] { return (c + shift) * C + w.at.half * HALF + 2 * w.l.p; };
  int stopped = 0, heads = 0, value_heads = 0;
  Move move = NEXT_SEQUENCE;
  do {
    int tokens;
    if (move == NEXT_SEQUENCE) {
      const TaskPart part = make_task_part(p, shared, task);
      length = uniform(part.sequence.length);
      shift = part.shift;
      tokens = part.tokens;
      from = make_source(p, part.sequence, w.l, w.at.slice, first_token());
    } else {
      shift = shift_to_end(task, length);
      tokens = length;
      advance(from, p, (c + shift - stopped) * C, heads, value_heads);
    }
    left = tokens - first_token();
    // What comes from the caches is requested before what comes from memory, as answers come in order.
    Gate gate = make_gate(p, gate_head(p, task.hv));
    const float own_bias = w.at.half ? 0.0f : load_own_bias(p, task.hv, 32 * w.at.slice + w.l.lane);
    Raw raw = {};
    load_gate(raw, {from, left}, w.gate);
    load_rows(raw, {from, left});
    store_bias(w, shared, gate, own_bias);
#pragma unroll 1
    for (; c < task.stop; c += STRIDE)
      slice_step(w, shared, gate, raw, own_step(c), from, left, [&] {
        advance(from);
        left -= STRIDE * C;
      });
    stopped = c + shift;
    const int hv = task.hv;
    move = move_to_step(p, shared, task, length, c);
    heads = key_head(p, task.hv) - key_head(p, hv);
    value_heads = gate_head(p, task.hv) - gate_head(p, hv);
  } while (move != NO_STEP);
}
