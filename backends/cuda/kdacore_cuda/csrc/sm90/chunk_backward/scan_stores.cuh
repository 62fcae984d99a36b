// The storing warp: what the state warps have staged goes to the workspace. One thread issues whole
// images of the block's rows: copies of single warps' rows, issued by those, took their time from
// the products.
#pragma once

#include "sm90/chunk_backward/scan_shared_memory.cuh"

// Waits until the stage may be written again, and says so.
template <class Ring>
__device__ __forceinline__ void finish_store(Ring& ring) {
  copy_out_commit();
  copy_out_wait_read<0>();
  barrier_arrive(ring.empty());
  ring.next();
}

// To place `at` of an array of states.
__device__ __forceinline__ void store_states(StateOutRing& ring, const Task& task, u64 states, long long at) {
  ring.wait_full();
  const u64 to = states + at * STATE_BYTES + task.part * HALF_OUT_BYTES;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    copy_out(reinterpret_cast<void*>(to + half * (STATE_BYTES / 2)), ring.stage() + half * HALF_OUT_BYTES,
             HALF_OUT_BYTES);
  }
  finish_store(ring);
}

__device__ __forceinline__ void store_rows(RowsOutRing& ring, const Task& task, u64 images, long long at) {
  ring.wait_full();
  copy_out(reinterpret_cast<void*>(images + at * TILE_BYTES + task.part * HALF_OUT_BYTES), ring.stage(),
           HALF_OUT_BYTES);
  finish_store(ring);
}

__device__ __forceinline__ void store_forward(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  StateOutRing states = {shared};
  RowsOutRing rows = {shared};
  for (int c = task.begin; c < task.end; ++c) {
    const long long at = task.at + (long long)c * p.HV;
    store_states(states, task, p.h, at);
    store_rows(rows, task, p.u, at);
  }
}

__device__ __forceinline__ void store_reverse(const ChunkBackwardParams& p, const Task& task, u32 shared) {
  if (thread_index() & 31) return;
  StateOutRing states = {shared};
  RowsOutRing rows = {shared};
  const int first = task.end - 1;
  long long at = task.at + (long long)first * p.HV;
  for (int c = first; c >= task.begin; --c, at -= p.HV) {
    if (c < first) {
      store_rows(rows, task, p.dr, at + p.HV);
    } else {
      rows.wait_full();
      finish_store(rows);
    }
    store_states(states, task, p.dh, at);
  }
  if (first >= task.begin) store_rows(rows, task, p.dr, at + p.HV);
}
