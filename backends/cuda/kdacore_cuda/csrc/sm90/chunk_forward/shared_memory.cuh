// What one prepared chunk of 32 tokens looks like in shared memory, and the names both sides of the pipeline share.
//
// A chunk is two halves of 16 tokens. With G the log2 decay summed from a half's first row, D1 and D2 the decays 2^G_last of
// the halves, S the state at the chunk's start, r the inverse norms of k, and for the halves' own tokens
//   T the inverse of I + tril(beta_i r_i r_j (k_i 2^(G_i - G_j)) . k_j, -1), Q_ij = (q_i 2^(G_i - G_j)) . k_j for j <= i,
// and across them (second half i, first half j)
//   A21_ij = (k_i 2^G_i) . (k_j 2^(G_last - G_j)), Q21 alike with q,
// the chunk is
//   X1 = (k 2^G) S; W1 = r T1 beta (V1 - r X1); O1 = c ((q 2^G) S + Q1 W1)
//   X2 = (k 2^G D1) S + A21 W1; W2 = r T2 beta (V2 - r X2); O2 = c ((q 2^G D1) S + Q21 W1 + Q2 W2)
//   S' = D1 D2 S + (k 2^(G_last - G) D2)^T W1 + (k 2^(G_last - G))^T W2
// with c = scale / |q|. Norms stay out of the 16-bit operands; they only scale rows of float32 sums. W is v_new times r.
#pragma once

#include "common/swizzle.cuh"
#include "common/ptx.cuh"
#include "generated/steps.cuh"

// Macros from the host: K_DIM, V_DIM, CLUSTER, SCANNERS, STAGES, GROUPS, SOLVER_SLOTS, BOUNDED, G_FLOAT, SHARED_LIMIT,
// SCAN_REGISTERS, SLICE_REGISTERS, SOLVE_REGISTERS.
constexpr int K = K_DIM;
constexpr int V = V_DIM;
constexpr int HALF = 16;
constexpr int C = 2 * HALF;
static_assert(C == STEP_TOKENS, "the host counts chunks of another size");
constexpr int HALVES = K / 64;
constexpr int SLICES = K / 32;                // of 32 channels, a warp each
constexpr int SLICE_WARPS = GROUPS * SLICES * 2;  // a warp a half; a group takes every GROUPS-th chunk of its block
constexpr int BLOCK_V = V / SCANNERS;         // the first SCANNERS blocks of a cluster carry the state, all prepare
constexpr int SCAN_WARPS = BLOCK_V / 16;
static_assert(BLOCK_V % 64 == 0, "a warpgroup carries 64 columns");
constexpr int SOLVERS = 2 * GROUPS;           // pairs of warps; they take turns
static_assert(2 * SOLVERS == SOLVER_SLOTS, "two warps a solver");
constexpr int THREADS = 32 * (SCAN_WARPS + SLICE_WARPS + SOLVER_SLOTS);
constexpr int SOLVER_BARRIER = 1 + GROUPS * SLICES;  // first of the solvers' named barriers; those before are the slices'
static_assert(STAGES % CLUSTER == 0, "a stage belongs to one block of the cluster");
// A group at chunk c has handed on chunk c - GROUPS * CLUSTER, for which a chunk STAGES earlier was consumed. So the barrier
// it waits on is at most one phase behind, and the parity tells which.
static_assert(GROUPS * CLUSTER <= STAGES, "a parity could be a full ring old");

// Byte offsets in a stage. Operand rows are 128 bytes (64 channels), 16-byte pieces swizzled by row as wgmma reads them. For
// each 64 channels 32 rows of k 2^G and then 32 of q 2^G lie together.
constexpr u32 ROWS_BYTES = C * 128;
constexpr u32 KQ_AT = 0;
constexpr u32 KG_AT = KQ_AT + HALVES * 2 * ROWS_BYTES;
constexpr u32 T_AT = KG_AT + HALVES * ROWS_BYTES;  // of each half: 16 x 16 bf16, two halves of columns, 16 bytes a row
constexpr u32 TRIANGLE_BYTES = 512;
constexpr u32 Q_AT = T_AT + 2 * TRIANGLE_BYTES;  // of each half
constexpr u32 Q21_AT = Q_AT + 2 * TRIANGLE_BYTES;
constexpr u32 A21_AT = Q21_AT + TRIANGLE_BYTES;
constexpr u32 DECAY_AT = A21_AT + TRIANGLE_BYTES;  // K floats, in the order scan lanes read them
constexpr u32 SCALARS_AT = DECAY_AT + 4 * K;       // beta, r, c: C floats each
constexpr u32 STAGE_BYTES = SCALARS_AT + 3 * 4 * C;
constexpr u32 STAGE_PITCH = (STAGE_BYTES + 1023) / 1024 * 1024;

constexpr int V_DEPTH = 3;
constexpr u32 TILE_BYTES = 512;  // 16 tokens x 16 columns of V
constexpr u32 SCRATCH_PITCH = 20;  // floats a row of a solver's triangle

// Sums over a slice's channels on their way from slice warps to the solver, 16 bytes a lane and part.
constexpr int PARTS = BOUNDED ? 5 : 6;
constexpr u32 PART_BYTES = 512;

// Shared memory of a block.
constexpr u32 STAGES_AT = 0;
constexpr u32 VALUES_AT = STAGES_AT + STAGES * STAGE_PITCH;
constexpr u32 OUT_AT = VALUES_AT + V_DEPTH * BLOCK_V / 16 * 2 * TILE_BYTES;
constexpr u32 PARTS_AT = OUT_AT + BLOCK_V / 16 * 2 * TILE_BYTES;
constexpr u32 SLICE_PARTS = (2 * PARTS + 4) * PART_BYTES;  // first half's, second half's, across
constexpr u32 EXCHANGE_AT = PARTS_AT + GROUPS * SLICES * SLICE_PARTS;
constexpr u32 EXCHANGE_BYTES = 1024;  // k 2^(G_last - G) of the first half, for the second half's warp
constexpr u32 TOTALS_AT = EXCHANGE_AT + GROUPS * SLICES * EXCHANGE_BYTES;
constexpr u32 SCRATCH_AT = TOTALS_AT + SLICE_WARPS * 128;
constexpr u32 SCRATCH_BYTES = HALF * SCRATCH_PITCH * 4;
constexpr u32 BIAS_AT = SCRATCH_AT + SOLVERS * 2 * SCRATCH_BYTES;
constexpr u32 FULL_AT = BIAS_AT + 4 * K;               // stage: prepared
constexpr u32 EMPTY_AT = FULL_AT + 8 * STAGES;         // stage: consumed
constexpr u32 PARTS_READY_AT = EMPTY_AT + 8 * STAGES;       // solver: its chunk's slices are done
constexpr u32 PARTS_READ_AT = PARTS_READY_AT + 8 * SOLVERS;      // group: its parts have been read, by both warps of a solver
constexpr u32 INTERVAL_AT = (PARTS_READ_AT + 8 * GROUPS + 15) / 16 * 16;  // what this cluster works on
constexpr u32 INTERVAL_BYTES = 32;
constexpr u32 SHARED_BYTES = INTERVAL_AT + INTERVAL_BYTES;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "the host's shared memory size is too small");

// Offset of half `half` of row `row` in a 16 x 16 tile with 32-byte rows, free of bank conflicts.
__device__ __forceinline__ u32 tile_offset(int row, int half) { return row * 32 + ((half ^ (row >> 2 & 1)) << 4); }
