// Shared memory of unit_grads, and its barriers.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/state.cuh"
#include "sm90/gated_delta/backward_workspace.cuh"
#include "sm90/gated_delta/key_unit.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// Two warpgroups compute, one of them what q is multiplied with, the other what k is.
enum Side { QUERIES, KEYS };
constexpr int SIDES = 2, SIDE_WARPS = 4, COMPUTE_WARPS = SIDES * SIDE_WARPS, LOAD_WARPS = 4,
              THREADS = 32 * (COMPUTE_WARPS + LOAD_WARPS);
// Moved between warpgroups.
constexpr int START_REGISTERS = 168, COMPUTE_REGISTERS = 232, LOAD_REGISTERS = 40;
static_assert(2 * COMPUTE_REGISTERS + LOAD_REGISTERS <= 3 * START_REGISTERS,
              "more registers than the block has");

// What a side adds up of a value head's tokens and pairs, in the place of the tile that only its own products read.
struct SideSums {
  float columns[SIDE_WARPS][C];  // of pairs, by the rows of each warp
  float rows[C];                 // of pairs, and what the states give
  float whole[SIDE_WARPS];       // what is to be added to the gradients of all of the chunk's decays
};
struct SidePlace {
  union {
    TileImage tile;  // d_o or dv
    struct {
      SideSums sums;
      alignas(1024) SquareImage pairs;  // of all value heads
    };
  };
};
struct HeadStage {
  SidePlace side[SIDES];
  TileImage u;
};
struct KeyTiles {
  TileImage side[SIDES];  // q, k
};
constexpr int STAGES = 2;
struct SharedMemory {
  HeadStage heads[STAGES];
  KeyTiles keys[STAGES];
  StateImage state, state_grad;
  HeadScalars head[STAGES];
  KeyScalars key[STAGES];
  KeyUnit unit[STAGES];  // of `keys`; no rows: there are no more
  // Barriers. A head's count the bytes of its bulk copies, the loading warps and, with its first value head, a unit's
  // tiles.
  u64 head_full[STAGES], head_empty[STAGES], keys_empty[STAGES];
  u64 state_full, state_empty, state_grad_full, state_grad_empty;
};
static_assert(sizeof(SharedMemory) <= 227 * 1024, "more than a multiprocessor has");
using HeadRing =
    Ring<STAGES, OFFSET(SharedMemory, heads), sizeof(HeadStage), OFFSET(SharedMemory, head_full), 8 * STAGES>;
using KeyRing =  // has no barrier for full
    Ring<STAGES, OFFSET(SharedMemory, keys), sizeof(KeyTiles), OFFSET(SharedMemory, keys_empty), 0>;
using StateRing = Ring<1, OFFSET(SharedMemory, state), 0, OFFSET(SharedMemory, state_full), 8>;
using StateGradRing = Ring<1, OFFSET(SharedMemory, state_grad), 0, OFFSET(SharedMemory, state_grad_full), 8>;

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() == 0) {
    constexpr u32 USERS = COMPUTE_WARPS * WARP_ARRIVALS;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared + OFFSET(SharedMemory, head_full) + 8 * i, 1 + LOAD_WARPS * WARP_ARRIVALS);
      barrier_init(shared + OFFSET(SharedMemory, head_empty) + 8 * i, USERS);
      barrier_init(shared + OFFSET(SharedMemory, keys_empty) + 8 * i, USERS);
    }
    barrier_init(shared + OFFSET(SharedMemory, state_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, state_empty), USERS);
    barrier_init(shared + OFFSET(SharedMemory, state_grad_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, state_grad_empty), USERS);
  }
  fence_async_proxy();  // bulk copies use them
  sync_block();
}

// The unit of a stage of `keys`.
__device__ __forceinline__ void store_unit(u32 shared, u32 slot, const KeyUnit& x) {
  const u32 to = shared + OFFSET(SharedMemory, unit) + slot * (u32)sizeof(KeyUnit);
  store_shared(to, (u32)x.h, (u32)x.rows, (u32)x.slot, (u32)(x.slot >> 32));
  store_shared(to + 16, (u32)x.batch, (u32)(x.batch >> 32), (u32)x.first, (u32)(x.first >> 32));
}
__device__ __forceinline__ KeyUnit load_unit(u32 shared, u32 slot) {
  const u32 from = shared + OFFSET(SharedMemory, unit) + slot * (u32)sizeof(KeyUnit);
  const uint4 x = load_shared_u4(from), y = load_shared_u4(from + 16);
  const auto join = [](u32 low, u32 high) { return (long long)((u64)high << 32 | low); };
  return {(int)x.x, (int)x.y, join(x.z, x.w), join(y.x, y.y), join(y.z, y.w)};
}
static_assert(sizeof(KeyUnit) == 32, "two pieces of 16 bytes");

// A lane of a computing warp. `block`: which 16 of the chunk's tokens are the warp's rows.
struct Lane {
  int lane, g, t, block;
  __device__ __forceinline__ int row(int i) const { return 16 * block + g + 8 * i; }  // i: 0 or 1
};
__device__ __forceinline__ Lane make_lane(int warp) {
  const int lane = thread_index() & 31;
  return {lane, lane >> 2, lane & 3, warp % SIDE_WARPS};
}
__device__ __forceinline__ void sync_side(Side side) { sync_threads(1 + side, 32 * SIDE_WARPS); }
__device__ __forceinline__ void sync_sides() { sync_threads(3, 32 * COMPUTE_WARPS); }
