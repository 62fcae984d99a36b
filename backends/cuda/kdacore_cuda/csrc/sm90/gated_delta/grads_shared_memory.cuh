// Shared memory of unit_grads, and its barriers.
#pragma once

#include "common/warp_arrivals.cuh"
#include "sm90/chunk_backward/state.cuh"
#include "sm90/gated_delta/backward_workspace.cuh"
#include "sm90/gated_delta/key_unit.cuh"
#include "sm90/ring.cuh"
#include "sm90/warp.cuh"

// Three warpgroups compute: what q is multiplied with; what k is, with the states; and pairs of tokens of k. One warp
// finishes the gates, two load.
enum Role { QUERIES, KEYS, PAIRS };
constexpr int ROLES = 3, ROLE_WARPS = 4, COMPUTE_WARPS = ROLES * ROLE_WARPS, LOAD_WARPS = 2,
              GATE_WARP = COMPUTE_WARPS + LOAD_WARPS, THREADS = 32 * (COMPUTE_WARPS + 4);
// Moved between warpgroups.
constexpr int START_REGISTERS = 128, QUERY_REGISTERS = 184, KEY_REGISTERS = 144, PAIR_REGISTERS = 136,
              LOAD_REGISTERS = 48;
static_assert(QUERY_REGISTERS + KEY_REGISTERS + PAIR_REGISTERS + LOAD_REGISTERS <= 4 * START_REGISTERS,
              "more registers than the block has");

// What each role finds of the gradients of a value head's decays.
struct DecaySums {
  float rows[ROLES][C];  // of each token; QUERIES and PAIRS hand them from warp to warp
  float of_states
      [ROLE_WARPS];  // parts of the states' product, by PAIRS: times the chunk's decay, all tokens get it
  float of_keys[ROLE_WARPS];  // parts of what KEYS gives to all tokens
};
struct HeadStage {
  TileImage d_o, dv, u;  // with the last value head d_o and dv make room for pairs, u and dv for dq and dk
};
struct KeyTiles {
  TileImage q, k;
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
  u64 sums_full, sums_empty;  // all roles have stored their sums, the warp of the gates has read them
  u64 pairs_full,
      tiles_unused;  // QUERIES and PAIRS have stored a unit's pairs; KEYS and PAIRS have read its last tiles
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
    constexpr u32 USERS = COMPUTE_WARPS * WARP_ARRIVALS, TWO_ROLES = 2 * ROLE_WARPS * WARP_ARRIVALS;
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared + OFFSET(SharedMemory, head_full) + 8 * i, 1 + LOAD_WARPS * WARP_ARRIVALS);
      barrier_init(shared + OFFSET(SharedMemory, head_empty) + 8 * i, USERS + WARP_ARRIVALS);
      barrier_init(shared + OFFSET(SharedMemory, keys_empty) + 8 * i, USERS + WARP_ARRIVALS);
    }
    barrier_init(shared + OFFSET(SharedMemory, state_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, state_empty), USERS);
    barrier_init(shared + OFFSET(SharedMemory, state_grad_full), 1);
    barrier_init(shared + OFFSET(SharedMemory, state_grad_empty), TWO_ROLES);
    barrier_init(shared + OFFSET(SharedMemory, sums_full), USERS);
    barrier_init(shared + OFFSET(SharedMemory, sums_empty), WARP_ARRIVALS);
    barrier_init(shared + OFFSET(SharedMemory, pairs_full), TWO_ROLES);
    barrier_init(shared + OFFSET(SharedMemory, tiles_unused), TWO_ROLES);
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
  return {lane, lane >> 2, lane & 3, warp % ROLE_WARPS};
}

// Warps of one role meet.
__device__ __forceinline__ void sync_role(Role role) { sync_threads(1 + role, 32 * ROLE_WARPS); }
