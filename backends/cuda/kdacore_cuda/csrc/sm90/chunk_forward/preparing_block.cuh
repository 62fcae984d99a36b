// Slice warps of a block that only prepares (in clusters of four, and helpers): twelve, where a block that also
// scans has eight.
//
// Six pairs of warps, a half of a chunk each, take turns with the four slices of one chunk after the
// other, so a pair alternates between two slices. What a pair keeps in shared memory lies where other
// blocks have V and o.
#pragma once

#include "sm90/chunk_forward/slices.cuh"

constexpr int PAIRS = 6;
static_assert(!(SEPARATE || SPACED) || 2 * PAIRS == SCAN_WARPS + SLICE_WARPS,
              "warps that scan in other blocks are slice warps here");
static_assert(!(SEPARATE || SPACED) || PAIRS % SLICES == 2 && SLICES == 4 && GROUPS == 1,
              "a pair alternates between slices two apart");
static_assert(!(SEPARATE || SPACED) || SOLVER_BARRIER > PAIRS, "named barriers of pairs and solvers");

struct PairMemory {
  uint4 keys[2][32];
  float totals[2][32], bias[2][32];  // bias: of the pair's two slices
};
constexpr u32 PAIR_BYTES = sizeof(PairMemory);
// What the warps' gates are copied to lies behind the second set of sums.
constexpr u32 GATES = OFFSET(SharedMemory, stages) + OWN_STAGES<true> * STAGE_PITCH + GROUPS * SLICES * SLICE_PARTS,
              GATE_BYTES = 2 * G_VECTORS * GATE_PITCH;
static_assert(!(SEPARATE || SPACED) || GATES + 2 * PAIRS * GATE_BYTES <= OFFSET(SharedMemory, stages) + STAGES * STAGE_PITCH,
              "no room for gates");
static_assert(!(SEPARATE || SPACED) || PAIRS * PAIR_BYTES <= sizeof(ValueTile[SCAN_WARPS][V_DEPTH][2]),
              "no room for the pairs' memory");

// A pair's next slice: two slices on in this chunk's place of the next chunk, or back in the one after it.
struct SliceStep {
  int chunks, channels;
};
__device__ __forceinline__ SliceStep next_slice(int slice, int stride = PREPARERS) {
  return slice < 2 ? SliceStep{stride, 64} : SliceStep{2 * stride, -64};
}
__device__ __forceinline__ void advance(Source& s, const SliceStep& step) {
  s.k += (long long)step.chunks * C * s.k_token + 2 * step.channels;
  s.q += (long long)step.chunks * C * s.q_token + 2 * step.channels;
  s.g += (long long)step.chunks * C * s.g_token + (G_FLOAT ? 4 : 2) * step.channels;
  s.move_channels(step.channels);
}

// What depends on the slice.
__device__ __forceinline__ void set_slice(SliceWarp& w, u32 shared, u32 memory, int slice) {
  w.at.slice = slice;
  w.bias = memory + OFFSET(PairMemory, bias) + 128 * (slice >> 1) + 32 * w.l.t;
  w.parts = shared + OFFSET(SharedMemory, parts) + slice * SLICE_PARTS + w.at.half * PARTS * PART_BYTES +
            16 * w.l.lane;
}

__device__ __forceinline__ void preparing_slice_warp(const ChunkForwardParams& p, u32 shared, int warp,
                                                     int preparer) {
  const int pair = warp % PAIRS;
  const u32 memory = shared + OFFSET(SharedMemory, values) + pair * PAIR_BYTES;
  int c = pair / SLICES * PREPARERS + preparer;  // of the cluster's steps
  Task task = load_task(shared + OFFSET(SharedMemory, interval));
  if (!advance_to_step(p, shared, task, c)) return;
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
  do {
    const TaskPart part = make_task_part(p, shared, task);
    const int tokens = part.tokens, token = (c + part.shift) * C + w.at.half * HALF + 2 * w.l.p;
    int left = tokens - token;  // this lane's tokens from the next load on
    Source from = make_source(p, part.sequence, w.l, w.at.slice, token);
    // What comes from the caches is requested before what comes from memory, as answers come in order.
    Gate gate = make_gate(p, gate_head(p, task.hv));
    float bias[2] = {};
    if (!w.at.half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) bias[i] = load_own_bias(p, task.hv, 64 * i + 32 * (pair & 1) + w.l.lane);
    }
    Raw raw = {};
    load_gate(raw, {from, left}, w.gate);
    load_rows(raw, {from, left});
    const bool softplus = !BOUNDED && gate.kind == GATE_SOFTPLUS;
    if (softplus) {
      for (float& x : bias) x += gate.shift;
      const bool rare = gate.rare || warp_any(is_large_bias(bias[0]) || is_large_bias(bias[1]));
#pragma unroll
      for (int i = 0; i < 2; ++i) bias[i] = softplus_bias(rare, bias[i]);
    }
    sync_pair(w.at.pair);
    if (!w.at.half) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
        store_shared(memory + OFFSET(PairMemory, bias) + 128 * i + 4 * w.l.lane, __float_as_uint(bias[i]));
    }
    sync_pair(w.at.pair);
    if (softplus) gate.rare = is_rare_bias(memory + OFFSET(PairMemory, bias));
#pragma unroll 1
    while (c < task.stop) {
      const SliceStep step = next_slice(w.at.slice);
      slice_step(w, shared, gate, raw, own_step(c), from, left, [&] {
        advance(from, step);
        left -= step.chunks * C;
      });
      c += step.chunks;
      set_slice(w, shared, memory, w.at.slice ^ 2);
    }
  } while (advance_to_step(p, shared, task, c));
}
