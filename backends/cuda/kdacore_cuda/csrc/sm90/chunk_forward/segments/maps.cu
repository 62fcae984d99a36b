// chunk_kda in segments on Hopper, second launch: how each segment changes the state, S' = S A + B.
// For each chunk, with its matrices of chunk_operands.cuh,
//
//   r = v - S kd^T;   S' = S diag(last) + r kt
//
// Starting from S = 0 (or the initial state) this gives B; from the unit matrix, without v, it
// gives A.
//
// Grid: two blocks a segment and value head, one for A and one for B, 128 rows each. Warps, rings
// and synchronisation: segment_scan.cuh.
//
// Macros: OF_SLICE, for a slice of a row that several ranks share. What a sequence begins with is then
// not known: B of first segments is from zero, and they have an A. The sequence that goes on behind
// the slice, the one that the last token belongs to, has both of its last segment, too;
// LEAVING_ONLY, no other sequence has any.
#include "sm90/chunk_forward/segments/chunk_operands.cuh"
constexpr u32 STAGED_BYTES = OFFSET(ChunkOperands, qg);  // the part that is loaded
#include "sm90/chunk_backward/segment_map.cuh"
#include "sm90/chunk_forward/segments/segment_scan.cuh"

#ifndef OF_SLICE
#define OF_SLICE 0
#endif

// A block's segment, and whether it computes A. Later segments come first: their operands were
// written last, and the blocks for A of first segments, which have nothing to do, cost nothing at
// the end.
struct Task {
  Segment x;
  bool from_identity, idle;
};
__device__ __forceinline__ Task find_task(const SegmentParams& p, int block) {
  const int index = grid_blocks() - 1 - block, m = index >> 1, slot = m / p.HV, hv = m - slot * p.HV;
  int n, j;
  find_slot_segment(p, slot, [&](int sequence, int segment) { n = sequence, j = segment; });
  Task task = {find_segment(p, n, j, hv), (index & 1) == 0, false};
#if OF_SLICE
  const Sequence& s = task.x.s;
  const bool leaves = s.first + s.length == p.T;
  task.idle = task.x.begin >= s.chunks || (!leaves && (LEAVING_ONLY || task.x.last()));
#else
  task.idle = task.x.last() || (task.from_identity && task.x.index == 0);
#endif
  return task;
}

__device__ __forceinline__ void initial_state(State& state, const SegmentParams& p, const Task& task,
                                              const Lane& l) {
  if (!task.from_identity) {
    const u64 h0 = task.x.index ? 0 : initial_state_at(p, task.x.n, task.x.hv, K * V);
    return read_state(state, l.row + l.g, l.t, h0, p.flags);
  }
  unit_state(state, l.row + l.g, l.t);
}

// The stages of the ring, which are no longer in use, hold A on its way.
__device__ __forceinline__ void store_map(const State& state, u64 map, u32 shared, const Lane& l) {
  sync_threads(1, 32 * STATE_WARPS);
  store_map_rows(state, map + OFFSET(SegmentMap, a_high), l.row, shared + l.row * 4 * IMAGE_ROW, l.piece,
                 l.lane);
}

__device__ __forceinline__ void scan_segment(const SegmentParams& p, const Task& task, u32 shared,
                                             const Lane& l) {
  State state;
  initial_state(state, p, task, l);
  Operand s;
  pack_state(s, state);
  if (task.from_identity) {
    // Without v: the places of this warp's values stay zero.
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
      const ValueRows values = values_of(shared + i * STAGE_PITCH + STAGE_LEAD, l);
#pragma unroll
      for (int n = 0; n < 4; ++n) store_shared(values.place(16 * n + (l.lane >> 1), l.lane & 1), 0, 0, 0, 0);
    }
    sync_warp();
  }
  OperandRing ring = {shared};
#pragma unroll 1
  for (int c = task.x.begin; c < task.x.end; ++c) {
    const u32 stage = ring.stage();
    const u64 kd = operand_descriptor(stage + OFFSET(ChunkOperands, kd), 16, 1024),
              kt = operand_descriptor(stage + OFFSET(ChunkOperands, kt), SQUARE_BYTES, 1024);
    ring.wait_full();
    float prediction[2 * C_TILES][4] = {};  // S kd^T
    fence_registers(prediction);
    warpgroup_fence();
    multiply_channels(prediction, s, kd);
    warpgroup_commit();
    end_basic_block(ring);
    TokenOperand v, r;
    load_values(v, l, values_of(stage, l));
    decay_state(state, l.t, stage + OFFSET(ChunkOperands, last));
    warpgroup_wait<0>();
    fence_registers(prediction);
    subtract(r, v, prediction);
    warpgroup_fence();
#pragma unroll
    for (int kk = 0; kk < C_TILES; ++kk) warpgroup_mma<1>(state.s, r.a[kk], over_tokens(kt, kk), 1);
    warpgroup_commit();
    warpgroup_wait<0>();
    fence_registers(state.s);
    pack_state(s, state);
    release(l, ring);
    ring.next();
  }
  const u64 map = p.maps + task.x.place * MAP_BYTES;
  if (task.from_identity)
    store_map(state, map, shared, l);
  else
    write_pairs(state.s, l.row + l.g, 2 * l.t, map + OFFSET(SegmentMap, b));
}

// Of a first segment, whose block for A has nothing else to do.
__device__ __forceinline__ void keep_initial_state(const SegmentParams& p, int warp) {
  if (warp >= STATE_WARPS || !keeps_initial_state(p)) return;
  const Task task = find_task(p, opaque(block_index()));
  if (task.x.last()) return;
  const Lane l = make_lane(warp);
  State state;
  read_state(state, l.row + l.g, l.t, initial_state_at(p, task.x.n, task.x.hv, K * V), p.flags);
  write_pairs(state.s, l.row + l.g, 2 * l.t, p.starts + task.x.place * FULL_STATE_BYTES);
}

KDA_KERNEL(THREADS, 1) maps(KDA_PARAM SegmentParams p) {
  KDA_SHARED(memory);
  const u32 shared = shared_address(memory);
  wait_for_inputs();
  const int warp = uniform(thread_index() >> 5);
  const Task task = find_task(p, block_index());
  if (task.idle) return keep_initial_state(p, warp);
  make_barriers(shared);
  if (warp < STATE_WARPS) {
    set_role_registers<1>();
    scan_segment(p, task, shared, make_lane(warp));
  } else {
    set_role_registers<0>();
    OperandRing ring = {shared};
    produce(p, task.x, ring, STAGED_BYTES, !task.from_identity);
  }
}
