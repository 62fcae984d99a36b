// What one prepared chunk of 32 tokens looks like in shared memory, and the constants that
// preparing and scanning warps share.
//
// A chunk is two halves of 16 tokens. With G the log2 decay summed from a half's first row, D1 and
// D2 the decays 2^G_last of the halves, S the state at the chunk's start, r the inverse norms of k,
// and for the halves' own tokens
//   T the inverse of I + tril(beta_i r_i r_j (k_i 2^(G_i - G_j)) . k_j, -1),
//   Q_ij = (q_i 2^(G_i - G_j)) . k_j for j <= i,
// and across them (second half i, first half j)
//   A21_ij = (k_i 2^G_i) . (k_j 2^(G_last - G_j)), Q21 alike with q,
// the chunk is
//   X1 = (k 2^G) S; W1 = r T1 beta (V1 - r X1); O1 = c ((q 2^G) S + Q1 W1)
//   X2 = (k 2^G D1) S + A21 W1; W2 = r T2 beta (V2 - r X2); O2 = c ((q 2^G D1) S + Q21 W1 + Q2 W2)
//   S' = D1 D2 S + (k 2^(G_last - G) D2)^T W1 + (k 2^(G_last - G))^T W2
// with c = scale / |q|. Norms are not applied to the 16-bit operands; they only scale rows of
// float32 sums. W is v_new times r.
//
// k 2^G, q 2^G, A21, Q21, Q and beta are stored KQ_SCALE times as large, r and c as many times smaller.
#pragma once

#include "common/chunk_forward/tiles.cuh"
#include "common/ptx.cuh"
#include "common/swizzle.cuh"
#include "generated/steps.cuh"

// Macros from the host: K_DIM, V_DIM, CLUSTER, SCANNERS, STAGES, GROUPS, SOLVER_SLOTS, BOUNDED,
// G_FLOAT, SCAN_REGISTERS, SLICE_REGISTERS, SOLVE_REGISTERS; HELPERS, 1 where other blocks prepare
// some of the steps (helpers.cuh).
constexpr int K = K_DIM;
constexpr int V = V_DIM;
constexpr int HALF = 16;
constexpr int C = 2 * HALF;
static_assert(C == STEP_TOKENS, "the host counts chunks of another size");
constexpr int HALVES = K / 64;
constexpr int SLICES = K / 32;  // of 32 channels, a warp each
// A warp a half; a group takes every GROUPS-th chunk of its block.
constexpr int SLICE_WARPS = GROUPS * SLICES * 2;
// The first SCANNERS blocks of a cluster carry the state. All prepare, or in a cluster with twice as
// many blocks the others alone, which then have a ring each for their own chunks (stage_copies.cuh).
constexpr bool SEPARATE = CLUSTER == 2 * SCANNERS;
static_assert(SEPARATE || CLUSTER == SCANNERS, "as many blocks only prepare as scan, or none");
// Clusters of two with helpers: which steps their blocks prepare themselves is a number of the launch.
constexpr bool SPACED = HELPERS && !SEPARATE;
// Blocks that prepare the steps of a cluster in turns, or if SPACED those that are not the helpers'. A helper
// (helpers.cuh) prepares for clusters that it is no part of.
constexpr int PREPARERS = SCANNERS + (HELPERS && SEPARATE);
// Chunks that a block prepares at a time. Blocks that only prepare (ALONE, here and below) have a shorter ring, whose
// other stages hold a second set of the slices' sums: slices then do not wait until a solver has read those
// of the chunk before.
template <bool ALONE = SEPARATE>
constexpr int OWN_STAGES = ALONE ? 4 : STAGES;
template <bool ALONE = SEPARATE>
constexpr int SUMS = ALONE ? 2 : 1;
constexpr int BLOCK_V = V / SCANNERS;
constexpr int SCAN_WARPS = BLOCK_V / 16;
static_assert(BLOCK_V % 64 == 0, "a warpgroup carries 64 columns");
constexpr int SOLVERS = 2 * GROUPS;  // pairs of warps, chunks alternate between them
static_assert(2 * SOLVERS == SOLVER_SLOTS, "two warps a solver");
constexpr int THREADS = 32 * (SCAN_WARPS + SLICE_WARPS + SOLVER_SLOTS);
// First of the solvers' named barriers; those before are the slices'.
constexpr int SOLVER_BARRIER = SEPARATE || SPACED ? 8 : 1 + GROUPS * SLICES;
static_assert(STAGES % PREPARERS == 0, "a stage belongs to one block of the cluster");
// A group at chunk c has finished chunk c - GROUPS * PREPARERS, and before that the chunk STAGES
// earlier was consumed. So the barrier it waits on is at most one phase behind, and a parity is
// enough to tell the phase. Where helpers prepare for clusters of two: helped_steps.cuh.
static_assert(GROUPS * PREPARERS <= STAGES, "a parity could be a full ring old");
// Barriers that say that a solver has read a chunk's sums. A pair of slice warps in a block that only prepares leaves
// out every third chunk (preparing_block.cuh) and solvers of even and odd chunks do not wait for one another, so with
// one barrier for each set of sums a pair could take the phase before the one it waits for, of which it knows nothing,
// for the one after. With two in turns, what the pair waited for before says that the phase before has completed: at
// chunk i it waits for chunk i - 2, whose barrier was chunk i - 6's, and it has waited for that one, or for i - 4,
// which the same solver reads after it.
template <bool ALONE = SEPARATE>
constexpr int READS = ALONE ? 2 * SUMS<ALONE> : GROUPS;
constexpr int MOST_READS = READS<SEPARATE || SPACED>;
static_assert(!(SEPARATE || SPACED) || GROUPS == 1, "sums in turns are those of one group");
// The barrier of the block's i-th chunk, which a group prepares, and how often it was used before.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ int read_barrier(int group, u32 i) {
  return ALONE ? i % READS<ALONE> : group;
}
template <bool ALONE = SEPARATE>
__device__ __forceinline__ u32 read_use(u32 i) {
  return i / READS<ALONE>;
}

// Which of the blocks that prepare this one is.
__device__ __forceinline__ int preparer_of(int rank) { return SEPARATE ? rank - SCANNERS : rank; }
// A step that a block prepares: the cluster's c-th, and the block's i-th.
struct OwnStep {
  int c;
  u32 i;
};
// Where blocks take turns.
__device__ __forceinline__ OwnStep own_step(int c) { return {c, (u32)c / PREPARERS}; }
// The stage of a step in the block that prepares it, and how often that stage was used before.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ int own_stage(const OwnStep& step) {
  return ALONE ? step.i % OWN_STAGES<ALONE> : step.c % OWN_STAGES<ALONE>;
}
template <bool ALONE = SEPARATE>
__device__ __forceinline__ int own_use(const OwnStep& step) {
  return ALONE ? step.i / OWN_STAGES<ALONE> : step.c / OWN_STAGES<ALONE>;
}

constexpr float KQ_SHIFT = BOUNDED ? 32.0f : 0.0f, KQ_SCALE = BOUNDED ? 4294967296.0f : 1.0f;  // 2^KQ_SHIFT

constexpr u32 ROWS_BYTES = C * 128;  // 64 channels of the chunk's tokens

// One float a token: beta, r and c.
struct TokenScalars {
  float beta[C], k_norm[C], q_factor[C];
};

// A prepared chunk. Operand rows are 128 bytes (64 channels), their 16-byte pieces swizzled by row
// as wgmma reads them.
struct ChunkImage {
  u16 kq[HALVES][2][C][64];  // k 2^G, then q 2^G
  u16 kg[HALVES][C][64];
  Triangle inverse[2];  // r T, below the diagonal
  Triangle qk[2];       // Q
  Triangle qk_across;   // Q21
  Triangle kk_across;   // A21
  float decay[K];       // in the order scan lanes read it
  TokenScalars scalars;
};
constexpr u32 IMAGE_BYTES = sizeof(ChunkImage);
struct alignas(1024) Stage {
  ChunkImage image;
};
constexpr u32 STAGE_PITCH = sizeof(Stage);

constexpr int V_DEPTH = 3;  // chunks of V in flight

// Partial sums over a slice's channels, from slice warps to the solver: 16 bytes a lane and part.
constexpr int PARTS = BOUNDED ? 5 : 6;
struct Part {
  float x[32][4];
};
constexpr u32 PART_BYTES = sizeof(Part);
struct SliceParts {
  Part half[2][PARTS];
  Part across[4];
};

struct SharedMemory {
  Stage stages[STAGES];
  ValueTile values[SCAN_WARPS][V_DEPTH][2];
  ValueTile out[SCAN_WARPS][2];
  SliceParts parts[GROUPS][SLICES];
  uint4 keys[GROUPS][SLICES][2][32];    // k 2^(G_last - G) of the first half, for the second half's warp
  float totals[GROUPS][SLICES][2][32];  // decay of each half, in log2 unless BOUNDED
  float scratch[SOLVERS][2][HALF][SCRATCH_PITCH];
  float bias[K];
  u64 full[STAGES];  // barriers: the stage is prepared
  // The stage is consumed, or if SEPARATE, in the block that prepares, copied; then (only if SEPARATE or SPACED)
  // room_at.
  u64 empty[SEPARATE || SPACED ? 2 : 1][STAGES];
  u64 parts_ready[SOLVERS];  // the slices of the solver's chunk are done
  // Both warps of a solver have read a chunk's parts; then (only if gates are unbounded) tiles_read.
  u64 parts_read[BOUNDED ? 1 : 2][MOST_READS];
  alignas(16) int interval[8];  // what this cluster works on: schedule.cuh
};
constexpr u32 SLICE_PARTS = sizeof(SliceParts), EXCHANGE_BYTES = sizeof(uint4[2][32]);
constexpr u32 SCRATCH_BYTES = sizeof(float[HALF][SCRATCH_PITCH]), INTERVAL_BYTES = sizeof(int[8]);
static_assert(!(SEPARATE || SPACED) ||
                  GROUPS * SLICES * SLICE_PARTS <= (STAGES - OWN_STAGES<true>) * STAGE_PITCH,
              "no room for a second set of sums");
// Barrier of a stage, if SEPARATE. In a preparing block: the scanning blocks have read this stage, it may be
// overwritten. In a scanning block, of the stages that a helper's chunks are copied to: this block has. If SPACED, in
// a helper: the stage has been written to device memory.
__device__ __forceinline__ u32 room_at(u32 shared, u32 stage) {
  return shared + OFFSET(SharedMemory, empty) + 8 * STAGES + 8 * stage;
}
// Barriers like parts_read, of the sums of pairs within halves, which unbounded gates' slices write earlier.
__device__ __forceinline__ u32 tiles_read() { return OFFSET(SharedMemory, parts_read) + 8 * MOST_READS; }
// From the slices' sums of one chunk of a block to those of the next, the block's i-th.
template <bool ALONE = SEPARATE>
__device__ __forceinline__ int sums_offset(int i) {
  constexpr int FIRST = OFFSET(SharedMemory, parts),
                SECOND = OFFSET(SharedMemory, stages) + OWN_STAGES<ALONE> * STAGE_PITCH;
  return SUMS<ALONE> > 1 && (i & 1) ? SECOND - FIRST : 0;
}
// Without the padding that the alignment of stages adds.
KDA_SHARED_BYTES(OFFSET(SharedMemory, interval) + INTERVAL_BYTES);
