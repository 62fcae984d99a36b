// Shared memory of prepare, and how its matrices lie there.
//
// All matrices are images as in chunk_backward/workspace.cuh, so that products of a warpgroup read
// them where they are. Regions serve several times; a barrier of the block stands between two
// columns of this table, except for k and q: the warp that reads a strip (32 tokens, 32 channels) of
// them writes the same strip.
//
//   region   raw rows    operands              pairs multiplied          end
//   k        k           zb                    zb, which kd is made of   aqt
//   q        q           zq                    the system in two parts   kt
//   rows     g           yk                    T^T, aqk                  T^T, aqk
//   earlier  g if float  sk                    the system's diagonal
//   kg       g if float  qg on its way, then   kg                        kg
//                        kg
//
// zq = q 2^(P + centre), zb = k 2^(P + centre), yk = k 2^(-P - centre), sk = k 2^(P_end - P), the last
// of the first half only: q with its norm and scale, k with its norm, P the log2 decay from the start
// of the row's half, P_end that of the first half.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/prepare_unit_inputs.cuh"
#include "sm90/chunk_forward/segments/chunk_operands.cuh"

constexpr int THREADS = 256;
constexpr int BLOCKS = 3;                      // of a multiprocessor
constexpr u32 HALF_SQUARE = HALF * IMAGE_ROW;  // 64 channels of 32 tokens

constexpr u32 DIAGONAL_PITCH = 24;  // floats a row of a 16 x 16 block on the system's diagonal

// 64 channels of keys: a right operand of 96 rows.
struct Keys {
  SquareImage rows;  // later T^T in the first, aqk in the second
  union {
    u16 earlier[HALF][64];
    float diagonal[2][16][DIAGONAL_PITCH];
  };
};
constexpr u32 KEYS_BYTES = sizeof(Keys);

struct SharedMemory {
  union {
    TileImage k;
    SquareImage aqt;
  };
  union {
    TileImage q;
    TileImage kt;
    struct {
      SquareImage system_high, system_low;
    };
  };
  Keys keys[2];
  TileImage kg;
  float q_factor[C];      // scale / |q|
  float k_norm[C];        // 1 / |k|
  float beta[C];          // as the recurrence uses it, 0 past the end
  float rounded_beta[C];  // to bfloat16
  float ratio[C];         // beta over that
  float totals[2][K];     // log2 decay of each half; before that, a copy of the gate's bias for each
};
KDA_SHARED_BYTES(sizeof(SharedMemory));
static_assert(BLOCKS * (sizeof(SharedMemory) + 1024) <= 228 * 1024,
              "a multiprocessor has no room for so many blocks");

// The unit's record.
__device__ __forceinline__ unsigned char* record_of(const ChunkBackwardParams& p) {
  return reinterpret_cast<unsigned char*>(p.last) + (u64)(u32)block_index() * sizeof(ChunkOperands);
}

// The input g is where keys and kg will be.
constexpr u32 RAW_G = OFFSET(SharedMemory, keys);

// Image i of keys, from the first; of the diagonal's block i.
__device__ __forceinline__ constexpr u32 keys_offset(int i) {
  return OFFSET(SharedMemory, keys) + i * KEYS_BYTES;
}
__device__ __forceinline__ u32 diagonal_offset(int block) {
  return keys_offset(block >> 1) + SQUARE_BYTES + (block & 1) * 16 * DIAGONAL_PITCH * 4;
}
// Images in the places of yk.
constexpr u32 TRANSFORM = keys_offset(0);  // T^T
constexpr u32 AQK = keys_offset(1);
