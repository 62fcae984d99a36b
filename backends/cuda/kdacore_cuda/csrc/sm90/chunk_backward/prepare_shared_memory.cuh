// Shared memory of prepare, and how its matrices lie there.
//
// Regions serve several times. A barrier of the whole block stands between two columns, but for k, q: the warp that reads a
// strip (32 tokens, 32 channels) writes the same strip.
//
//   region   raw rows      operands               pairs multiplied          end
//   K_AT     k             zb                     zb                        zb
//   Q_AT     q             zq                     the system in two parts   w
//   SK_AT    -             sk (first half; first  its diagonal, float       u, with A_AT
//                          quarter)
//   A_AT     g if float    strips of kg, then     aqk
//   INV_AT   g if float    of qg                  inv                       inv
//   G_AT     g             yk                     v                         v
//   S2_AT, S3_AT           sk of earlier quarters, as the third and the fourth see them (gates without a bound)
//
// A part is what one anchor serves: a half if gates are bounded, else a quarter.
// zq = q 2^(P + centre), zb = beta k 2^(P + centre), yk = k 2^(-P - centre), sk = k 2^(P_end - P): q with its norm and scale,
// k with its norm, P the log2 decay from the start of the row's part, P_end that to the start of the later part which sees it.
#pragma once

#include "sm90/bulk_copies.cuh"
#include "sm90/chunk_backward/workspace.cuh"
#ifndef FOR_SEGMENTS
#define FOR_SEGMENTS 0
#endif
#if FOR_SEGMENTS
#include "sm90/chunk_forward/segments/chunk_operands.cuh"
#endif

constexpr int THREADS = 256;
constexpr int PARTS = BOUNDED ? 2 : 4;
constexpr int BLOCKS = BOUNDED ? 3 : 2;  // of a multiprocessor
constexpr u32 HALF_SQUARE = HALF * IMAGE_ROW;  // 64 channels of 32 tokens

constexpr u32 K_AT = 0;
constexpr u32 Q_AT = K_AT + TILE_BYTES;
constexpr u32 SK_AT = Q_AT + TILE_BYTES;
constexpr u32 A_AT = SK_AT + 2 * HALF_SQUARE;
constexpr u32 INV_AT = A_AT + SQUARE_BYTES;
constexpr u32 G_AT = INV_AT + SQUARE_BYTES;
constexpr u32 S2_AT = G_AT + TILE_BYTES;
constexpr u32 S3_AT = S2_AT + 2 * HALF_SQUARE;
constexpr u32 SMALL_AT = BOUNDED ? S2_AT : S3_AT + TILE_BYTES;

constexpr u32 RAW_G_AT = G_FLOAT ? A_AT : G_AT;
constexpr u32 STRIPS_AT = A_AT, STRIP_BYTES = 2048;
constexpr u32 HIGH_AT = Q_AT, LOW_AT = HIGH_AT + SQUARE_BYTES;
constexpr u32 DIAGONAL_AT = SK_AT, DIAGONAL_PITCH = 24;  // floats; four blocks of 16 x 16
constexpr u32 W_AT = Q_AT, U_AT = SK_AT, V_AT = G_AT;
static_assert(4 * C * DIAGONAL_PITCH <= A_AT - DIAGONAL_AT && 8 * STRIP_BYTES == G_AT - A_AT && U_AT + TILE_BYTES <= INV_AT, "");

// float [64] each; the first three are `rows` of the workspace.
constexpr u32 BETA_AT = SMALL_AT;
constexpr u32 RQ_AT = BETA_AT + 4 * C;
constexpr u32 RK_AT = RQ_AT + 4 * C;
constexpr u32 Q_FACTOR_AT = RK_AT + 4 * C;   // scale / |q|
constexpr u32 KB_FACTOR_AT = Q_FACTOR_AT + 4 * C;  // beta / |k|
// float [PARTS][128]: log2 decay of each part.
constexpr u32 TOTAL_AT = KB_FACTOR_AT + 4 * C;
constexpr u32 BIAS_AT = TOTAL_AT + 4 * PARTS * K;  // float [128]
// Address of v's rows, their number: kept here because registers are what there is least of.
constexpr u32 VALUES_AT = BIAS_AT + 4 * K;
static_assert(VALUES_AT + 16 <= SHARED_BYTES, "the host asks for what is used");
static_assert(BLOCKS * (SHARED_BYTES + 1024) <= 228 * 1024, "");

// Offset of a 16-byte piece in an image of the kernel's own. Neither eight neighbouring rows nor eight rows of a scan
// (rows 8t + 2m, 8t + 2m + 1 for t = 0..3) meet in a bank.
__device__ __forceinline__ u32 tile_offset(int row, int piece) {
  return row * IMAGE_ROW + ((piece ^ (row & 7) ^ (row >> 2 & 6)) << 4);
}

// This block's unit in an array of the workspace, or its part of the unit's record.
__device__ __forceinline__ unsigned char* place_of(u64 base, u32 bytes) {
#if FOR_SEGMENTS
  bytes = chunk_operands::BYTES;
#endif
  return reinterpret_cast<unsigned char*>(base) + (u64)block_index() * bytes;
}
