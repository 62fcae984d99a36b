// What one prepared chunk of 16 tokens looks like in shared memory, and the constants that
// preparing and scanning warps share.
//
// With G the log2 decay summed from the chunk's first row, S the state at its start, r the inverse
// norms of k:
//   X = (k 2^G) S;  R = beta (V - r X);  W = r T R
//   O = c ((q 2^G) S + Aqk W);  S' = 2^G_last S + (k 2^(G_last - G))^T W
// where T inverts I + tril(beta_i r_i r_j (k_i 2^(G_i - G_j)) . k_j, -1), Aqk_ij = (q_i 2^(G_i -
// G_j)) . k_j for j <= i and c = scale / |q|. Norms are not applied to the 16-bit operands; they
// only scale rows of float32 sums. W is v_new times r.
#pragma once

#include "common/chunk_forward/tiles.cuh"
#include "common/ptx.cuh"
#include "common/swizzle.cuh"

// Macros from the host: K_DIM, V_DIM, CLUSTER, STAGES, PREPARE_WARPS, BOUNDED, G_FLOAT,
// WARPGROUP, SLICE_UNROLL.
constexpr int K = K_DIM;
constexpr int V = V_DIM;
constexpr int C = 16;
constexpr int HALVES = K / 64;
constexpr int BLOCK_V = V / CLUSTER;
constexpr int ROW_TILES = WARPGROUP || BLOCK_V < 128 ? 1 : 2;  // 16 columns of V each, per scan warp
constexpr int SCAN_WARPS = BLOCK_V / (16 * ROW_TILES);
constexpr int THREADS = 32 * (SCAN_WARPS + PREPARE_WARPS);
static_assert(STAGES % CLUSTER == 0, "a stage belongs to one block of the cluster");
// A prepare warp at chunk c has published chunk c - PREPARE_WARPS * CLUSTER, and before that the
// chunk STAGES earlier was consumed. So the barrier it waits on is at most one phase behind, and a
// parity is enough to tell the phase.
static_assert(PREPARE_WARPS * CLUSTER <= STAGES, "a parity could be a full ring old");

constexpr u32 ROWS_BYTES = C * 128;  // 64 channels of the chunk's tokens

// One float a token: beta, beta r, r and c.
struct TokenScalars {
  float beta[C], beta_k_norm[C], k_norm[C], q_factor[C];
};

// A prepared chunk. Operand rows are 128 bytes (64 channels), their 16-byte pieces swizzled by row;
// k 2^G and q 2^G of one half of the channels lie together as 32 rows.
struct ChunkImage {
  u16 kq[HALVES][2][C][64];
  u16 kg[HALVES][C][64];
  Triangle inverse;  // r T, below the diagonal
  Triangle qk;       // Aqk
  float decay[K];    // in the order scan lanes read it
  TokenScalars scalars;
};
constexpr u32 IMAGE_BYTES = sizeof(ChunkImage);
struct alignas(1024) Stage {
  ChunkImage image;
};
constexpr u32 STAGE_PITCH = sizeof(Stage);

constexpr int V_DEPTH = 4;  // chunks of V in flight

struct SharedMemory {
  Stage stages[STAGES];
  ValueTile values[SCAN_WARPS][V_DEPTH][ROW_TILES];
  ValueTile out[SCAN_WARPS][ROW_TILES];
  float scratch[PREPARE_WARPS][C][SCRATCH_PITCH];
  float bias[K];
  u64 full[STAGES];   // barriers: the stage is prepared
  u64 empty[STAGES];  // the stage is consumed
  int picked[4];      // the sequence that this cluster takes
};
// Without the padding that the alignment of stages adds.
KDA_SHARED_BYTES(OFFSET(SharedMemory, picked) + sizeof(int[4]));
