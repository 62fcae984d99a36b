// What one prepared chunk of 16 tokens looks like in shared memory, and the names both sides of the pipeline share.
//
// With G the log2 decay summed from the chunk's first row, S the state at its start, r the inverse norms of k:
//   X = (k 2^G) S;  R = beta (V - r X);  W = r T R;  O = c ((q 2^G) S + Aqk W);  S' = 2^G_last S + (k 2^(G_last - G))^T W
// where T inverts I + tril(beta_i r_i r_j (k_i 2^(G_i - G_j)) . k_j, -1), Aqk_ij = (q_i 2^(G_i - G_j)) . k_j for j <= i and
// c = scale / |q|. Norms stay out of the 16-bit operands; they only scale rows of float32 sums. W is v_new times r.
#pragma once

#include "common/swizzle.cuh"
#include "common/ptx.cuh"

// Macros from the host: K_DIM, V_DIM, CLUSTER, STAGES, PREPARE_WARPS, BOUNDED, G_FLOAT,
// WARPGROUP, SHARED_LIMIT, SLICE_UNROLL.
constexpr int K = K_DIM;
constexpr int V = V_DIM;
constexpr int C = 16;
constexpr int HALVES = K / 64;
constexpr int BLOCK_V = V / CLUSTER;
constexpr int ROW_TILES = WARPGROUP || BLOCK_V < 128 ? 1 : 2;  // 16 columns of V each, per scan warp
constexpr int SCAN_WARPS = BLOCK_V / (16 * ROW_TILES);
constexpr int THREADS = 32 * (SCAN_WARPS + PREPARE_WARPS);
static_assert(STAGES % CLUSTER == 0, "a stage belongs to one block of the cluster");
// A prepare warp at chunk c has published chunk c - PREPARE_WARPS * CLUSTER, for which a chunk STAGES earlier was consumed.
// So the barrier it waits on is at most one phase behind, and the parity tells which.
static_assert(PREPARE_WARPS * CLUSTER <= STAGES, "a parity could be a full ring old");

// Byte offsets in a stage. Operand rows are 128 bytes (64 channels), 16-byte pieces swizzled by row; k 2^G and q 2^G of one half lie together as 32 rows.
constexpr u32 ROWS_BYTES = C * 128;
constexpr u32 KQ_AT = 0;
constexpr u32 KG_AT = KQ_AT + HALVES * 2 * ROWS_BYTES;
constexpr u32 T_AT = KG_AT + HALVES * ROWS_BYTES;  // 16 x 16 bf16, two halves of columns, 16 bytes a row
constexpr u32 QK_AT = T_AT + 512;
constexpr u32 DECAY_AT = QK_AT + 512;         // K floats, in the order scan lanes read them
constexpr u32 SCALARS_AT = DECAY_AT + 4 * K;  // beta, beta r, r, c: 16 floats each
constexpr u32 STAGE_BYTES = SCALARS_AT + 4 * 64;
constexpr u32 STAGE_PITCH = (STAGE_BYTES + 1023) / 1024 * 1024;

constexpr int V_DEPTH = 4;
constexpr u32 TILE_BYTES = 512;  // 16 tokens x 16 columns of V
constexpr u32 SCRATCH_PITCH = 20;  // floats a row of a prepare warp's triangle

// Shared memory of a block.
constexpr u32 STAGES_AT = 0;
constexpr u32 VALUES_AT = STAGES_AT + STAGES * STAGE_PITCH;
constexpr u32 OUT_AT = VALUES_AT + V_DEPTH * BLOCK_V / 16 * TILE_BYTES;
constexpr u32 SCRATCH_AT = OUT_AT + BLOCK_V / 16 * TILE_BYTES;
constexpr u32 BIAS_AT = SCRATCH_AT + PREPARE_WARPS * C * SCRATCH_PITCH * 4;
constexpr u32 FULL_AT = BIAS_AT + 4 * K;
constexpr u32 EMPTY_AT = FULL_AT + 8 * STAGES;
constexpr u32 PICK_AT = EMPTY_AT + 8 * STAGES;
constexpr u32 SHARED_BYTES = PICK_AT + 16;
static_assert(SHARED_BYTES <= SHARED_LIMIT, "the host's shared memory size is too small");

// Offset of half `half` of row `row` in a 16 x 16 tile with 32-byte rows, free of bank conflicts.
__device__ __forceinline__ u32 tile_offset(int row, int half) { return row * 32 + ((half ^ (row >> 2 & 1)) << 4); }
