// A ring of stages in shared memory. Each stage has two barriers: one completes when it is full,
// one when it is empty.
#pragma once

#include "common/ptx.cuh"

// The position of a producer or a consumer. Stages begin at offset AT, PITCH bytes apart. The
// barriers for full begin at FULL_AT, 8 bytes apart, those for empty EMPTY bytes after them. Stages
// are filled for the first time at parity 0.
template <int STAGES, u32 AT, u32 PITCH, u32 FULL_AT, u32 EMPTY>
struct Ring {
  u32 shared;
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ u32 stage() const { return shared + AT + slot * PITCH; }
  __device__ __forceinline__ u32 full() const { return shared + FULL_AT + 8 * slot; }
  __device__ __forceinline__ u32 empty() const { return full() + EMPTY; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
  __device__ __forceinline__ void next() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};
