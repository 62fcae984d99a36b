// A warp's arrival at a barrier in shared memory: all earlier accesses of its lanes come before
// those of the threads that wait.
//
// One lane arrives for its warp, after __syncwarp. racecheck tracks only the threads that arrive
// and reports the other lanes; with EVERY_LANE (build/kernel_source.py) each lane arrives for itself, and all
// barriers expect 32 times as many.
#pragma once

#include "common/ptx.cuh"

// Arrivals of one warp.
constexpr u32 WARP_ARRIVALS = EVERY_LANE ? 32 : 1;

__device__ __forceinline__ void warp_arrive(u32 bar, int lane) {
  sync_warp();
  if (EVERY_LANE || lane == 0) barrier_arrive(bar);
}

__device__ __forceinline__ void warp_arrive_remote(u32 bar, int lane) {
  sync_warp();
  if (EVERY_LANE || lane == 0) barrier_arrive_remote(bar);
}

// One lane arrives for its warp at another block's barrier, whose phase also waits for `bytes`.
__device__ __forceinline__ void warp_expect_remote(u32 bar, u32 bytes) {
  for (u32 i = 1; i < WARP_ARRIVALS; ++i) barrier_arrive_remote(bar);
  barrier_expect_remote(bar, bytes);
}
