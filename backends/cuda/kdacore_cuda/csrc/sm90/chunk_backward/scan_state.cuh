// Loads and stores of a warp's rows of a state; its bfloat16 copy and a chunk's rows of v or dr on
// their way out.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"
#include "sm90/chunk_backward/state.cuh"

struct ScanLane {
  u32 shared;
  int lane, g, t;
  int row;  // this warp's first row among the block's
  // In a 16-row tile: where lane 8i + r finds row r of matrix i of four that make the first 16
  // columns.
  u32 piece;
};

__device__ __forceinline__ ScanLane make_lane(u32 shared, int warp) {
  ScanLane l;
  l.shared = shared;
  l.lane = thread_index() & 31;
  l.g = l.lane >> 2;
  l.t = l.lane & 3;
  l.row = 16 * warp;
  l.piece = swizzled(l.lane & 15, l.lane >> 4);
  return l;
}

// The state of this sequence and head in an array of them.
__device__ __forceinline__ u64 state_at(u64 states, const Task& task, int flags) {
  return states + task.nh * (K * V * (flags & FLAG_STATE_BF16 ? 2 : 4));
}

__device__ __forceinline__ int state_row(const ScanLane& l, const Task& task) {
  return task.part * BLOCK_V + l.row + l.g;
}

// What the task begins with: a segment's state, else one of the caller's array of them, or zero
// where there is none.
__device__ __forceinline__ void read_state(State& state, const ScanLane& l, const Task& task, u64 states,
                                           int flags) {
  if (IN_SEGMENTS && task.given)
    read_pairs(state.s, state_row(l, task), 2 * l.t, task.given);
  else
    read_state(state, state_row(l, task), l.t, states ? state_at(states, task, flags) : 0, flags);
}
__device__ __forceinline__ void write_state(State& state, const ScanLane& l, const Task& task, u64 states,
                                            int flags) {
  write_state(state, state_row(l, task), l.t, state_at(states, task, flags), flags);
}
__device__ __forceinline__ void decay_state(State& state, const ScanLane& l, u32 last) {
  decay_state(state, l.t, last);
}

// This warp's rows of h or dh, and of v or dr, to where the storing warp takes them from.
__device__ __forceinline__ void stage_state(const ScanLane& l, const StateOutRing& ring, const Operand& x) {
  const u32 to = ring.stage() + l.row * IMAGE_ROW + l.piece;
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    store_matrix4(to + (kk >> 2) * HALF_OUT_BYTES ^ (kk & 3) << 5, x.a[kk]);
}
__device__ __forceinline__ void stage_rows(const ScanLane& l, const RowsOutRing& ring, const TokenOperand& x) {
  const u32 to = ring.stage() + l.row * IMAGE_ROW + l.piece;
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) store_matrix4(to ^ kk << 5, x.a[kk]);
}
// What this warp has staged may be stored; fence_async_proxy comes before.
template <class Ring>
__device__ __forceinline__ void hand_over(const ScanLane& l, Ring& ring) {
  warp_arrive(ring.full(), l.lane);
  ring.next();
}

// This warp has finished reading the stage of this barrier.
__device__ __forceinline__ void release(const ScanLane& l, u32 empty) { warp_arrive(empty, l.lane); }
