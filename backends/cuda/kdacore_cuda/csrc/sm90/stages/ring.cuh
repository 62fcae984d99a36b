// kda_recompute_w_u on Hopper: what of a chunk lies where in shared memory, and the ring of stages that producer warps fill and teams of
// consumer warps empty.
//
// Macros from the host: K_DIM (128), HALF_F16, HAS_Q, STAGES, TEAMS, TEAM (warps of one), PRODUCERS (warps), BULK, DYNAMIC, TOGETHER,
// MIN_BLOCKS, SHARED_BYTES.
#ifndef KDACORE_STAGES_RING_CUH
#define KDACORE_STAGES_RING_CUH

#include "common/arrivals.cuh"
#include "common/stage.cuh"
#include "generated/recompute_ring_params.cuh"
#include "sm90/backward/bulk.cuh"
#include "sm90/lanes.cuh"

static_assert(K == 128, "rows of 128 channels and values");
static_assert(TEAMS <= STAGES, "a team without a stage");
static_assert(DYNAMIC + TOGETHER + (STAGES == 1) <= 1, "one order of chunks");

// Rows as they come, a piece of 16 bytes more apart than they are long, so that eight neighbours never share a bank. A chunk's results
// take the places of what they are made from: kg that of k, u that of v, qg that of q, and w the place of gc.
constexpr u32 HALF_PITCH = 2 * K + 16, FLOAT_PITCH = 4 * K + 16;
constexpr u32 K_AT = 0;
constexpr u32 V_AT = K_AT + C * HALF_PITCH;
constexpr u32 Q_AT = V_AT + C * HALF_PITCH;
constexpr u32 G_AT = Q_AT + HAS_Q * C * HALF_PITCH;
// Akk, of which nothing right of the diagonal is read: half a row will do for the first 32.
constexpr u32 INVERSE_AT = G_AT + C * FLOAT_PITCH;
constexpr u32 SHORT_PITCH = 64 + 16, LONG_PITCH = 128 + 16;
constexpr u32 BETA_AT = INVERSE_AT + C / 2 * (SHORT_PITCH + LONG_PITCH);
constexpr u32 INFO_AT = BETA_AT + 4 * C;  // tokens (0: no further chunk), byte offset in the results
constexpr u32 STAGE_PITCH = INFO_AT + 16;

constexpr u32 BARRIERS_AT = STAGES * STAGE_PITCH, NEXT_AT = BARRIERS_AT + 16 * STAGES;
static_assert(NEXT_AT + 32 <= SHARED_BYTES, "the host's shared memory size is too small");

// With one stage there is a block a chunk, and several of a multiprocessor are each other's ring: the team itself asks for the chunk.
constexpr bool ONCE = STAGES == 1;
static_assert(!ONCE || PRODUCERS == TEAM, "the team");
constexpr int THREADS = 32 * (TEAMS * TEAM + (ONCE ? 0 : PRODUCERS));
// Asynchronous copies of 16 bytes arrive by themselves, for each thread.
constexpr u32 FULL_ARRIVALS = PRODUCERS * (WARP_ARRIVALS + (BULK ? 0 : 32));

__device__ __forceinline__ constexpr u32 inverse_at(int row) {
  return INVERSE_AT + (row < C / 2 ? row * SHORT_PITCH : C / 2 * SHORT_PITCH + (row - C / 2) * LONG_PITCH);
}

// Where a ring stands. Filled for the first time at parity 0.
struct Ring {
  u32 shared;
  u32 slot = 0, parity = 0;
  __device__ __forceinline__ u32 stage() const { return shared + slot * STAGE_PITCH; }
  __device__ __forceinline__ u32 full() const { return shared + BARRIERS_AT + 8 * slot; }
  __device__ __forceinline__ u32 empty() const { return full() + 8 * STAGES; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(full(), parity); }
  __device__ __forceinline__ void wait_empty() const { barrier_wait(empty(), parity ^ 1); }
  __device__ __forceinline__ void next(u32 stages = 1) {
    slot += stages;
    if (slot >= STAGES) {
      slot -= STAGES;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < 2 * STAGES) {
    barrier_init(shared + BARRIERS_AT + 8 * thread_index(), thread_index() < STAGES ? FULL_ARRIVALS : TEAM * WARP_ARRIVALS);
  }
  if (BULK) fence_async_proxy();  // copies will count on them
  sync_block();
}

#endif
