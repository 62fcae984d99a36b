// kda_recompute_w_u on Hopper: what of a chunk lies where in shared memory, and the ring of stages that four warps fill and teams of
// four warps empty.
//
// Macros from the host: K_DIM (128), HALF_F16, CHUNKS, TEAMS, MIN_BLOCKS, SHARED_BYTES.
#ifndef KDACORE_STAGES_RING_CUH
#define KDACORE_STAGES_RING_CUH

#include "common/arrivals.cuh"
#include "common/stage.cuh"
#include "sm90/backward/bulk.cuh"
#include "sm90/lanes.cuh"
#include "sm90/ring.cuh"

static_assert(K == 128, "rows of 128 channels and values");
static_assert(TEAMS <= CHUNKS, "a team without a stage");

// Rows as they come, a piece of 16 bytes more apart than they are long, so that eight neighbours never share a bank. A chunk's results
// take the places of what they are made from: kg that of k, u that of v, and w that of gc.
constexpr u32 HALF_PITCH = 2 * K + 16, FLOAT_PITCH = 4 * K + 16;
constexpr u32 K_AT = 0;
constexpr u32 V_AT = K_AT + C * HALF_PITCH;
constexpr u32 G_AT = V_AT + C * HALF_PITCH;
// Akk, of which nothing right of the diagonal is read: half a row will do for the first 32.
constexpr u32 INVERSE_AT = G_AT + C * FLOAT_PITCH;
constexpr u32 SHORT_PITCH = 64 + 16, LONG_PITCH = 128 + 16;
constexpr u32 BETA_AT = INVERSE_AT + C / 2 * (SHORT_PITCH + LONG_PITCH);
constexpr u32 INFO_AT = BETA_AT + 4 * C;  // tokens (0: no further chunk), byte offset in the results
constexpr u32 STAGE_PITCH = INFO_AT + 16;

constexpr u32 BARRIERS_AT = CHUNKS * STAGE_PITCH;
static_assert(BARRIERS_AT + 16 * CHUNKS <= SHARED_BYTES, "the host's shared memory size is too small");

// With one stage there is a block a chunk, and the blocks of a multiprocessor are each other's ring: the team itself asks for the chunk.
constexpr bool ONCE = CHUNKS == 1;
constexpr int TEAM = 4, FETCHERS = 32 * TEAM;
constexpr int THREADS = 32 * TEAMS * TEAM + (ONCE ? 0 : FETCHERS);

__device__ __forceinline__ constexpr u32 inverse_at(int row) {
  return INVERSE_AT + (row < C / 2 ? row * SHORT_PITCH : C / 2 * SHORT_PITCH + (row - C / 2) * LONG_PITCH);
}

using Chunks = Ring<CHUNKS, 0, STAGE_PITCH, BARRIERS_AT, 8 * CHUNKS>;

// Copies arrive by themselves, for each thread; the warp for what it has written.
__device__ __forceinline__ void arrive_full(const Chunks& ring, int lane) {
  copy_async_arrive(ring.full());
  warp_arrive(ring.full(), lane);
}

__device__ __forceinline__ void make_barriers(u32 shared) {
  if (thread_index() < 2 * CHUNKS) {
    const u32 arrivals = thread_index() < CHUNKS ? FETCHERS + FETCHERS / 32 * WARP_ARRIVALS : TEAM * WARP_ARRIVALS;
    barrier_init(shared + BARRIERS_AT + 8 * thread_index(), arrivals);
  }
  sync_block();
}

#endif
