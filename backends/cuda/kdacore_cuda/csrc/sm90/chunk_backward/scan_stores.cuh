// The storing warp: what the state warps have staged goes to the workspace. One thread issues whole
// images of the block's rows: copies of single warps' rows, issued by those, took their time from
// the products.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"

// To place `at` of an array of states, and of one of rows.
__device__ __forceinline__ void store_states(const StateOutRing& ring, const Task& task, u64 states,
                                             long long at) {
  const u64 to = states + at * STATE_BYTES + task.part * HALF_OUT_BYTES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_out(reinterpret_cast<void*>(to + half * (STATE_BYTES / 2)), ring.stage() + half * HALF_OUT_BYTES,
             HALF_OUT_BYTES);
  }
}
__device__ __forceinline__ void store_rows(const RowsOutRing& ring, const Task& task, u64 images,
                                           long long at) {
  copy_out(reinterpret_cast<void*>(images + at * TILE_BYTES + task.part * HALF_OUT_BYTES), ring.stage(),
           HALF_OUT_BYTES);
}

// The oldest stage that was not given back may be written again.
template <class Ring>
__device__ __forceinline__ void give_back(Ring& ring) {
  barrier_arrive(ring.empty());
  ring.next();
}

// A copy waits for its turn behind those of operands, so the next one is issued before its stage is
// given back.
__device__ __forceinline__ void store_forward(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  StateOutRing states = {shared}, states_read = {shared};
  RowsOutRing rows = {shared}, rows_read = {shared};
  for (int c = task.begin; c < task.end; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    states.wait_full();
    store_states(states, task, p.h, at);
    copy_out_commit();
    states.next();
    copy_out_wait_read<1>();
    if (c > task.begin) give_back(rows_read);
    rows.wait_full();
    store_rows(rows, task, p.u, at);
    copy_out_commit();
    rows.next();
    copy_out_wait_read<1>();
    give_back(states_read);
  }
  copy_out_wait_read<0>();
}

__device__ __forceinline__ void store_reverse(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  StateOutRing states = {shared}, states_read = {shared};
  RowsOutRing rows = {shared}, rows_read = {shared};
  const int first = task.end - 1;
  long long at = task.at + (long long)first * p.HV;
  for (int c = first; c >= task.begin; --c, at -= p.HV) {
    rows.wait_full();
    if (c < first) store_rows(rows, task, p.dr, at + p.HV);
    rows.next();
    states.wait_full();
    store_states(states, task, p.dh, at);
    copy_out_commit();
    states.next();
    copy_out_wait_read<OUT_STAGES - 1>();
    if (OUT_STAGES == 1 || c < first) {
      give_back(rows_read);
      give_back(states_read);
    }
  }
  if (first >= task.begin) {
    rows.wait_full();
    store_rows(rows, task, p.dr, at + p.HV);
    copy_out_commit();
  }
  copy_out_wait_read<0>();
}
