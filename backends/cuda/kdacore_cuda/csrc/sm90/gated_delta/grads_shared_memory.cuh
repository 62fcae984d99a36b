// Shared memory of unit_grads, and its barriers.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/state.cuh"
#include "sm90/gated_delta/backward_workspace.cuh"
#include "sm90/gated_delta/key_unit.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// Two warpgroups compute: what q is multiplied with, and what k is. They run the same instructions, as those of two
// different roles would not fit into the instruction cache. Two warps load, two finish the gates.
enum Side { QUERIES, KEYS };
constexpr int SIDES = 2, SIDE_WARPS = 4, COMPUTE_WARPS = SIDES * SIDE_WARPS, LOAD_WARPS = 2, GATE_WARPS = 2,
              THREADS = 32 * (COMPUTE_WARPS + LOAD_WARPS + GATE_WARPS);
// Moved between warpgroups.
constexpr int START_REGISTERS = 168, COMPUTE_REGISTERS = 216, OTHER_REGISTERS = 72;
static_assert(SIDES * COMPUTE_REGISTERS + OTHER_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");

// Gradients of the logarithms of a value head's decays, but for the states' product.
struct DecaySums {
  float tokens[SIDES][C];  // handed from warp to warp
  float of_states;         // half of the states' product: times the chunk's decay, all tokens get it
};
struct HeadStage {
  TileImage own[SIDES],
      u;  // d_o, dv; with the last value head these make room for pairs, u and dv for dq and dk
};
struct KeyTiles {
  TileImage own[SIDES];  // q, k
};
constexpr int STAGES = 2;
struct SharedMemory {
  HeadStage heads[STAGES];
  KeyTiles keys[STAGES];
  StateImage state, state_grad;
  HeadScalars head[STAGES];
  KeyScalars key[STAGES];
  KeyUnit unit[STAGES];  // of `keys`; no rows: there are no more
  DecaySums sums;
  // Barriers. A head's count the bytes of its bulk copies, the loading warps and, with its first value head, a unit's
  // tiles.
  u64 head_full[STAGES], head_empty[STAGES], keys_empty[STAGES];
  u64 state_full, state_empty, state_grad_full, state_grad_empty;
  u64 sums_full, sums_empty;  // all sums of a head are there; the warp that finishes the gate has read them
  u64 pairs_full, tiles_unused;  // a unit's pairs are there; its last value head's tiles have been read
};
static_assert(sizeof(SharedMemory) <= 227 * 1024, "more than a multiprocessor has");
using HeadRing =
    Ring<STAGES, OFFSET(SharedMemory, heads), sizeof(HeadStage), OFFSET(SharedMemory, head_full), 8 * STAGES>;
using KeyRing =  // has no barrier for full
    Ring<STAGES, OFFSET(SharedMemory, keys), sizeof(KeyTiles), OFFSET(SharedMemory, keys_empty), 0>;
using StateRing = Ring<1, OFFSET(SharedMemory, state), 0, OFFSET(SharedMemory, state_full), 8>;
using StateGradRing = Ring<1, OFFSET(SharedMemory, state_grad), 0, OFFSET(SharedMemory, state_grad_full), 8>;
using SumsRing = Ring<1, 0, 0, OFFSET(SharedMemory, sums_full), 8>;
using PairsRing = Ring<1, 0, 0, OFFSET(SharedMemory, pairs_full), 8>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() == 0) {
    constexpr u32 SIDE = SIDE_WARPS * WARP_ARRIVALS, BOTH = SIDES * SIDE, LOADS = LOAD_WARPS * WARP_ARRIVALS,
                  GATES = GATE_WARPS * WARP_ARRIVALS;
    const auto init = [&](u32 offset, u32 count) { barrier_init(shared + offset, count); };
    for (int i = 0; i < STAGES; ++i) {
      init(OFFSET(SharedMemory, head_full) + 8 * i, 1 + LOADS);
      init(OFFSET(SharedMemory, head_empty) + 8 * i, BOTH + GATES);
      init(OFFSET(SharedMemory, keys_empty) + 8 * i, BOTH + GATES);
    }
    init(OFFSET(SharedMemory, state_full), 1);
    init(OFFSET(SharedMemory, state_empty), BOTH + GATES);
    init(OFFSET(SharedMemory, state_grad_full), 1);
    init(OFFSET(SharedMemory, state_grad_empty), SIDE + GATES);
    init(OFFSET(SharedMemory, sums_full), BOTH + WARP_ARRIVALS);
    init(OFFSET(SharedMemory, sums_empty), WARP_ARRIVALS);
    init(OFFSET(SharedMemory, pairs_full), BOTH);
    init(OFFSET(SharedMemory, tiles_unused), BOTH + GATES);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// The unit of a stage of `keys`.
__device__ __forceinline__ void store_unit(u32 shared, u32 slot, const KeyUnit& x) {
  store_key_unit(shared + OFFSET(SharedMemory, unit) + slot * (u32)sizeof(KeyUnit), x);
}
__device__ __forceinline__ KeyUnit load_unit(u32 shared, u32 slot) {
  return load_key_unit(shared + OFFSET(SharedMemory, unit) + slot * (u32)sizeof(KeyUnit));
}

// A lane of a computing warp. `block`: which 16 of the chunk's tokens are the warp's rows.
struct Lane {
  int lane, g, t, block;
  __device__ __forceinline__ int row(int i) const { return 16 * block + g + 8 * i; }  // i: 0 or 1
};
__device__ __forceinline__ Lane make_lane(int warp) {
  const int lane = thread_index() & 31;
  return {lane, lane >> 2, lane & 3, warp % SIDE_WARPS};
}

// The warps of a side meet.
__device__ __forceinline__ void sync_side(int side) { sync_threads(1 + side, 32 * SIDE_WARPS); }
// Where a warp is: how many value heads and units of its block are behind it.
struct Position {
  u32 shared, head = 0, unit = 0;
  __device__ __forceinline__ HeadRing heads() const { return {shared, head & 1, head >> 1 & 1}; }
  __device__ __forceinline__ KeyRing keys() const { return {shared, unit & 1, unit >> 1 & 1}; }
  __device__ __forceinline__ StateRing states() const { return {shared, 0, head & 1}; }
  __device__ __forceinline__ StateGradRing state_grads() const { return {shared, 0, head & 1}; }
  __device__ __forceinline__ SumsRing sums() const { return {shared, 0, head & 1}; }
  __device__ __forceinline__ PairsRing pairs() const { return {shared, 0, unit & 1}; }
  __device__ __forceinline__ u32 head_scalars() const {
    return shared + OFFSET(SharedMemory, head) + (head & 1) * (u32)sizeof(HeadScalars);
  }
  __device__ __forceinline__ u32 key_scalars() const {
    return shared + OFFSET(SharedMemory, key) + (unit & 1) * (u32)sizeof(KeyScalars);
  }
};
// Calls head(unit, value head, whether it is the first, whether it is the last) and unit(unit) for all of the block's.
template <class Head, class End>
__device__ __forceinline__ void each_unit(const GatedDeltaBackwardParams& p, Position& at, Head head,
                                          End end) {
  const int group = divide(p.HV, p.h_factor, p.h_shift);
#pragma unroll 1
  for (;;) {
    at.heads().wait_full();
    const KeyUnit u = load_unit(at.shared, at.unit & 1);
    if (!u.rows) break;
#pragma unroll 1
    for (int i = 0;;) {
      head(u, u.h * group + i, i == 0, i == group - 1);
      if (++i == group) break;
      ++at.head;
      at.heads().wait_full();
    }
    end(u);
    ++at.head;
    ++at.unit;
  }
}
