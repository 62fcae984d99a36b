// Loads and stores of a warp's rows of a state, of their bfloat16 copy and of a chunk's rows of v
// or dr.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"
#include "sm90/chunk_backward/state.cuh"

struct ScanLane {
  u32 shared;
  int lane, g, t;
  int row;  // this warp's first row among the block's
  u32 out;  // its part of OUT
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
  l.out = shared + OFFSET(SharedMemory, out) + warp * OUT_BYTES;
  l.piece = swizzled(l.lane & 15, l.lane >> 4);
  return l;
}

// The state of this sequence and head, from the block's first value on, in an array of them.
__device__ __forceinline__ u64 state_at(u64 states, const Task& task, int flags, const ChunkBackwardParams& p) {
  const u64 at = states + task.nh * (channels_of(p) * values_of(p) * (flags & FLAG_STATE_BF16 ? 2 : 4));
  if (!NARROW) return at;
  return at + task.block * V * (flags & FLAG_STATE_BF16 ? 2 : 4) * (flags & FLAG_V_FIRST ? p.K : 1);
}
__device__ __forceinline__ StateDims own_dims(const ChunkBackwardParams& p, const Task& task) {
  return {channels_of(p), values_of_block(p, task.block), values_of(p)};
}

__device__ __forceinline__ int state_row(const ScanLane& l, const Task& task) {
  return task.part * BLOCK_V + l.row + l.g;
}

// What the task begins with: a segment's state, else one of the caller's array of them, or zero
// where there is none.
__device__ __forceinline__ void read_state(State& state, const ScanLane& l, const Task& task,
                                           u64 states, int flags, const ChunkBackwardParams& p) {
  if (IN_SEGMENTS && task.given)
    read_pairs(state.s, state_row(l, task), 2 * l.t, task.given);
  else if constexpr (NARROW)
    read_narrow_state(state, own_dims(p, task), state_row(l, task), l.t,
                       states ? state_at(states, task, flags, p) : 0, flags);
  else
    read_state(state, state_row(l, task), l.t, states ? state_at(states, task, flags, p) : 0, flags);
}
__device__ __forceinline__ void write_state(State& state, const ScanLane& l, const Task& task,
                                            u64 states, int flags, const ChunkBackwardParams& p) {
  if constexpr (NARROW)
    write_narrow_state(state, own_dims(p, task), state_row(l, task), l.t, state_at(states, task, flags, p), flags);
  else
    write_state(state, state_row(l, task), l.t, state_at(states, task, flags, p), flags);
}
__device__ __forceinline__ void decay_state(State& state, const ScanLane& l, u32 last) {
  decay_state(state, l.t, last);
}

// Stores of rows of h or dh, and of v or dr: wait until earlier copies (all groups but the last N)
// have read the staging rows, stage, fence, and copy as one group.
template <int N>
__device__ __forceinline__ void wait_stores(const ScanLane& l) {
  if (l.lane == 0) copy_out_wait_read<N>();
  sync_warp();
}
__device__ __forceinline__ void stage_state(const ScanLane& l, const Operand& x) {
#pragma unroll
  for (int kk = 0; kk < K_TILES; ++kk)
    store_matrix4(l.out + (kk >> 2) * ROWS_OUT + (l.piece ^ (kk & 3) << 5), x.a[kk]);
}
__device__ __forceinline__ void stage_rows(const ScanLane& l, const TokenOperand& x) {
#pragma unroll
  for (int kk = 0; kk < C_TILES; ++kk) store_matrix4(l.out + 2 * ROWS_OUT + (l.piece ^ kk << 5), x.a[kk]);
}
__device__ __forceinline__ void fence_staged() {
  fence_async_proxy();
  sync_warp();
}
// To place `at`; one lane calls these.
__device__ __forceinline__ void store_state_image(const ScanLane& l, const Task& task, u64 states,
                                                  long long at) {
  const u64 to = states + at * STATE_BYTES + (task.part * BLOCK_V + l.row) * IMAGE_ROW;
  copy_out(reinterpret_cast<void*>(to), l.out, ROWS_OUT);
  copy_out(reinterpret_cast<void*>(to + V * IMAGE_ROW), l.out + ROWS_OUT, ROWS_OUT);
}
__device__ __forceinline__ void store_rows_image(const ScanLane& l, const Task& task, u64 images,
                                                 long long at) {
  const u64 to = images + at * TILE_BYTES + (task.part * BLOCK_V + l.row) * IMAGE_ROW;
  copy_out(reinterpret_cast<void*>(to), l.out + 2 * ROWS_OUT, ROWS_OUT);
}

// This warp has finished reading the stage of this barrier.
__device__ __forceinline__ void release(const ScanLane& l, u32 empty) { warp_arrive(empty, l.lane); }
